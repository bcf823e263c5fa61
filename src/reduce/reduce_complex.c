/* SPDX-License-Identifier: MIT
 *
 * Generic kernels for products of complex64 and complex128. Everything else that complex numbers
 * support goes part by part: reduce.c runs it as twice as many real numbers.
 */
#include "reduce/kernels.h"

/* (a + bi)(c + di) by the schoolbook rule, as torch and MPI do: no rescue of infinities. */
#define DEFINE_COMPLEX_PROD(name, real)                                        \
    static void name(void *dst, const void *left, const void *right, size_t n) \
    {                                                                          \
        any_##real *const to = dst;                                            \
        const any_##real *const x = left;                                      \
        const any_##real *const y = right;                                     \
        INDEPENDENT                                                            \
        for (size_t i = 0; i < n; i++) {                                       \
            const real a = x[2 * i], b = x[2 * i + 1];                         \
            const real c = y[2 * i], d = y[2 * i + 1];                         \
            to[2 * i] = canonical_##real(a * c - b * d);                       \
            to[2 * i + 1] = canonical_##real(a * d + b * c);                   \
        }                                                                      \
    }
DEFINE_COMPLEX_PROD(prod_c64, float)
DEFINE_COMPLEX_PROD(prod_c128, double)

void reduce_fill_complex(struct reduce_table *table)
{
    table->types[MCCL_COMPLEX64] = (struct reduce_type){.size = 8, .acc_size = 8};
    table->types[MCCL_COMPLEX128] = (struct reduce_type){.size = 16, .acc_size = 16};
    table->kernels[MCCL_PROD][MCCL_COMPLEX64] =
        (struct reduce_kernel){.fold = prod_c64, .pair = prod_c64};
    table->kernels[MCCL_PROD][MCCL_COMPLEX128] =
        (struct reduce_kernel){.fold = prod_c128, .pair = prod_c128};
}

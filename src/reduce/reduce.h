/* SPDX-License-Identifier: MIT
 *
 * Reduction kernels by op and dtype. Called by whichever thread drives communication; every call
 * sets the floating-point mode it needs (round to nearest, denormals kept) and restores the
 * caller's.
 */
#ifndef MCCL_REDUCE_H
#define MCCL_REDUCE_H

#include "mccl.h"

#include <stdbool.h>
#include <stddef.h>

/* True if `op` makes sense for `dtype` (see MCCL_OPS in mccl.h). */
bool reduce_supports(mccl_op op, mccl_dtype dtype);

/* dst[i] = srcs[0][i] op srcs[1][i] op ... op srcs[n_srcs-1][i], strictly in this order, for i <
 * count.
 *
 * n_srcs >= 1. dst may equal any one of srcs exactly; otherwise nothing overlaps. No alignment is
 * assumed beyond one byte. AVG and PREMUL_SUM reduce as SUM; `divisor` > 1 divides the total in the
 * accumulator's precision before the one rounding (AVG: pass n on the last step, 1 before).
 * Accumulators: float32 for float16 and bfloat16, else the dtype. NaN results are the canonical
 * quiet NaN (also with n_srcs == 1 of an arithmetic op). BOOL inputs count as true when non-zero;
 * results are 0 or 1. Integers wrap. MIN/MAX: NaN wins, -0 < +0. */
void reduce_run(mccl_op op, mccl_dtype dtype, void *dst, const void *const *srcs, int n_srcs,
                size_t count, int divisor);

/* dst[i] = src[i] * factor (PREMUL_SUM's first step), rounded to the dtype once. dst may equal
 * src. */
void reduce_scale(mccl_dtype dtype, void *dst, const void *src, size_t count, double factor);

/* float16/bfloat16 -> float32 (exact), and back (round to nearest even, canonical NaN). No
 * overlap. */
void reduce_widen(mccl_dtype dtype, float *dst, const void *src, size_t count);
void reduce_narrow(mccl_dtype dtype, void *dst, const float *src, size_t count);

/* Which set of kernels is in use: "avx512", "avx2" or "generic". The best that the processor has is
 * taken by the first reduction. Results of all sets are the same bits. */
const char *reduce_kernel_set(void);
/* Takes another one, for tests: no reduction may run meanwhile. False if the processor has not got
 * it. */
bool reduce_use_kernel_set(const char *name);

#endif

/* SPDX-License-Identifier: MIT
 *
 * Generic kernels for float32 and float64. The rules (canonical NaN, order of zeros) are in
 * kernels.h; here they become loops.
 */
#include "reduce/kernels.h"

DEFINE_FOLD(sum_f32, float, canonical_float(a + b))
DEFINE_FOLD(prod_f32, float, canonical_float(a *b))
DEFINE_FOLD(min_f32, float, canonical_float(least_float(a, b)))
DEFINE_FOLD(max_f32, float, canonical_negate_float(least_float(negate_float(a), negate_float(b))))
DEFINE_MANY(sum_f32_many, float, float, SAME, a + b, a / (float)divisor, canonical_float)
DEFINE_MANY(min_f32_many, float, float, SAME, least_float(a, b), a, canonical_float)
DEFINE_MANY(max_f32_many, float, float, negate_float, least_float(a, b), a, canonical_negate_float)
DEFINE_MAP(settle_f32, float, float, canonical_float(x))
DEFINE_SCALE(scale_f32, float, float, canonical_float(x *y))

DEFINE_FOLD(sum_f64, double, canonical_double(a + b))
DEFINE_FOLD(prod_f64, double, canonical_double(a *b))
DEFINE_FOLD(min_f64, double, canonical_double(least_double(a, b)))
DEFINE_FOLD(max_f64, double,
            canonical_negate_double(least_double(negate_double(a), negate_double(b))))
DEFINE_MANY(sum_f64_many, double, double, SAME, a + b, a / (double)divisor, canonical_double)
DEFINE_MANY(min_f64_many, double, double, SAME, least_double(a, b), a, canonical_double)
DEFINE_MANY(max_f64_many, double, double, negate_double, least_double(a, b), a,
            canonical_negate_double)
DEFINE_MAP(settle_f64, double, double, canonical_double(x))
DEFINE_SCALE(scale_f64, double, double, canonical_double(x *y))

/* Divided, not multiplied by a reciprocal, which would round twice. */
static void divide_f32(void *dst, size_t n, int divisor)
{
    any_float *const x = dst;
    for (size_t i = 0; i < n; i++)
        x[i] /= (float)divisor;
}

static void divide_f64(void *dst, size_t n, int divisor)
{
    any_double *const x = dst;
    for (size_t i = 0; i < n; i++)
        x[i] /= divisor;
}

static void set(struct reduce_table *table, mccl_op op, mccl_dtype dtype, reduce_fold_fn *fold,
                reduce_many_fn *many)
{
    table->kernels[op][dtype] = (struct reduce_kernel){.fold = fold, .pair = fold, .many = many};
}

void reduce_fill_float(struct reduce_table *table)
{
    table->types[MCCL_FLOAT32] = (struct reduce_type){
        .size = 4, .acc_size = 4, .settle = settle_f32, .divide = divide_f32, .scale = scale_f32};
    set(table, MCCL_SUM, MCCL_FLOAT32, sum_f32, sum_f32_many);
    set(table, MCCL_PROD, MCCL_FLOAT32, prod_f32, NULL);
    set(table, MCCL_MIN, MCCL_FLOAT32, min_f32, min_f32_many);
    set(table, MCCL_MAX, MCCL_FLOAT32, max_f32, max_f32_many);

    table->types[MCCL_FLOAT64] = (struct reduce_type){
        .size = 8, .acc_size = 8, .settle = settle_f64, .divide = divide_f64, .scale = scale_f64};
    set(table, MCCL_SUM, MCCL_FLOAT64, sum_f64, sum_f64_many);
    set(table, MCCL_PROD, MCCL_FLOAT64, prod_f64, NULL);
    set(table, MCCL_MIN, MCCL_FLOAT64, min_f64, min_f64_many);
    set(table, MCCL_MAX, MCCL_FLOAT64, max_f64, max_f64_many);
}

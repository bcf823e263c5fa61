/* SPDX-License-Identifier: MIT
 *
 * Generic kernels for float16 and bfloat16: widened to float32, reduced there, rounded once. The
 * conversions are integer code without branches, which a baseline x86-64 (no F16C) vectorises. They
 * need round to nearest and denormals kept, which reduce.c sees to.
 */
#include "reduce/kernels.h"

static inline float from_bf16(uint16_t x)
{
    return float_from((uint32_t)x << 16);
}

/* Adding just under half of the last kept place, and one more if that place is odd, is round to
 * nearest even; the carry into the exponent is right too, up to infinity. */
static inline uint16_t to_bf16(float x)
{
    const uint32_t bits = float_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0u : rounded);
}

/* The 15 bits without sign, moved to float32's places, are the number times 2^-112: denormals
 * included, so one exact multiplication finishes all but infinity and NaN, whose exponent is filled
 * up afterwards. */
static inline float from_f16(uint16_t x)
{
    const uint32_t moved = (x & 0x7fffu) << 13;
    const uint32_t sign = (x & 0x8000u) << 16;
    const uint32_t number = float_bits(float_from(moved) * 0x1p112f);
    const uint32_t special = (int32_t)moved >= 0x0f800000 ? 0x7f800000u : 0;
    return float_from(number | special | sign);
}

/* All ones if a < b, else 0; for a and b >= 0. */
static inline int32_t mask_below(int32_t a, int32_t b)
{
    return (a - b) >> 31;
}

static inline int32_t choose(int32_t mask, int32_t yes, int32_t no)
{
    return (yes & mask) | (no & ~mask);
}

/* Normal results: the exponent is rebased and the mantissa rounded as in to_bf16, up to infinity.
 * Denormal results: adding 0.5, whose last place is 2^-24 as theirs, lets the adder do the
 * rounding. Masks instead of `?:`, since the compiler turns that into a branch around the addition,
 * which might trap, and then does not vectorise. */
static inline uint16_t to_f16(float x)
{
    const uint32_t bits = float_bits(x);
    const int32_t magnitude = (int32_t)(bits & 0x7fffffffu);
    const int32_t sign = (int32_t)(bits >> 16) & 0x8000;
    const int32_t normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const int32_t denormal =
        (int32_t)(float_bits(float_from((uint32_t)magnitude) + 0.5f) - 0x3f000000u);
    const int32_t finite = choose(mask_below(magnitude, 0x38800000), denormal, normal); /* 2^-14 */
    const int32_t number = choose(mask_below(magnitude, 0x477ff000), finite, 0x7c00);   /* 65520 */
    const int32_t is_nan = mask_below(0x7f800000, magnitude);
    return (uint16_t)choose(is_nan, 0x7e00, number | sign);
}

/* MIN and MAX need no arithmetic. With the lower bits of negative numbers flipped, the order of the
 * numbers, -0 below +0 included, is that of 16-bit integers; flipping again gives the number back.
 * `infinity` is where NaN begins. */
static inline int16_t flip(uint16_t x)
{
    return (int16_t)(x ^ (((int16_t)x >> 15) & 0x7fff));
}

static inline uint16_t unless_nan(uint16_t x, uint16_t a, uint16_t b, int infinity, uint16_t nan)
{
    const int is_nan = ((a & 0x7fff) > infinity) | ((b & 0x7fff) > infinity);
    return is_nan ? nan : x;
}

static inline uint16_t min_16(uint16_t a, uint16_t b, int infinity, uint16_t nan)
{
    const int16_t least = flip(a) < flip(b) ? flip(a) : flip(b);
    return unless_nan((uint16_t)flip((uint16_t)least), a, b, infinity, nan);
}

static inline uint16_t max_16(uint16_t a, uint16_t b, int infinity, uint16_t nan)
{
    const int16_t most = flip(a) > flip(b) ? flip(a) : flip(b);
    return unless_nan((uint16_t)flip((uint16_t)most), a, b, infinity, nan);
}

DEFINE_MAP(load_bf16, float, uint16_t, from_bf16(x))
DEFINE_MAP(store_bf16, uint16_t, float, to_bf16(x))
DEFINE_MAP(settle_bf16, uint16_t, uint16_t, (uint16_t)((x & 0x7fff) > 0x7f80 ? 0x7fc0 : x))
DEFINE_SCALE(scale_bf16, uint16_t, float, to_bf16(from_bf16(x) * y))
DEFINE_FOLD(sum_bf16, uint16_t, to_bf16(from_bf16(a) + from_bf16(b)))
DEFINE_FOLD(prod_bf16, uint16_t, to_bf16(from_bf16(a) * from_bf16(b)))
DEFINE_FOLD(min_bf16, uint16_t, min_16(a, b, 0x7f80, 0x7fc0))
DEFINE_FOLD(max_bf16, uint16_t, max_16(a, b, 0x7f80, 0x7fc0))

DEFINE_MAP(load_f16, float, uint16_t, from_f16(x))
DEFINE_MAP(store_f16, uint16_t, float, to_f16(x))
DEFINE_MAP(settle_f16, uint16_t, uint16_t, (uint16_t)((x & 0x7fff) > 0x7c00 ? 0x7e00 : x))
DEFINE_SCALE(scale_f16, uint16_t, float, to_f16(from_f16(x) * y))
DEFINE_FOLD(sum_f16, uint16_t, to_f16(from_f16(a) + from_f16(b)))
DEFINE_FOLD(prod_f16, uint16_t, to_f16(from_f16(a) * from_f16(b)))
DEFINE_FOLD(min_f16, uint16_t, min_16(a, b, 0x7c00, 0x7e00))
DEFINE_FOLD(max_f16, uint16_t, max_16(a, b, 0x7c00, 0x7e00))

/* Three and more sources are folded as float32, by its kernels. */
static void set(struct reduce_table *table, mccl_op op, mccl_dtype dtype, reduce_fold_fn *pair)
{
    table->kernels[op][dtype] =
        (struct reduce_kernel){.fold = table->kernels[op][MCCL_FLOAT32].fold, .pair = pair};
}

void reduce_fill_half(struct reduce_table *table)
{
    reduce_divide_fn *const divide = table->types[MCCL_FLOAT32].divide;
    table->types[MCCL_BFLOAT16] = (struct reduce_type){.size = 2,
                                                       .acc_size = 4,
                                                       .load = load_bf16,
                                                       .store = store_bf16,
                                                       .settle = settle_bf16,
                                                       .divide = divide,
                                                       .scale = scale_bf16};
    set(table, MCCL_SUM, MCCL_BFLOAT16, sum_bf16);
    set(table, MCCL_PROD, MCCL_BFLOAT16, prod_bf16);
    set(table, MCCL_MIN, MCCL_BFLOAT16, min_bf16);
    set(table, MCCL_MAX, MCCL_BFLOAT16, max_bf16);

    table->types[MCCL_FLOAT16] = (struct reduce_type){.size = 2,
                                                      .acc_size = 4,
                                                      .load = load_f16,
                                                      .store = store_f16,
                                                      .settle = settle_f16,
                                                      .divide = divide,
                                                      .scale = scale_f16};
    set(table, MCCL_SUM, MCCL_FLOAT16, sum_f16);
    set(table, MCCL_PROD, MCCL_FLOAT16, prod_f16);
    set(table, MCCL_MIN, MCCL_FLOAT16, min_f16);
    set(table, MCCL_MAX, MCCL_FLOAT16, max_f16);
}

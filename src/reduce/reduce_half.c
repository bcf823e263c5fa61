/* SPDX-License-Identifier: MIT
 *
 * Kernels for float16 and bfloat16: widened to float32, reduced there, rounded once. The
 * conversions are integer code without branches, which the vectoriser takes; where instructions
 * convert float16, those are 4 to 20 times as fast and do it instead. All need round to nearest and
 * denormals kept, which reduce.c sees to.
 */
#include "reduce/kernels.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

static inline float from_bf16(uint16_t x)
{
    return float_from((uint32_t)x << 16);
}

/* The upper 16 bits of the result are x rounded, the rest is left over. Adding just under half of
 * the last kept place, and one more if that place is odd, is round to nearest even; the carry into
 * the exponent is right too, up to infinity. AVX-512's own instruction, VCVTNEPS2BF16, is not used:
 * it flushes denormals whatever the mode and keeps payloads of NaN. */
static inline uint32_t round_bf16(float x)
{
    const uint32_t bits = float_bits(x);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1);
    return x != x ? 0x7fc00000u : rounded;
}

static inline uint16_t to_bf16(float x)
{
    return (uint16_t)(round_bf16(x) >> 16);
}

/* Two neighbours in one word of 32 bits: no shuffles to widen and narrow them, which take half of
 * the time otherwise. Which is the first does not matter. */
static inline float lower_bf16(uint32_t word)
{
    return float_from(word << 16);
}

static inline float upper_bf16(uint32_t word)
{
    return float_from(word & 0xffff0000u);
}

static inline uint32_t two_bf16(float lower, float upper)
{
    return round_bf16(lower) >> 16 | (round_bf16(upper) & 0xffff0000u);
}

#if defined(__aarch64__)

static inline float from_f16(uint16_t x)
{
    __fp16 half;
    memcpy(&half, &x, sizeof half);
    return (float)half;
}

static inline uint16_t to_f16(float x)
{
    const __fp16 half = (__fp16)x;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return x != x ? 0x7e00 : bits;
}

#else

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

#endif

#if defined(__F16C__)

/* WIDE numbers at a time. The instructions make a NaN quiet and keep its payload, so it is made
 * canonical before it is stored. */
#if defined(__AVX512F__)
#define WIDE 16
typedef __m512 wide;

static inline wide wide_load(const any_uint16_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
}

static inline void wide_store(any_uint16_t *to, wide x)
{
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((void *)to,
                        _mm256_mask_blend_epi16(is_nan, half, _mm256_set1_epi16(0x7e00)));
}

static inline wide wide_of(const float *from)
{
    return _mm512_loadu_ps(from);
}

static inline void wide_out(float *to, wide x)
{
    _mm512_storeu_ps(to, x);
}
#define wide_add _mm512_add_ps
#define wide_multiply _mm512_mul_ps
#define wide_divide _mm512_div_ps
#define wide_fill _mm512_set1_ps
#else
#define WIDE 8
typedef __m256 wide;

static inline wide wide_load(const any_uint16_t *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
}

static inline void wide_store(any_uint16_t *to, wide x)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    const __m256 settled = _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    _mm_storeu_si128((void *)to,
                     _mm256_cvtps_ph(settled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline wide wide_of(const float *from)
{
    return _mm256_loadu_ps(from);
}

static inline void wide_out(float *to, wide x)
{
    _mm256_storeu_ps(to, x);
}
#define wide_add _mm256_add_ps
#define wide_multiply _mm256_mul_ps
#define wide_divide _mm256_div_ps
#define wide_fill _mm256_set1_ps
#endif

/* As DEFINE_FOLD, with one expression for WIDE numbers and one for what is left. */
#define DEFINE_F16_FOLD(name, wide_expression, expression)                     \
    static void name(void *dst, const void *left, const void *right, size_t n) \
    {                                                                          \
        any_uint16_t *const to = dst;                                          \
        const any_uint16_t *const from_a = left;                               \
        const any_uint16_t *const from_b = right;                              \
        size_t i = 0;                                                          \
        for (; n - i >= WIDE; i += WIDE) {                                     \
            const wide a = wide_load(from_a + i);                              \
            const wide b = wide_load(from_b + i);                              \
            wide_store(to + i, wide_expression);                               \
        }                                                                      \
        for (; i < n; i++) {                                                   \
            const float a = from_f16(from_a[i]);                               \
            const float b = from_f16(from_b[i]);                               \
            to[i] = to_f16(expression);                                        \
        }                                                                      \
    }

static void load_f16(void *dst, const void *src, size_t n)
{
    float *const to = dst;
    const any_uint16_t *const from = src;
    size_t i = 0;
    for (; n - i >= WIDE; i += WIDE)
        wide_out(to + i, wide_load(from + i));
    for (; i < n; i++)
        to[i] = from_f16(from[i]);
}

static void store_f16(void *dst, const void *src, size_t n)
{
    any_uint16_t *const to = dst;
    const float *const from = src;
    size_t i = 0;
    for (; n - i >= WIDE; i += WIDE)
        wide_store(to + i, wide_of(from + i));
    for (; i < n; i++)
        to[i] = to_f16(from[i]);
}

static void scale_f16(void *dst, const void *src, size_t n, double factor)
{
    any_uint16_t *const to = dst;
    const any_uint16_t *const from = src;
    const float y = (float)factor;
    size_t i = 0;
    for (; n - i >= WIDE; i += WIDE)
        wide_store(to + i, wide_multiply(wide_load(from + i), wide_fill(y)));
    for (; i < n; i++)
        to[i] = to_f16(from_f16(from[i]) * y);
}

DEFINE_F16_FOLD(sum_f16, wide_add(a, b), a + b)
DEFINE_F16_FOLD(prod_f16, wide_multiply(a, b), a *b)

/* As DEFINE_MANY. */
static size_t sum_f16_many(void *dst, const void *const *srcs, int n_srcs, size_t n, int divisor)
{
    enum { N_WIDE = TILE_BYTES / sizeof(wide), TILE = N_WIDE * WIDE };
    size_t done = 0;
    for (; n - done >= TILE; done += TILE) {
        wide total[N_WIDE];
        any_uint16_t *const to = (any_uint16_t *)dst + done;
        const any_uint16_t *from = (const any_uint16_t *)srcs[0] + done;
        for (int i = 0; i < N_WIDE; i++)
            total[i] = wide_load(from + i * WIDE);
        for (int s = 1; s < n_srcs; s++) {
            from = (const any_uint16_t *)srcs[s] + done;
            for (int i = 0; i < N_WIDE; i++)
                total[i] = wide_add(total[i], wide_load(from + i * WIDE));
        }
        for (int i = 0; divisor > 1 && i < N_WIDE; i++)
            total[i] = wide_divide(total[i], wide_fill((float)divisor));
        for (int i = 0; i < N_WIDE; i++)
            wide_store(to + i * WIDE, total[i]);
    }
    return done;
}

#else

DEFINE_MAP(load_f16, float, uint16_t, from_f16(x))
DEFINE_MAP(store_f16, uint16_t, float, to_f16(x))
DEFINE_SCALE(scale_f16, uint16_t, float, to_f16(from_f16(x) * y))
DEFINE_FOLD(sum_f16, uint16_t, to_f16(from_f16(a) + from_f16(b)))
DEFINE_FOLD(prod_f16, uint16_t, to_f16(from_f16(a) * from_f16(b)))
DEFINE_MANY(sum_f16_many, uint16_t, float, from_f16, a + b, a / (float)divisor, to_f16)

#endif

/* MIN and MAX need no arithmetic. With the lower bits of negative numbers flipped, the order of the
 * numbers, -0 below +0 included, is that of 16-bit integers; flipping again gives the number back.
 * Negative NaNs come below -infinity and positive ones above +infinity, `nans` of each; moved up by
 * `nans` the positive ones wrap round to the lowest keys, moved down the negative ones to the
 * highest. So a NaN wins. */
static inline uint16_t flip(uint16_t x)
{
    return (uint16_t)(x ^ (((int16_t)x >> 15) & 0x7fff));
}

#define NANS_BF16 0x7f
#define NANS_F16 0x3ff
#define DEFINE_KEYS(type, NANS, nan)                          \
    static inline int16_t low_key_##type(uint16_t x)          \
    {                                                         \
        return (int16_t)(uint16_t)(flip(x) + NANS);           \
    }                                                         \
    static inline uint16_t from_low_key_##type(int16_t key)   \
    {                                                         \
        const uint16_t number = flip((uint16_t)(key - NANS)); \
        return key < INT16_MIN + 2 * NANS ? nan : number;     \
    }                                                         \
    static inline int16_t high_key_##type(uint16_t x)         \
    {                                                         \
        return (int16_t)(uint16_t)(flip(x) - NANS);           \
    }                                                         \
    static inline uint16_t from_high_key_##type(int16_t key)  \
    {                                                         \
        const uint16_t number = flip((uint16_t)(key + NANS)); \
        return key > INT16_MAX - 2 * NANS ? nan : number;     \
    }
DEFINE_KEYS(bf16, NANS_BF16, 0x7fc0)
DEFINE_KEYS(f16, NANS_F16, 0x7e00)

static inline int16_t lesser(int16_t a, int16_t b)
{
    return a < b ? a : b;
}

static inline int16_t greater(int16_t a, int16_t b)
{
    return a > b ? a : b;
}

DEFINE_MAP(load_bf16, float, uint16_t, from_bf16(x))
DEFINE_MAP(store_bf16, uint16_t, float, to_bf16(x))
DEFINE_MAP(settle_bf16, uint16_t, uint16_t, (uint16_t)((x & 0x7fff) > 0x7f80 ? 0x7fc0 : x))
DEFINE_SCALE(scale_bf16, uint16_t, float, to_bf16(from_bf16(x) * y))

/* As DEFINE_FOLD, for the operator OP. */
#define DEFINE_BF16_FOLD(name, OP)                                                        \
    DEFINE_FOLD(name##_words, uint32_t,                                                   \
                two_bf16(lower_bf16(a) OP lower_bf16(b), upper_bf16(a) OP upper_bf16(b))) \
    static void name(void *dst, const void *left, const void *right, size_t n)            \
    {                                                                                     \
        name##_words(dst, left, right, n / 2);                                            \
        if (n % 2) {                                                                      \
            const uint16_t a = ((const any_uint16_t *)left)[n - 1];                       \
            const uint16_t b = ((const any_uint16_t *)right)[n - 1];                      \
            ((any_uint16_t *)dst)[n - 1] = to_bf16(from_bf16(a) OP from_bf16(b));         \
        }                                                                                 \
    }
DEFINE_BF16_FOLD(sum_bf16, +)
DEFINE_BF16_FOLD(prod_bf16, *)

/* As DEFINE_MANY. */
static size_t sum_bf16_many(void *dst, const void *const *srcs, int n_srcs, size_t n, int divisor)
{
    enum { WORDS = TILE_BYTES / 8 };
    size_t done = 0; /* words */
    for (; n / 2 - done >= WORDS; done += WORDS) {
        float lower[WORDS], upper[WORDS];
        any_uint32_t *const to = (any_uint32_t *)dst + done;
        const any_uint32_t *const first = (const any_uint32_t *)srcs[0] + done;
        const any_uint32_t *const second = (const any_uint32_t *)srcs[1] + done;
        INDEPENDENT
        for (int i = 0; i < WORDS; i++) {
            lower[i] = lower_bf16(first[i]) + lower_bf16(second[i]);
            upper[i] = upper_bf16(first[i]) + upper_bf16(second[i]);
        }
        for (int s = 2; s < n_srcs; s++) {
            KEEP_LOOP_ORDER;
            const any_uint32_t *const next = (const any_uint32_t *)srcs[s] + done;
            INDEPENDENT
            for (int i = 0; i < WORDS; i++) {
                lower[i] += lower_bf16(next[i]);
                upper[i] += upper_bf16(next[i]);
            }
        }
        if (divisor > 1) {
            INDEPENDENT
            for (int i = 0; i < WORDS; i++) {
                lower[i] /= (float)divisor;
                upper[i] /= (float)divisor;
            }
        }
        INDEPENDENT
        for (int i = 0; i < WORDS; i++)
            to[i] = two_bf16(lower[i], upper[i]);
    }
    return 2 * done;
}

DEFINE_FOLD(min_bf16, uint16_t, from_low_key_bf16(lesser(low_key_bf16(a), low_key_bf16(b))))
DEFINE_FOLD(max_bf16, uint16_t, from_high_key_bf16(greater(high_key_bf16(a), high_key_bf16(b))))
DEFINE_MANY(min_bf16_many, uint16_t, int16_t, low_key_bf16, lesser(a, b), a, from_low_key_bf16)
DEFINE_MANY(max_bf16_many, uint16_t, int16_t, high_key_bf16, greater(a, b), a, from_high_key_bf16)

DEFINE_MAP(settle_f16, uint16_t, uint16_t, (uint16_t)((x & 0x7fff) > 0x7c00 ? 0x7e00 : x))
DEFINE_FOLD(min_f16, uint16_t, from_low_key_f16(lesser(low_key_f16(a), low_key_f16(b))))
DEFINE_FOLD(max_f16, uint16_t, from_high_key_f16(greater(high_key_f16(a), high_key_f16(b))))
DEFINE_MANY(min_f16_many, uint16_t, int16_t, low_key_f16, lesser(a, b), a, from_low_key_f16)
DEFINE_MANY(max_f16_many, uint16_t, int16_t, high_key_f16, greater(a, b), a, from_high_key_f16)

/* What `many` leaves of three and more sources is folded as float32, by its kernels. */
static void set(struct reduce_table *table, mccl_op op, mccl_dtype dtype, reduce_fold_fn *pair,
                reduce_many_fn *many)
{
    table->kernels[op][dtype] = (struct reduce_kernel){
        .fold = table->kernels[op][MCCL_FLOAT32].fold, .pair = pair, .many = many};
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
    set(table, MCCL_SUM, MCCL_BFLOAT16, sum_bf16, sum_bf16_many);
    set(table, MCCL_PROD, MCCL_BFLOAT16, prod_bf16, NULL);
    set(table, MCCL_MIN, MCCL_BFLOAT16, min_bf16, min_bf16_many);
    set(table, MCCL_MAX, MCCL_BFLOAT16, max_bf16, max_bf16_many);

    table->types[MCCL_FLOAT16] = (struct reduce_type){.size = 2,
                                                      .acc_size = 4,
                                                      .load = load_f16,
                                                      .store = store_f16,
                                                      .settle = settle_f16,
                                                      .divide = divide,
                                                      .scale = scale_f16};
    set(table, MCCL_SUM, MCCL_FLOAT16, sum_f16, sum_f16_many);
    set(table, MCCL_PROD, MCCL_FLOAT16, prod_f16, NULL);
    set(table, MCCL_MIN, MCCL_FLOAT16, min_f16, min_f16_many);
    set(table, MCCL_MAX, MCCL_FLOAT16, max_f16, max_f16_many);
}

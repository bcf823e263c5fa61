/* SPDX-License-Identifier: MIT
 *
 * The contract between reduce.c and the kernels, and what the kernels share. The kernel files,
 * reduce_*.c, are compiled once for every set of instructions (cmake/kernels.cmake): the vectoriser
 * turns the same loops into other code, whose results are the same bits. Kernels run on whichever
 * thread drives communication, inside reduce.c's floating-point mode.
 */
#ifndef MCCL_REDUCE_KERNELS_H
#define MCCL_REDUCE_KERNELS_H

#include "mccl.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* dst[i] = a[i] op b[i]. `dst` may be `a` or `b`; no alignment is assumed. */
typedef void reduce_fold_fn(void *dst, const void *a, const void *b, size_t n);
/* dst[i] = f(src[i]). `dst` may be `src` where both have elements of the same size. */
typedef void reduce_map_fn(void *dst, const void *src, size_t n);
typedef void reduce_scale_fn(void *dst, const void *src, size_t n, double factor);
typedef void reduce_divide_fn(void *dst, size_t n, int divisor);
/* All of a reduction of two or more sources of elements, in one pass over them; returns how many
 * elements it did, from the first: whole tiles of them. `dst` may be one of the sources. */
typedef size_t reduce_many_fn(void *dst, const void *const *srcs, int n_srcs, size_t n,
                              int divisor);

/* What a dtype needs whatever the operation. An accumulator is the dtype itself, or float32 for
 * 16-bit floats. */
struct reduce_type {
    size_t size;          /* bytes of an element */
    size_t acc_size;      /* bytes of an accumulator */
    reduce_map_fn *load;  /* element to accumulator; NULL if they are the same */
    reduce_map_fn *store; /* accumulator to element, rounding once; NULL likewise */
    reduce_map_fn
        *settle; /* element to element: NaN made canonical, BOOL made 0 or 1; not for complex */
    reduce_divide_fn *divide; /* accumulators, in place; NULL: never divided */
    reduce_scale_fn *scale;   /* element to element; NULL: never scaled */
};

struct reduce_kernel {
    reduce_fold_fn *fold; /* on accumulators */
    reduce_fold_fn *pair; /* on elements: all of a reduction of two sources */
    reduce_many_fn *many; /* on elements; NULL: there is none, reduce.c folds */
};

struct reduce_table {
    struct reduce_type types[MCCL_N_DTYPES];
    /* Empty for AVG and PREMUL_SUM, which run as SUM, and for complex but PROD, which runs part by
     * part. */
    struct reduce_kernel kernels[MCCL_N_OPS][MCCL_N_DTYPES];
};

/* The whole table, by one set of instructions each. */
typedef void reduce_fill_fn(struct reduce_table *table);
reduce_fill_fn reduce_fill_generic, reduce_fill_avx2, reduce_fill_avx512;

/* The set that a kernel file is compiled for; what it defines for others gets the set's name. */
#ifndef REDUCE_SET
#define REDUCE_SET generic
#endif
#define REDUCE_JOIN(name, set) name##_##set
#define REDUCE_NAME(name, set) REDUCE_JOIN(name, set)
#define reduce_fill_integer REDUCE_NAME(reduce_fill_integer, REDUCE_SET)
#define reduce_fill_float REDUCE_NAME(reduce_fill_float, REDUCE_SET)
#define reduce_fill_half REDUCE_NAME(reduce_fill_half, REDUCE_SET)
reduce_fill_fn reduce_fill_integer, reduce_fill_float;
reduce_fill_fn reduce_fill_half;    /* after reduce_fill_float, whose kernels it uses */
reduce_fill_fn reduce_fill_complex; /* one for all sets */

/* Elements as they lie in users' buffers: at any address, under any effective type. */
#define UNALIGNED __attribute__((aligned(1), may_alias))
typedef uint8_t UNALIGNED any_uint8_t;
typedef uint16_t UNALIGNED any_uint16_t;
typedef uint32_t UNALIGNED any_uint32_t;
typedef uint64_t UNALIGNED any_uint64_t;
typedef int8_t UNALIGNED any_int8_t;
typedef int16_t UNALIGNED any_int16_t;
typedef int32_t UNALIGNED any_int32_t;
typedef int64_t UNALIGNED any_int64_t;
typedef float UNALIGNED any_float;
typedef double UNALIGNED any_double;

/* Before a loop whose iterations are independent: equal pointers are fine, so the compiler need not
 * test for overlap and fall back to scalar code in place. */
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Defines a reduce_fold_fn over `type` from an expression in a and b. */
#define DEFINE_FOLD(name, type, expression)                                    \
    static void name(void *dst, const void *left, const void *right, size_t n) \
    {                                                                          \
        any_##type *const to = dst;                                            \
        const any_##type *const from_a = left;                                 \
        const any_##type *const from_b = right;                                \
        INDEPENDENT                                                            \
        for (size_t i = 0; i < n; i++) {                                       \
            const type a = from_a[i];                                          \
            const type b = from_b[i];                                          \
            to[i] = (expression);                                              \
        }                                                                      \
    }

/* Accumulators of one tile: eight registers of AVX-512 or AVX2, sixteen of SSE2 or NEON. (GCC 12
 * unrolls a loop over 16 elements or fewer before it could vectorise it.) */
#if defined(__AVX512F__)
#define TILE_BYTES 512
#else
#define TILE_BYTES 256
#endif
#define TILE_OF(accumulator) (TILE_BYTES / sizeof(accumulator))

/* For `load` and `store` where the accumulator is the element. */
#define SAME(x) (x)

/* In the loop over sources. GCC would otherwise exchange it with the loop over a tile's elements
 * and keep the accumulators in memory. Generates nothing. */
#define KEEP_LOOP_ORDER __asm__ volatile("")

/* Defines a reduce_many_fn from expressions: the fold of accumulators a and b, and a divided by
 * `divisor` (just a, where nothing is divided); and from functions: `load` makes an element an
 * accumulator, `store` the other way. The loops over a tile are unrolled and `total` is in
 * registers, so each source is read once and the result written once. */
#define DEFINE_MANY(name, type, accumulator, load, fold, quotient, store)                     \
    static size_t name(void *dst, const void *const *srcs, int n_srcs, size_t n, int divisor) \
    {                                                                                         \
        const size_t tile = TILE_OF(accumulator);                                             \
        size_t done = 0;                                                                      \
        for (; n - done >= tile; done += tile) {                                              \
            accumulator total[TILE_OF(accumulator)];                                          \
            any_##type *const to = (any_##type *)dst + done;                                  \
            const any_##type *const first = (const any_##type *)srcs[0] + done;               \
            const any_##type *const second = (const any_##type *)srcs[1] + done;              \
            INDEPENDENT                                                                       \
            for (size_t i = 0; i < tile; i++) {                                               \
                const accumulator a = load(first[i]);                                         \
                const accumulator b = load(second[i]);                                        \
                total[i] = (fold);                                                            \
            }                                                                                 \
            for (int s = 2; s < n_srcs; s++) {                                                \
                KEEP_LOOP_ORDER;                                                              \
                const any_##type *const next = (const any_##type *)srcs[s] + done;            \
                INDEPENDENT                                                                   \
                for (size_t i = 0; i < tile; i++) {                                           \
                    const accumulator a = total[i];                                           \
                    const accumulator b = load(next[i]);                                      \
                    total[i] = (fold);                                                        \
                }                                                                             \
            }                                                                                 \
            if (divisor > 1) {                                                                \
                INDEPENDENT                                                                   \
                for (size_t i = 0; i < tile; i++) {                                           \
                    const accumulator a = total[i];                                           \
                    total[i] = (quotient);                                                    \
                }                                                                             \
            }                                                                                 \
            INDEPENDENT                                                                       \
            for (size_t i = 0; i < tile; i++)                                                 \
                to[i] = store(total[i]);                                                      \
        }                                                                                     \
        return done;                                                                          \
    }

/* Defines a reduce_map_fn from an expression in x. */
#define DEFINE_MAP(name, to_type, from_type, expression)   \
    static void name(void *dst, const void *src, size_t n) \
    {                                                      \
        any_##to_type *const to = dst;                     \
        const any_##from_type *const from = src;           \
        INDEPENDENT                                        \
        for (size_t i = 0; i < n; i++) {                   \
            const from_type x = from[i];                   \
            to[i] = (expression);                          \
        }                                                  \
    }

/* Defines a reduce_scale_fn that multiplies in `work`, from an expression in x and the factor y. */
#define DEFINE_SCALE(name, type, work, expression)                        \
    static void name(void *dst, const void *src, size_t n, double factor) \
    {                                                                     \
        any_##type *const to = dst;                                       \
        const any_##type *const from = src;                               \
        const work y = (work)factor;                                      \
        INDEPENDENT                                                       \
        for (size_t i = 0; i < n; i++) {                                  \
            const type x = from[i];                                       \
            to[i] = (expression);                                         \
        }                                                                 \
    }

static inline uint32_t float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float float_from(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static inline uint64_t double_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline double double_from(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* The arithmetic of MCCL's floating-point reductions: any NaN becomes the canonical one. All of it
 * compiles to compares and masks, no branch. */
static inline float canonical_float(float x)
{
    return x != x ? float_from(0x7fc00000u) : x;
}

static inline double canonical_double(double x)
{
    return x != x ? double_from(0x7ff8000000000000u) : x;
}

/* The lesser of two numbers, or a NaN of any kind where one is NaN. x and y are equal but where a
 * and b are zeros of two signs, of which OR keeps the minus, or one is NaN: then they are b and a,
 * and NaN or anything is NaN. Two MINPS and an OR on x86. The greater is the negated lesser of the
 * negated. */
static inline float least_float(float a, float b)
{
    const float x = a < b ? a : b;
    const float y = b < a ? b : a;
    return float_from(float_bits(x) | float_bits(y));
}

static inline float negate_float(float x)
{
    return float_from(float_bits(x) ^ 0x80000000u);
}

static inline float canonical_negate_float(float x)
{
    return canonical_float(negate_float(x));
}

static inline double least_double(double a, double b)
{
    const double x = a < b ? a : b;
    const double y = b < a ? b : a;
    return double_from(double_bits(x) | double_bits(y));
}

static inline double negate_double(double x)
{
    return double_from(double_bits(x) ^ 0x8000000000000000u);
}

static inline double canonical_negate_double(double x)
{
    return canonical_double(negate_double(x));
}

#endif

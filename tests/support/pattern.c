/* SPDX-License-Identifier: MIT
 *
 * See pattern.h. An element is held in the widest form of its family (struct value) while it is
 * worked on.
 */
#include "support/pattern.h"

#include "support/check.h"

#include <math.h>
#include <stdbool.h>

enum family { FAMILY_FLOAT, FAMILY_COMPLEX, FAMILY_SIGNED, FAMILY_UNSIGNED, FAMILY_BOOL };

struct value {
    double re, im;
    uint64_t bits; /* integers, sign-extended; bool: 0 or 1 */
};

static enum family family_of(mccl_dtype dtype)
{
    switch (dtype) {
    case MCCL_FLOAT32:
    case MCCL_FLOAT64:
    case MCCL_FLOAT16:
    case MCCL_BFLOAT16:
        return FAMILY_FLOAT;
    case MCCL_COMPLEX64:
    case MCCL_COMPLEX128:
        return FAMILY_COMPLEX;
    case MCCL_INT8:
    case MCCL_INT16:
    case MCCL_INT32:
    case MCCL_INT64:
        return FAMILY_SIGNED;
    case MCCL_BOOL:
        return FAMILY_BOOL;
    default:
        return FAMILY_UNSIGNED;
    }
}

uint64_t pattern_hash(uint64_t seed, uint64_t a, uint64_t b)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15u + a * 0xd1b54a32d192ed03u + b * 0x8cb92ba72f3d8dd7u + 1;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

double pattern_factor(int rank)
{
    return rank % 2 == 0 ? 2.0 : 0.5;
}

/* A float such that the reduction over up to 8 ranks, and every partial one, fits bfloat16's eight
 * bits. */
static double float_value(uint64_t hash, mccl_op op, int n)
{
    static const double powers[4] = {-2.0, -1.0, 1.0, 2.0};
    switch (op) {
    case MCCL_PROD:
        return powers[hash % 4];
    case MCCL_AVG:
        return n * (double)((int)(hash % 31) - 15); /* the sum is a multiple of n */
    case MCCL_PREMUL_SUM:
        return 2.0 * ((int)(hash % 15) - 7); /* may be halved */
    default:
        return (int)(hash % 31) - 15;
    }
}

/* Complex products of 2+i turned by quarters: parts of at most 5^4 for 8 ranks, and never 0, whose
 * sign would depend on the order of reduction. */
static struct value complex_value(uint64_t hash, mccl_op op, int n)
{
    static const struct value factors[4] = {
        {2.0, 1.0, 0}, {-1.0, 2.0, 0}, {-2.0, -1.0, 0}, {1.0, -2.0, 0}};
    if (op == MCCL_PROD)
        return factors[hash % 4];
    return (struct value){float_value(hash, op, n), float_value(hash >> 20, op, n), 0};
}

static struct value value_at(mccl_dtype dtype, mccl_op op, uint64_t seed, int rank, int n,
                             size_t at)
{
    const uint64_t hash = pattern_hash(seed, (uint64_t)rank + 1, at % PATTERN_PERIOD);
    struct value value = {0.0, 0.0, 0};
    switch (family_of(dtype)) {
    case FAMILY_FLOAT:
        value.re = float_value(hash, op, n);
        break;
    case FAMILY_COMPLEX:
        value = complex_value(hash, op, n);
        break;
    case FAMILY_BOOL:
        /* Mostly true for AND, mostly false for OR, so that both results occur. */
        if (op == MCCL_PROD || op == MCCL_MIN || op == MCCL_BAND)
            value.bits = hash % 8 != 0;
        else if (op == MCCL_BXOR)
            value.bits = hash % 2;
        else
            value.bits = hash % 8 == 0;
        break;
    case FAMILY_SIGNED: {
        const unsigned unused = 64 - 8 * (unsigned)mccl_dtype_size(dtype);
        const uint64_t shifted = hash << unused;
        value.bits = unused ? (shifted >> unused) | (0 - (shifted >> 63)) << (64 - unused) : hash;
        break;
    }
    case FAMILY_UNSIGNED: {
        const unsigned unused = 64 - 8 * (unsigned)mccl_dtype_size(dtype);
        value.bits = hash << unused >> unused;
        break;
    }
    }
    return value;
}

static double smaller(double a, double b)
{
    return a < b ? a : b;
}

static bool less(mccl_dtype dtype, uint64_t a, uint64_t b)
{
    return family_of(dtype) == FAMILY_SIGNED ? (int64_t)a < (int64_t)b : a < b;
}

static struct value combine_bits(mccl_dtype dtype, mccl_op op, struct value a, struct value b)
{
    const bool boolean = family_of(dtype) == FAMILY_BOOL;
    switch (op) {
    case MCCL_SUM:
        a.bits = boolean ? (a.bits | b.bits) : a.bits + b.bits;
        break;
    case MCCL_PROD:
        a.bits = a.bits * b.bits;
        break;
    case MCCL_MIN:
        a.bits = less(dtype, a.bits, b.bits) ? a.bits : b.bits;
        break;
    case MCCL_MAX:
        a.bits = less(dtype, a.bits, b.bits) ? b.bits : a.bits;
        break;
    case MCCL_BAND:
        a.bits &= b.bits;
        break;
    case MCCL_BOR:
        a.bits |= b.bits;
        break;
    case MCCL_BXOR:
        a.bits ^= b.bits;
        break;
    default:
        CHECK_FAIL("no reference for %s on %s", mccl_op_name(op), mccl_dtype_name(dtype));
    }
    return a;
}

static struct value combine(mccl_dtype dtype, mccl_op op, struct value a, struct value b)
{
    const enum family family = family_of(dtype);
    if (family != FAMILY_FLOAT && family != FAMILY_COMPLEX)
        return combine_bits(dtype, op, a, b);
    switch (op) {
    case MCCL_PROD:
        return (struct value){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re, 0};
    case MCCL_MIN:
        return (struct value){smaller(a.re, b.re), 0.0, 0};
    case MCCL_MAX:
        return (struct value){-smaller(-a.re, -b.re), 0.0, 0};
    default:
        return (struct value){a.re + b.re, a.im + b.im, 0};
    }
}

double pattern_half_value(mccl_dtype dtype, uint16_t bits)
{
    const int fraction_bits = dtype == MCCL_FLOAT16 ? 10 : 7;
    const int bias = dtype == MCCL_FLOAT16 ? 15 : 127;
    const int exponent = (bits & 0x7fff) >> fraction_bits;
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == (0x7fff >> fraction_bits))
        return fraction ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - bias - fraction_bits);
    return sign * ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

uint16_t pattern_half_round(mccl_dtype dtype, double value)
{
    const uint16_t infinity = dtype == MCCL_FLOAT16 ? 0x7c00 : 0x7f80;
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    /* Bisection over the positive bit patterns, which are in the order of their values. */
    uint16_t low = 0, high = infinity;
    const double size = fabs(value);
    while (high - low > 1) {
        const uint16_t middle = (uint16_t)((low + high) / 2);
        if (pattern_half_value(dtype, middle) <= size)
            low = middle;
        else
            high = middle;
    }
    const double below = pattern_half_value(dtype, low);
    /* The step beyond the largest number counts as if numbers went on. */
    const double above = high == infinity
                             ? 2 * below - pattern_half_value(dtype, (uint16_t)(low - 1))
                             : pattern_half_value(dtype, high);
    const double to_below = size - below, to_above = above - size;
    const bool up = to_above < to_below || (to_above == to_below && low % 2 == 1);
    return (uint16_t)(sign | (up ? high : low));
}

static void store(void *dst, mccl_dtype dtype, struct value value)
{
    const float single[2] = {(float)value.re, (float)value.im};
    const double both[2] = {value.re, value.im};
    switch (dtype) {
    case MCCL_FLOAT32:
    case MCCL_COMPLEX64:
        memcpy(dst, single, mccl_dtype_size(dtype));
        break;
    case MCCL_FLOAT64:
    case MCCL_COMPLEX128:
        memcpy(dst, both, mccl_dtype_size(dtype));
        break;
    case MCCL_FLOAT16:
    case MCCL_BFLOAT16: {
        const uint16_t bits = pattern_half_round(dtype, value.re);
        memcpy(dst, &bits, sizeof bits);
        break;
    }
    default:
        for (size_t at = 0; at < mccl_dtype_size(dtype); at++)
            ((unsigned char *)dst)[at] = (unsigned char)(value.bits >> (8 * at));
        break;
    }
}

/* Repeats the first PATTERN_PERIOD elements over the rest. */
static void repeat(unsigned char *dst, size_t count, size_t size)
{
    size_t done = PATTERN_PERIOD;
    while (done < count) {
        const size_t more = done < count - done ? done : count - done;
        memcpy(dst + done * size, dst, more * size);
        done += more; /* `done` stays a multiple of the period until the end */
    }
}

void pattern_fill(void *dst, size_t count, mccl_dtype dtype, mccl_op op, uint64_t seed, int rank,
                  int n, size_t first)
{
    const size_t size = mccl_dtype_size(dtype);
    unsigned char *bytes = dst;
    for (size_t k = 0; k < count && k < PATTERN_PERIOD; k++) {
        if (op == PATTERN_MOVE) {
            const size_t at = (first + k) % PATTERN_PERIOD;
            const uint64_t hash[2] = {pattern_hash(seed, (uint64_t)rank + 1, at),
                                      pattern_hash(seed + 1, (uint64_t)rank + 1, at)};
            memcpy(bytes + k * size, hash, size);
        } else {
            store(bytes + k * size, dtype, value_at(dtype, op, seed, rank, n, first + k));
        }
    }
    repeat(bytes, count, size);
}

void pattern_reduced(void *dst, size_t count, mccl_dtype dtype, mccl_op op, uint64_t seed, int n,
                     size_t first)
{
    const size_t size = mccl_dtype_size(dtype);
    unsigned char *bytes = dst;
    for (size_t k = 0; k < count && k < PATTERN_PERIOD; k++) {
        struct value total = {0.0, 0.0, 0};
        for (int rank = 0; rank < n; rank++) {
            struct value value = value_at(dtype, op, seed, rank, n, first + k);
            if (op == MCCL_PREMUL_SUM) {
                value.re *= pattern_factor(rank);
                value.im *= pattern_factor(rank);
            }
            total = rank == 0 ? value : combine(dtype, op, total, value);
        }
        if (op == MCCL_AVG) {
            total.re /= n;
            total.im /= n;
        }
        store(bytes + k * size, dtype, total);
    }
    repeat(bytes, count, size);
}

/* SPDX-License-Identifier: MIT
 *
 * What the operands of collectives are in tests, and what must come out: values from rank, block
 * and position, and straightforward arithmetic on them. Shares no code with the library.
 * Floating-point values are chosen so that every result is exact in every dtype and in any order.
 */
#ifndef MCCL_TESTS_COLL_REFERENCE_H
#define MCCL_TESTS_COLL_REFERENCE_H

#include "mccl.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t reference_hash(int rank, size_t block, size_t position, int salt)
{
    uint64_t z = (uint64_t)rank * UINT64_C(0x9e3779b97f4a7c15) +
                 block * UINT64_C(0xd1342543de82ef95) + position * UINT64_C(0xbf58476d1ce4e5b9) +
                 (uint64_t)salt * UINT64_C(0x94d049bb133111eb);
    z = (z ^ (z >> 31)) * UINT64_C(0x2545f4914f6cdd1d);
    return z ^ (z >> 29);
}

static inline double reference_factor(int rank)
{
    static const double factors[3] = {0.5, 2.0, 1.0};
    return factors[rank % 3];
}

static inline bool reference_is_complex(mccl_dtype dtype)
{
    return dtype == MCCL_COMPLEX64 || dtype == MCCL_COMPLEX128;
}

static inline bool reference_is_float(mccl_dtype dtype)
{
    return dtype <= MCCL_BFLOAT16 || reference_is_complex(dtype);
}

static inline bool reference_is_signed(mccl_dtype dtype)
{
    return dtype == MCCL_INT8 || dtype == MCCL_INT16 || dtype == MCCL_INT32 || dtype == MCCL_INT64;
}

/* Real (part 0) or imaginary (1) part of rank's operand. */
static inline double reference_value(mccl_op op, int n, int rank, size_t block, size_t position,
                                     int part)
{
    const uint64_t h = reference_hash(rank, block, position, part) % 5;
    static const double factors[5] = {1, 2, -1, -2,
                                      1}; /* 256 at most for 8 ranks: 8 bits of mantissa */
    const double value = op == MCCL_PROD ? factors[h] : (double)h - 2;
    return op == MCCL_AVG ? value * n : op == MCCL_PREMUL_SUM ? value * 2 : value;
}

/* The same for a dtype. Complex factors are 1 + 2i times 1, i, -1 or -i: no part of any product of
 * them is 0, whose sign would depend on the order. */
static inline double reference_part(mccl_dtype dtype, mccl_op op, int n, int rank, size_t block,
                                    size_t position, int part)
{
    static const double factors[2][4] = {{1, -2, -1, 2}, {2, 1, -2, -1}};
    if (op == MCCL_PROD && reference_is_complex(dtype))
        return factors[part][reference_hash(rank, block, position, 0) % 4];
    return reference_value(op, n, rank, block, position, part);
}

/* `value` in a format with that many exponent and mantissa bits; it must fit exactly. */
static inline uint16_t reference_small_float(double value, int exponent_bits, int mantissa_bits)
{
    if (value == 0)
        return 0;
    int exponent;
    const double mantissa = frexp(fabs(value), &exponent) * 2; /* [1, 2) */
    const int biased = exponent - 1 + (1 << (exponent_bits - 1)) - 1;
    const int fraction = (int)((mantissa - 1) * (1 << mantissa_bits));
    return (uint16_t)((value < 0 ? 0x8000 : 0) | biased << mantissa_bits | fraction);
}

static inline void reference_store_float(mccl_dtype dtype, double re, double im, void *to)
{
    const float single[2] = {(float)re, (float)im};
    const double full[2] = {re, im};
    const uint16_t half = reference_small_float(re, 5, 10), brain = reference_small_float(re, 8, 7);
    switch (dtype) {
    case MCCL_FLOAT16:
        memcpy(to, &half, 2);
        return;
    case MCCL_BFLOAT16:
        memcpy(to, &brain, 2);
        return;
    case MCCL_FLOAT32:
    case MCCL_COMPLEX64:
        memcpy(to, single, mccl_dtype_size(dtype));
        return;
    default:
        memcpy(to, full, mccl_dtype_size(dtype));
        return;
    }
}

static inline void reference_store_int(size_t size, uint64_t value, void *to)
{
    const uint8_t v8 = (uint8_t)value;
    const uint16_t v16 = (uint16_t)value;
    const uint32_t v32 = (uint32_t)value;
    const void *from = size == 1   ? (const void *)&v8
                       : size == 2 ? (const void *)&v16
                       : size == 4 ? (const void *)&v32
                                   : (const void *)&value;
    memcpy(to, from, size);
}

/* An integer operand: random bits, extended to 64 as its dtype does. */
static inline uint64_t reference_int(mccl_dtype dtype, int rank, size_t block, size_t position)
{
    const uint64_t bits = reference_hash(rank, block, position, 2);
    const unsigned unused = 64 - 8 * (unsigned)mccl_dtype_size(dtype);
    if (dtype == MCCL_BOOL)
        return bits & 1;
    const uint64_t low = bits << unused >> unused;
    return reference_is_signed(dtype) && unused > 0 && low >> (63 - unused)
               ? low | UINT64_MAX << (64 - unused)
               : low;
}

static inline uint64_t reference_combine_int(mccl_dtype dtype, mccl_op op, uint64_t a, uint64_t b)
{
    const bool less = reference_is_signed(dtype) ? (int64_t)a < (int64_t)b : a < b;
    switch (op) {
    case MCCL_SUM:
        return dtype == MCCL_BOOL ? (a | b) : a + b;
    case MCCL_PROD:
        return a * b;
    case MCCL_MIN:
        return less ? a : b;
    case MCCL_MAX:
        return less ? b : a;
    case MCCL_BAND:
        return a & b;
    case MCCL_BOR:
        return a | b;
    default: /* MCCL_BXOR */
        return a ^ b;
    }
}

/* Operand `position` of a rank's block, as it lies in memory. */
static inline void reference_operand(mccl_dtype dtype, mccl_op op, int n, int rank, size_t block,
                                     size_t position, void *to)
{
    if (reference_is_float(dtype))
        reference_store_float(dtype, reference_part(dtype, op, n, rank, block, position, 0),
                              reference_part(dtype, op, n, rank, block, position, 1), to);
    else
        reference_store_int(mccl_dtype_size(dtype), reference_int(dtype, rank, block, position),
                            to);
}

static inline void reference_result(mccl_dtype dtype, mccl_op op, int n, size_t block,
                                    size_t position, void *to)
{
    if (!reference_is_float(dtype)) {
        uint64_t total = reference_int(dtype, 0, block, position);
        for (int rank = 1; rank < n; rank++)
            total = reference_combine_int(dtype, op, total,
                                          reference_int(dtype, rank, block, position));
        reference_store_int(mccl_dtype_size(dtype), total, to);
        return;
    }
    double re = 0, im = 0;
    for (int rank = 0; rank < n; rank++) {
        const double scale = op == MCCL_PREMUL_SUM ? reference_factor(rank) : 1;
        const double x = reference_part(dtype, op, n, rank, block, position, 0) * scale;
        const double y = reference_is_complex(dtype)
                             ? reference_part(dtype, op, n, rank, block, position, 1) * scale
                             : 0;
        const double old = re;
        if (rank == 0)
            re = x, im = y;
        else if (op == MCCL_PROD)
            re = old * x - im * y, im = old * y + im * x;
        else if (op == MCCL_MIN)
            re = x < re ? x : re;
        else if (op == MCCL_MAX)
            re = x > re ? x : re;
        else
            re += x, im += y;
    }
    const double divisor = op == MCCL_AVG ? n : 1;
    reference_store_float(dtype, re / divisor, im / divisor, to);
}

#endif

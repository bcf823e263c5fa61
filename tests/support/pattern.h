/* SPDX-License-Identifier: MIT
 *
 * Test data that depends on rank and position, and what reducing it must give. All values are
 * chosen so that the result is exact in every dtype: bits for integers (which wrap) and for data
 * that is only moved, small integers for floats, powers of two for products. The reference is
 * straightforward arithmetic in 64-bit integers and doubles and shares no code with the library.
 * Values repeat after PATTERN_PERIOD elements, a prime, so that a piece in a wrong place shows
 * although large buffers cost only a memcpy.
 */
#ifndef MCCL_TESTS_PATTERN_H
#define MCCL_TESTS_PATTERN_H

#include "mccl.h"

#include <stddef.h>
#include <stdint.h>

#define PATTERN_PERIOD 1021
/* In place of an mccl_op: data is moved and any bits will do. */
#define PATTERN_MOVE MCCL_N_OPS

/* Well mixed 64 bits. */
uint64_t pattern_hash(uint64_t seed, uint64_t a, uint64_t b);

/* dst[k] = what `rank` of `n` holds at position first + k, for `op`. */
void pattern_fill(void *dst, size_t count, mccl_dtype dtype, mccl_op op, uint64_t seed, int rank,
                  int n, size_t first);
/* dst[k] = op over all n ranks of their values at position first + k. */
void pattern_reduced(void *dst, size_t count, mccl_dtype dtype, mccl_op op, uint64_t seed, int n,
                     size_t first);
/* The factor of a rank for PREMUL_SUM: pass it in mccl_options. */
double pattern_factor(int rank);

/* Conversions by the book, for references: value of the bits, and bits of the nearest value (ties
 * to even) to a double. FLOAT16 and BFLOAT16. */
double pattern_half_value(mccl_dtype dtype, uint16_t bits);
uint16_t pattern_half_round(mccl_dtype dtype, double value);

#endif

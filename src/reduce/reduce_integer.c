/* SPDX-License-Identifier: MIT
 *
 * Generic kernels for integers and BOOL. Sums and products of signed types run on the unsigned type
 * of the same width: the bits are the same and wrapping is defined.
 */
#include "reduce/kernels.h"

/* Narrow products are taken in 32 bits: the usual promotion to int would overflow it. */
DEFINE_FOLD(sum_8, uint8_t, (uint8_t)(a + b))
DEFINE_FOLD(sum_16, uint16_t, (uint16_t)(a + b))
DEFINE_FOLD(sum_32, uint32_t, a + b)
DEFINE_FOLD(sum_64, uint64_t, a + b)
DEFINE_FOLD(prod_8, uint8_t, (uint8_t)(a *b))
DEFINE_FOLD(prod_16, uint16_t, (uint16_t)((uint32_t)a *b))
DEFINE_FOLD(prod_32, uint32_t, a *b)
DEFINE_FOLD(prod_64, uint64_t, a *b)

DEFINE_FOLD(min_u8, uint8_t, a < b ? a : b)
DEFINE_FOLD(max_u8, uint8_t, a > b ? a : b)
DEFINE_FOLD(min_i8, int8_t, a < b ? a : b)
DEFINE_FOLD(max_i8, int8_t, a > b ? a : b)
DEFINE_FOLD(min_u16, uint16_t, a < b ? a : b)
DEFINE_FOLD(max_u16, uint16_t, a > b ? a : b)
DEFINE_FOLD(min_i16, int16_t, a < b ? a : b)
DEFINE_FOLD(max_i16, int16_t, a > b ? a : b)
DEFINE_FOLD(min_u32, uint32_t, a < b ? a : b)
DEFINE_FOLD(max_u32, uint32_t, a > b ? a : b)
DEFINE_FOLD(min_i32, int32_t, a < b ? a : b)
DEFINE_FOLD(max_i32, int32_t, a > b ? a : b)
DEFINE_FOLD(min_u64, uint64_t, a < b ? a : b)
DEFINE_FOLD(max_u64, uint64_t, a > b ? a : b)
DEFINE_FOLD(min_i64, int64_t, a < b ? a : b)
DEFINE_FOLD(max_i64, int64_t, a > b ? a : b)

DEFINE_MANY(sum_32_many, uint32_t, uint32_t, SAME, a + b, a, SAME)
DEFINE_MANY(sum_64_many, uint64_t, uint64_t, SAME, a + b, a, SAME)
DEFINE_MANY(min_i32_many, int32_t, int32_t, SAME, a < b ? a : b, a, SAME)
DEFINE_MANY(max_i32_many, int32_t, int32_t, SAME, a > b ? a : b, a, SAME)
DEFINE_MANY(min_i64_many, int64_t, int64_t, SAME, a < b ? a : b, a, SAME)
DEFINE_MANY(max_i64_many, int64_t, int64_t, SAME, a > b ? a : b, a, SAME)

/* Bitwise operations on elements of any width, as bytes. */
DEFINE_FOLD(and_8, uint8_t, a &b)
DEFINE_FOLD(or_8, uint8_t, a | b)
DEFINE_FOLD(xor_8, uint8_t, a ^ b)

#define DEFINE_BITWISE(name, bytewise, size)                            \
    static void name(void *dst, const void *a, const void *b, size_t n) \
    {                                                                   \
        bytewise(dst, a, b, n *size);                                   \
    }
DEFINE_BITWISE(and_16, and_8, 2)
DEFINE_BITWISE(and_32, and_8, 4)
DEFINE_BITWISE(and_64, and_8, 8)
DEFINE_BITWISE(or_16, or_8, 2)
DEFINE_BITWISE(or_32, or_8, 4)
DEFINE_BITWISE(or_64, or_8, 8)
DEFINE_BITWISE(xor_16, xor_8, 2)
DEFINE_BITWISE(xor_32, xor_8, 4)
DEFINE_BITWISE(xor_64, xor_8, 8)

/* A BOOL from outside may hold any byte. */
DEFINE_FOLD(and_bool, uint8_t, (a != 0) & (b != 0))
DEFINE_FOLD(or_bool, uint8_t, (a | b) != 0)
DEFINE_FOLD(xor_bool, uint8_t, (a != 0) ^ (b != 0))
DEFINE_MAP(settle_bool, uint8_t, uint8_t, x != 0)

#define DEFINE_SETTLE(name, size)                          \
    static void name(void *dst, const void *src, size_t n) \
    {                                                      \
        if (dst != src)                                    \
            memcpy(dst, src, n *size);                     \
    }
DEFINE_SETTLE(settle_8, 1)
DEFINE_SETTLE(settle_16, 2)
DEFINE_SETTLE(settle_32, 4)
DEFINE_SETTLE(settle_64, 8)

static void set(struct reduce_table *table, mccl_op op, mccl_dtype dtype, reduce_fold_fn *fold)
{
    table->kernels[op][dtype] = (struct reduce_kernel){.fold = fold, .pair = fold};
}

static void set_type(struct reduce_table *table, mccl_dtype dtype, size_t size,
                     reduce_map_fn *settle)
{
    table->types[dtype] = (struct reduce_type){.size = size, .acc_size = size, .settle = settle};
}

/* What signed and unsigned integers of one width share. */
#define SET_SHARED(table, dtype, bits)                   \
    do {                                                 \
        set_type(table, dtype, bits / 8, settle_##bits); \
        set(table, MCCL_SUM, dtype, sum_##bits);         \
        set(table, MCCL_PROD, dtype, prod_##bits);       \
        set(table, MCCL_BAND, dtype, and_##bits);        \
        set(table, MCCL_BOR, dtype, or_##bits);          \
        set(table, MCCL_BXOR, dtype, xor_##bits);        \
    } while (0)

#define SET_ORDER(table, dtype, suffix)            \
    do {                                           \
        set(table, MCCL_MIN, dtype, min_##suffix); \
        set(table, MCCL_MAX, dtype, max_##suffix); \
    } while (0)

void reduce_fill_integer(struct reduce_table *table)
{
    SET_SHARED(table, MCCL_INT8, 8);
    SET_SHARED(table, MCCL_UINT8, 8);
    SET_SHARED(table, MCCL_INT16, 16);
    SET_SHARED(table, MCCL_UINT16, 16);
    SET_SHARED(table, MCCL_INT32, 32);
    SET_SHARED(table, MCCL_UINT32, 32);
    SET_SHARED(table, MCCL_INT64, 64);
    SET_SHARED(table, MCCL_UINT64, 64);
    SET_ORDER(table, MCCL_INT8, i8);
    SET_ORDER(table, MCCL_UINT8, u8);
    SET_ORDER(table, MCCL_INT16, i16);
    SET_ORDER(table, MCCL_UINT16, u16);
    SET_ORDER(table, MCCL_INT32, i32);
    SET_ORDER(table, MCCL_UINT32, u32);
    SET_ORDER(table, MCCL_INT64, i64);
    SET_ORDER(table, MCCL_UINT64, u64);

    table->kernels[MCCL_SUM][MCCL_INT32].many = sum_32_many;
    table->kernels[MCCL_SUM][MCCL_UINT32].many = sum_32_many;
    table->kernels[MCCL_SUM][MCCL_INT64].many = sum_64_many;
    table->kernels[MCCL_SUM][MCCL_UINT64].many = sum_64_many;
    table->kernels[MCCL_MIN][MCCL_INT32].many = min_i32_many;
    table->kernels[MCCL_MAX][MCCL_INT32].many = max_i32_many;
    table->kernels[MCCL_MIN][MCCL_INT64].many = min_i64_many;
    table->kernels[MCCL_MAX][MCCL_INT64].many = max_i64_many;

    set_type(table, MCCL_BOOL, 1, settle_bool);
    set(table, MCCL_SUM, MCCL_BOOL, or_bool);
    set(table, MCCL_MAX, MCCL_BOOL, or_bool);
    set(table, MCCL_BOR, MCCL_BOOL, or_bool);
    set(table, MCCL_PROD, MCCL_BOOL, and_bool);
    set(table, MCCL_MIN, MCCL_BOOL, and_bool);
    set(table, MCCL_BAND, MCCL_BOOL, and_bool);
    set(table, MCCL_BXOR, MCCL_BOOL, xor_bool);
}

/* SPDX-License-Identifier: MIT
 *
 * Small whole numbers that depend on rank and position: their sums are exact in every type, in
 * whatever order they are added. Used by one thread.
 */
#include "data.h"

#include <stdlib.h>
#include <string.h>

#define POISON 0xA5

static const char *const op_names[] = {
#define X(name) #name,
    OPS(X)
#undef X
};

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {
#define X(name, bytes) {#name, bytes},
    DTYPES(X)
#undef X
};

size_t dtype_bytes(enum dtype dtype)
{
    return dtype < N_DTYPES ? dtypes[dtype].bytes : 0;
}

enum op op_named(const char *name)
{
    int op = 0;
    while (op < N_OPS && strcmp(op_names[op], name) != 0)
        op++;
    return (enum op)op;
}

enum dtype dtype_named(const char *name)
{
    int dtype = 0;
    while (dtype < N_DTYPES && strcmp(dtypes[dtype].name, name) != 0)
        dtype++;
    return (enum dtype)dtype;
}

/* 0 .. 6 where few integers are exact, so that 16 ranks add up to less than 128; else 0 .. 60. */
static unsigned n_values(enum dtype dtype)
{
    return dtype == DTYPE_int8 || dtype == DTYPE_uint8 || dtype == DTYPE_bfloat16 ? 7 : 61;
}

/* Element `i` of rank `rank`. The product spreads positions, so that no shift maps onto itself. */
static unsigned value(int rank, size_t i, unsigned n)
{
    const uint32_t mixed = (uint32_t)i * 2654435761u + (uint32_t)rank * 1013904223u;
    return (mixed >> 16) % n;
}

/* A whole number below 1024 as float16, below 256 as bfloat16: exponent, then the leading bits. */
static uint16_t half_bits(unsigned whole, unsigned mantissa_bits, unsigned bias)
{
    if (whole == 0)
        return 0;
    unsigned exponent = 0;
    while (whole >> (exponent + 1))
        exponent++;
    const unsigned mantissa = (whole << (mantissa_bits - exponent)) & ((1u << mantissa_bits) - 1);
    return (uint16_t)(((exponent + bias) << mantissa_bits) | mantissa);
}

static void store(unsigned char *at, enum dtype dtype, size_t i, unsigned whole)
{
    switch (dtype) {
    case DTYPE_float32:
        ((float *)(void *)at)[i] = (float)whole;
        break;
    case DTYPE_float64:
        ((double *)(void *)at)[i] = whole;
        break;
    case DTYPE_float16:
        ((uint16_t *)(void *)at)[i] = half_bits(whole, 10, 15);
        break;
    case DTYPE_bfloat16:
        ((uint16_t *)(void *)at)[i] = half_bits(whole, 7, 127);
        break;
    case DTYPE_int32:
        ((int32_t *)(void *)at)[i] = (int32_t)whole;
        break;
    case DTYPE_int64:
        ((int64_t *)(void *)at)[i] = whole;
        break;
    default:
        at[i] = (unsigned char)whole;
    }
}

/* The sizes of an operation: of this rank's input and output, in blocks of call.count elements, and
 * whether there is an output here. */
struct shape {
    bool is_split; /* `bytes` are those of all ranks' blocks together */
    bool in_place;
    size_t in, out;
    bool has_result;
};

static struct shape shape_of(enum op op, const struct job *job)
{
    const size_t n = (size_t)job->n;
    const bool is_root = job->rank == 0;
    switch (op) {
    case OP_all_reduce:
    case OP_broadcast:
        return (struct shape){false, true, 1, 1, true};
    case OP_reduce:
        return (struct shape){false, true, 1, 1, is_root};
    case OP_all_gather:
        return (struct shape){true, false, 1, n, true};
    case OP_reduce_scatter:
        return (struct shape){true, false, n, 1, true};
    case OP_gather:
        return (struct shape){true, false, 1, n, is_root};
    case OP_scatter:
        return (struct shape){true, false, n, 1, true};
    case OP_all_to_all:
        return (struct shape){true, false, n, n, true};
    case OP_send_recv:
        return (struct shape){false, false, 1, 1, true};
    default:
        return (struct shape){false, false, 0, 0, false};
    }
}

/* Where only bytes are moved: what has to come from the other rank, or to go there, in one block.
 */
static struct shape moved_shape(enum op op, const struct job *job)
{
    const bool is_root = job->rank == 0;
    struct shape shape = shape_of(op, job);
    const bool to_root = op == OP_reduce || op == OP_gather;
    const bool from_root = op == OP_broadcast || op == OP_scatter;
    shape.in_place = false;
    shape.in = to_root ? !is_root : from_root ? is_root : 1;
    shape.out = to_root ? is_root : from_root ? !is_root : 1;
    shape.has_result = shape.out > 0;
    return shape;
}

static unsigned expected_value(const struct job *job, enum op op, size_t i, size_t count,
                               unsigned n)
{
    const size_t own = (size_t)job->rank * count;
    unsigned sum = 0;
    switch (op) {
    case OP_all_reduce:
    case OP_reduce:
        for (int rank = 0; rank < job->n; rank++)
            sum += value(rank, i, n);
        return sum;
    case OP_reduce_scatter:
        for (int rank = 0; rank < job->n; rank++)
            sum += value(rank, own + i, n);
        return sum;
    case OP_all_gather:
    case OP_gather:
        return value((int)(i / count), i % count, n);
    case OP_all_to_all:
        return value((int)(i / count), own + i % count, n);
    case OP_scatter:
        return value(0, own + i, n);
    case OP_send_recv:
        return value((job->rank + job->n - 1) % job->n, i, n);
    default:
        return value(0, i, n);
    }
}

static void *grow(void *old, size_t *room, size_t bytes)
{
    if (old && bytes <= *room)
        return old;
    free(old);
    const size_t lines = bytes / CACHE_LINE + 1;
    void *memory = aligned_alloc(CACHE_LINE, lines * CACHE_LINE);
    if (!memory)
        fail("no memory for %zu bytes", bytes);
    *room = lines * CACHE_LINE;
    return memory;
}

void data_set_up(struct data *data, const struct job *job, bool only_moves, enum op op,
                 enum dtype dtype, size_t bytes)
{
    if (data->source && data->op == op && data->dtype == dtype && data->bytes == bytes)
        return;
    const struct shape shape = only_moves ? moved_shape(op, job) : shape_of(op, job);
    const size_t size = dtype_bytes(dtype);
    const size_t count = bytes / size / (shape.is_split ? (size_t)job->n : 1);
    data->op = op;
    data->dtype = dtype;
    data->bytes = bytes;
    data->in_place = shape.in_place;
    data->is_checked = shape.has_result;
    data->source_bytes = shape.in * count * size;
    data->target_bytes = shape.out * count * size;
    size_t same_room = data->target_room;
    data->source = grow(data->source, &data->source_room, data->source_bytes);
    data->expected = grow(data->expected, &same_room, data->target_bytes);
    data->target = grow(data->target, &data->target_room, data->target_bytes);
    data->call = (struct call){
        .op = op,
        .dtype = dtype,
        .send = shape.in_place ? data->target : data->source,
        .recv = data->target,
        .count = count,
        .send_bytes = data->source_bytes,
        .recv_bytes = data->target_bytes,
    };
    const unsigned n = n_values(dtype);
    for (size_t i = 0; i < shape.in * count; i++)
        store(data->source, dtype, i, value(job->rank, i, n));
    for (size_t i = 0; i < shape.out * count && shape.has_result; i++)
        store(data->expected, dtype, i,
              only_moves ? value(1 - job->rank, i, n) : expected_value(job, op, i, count, n));
}

void data_fill(struct data *data)
{
    if (data->in_place)
        memcpy(data->target, data->source, data->source_bytes);
    else
        memset(data->target, POISON, data->target_bytes);
}

uint64_t data_count_wrong(const struct data *data)
{
    if (!data->is_checked || memcmp(data->target, data->expected, data->target_bytes) == 0)
        return 0;
    uint64_t wrong = 0;
    const size_t size = dtype_bytes(data->dtype);
    for (size_t at = 0; at < data->target_bytes; at += size)
        wrong += memcmp(data->target + at, data->expected + at, size) != 0;
    return wrong;
}

void data_free(struct data *data)
{
    free(data->source);
    free(data->target);
    free(data->expected);
}

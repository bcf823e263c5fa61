/* SPDX-License-Identifier: MIT
 *
 * One rank's buffers for an operation, what goes into them and what has to come out.
 */
#ifndef BENCH_DATA_H
#define BENCH_DATA_H

#include "library.h"

struct data {
    enum op op;
    enum dtype dtype;
    size_t bytes;            /* as asked for; of the whole, in nccl-tests' sense */
    struct call call;        /* to pass to the library */
    unsigned char *source;   /* what this rank contributes */
    unsigned char *target;   /* where the result arrives */
    unsigned char *expected; /* what it has to be */
    size_t source_bytes, target_bytes;
    size_t source_room, target_room;
    bool in_place;
    bool is_checked; /* the operation leaves a result on this rank */
};

/* Element size in bytes, 0 past the end. */
size_t dtype_bytes(enum dtype dtype);
/* The value of a name, N_OPS or N_DTYPES if there is none. */
enum op op_named(const char *name);
enum dtype dtype_named(const char *name);

/* Makes `data` that of `bytes` of `op`; nothing is done if it is already. */
void data_set_up(struct data *data, const struct job *job, bool only_moves, enum op op,
                 enum dtype dtype, size_t bytes);
/* Before each call: the input, and nothing that could pass for a result. */
void data_fill(struct data *data);
/* After each call: the number of wrong elements. */
uint64_t data_count_wrong(const struct data *data);
void data_free(struct data *data);

#endif

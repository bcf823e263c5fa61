/* SPDX-License-Identifier: MIT
 *
 * One collective call, carried out by every rank of a communicator and checked to the last byte:
 * results against pattern_reduced or pattern_fill, send buffers for being unchanged, guard bytes
 * around everything. A wrong byte ends the rank with the case and the position.
 */
#ifndef MCCL_TESTS_CASES_H
#define MCCL_TESTS_CASES_H

#include "mccl.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, reduces, has a root, may be in place) */
#define CASE_KINDS(X)                      \
    X(ALL_REDUCE, true, false, true)       \
    X(REDUCE, true, true, true)            \
    X(REDUCE_SCATTER, true, false, true)   \
    X(REDUCE_SCATTER_V, true, false, true) \
    X(BROADCAST, false, true, true)        \
    X(ALL_GATHER, false, false, true)      \
    X(ALL_GATHER_V, false, false, true)    \
    X(GATHER, false, true, true)           \
    X(GATHER_V, false, true, true)         \
    X(SCATTER, false, true, true)          \
    X(SCATTER_V, false, true, true)        \
    X(ALL_TO_ALL, false, false, false)     \
    X(ALL_TO_ALL_V, false, false, false)

enum case_kind {
#define X(name, reduces, rooted, in_place) CASE_##name,
    CASE_KINDS(X)
#undef X
        N_CASE_KINDS
};

struct collective_case {
    enum case_kind kind;
    mccl_dtype dtype;
    mccl_op op;   /* kinds that reduce */
    size_t count; /* elements a block; the _V kinds derive each block's own count from it */
    int root;
    bool in_place;
    uint64_t seed; /* the same on all ranks; another one for each case */
};

bool case_reduces(enum case_kind kind);
bool case_has_root(enum case_kind kind);
bool case_can_be_in_place(enum case_kind kind);

/* Runs and checks it. The same case on every rank of `comm`; blocks until done here. */
void case_run(mccl_comm *comm, const struct collective_case *test);

#endif

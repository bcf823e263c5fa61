/* SPDX-License-Identifier: MIT
 *
 * What an operation claims to be. It travels in every frame, so that ranks which disagree find out
 * before data is believed, and it is what error texts print for both sides.
 */
#ifndef MCCL_COMM_SIGNATURE_H
#define MCCL_COMM_SIGNATURE_H

#include "mccl.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define OP_KINDS(X)                            \
    X(ALL_REDUCE, 1, "all_reduce")             \
    X(REDUCE, 2, "reduce")                     \
    X(BROADCAST, 3, "broadcast")               \
    X(ALL_GATHER, 4, "all_gather")             \
    X(ALL_GATHER_V, 5, "all_gather_v")         \
    X(REDUCE_SCATTER, 6, "reduce_scatter")     \
    X(REDUCE_SCATTER_V, 7, "reduce_scatter_v") \
    X(GATHER, 8, "gather")                     \
    X(GATHER_V, 9, "gather_v")                 \
    X(SCATTER, 10, "scatter")                  \
    X(SCATTER_V, 11, "scatter_v")              \
    X(ALL_TO_ALL, 12, "all_to_all")            \
    X(ALL_TO_ALL_V, 13, "all_to_all_v")        \
    X(BARRIER, 14, "barrier")                  \
    X(SEND, 15, "send")                        \
    X(RECV, 16, "recv")

enum op_kind {
#define X(name, value, text) OP_##name = value,
    OP_KINDS(X)
#undef X
};

#define SIGNATURE_NO_OP 0xff     /* reduce_op of kinds that do not reduce */
#define SIGNATURE_NO_ROOT 0xffff /* root of kinds that have none */

/* What one number says of the counts of ALL_GATHER_V and REDUCE_SCATTER_V, which all ranks must
 * share: with this bit their total and a hash, without it the count that all of them are. */
#define SIGNATURE_COUNTS_DIFFER (UINT64_C(1) << 63)
#define SIGNATURE_HASH_BITS 24 /* the lowest ones */
#define SIGNATURE_TOTAL_MASK ((UINT64_C(1) << 39) - 1)

struct signature {
    uint8_t kind;      /* enum op_kind */
    uint8_t dtype;     /* mccl_dtype; barrier: UINT8 */
    uint8_t reduce_op; /* mccl_op or SIGNATURE_NO_OP */
    uint16_t root;     /* or SIGNATURE_NO_ROOT */
    /* Elements of the call's count argument. ALL_GATHER_V and REDUCE_SCATTER_V: see above.
     * GATHER_V, SCATTER_V, ALL_TO_ALL_V: 0, since counts differ by rank there. */
    uint64_t count;
};

const char *op_kind_name(unsigned kind);
bool signature_equal(const struct signature *a, const struct signature *b);
/* "all_reduce(count=4, dtype=float32, op=sum)". Values outside their enums print as numbers:
 * `signature` may come from the network. */
void signature_format(const struct signature *signature, char *text, size_t size);

#endif

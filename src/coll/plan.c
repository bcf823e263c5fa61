/* SPDX-License-Identifier: MIT
 *
 * Chooses the algorithm of a call and has it built. The choice is the first row of a table that
 * fits, so what the library does at which size can be read here, and docs/algorithms.md tells why.
 * Pure functions, called by the submitter; every rank computes the same choice from the same
 * arguments.
 */
#include "base/config.h"
#include "base/error.h"
#include "coll/build.h"

#define N_ANY INT32_MAX
/* Kinds of limits on a call's bytes. With S the whole vector: */
enum limit {
    LIMIT_ANY,
    LIMIT_SMALL,  /* S <= small_bytes */
    LIMIT_FANOUT, /* (n - 1) * S <= small_bytes: what one rank sends or receives if all get whole
                     vectors */
};

struct row {
    enum op_kind kind;
    int n_max;
    enum limit limit;
    enum coll_algorithm algorithm;
};

/* The first row that fits is taken. Cost models: a seconds per message, b seconds per byte of a
 * rank's port, both directions at once; a/b is about 90 KB for TCP (15 us, 6 GB/s).
 * MCCL_SMALL_MSG_THRESHOLD moves the limits. */
static const struct row rows[] = {
    /* One step a + (n-1)Sb against two 2a + 2(n-1)/n Sb: even at S = a/b * n/((n-1)(n-2)), that is
     * a message volume (n-1)S of 270, 180, 120 KB for n = 3, 4, 8. For n = 2 both send S, but the
     * second reduces half as much on each rank: measured on 16 cores, even at 128 to 256 KiB, and
     * 1.24 and 1.4 times as fast at 1 and 64 MiB. */
    {OP_ALL_REDUCE, N_ANY, LIMIT_FANOUT, ALGO_DIRECT},
    /* The bytes of a ring in 2 steps instead of 2(n-1), and one rounding of 16-bit sums. */
    {OP_ALL_REDUCE, N_ANY, LIMIT_ANY, ALGO_TWO_SHOT},

    /* n = 2: S to root is the least possible. */
    {OP_REDUCE, 2, LIMIT_ANY, ALGO_LINEAR},
    /* Root receives (n-1)S in one step, against S in two: even at (n-1)S = a/b * (n-1)/(n-2). */
    {OP_REDUCE, N_ANY, LIMIT_FANOUT, ALGO_LINEAR},
    {OP_REDUCE, N_ANY, LIMIT_ANY, ALGO_SCATTER_GATHER},

    /* n = 2: a tree of one edge. */
    {OP_BROADCAST, 2, LIMIT_ANY, ALGO_TREE},
    /* log2(n) messages at the busiest rank, against n - 1 shares of S/(n-1) at every rank: short
     * shares cost more in messages than the tree does in bytes. */
    {OP_BROADCAST, N_ANY, LIMIT_SMALL, ALGO_TREE},
    {OP_BROADCAST, N_ANY, LIMIT_ANY, ALGO_SCATTER_GATHER},

    /* One step with the least bytes, at every size. */
    {OP_REDUCE_SCATTER, N_ANY, LIMIT_ANY, ALGO_DIRECT},
    {OP_REDUCE_SCATTER_V, N_ANY, LIMIT_ANY, ALGO_DIRECT},
    {OP_ALL_GATHER, N_ANY, LIMIT_ANY, ALGO_DIRECT},
    {OP_ALL_GATHER_V, N_ANY, LIMIT_ANY, ALGO_DIRECT},
    {OP_GATHER, N_ANY, LIMIT_ANY, ALGO_LINEAR},
    {OP_GATHER_V, N_ANY, LIMIT_ANY, ALGO_LINEAR},
    {OP_SCATTER, N_ANY, LIMIT_ANY, ALGO_LINEAR},
    {OP_SCATTER_V, N_ANY, LIMIT_ANY, ALGO_LINEAR},
    {OP_ALL_TO_ALL, N_ANY, LIMIT_ANY, ALGO_PAIRWISE},
    {OP_ALL_TO_ALL_V, N_ANY, LIMIT_ANY, ALGO_PAIRWISE},
    {OP_BARRIER, N_ANY, LIMIT_ANY, ALGO_DISSEMINATION},
};

/* Who builds what, and from how many ranks on. ALGO_LOCAL is added by coll_build. */
static const struct builder {
    enum op_kind kind;
    enum coll_algorithm algorithm;
    int n_min;
    coll_builder *build;
} builders[] = {
    {OP_ALL_REDUCE, ALGO_DIRECT, 2, build_owners},
    {OP_ALL_REDUCE, ALGO_TWO_SHOT, 2, build_owners},
    {OP_ALL_REDUCE, ALGO_RING, 2, build_ring},
    {OP_ALL_REDUCE, ALGO_RING_FAST, 3, build_ring},
    {OP_REDUCE, ALGO_LINEAR, 2, build_owners},
    {OP_REDUCE, ALGO_SCATTER_GATHER, 2, build_owners},
    {OP_REDUCE_SCATTER, ALGO_DIRECT, 2, build_owners},
    {OP_REDUCE_SCATTER_V, ALGO_DIRECT, 2, build_owners},
    {OP_BROADCAST, ALGO_TREE, 2, build_broadcast},
    {OP_BROADCAST, ALGO_SCATTER_GATHER, 2, build_broadcast},
    {OP_ALL_GATHER, ALGO_DIRECT, 2, build_exchange},
    {OP_ALL_GATHER_V, ALGO_DIRECT, 2, build_exchange},
    {OP_GATHER, ALGO_LINEAR, 2, build_exchange},
    {OP_GATHER_V, ALGO_LINEAR, 2, build_exchange},
    {OP_SCATTER, ALGO_LINEAR, 2, build_exchange},
    {OP_SCATTER_V, ALGO_LINEAR, 2, build_exchange},
    {OP_ALL_TO_ALL, ALGO_PAIRWISE, 2, build_exchange},
    {OP_ALL_TO_ALL_V, ALGO_PAIRWISE, 2, build_exchange},
    {OP_BARRIER, ALGO_DISSEMINATION, 2, build_barrier},
};

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

const char *coll_algorithm_name(enum coll_algorithm algorithm)
{
    static const char *const names[ALGO_COUNT] = {
        [ALGO_LOCAL] = "local",         [ALGO_DIRECT] = "direct",
        [ALGO_TWO_SHOT] = "two_shot",   [ALGO_RING] = "ring",
        [ALGO_RING_FAST] = "ring_fast", [ALGO_LINEAR] = "linear",
        [ALGO_TREE] = "tree",           [ALGO_SCATTER_GATHER] = "scatter_gather",
        [ALGO_PAIRWISE] = "pairwise",   [ALGO_DISSEMINATION] = "dissemination",
    };
    return (unsigned)algorithm < ALGO_COUNT ? names[algorithm] : "?";
}

static bool fits(enum limit limit, size_t bytes, const struct coll_env *env)
{
    switch (limit) {
    case LIMIT_SMALL:
        return bytes <= env->small_bytes;
    case LIMIT_FANOUT:
        return bytes <= env->small_bytes / (size_t)(env->n_ranks - 1);
    case LIMIT_ANY:
        break;
    }
    return true;
}

/* The user's word on all_reduce, or ALGO_COUNT. RING_ALGO says which ring, once there is one. */
static enum coll_algorithm forced_all_reduce(const struct coll_env *env, size_t bytes)
{
    switch (env->allreduce_algo) {
    case ALLREDUCE_DIRECT:
        return ALGO_DIRECT;
    case ALLREDUCE_TWO_SHOT:
        return ALGO_TWO_SHOT;
    case ALLREDUCE_RING_CHUNKED:
        if (bytes <= env->small_bytes)
            return ALGO_DIRECT;
        break;
    case ALLREDUCE_RING:
        break;
    default:
        return ALGO_COUNT;
    }
    /* Two ranks have one link between them: a second direction adds nothing. */
    return env->ring_algo == RING_FAST && env->n_ranks > 2 ? ALGO_RING_FAST : ALGO_RING;
}

enum coll_algorithm coll_choose(const struct coll_call *call, const struct coll_env *env)
{
    if (env->n_ranks == 1)
        return ALGO_LOCAL;
    const size_t bytes = call->count * mccl_dtype_size(call->dtype);
    if (call->kind == OP_ALL_REDUCE) {
        const enum coll_algorithm forced = forced_all_reduce(env, bytes);
        if (forced != ALGO_COUNT)
            return forced;
    }
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        if (rows[i].kind == call->kind && env->n_ranks <= rows[i].n_max &&
            fits(rows[i].limit, bytes, env))
            return rows[i].algorithm;
    error_assert_failed("the table has a row for every collective", __FILE__, __LINE__);
}

/* With one rank every builder of a kind comes down to the same local steps: the first one serves.
 * Rings and SCATTER_GATHER come later in the table, since they need a peer. */
static const struct builder *find_builder(enum op_kind kind, enum coll_algorithm algorithm,
                                          int n_ranks)
{
    for (size_t i = 0; i < COUNT_OF(builders); i++) {
        const struct builder *builder = &builders[i];
        if (builder->kind != kind)
            continue;
        if (n_ranks == 1 && algorithm == ALGO_LOCAL)
            return builder;
        if (builder->algorithm == algorithm && n_ranks >= builder->n_min)
            return builder;
    }
    return NULL;
}

mccl_result coll_build(const struct coll_call *call, const struct coll_env *env,
                       enum coll_algorithm algorithm, struct schedule *schedule)
{
    const struct builder *builder = find_builder(call->kind, algorithm, env->n_ranks);
    if (builder == NULL)
        return error_set(MCCL_ERR_UNSUPPORTED,
                         "%s has no algorithm '%s' for %d ranks; use the default",
                         op_kind_name(call->kind), coll_algorithm_name(algorithm), env->n_ranks);
    TRY(schedule_reset(schedule, env->n_ranks, call->dtype, call->op));
    schedule->factor = call->factor;
    builder->build(call, env, algorithm, schedule);
    if (schedule->failed != MCCL_OK)
        return error_set(schedule->failed,
                         "no memory to plan %s of %zu elements on %d ranks; free some and retry",
                         op_kind_name(call->kind), call->count, env->n_ranks);
    return MCCL_OK;
}

mccl_result coll_plan(const struct coll_call *call, const struct coll_env *env,
                      struct schedule *schedule)
{
    return coll_build(call, env, coll_choose(call, env), schedule);
}

/* The hash is FNV-1a, 64 bits, over the counts as little-endian 64-bit numbers. */
static uint64_t sum_up_counts(const size_t *counts, int n)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325), total = 0;
    bool equal = true;
    for (int i = 0; i < n; i++) {
        equal = equal && counts[i] == counts[0];
        total += counts[i];
        for (int shift = 0; shift < 64; shift += 8) {
            hash ^= ((uint64_t)counts[i] >> shift) & 0xff;
            hash *= UINT64_C(0x100000001b3);
        }
    }
    if (equal)
        return counts[0] & ~SIGNATURE_COUNTS_DIFFER;
    return SIGNATURE_COUNTS_DIFFER | (total & SIGNATURE_TOTAL_MASK) << SIGNATURE_HASH_BITS |
           hash >> (64 - SIGNATURE_HASH_BITS);
}

void coll_signature(const struct coll_call *call, int n_ranks, struct signature *signature)
{
    *signature = (struct signature){.kind = (uint8_t)call->kind,
                                    .dtype = (uint8_t)call->dtype,
                                    .reduce_op = SIGNATURE_NO_OP,
                                    .root = SIGNATURE_NO_ROOT,
                                    .count = call->count};
    switch (call->kind) {
    case OP_REDUCE:
        signature->root = (uint16_t)call->root;
        signature->reduce_op = (uint8_t)call->op;
        break;
    case OP_ALL_REDUCE:
    case OP_REDUCE_SCATTER:
        signature->reduce_op = (uint8_t)call->op;
        break;
    case OP_REDUCE_SCATTER_V:
        signature->reduce_op = (uint8_t)call->op;
        signature->count = sum_up_counts(call->send_counts, n_ranks);
        break;
    case OP_ALL_GATHER_V:
        signature->count = sum_up_counts(call->recv_counts, n_ranks);
        break;
    case OP_GATHER_V:
    case OP_SCATTER_V:
        signature->count = 0;
        signature->root = (uint16_t)call->root;
        break;
    case OP_BROADCAST:
    case OP_GATHER:
    case OP_SCATTER:
        signature->root = (uint16_t)call->root;
        break;
    case OP_ALL_TO_ALL_V:
        signature->count = 0;
        break;
    case OP_BARRIER:
        signature->count = 0;
        signature->dtype = MCCL_UINT8;
        break;
    case OP_ALL_GATHER:
    case OP_ALL_TO_ALL:
    case OP_SEND:
    case OP_RECV:
        break;
    }
}

/* SPDX-License-Identifier: MIT
 *
 * From a collective call to a schedule. coll_plan is a pure function over the table in plan.c: it
 * picks the algorithm by op, number of ranks and bytes; one file per algorithm or family then adds
 * the steps. Nothing here knows links, sockets or threads.
 */
#ifndef MCCL_COLL_H
#define MCCL_COLL_H

#include "comm/schedule.h"
#include "comm/signature.h"

/* A checked call. Which members matter depends on `kind`; they mean what the parameters of the same
 * name mean in mccl.h. Single-buffer kinds use send/recv/count, _V kinds the arrays. Buffers of 0
 * elements may be NULL. Checked means also that a rank's own part of GATHER_V, SCATTER_V and
 * ALL_TO_ALL_V has the same count on both sides, where both are known to it. */
struct coll_call {
    enum op_kind kind;
    mccl_dtype dtype;
    mccl_op op;
    int root;
    double factor; /* PREMUL_SUM */
    const void *send;
    void *recv;
    size_t count; /* count, send_count or recv_count argument */
    const void *const *sends;
    void *const *recvs;
    const size_t *send_counts; /* REDUCE_SCATTER_V's `counts` too */
    const size_t *recv_counts;
};

/* What the links of a group are, as far as all ranks know it. */
enum coll_links {
    LINKS_TCP,   /* or not known */
    LINKS_SHM,   /* all ranks are on one host and share memory */
    LINKS_MIXED, /* several hosts, several ranks on some of them */
    N_LINKS
};

/* What the choice depends on besides the call. Equal on all ranks but for `rank`. */
struct coll_env {
    int rank, n_ranks;
    size_t chunk_bytes; /* most bytes in one message (MCCL_CHUNK_BYTES) */
    size_t small_bytes; /* MCCL_SMALL_MSG_THRESHOLD: at most this is "small" */
    int allreduce_algo; /* enum setting_allreduce_algo */
    int ring_algo;      /* enum setting_ring_algo */
    enum coll_links links;
    const int *hosts; /* by rank: the host's number, counted from 0; NULL: all ranks on one */
};

enum coll_algorithm {
    ALGO_LOCAL,    /* n = 1: at most a copy */
    ALGO_DIRECT,   /* every rank exchanges whole vectors with every other; one step */
    ALGO_TWO_SHOT, /* direct reduce-scatter, then direct all-gather */
    ALGO_RING,
    ALGO_RING_FAST,      /* two rings in opposite directions */
    ALGO_LINEAR,         /* root talks to everybody */
    ALGO_TREE,           /* binomial */
    ALGO_SCATTER_GATHER, /* broadcast: scatter, then all-gather; reduce: reduce-scatter, then gather
                          */
    ALGO_PAIRWISE,
    ALGO_DISSEMINATION,
    ALGO_RECURSIVE_DOUBLING,
    ALGO_RABENSEIFNER,
    ALGO_CHAIN, /* a tree of one branch, in pieces */
    ALGO_BRUCK,
    ALGO_TWO_LEVEL, /* within hosts, between hosts, within hosts */
    ALGO_COUNT
};
const char *coll_algorithm_name(enum coll_algorithm algorithm);

/* Is there such an algorithm for the kind, with this many ranks? */
bool coll_has(enum op_kind kind, enum coll_algorithm algorithm, int n_ranks);

/* Which algorithm `call` gets. Never fails for a checked call, and depends on nothing that differs
 * by rank. */
enum coll_algorithm coll_choose(const struct coll_call *call, const struct coll_env *env);

/* Builds the schedule (which it resets first) of rank env->rank with `algorithm`.
 * MCCL_ERR_NO_MEMORY, or MCCL_ERR_UNSUPPORTED if the algorithm does not implement the kind for this
 * number of ranks. */
mccl_result coll_build(const struct coll_call *call, const struct coll_env *env,
                       enum coll_algorithm algorithm, struct schedule *schedule);

/* coll_choose and coll_build. */
mccl_result coll_plan(const struct coll_call *call, const struct coll_env *env,
                      struct schedule *schedule);

/* The call's signature. */
void coll_signature(const struct coll_call *call, int n_ranks, struct signature *signature);

#endif

/* SPDX-License-Identifier: MIT
 *
 * Reductions in which every element has an owner that gets the operands of all ranks directly and
 * reduces them in one pass, in rank order. Who owns what makes the collective: all_reduce DIRECT
 * everybody owns everything all_reduce TWO_SHOT       each rank a shard, then delivered to
 * everybody reduce LINEAR             root everything reduce SCATTER_GATHER     each rank but root
 * a shard, then delivered to root reduce_scatter(_v) DIRECT each rank its block Called by the
 * submitter, through coll_build.
 */
#include "base/error.h"
#include "coll/build.h"

#include <stdlib.h>

/* Delivery runs this many pieces behind: a message to a peer waits for those before it, so a result
 * that is not ready yet must not hold up the next operands. */
#define DELIVERY_LAG 2u
/* Rounds whose steps are remembered; more than PIECE_DEPTH and DELIVERY_LAG. */
#define HISTORY 8u
/* A result slot is used again PIECE_DEPTH rounds later: its message must exist by then. */
/* So many ranks are remembered without an allocation. */
#define FEW_RANKS 8
_Static_assert(DELIVERY_LAG < PIECE_DEPTH && PIECE_DEPTH < HISTORY, "steps forgotten too early");

/* The part of the vector that one rank owns, as this rank sees it. */
struct block {
    const unsigned char *src; /* this rank's operand */
    unsigned char *dst;       /* where the result belongs here; NULL if nowhere */
    size_t count;             /* elements */
};

struct job {
    const struct coll_call *call;
    const struct coll_env *env;
    struct schedule *schedule;
    enum coll_algorithm algorithm;
    int rank, n;
    size_t element;  /* bytes */
    size_t shard;    /* elements; for algorithms with shards */
    size_t piece;    /* elements */
    size_t n_rounds; /* pieces of the largest block */
    size_t depth;    /* scratch slots per peer */
    bool shared;     /* everybody owns the same block */
    bool premultiply;
    bool lands; /* the first peer's operands arrive where the result goes */
    struct block own;
    /* Scratch, NULL where not needed: slots of `piece` elements. */
    unsigned char *operands; /* arriving, [peer][depth] */
    unsigned char *scaled;   /* leaving, [peer][depth] */
    unsigned char *results;  /* on their way to root, [depth] */
    /* Steps of the last rounds. */
    uint32_t *sent;    /* [HISTORY][n] by peer */
    uint32_t *arrived; /* [n], this round */
    uint32_t reduced[HISTORY], delivered[HISTORY];
    const void **srcs;                             /* [n] by rank, this round */
    uint32_t few_steps[(HISTORY + 1) * FEW_RANKS]; /* where the arrays lie if they fit */
    const void *few_srcs[FEW_RANKS];
};

/* A slice of the whole vector; `index` of shards. */
static struct block shard_block(const struct job *job, size_t index)
{
    const size_t first = index * job->shard;
    const size_t count = cut_length(job->call->count, job->shard, index);
    if (count == 0)
        return (struct block){0};
    const bool wants_result = job->call->kind == OP_ALL_REDUCE || job->rank == job->call->root;
    return (struct block){
        (const unsigned char *)job->call->send + first * job->element,
        wants_result ? (unsigned char *)job->call->recv + first * job->element : NULL, count};
}

static struct block block_of(const struct job *job, int owner)
{
    const struct coll_call *call = job->call;
    const bool own = owner == job->rank;
    switch (call->kind) {
    case OP_REDUCE_SCATTER:
        if (call->count == 0)
            return (struct block){0};
        return (struct block){(const unsigned char *)call->send +
                                  (size_t)owner * call->count * job->element,
                              own ? call->recv : NULL, call->count};
    case OP_REDUCE_SCATTER_V:
        return (struct block){call->sends[owner], own ? call->recv : NULL,
                              call->send_counts[owner]};
    case OP_ALL_REDUCE:
        if (job->algorithm == ALGO_TWO_SHOT)
            return shard_block(job, (size_t)owner);
        return (struct block){call->send, call->recv, call->count};
    default: /* OP_REDUCE */
        if (job->algorithm == ALGO_SCATTER_GATHER)
            return owner == call->root
                       ? (struct block){0}
                       : shard_block(job, (size_t)(owner < call->root ? owner : owner - 1));
        return owner == call->root
                   ? (struct block){call->send, own ? call->recv : NULL, call->count}
                   : (struct block){0};
    }
}

/* The peers in an order that differs by rank, so that no rank is everybody's first. */
static int send_peer(const struct job *job, int lane)
{
    return (job->rank + 1 + lane) % job->n;
}

static int recv_peer(const struct job *job, int lane)
{
    return (job->rank + job->n - 1 - lane) % job->n;
}

static size_t piece_bytes(const struct job *job)
{
    return job->piece * job->element;
}

static uint32_t *sent_step(const struct job *job, size_t round, int peer)
{
    return &job->sent[round % HISTORY * (size_t)job->n + (size_t)peer];
}

/* What must be done before the slots that `round` uses are free again: `steps` of the round before
 * in them. */
static uint32_t slot_free(const struct job *job, const uint32_t *steps, size_t round)
{
    return round < job->depth ? STEP_NONE : steps[(round - job->depth) % HISTORY];
}

static unsigned char *slot(const struct job *job, unsigned char *slots, size_t lane, size_t round)
{
    return slots + (lane * job->depth + round % job->depth) * piece_bytes(job);
}

static unsigned char *result_at(const struct job *job, size_t round)
{
    return job->own.dst != NULL ? job->own.dst + round * piece_bytes(job)
                                : slot(job, job->results, 0, round);
}

/* The step that makes the place of the round's result writable. */
static uint32_t result_free(const struct job *job, size_t round)
{
    return job->own.dst != NULL ? STEP_NONE : slot_free(job, job->delivered, round);
}

/* This rank's own operand of the round and the step that makes it. */
struct operand {
    const unsigned char *src;
    uint32_t ready;
};

static struct operand own_operand(const struct job *job, size_t round, size_t length)
{
    if (length == 0)
        return (struct operand){NULL, STEP_NONE};
    const unsigned char *src = job->own.src + round * piece_bytes(job);
    if (!job->premultiply)
        return (struct operand){src, STEP_NONE};
    unsigned char *dst = result_at(job, round);
    return (struct operand){
        dst, schedule_scale(job->schedule, dst, src, length, result_free(job, round))};
}

static void send_operand(const struct job *job, size_t round, int lane, struct operand own)
{
    const int peer = send_peer(job, lane);
    const struct block block = block_of(job, peer);
    const size_t length = cut_length(block.count, job->piece, round);
    uint32_t *sent = sent_step(job, round, peer);
    struct operand operand = own;
    if (length == 0) {
        *sent = STEP_NONE;
        return;
    }
    if (!job->shared) {
        operand = (struct operand){block.src + round * piece_bytes(job), STEP_NONE};
        if (job->premultiply) {
            unsigned char *scaled = slot(job, job->scaled, (size_t)lane, round);
            const uint32_t vacant =
                round < job->depth ? STEP_NONE : *sent_step(job, round - job->depth, peer);
            operand.ready = schedule_scale(job->schedule, scaled, operand.src, length, vacant);
            operand.src = scaled;
        }
    }
    *sent = schedule_send(job->schedule, peer, operand.src, length * job->element, operand.ready);
}

static void reduce_own(struct job *job, size_t round, size_t length, struct operand own)
{
    unsigned char *dst = result_at(job, round);
    for (int lane = 0; lane < job->n - 1; lane++) {
        const int peer = recv_peer(job, lane);
        const bool lands = job->lands && lane == 0;
        const size_t index = (size_t)(job->lands ? lane - 1 : lane);
        unsigned char *operand = lands ? dst : slot(job, job->operands, index, round);
        const uint32_t vacant =
            lands ? result_free(job, round) : slot_free(job, job->reduced, round);
        job->arrived[peer] =
            schedule_recv(job->schedule, peer, operand, length * job->element, vacant);
        job->srcs[peer] = operand;
    }
    job->srcs[job->rank] = own.src;
    const int divisor = job->call->op == MCCL_AVG ? job->n : 1;
    const uint32_t step =
        schedule_reduce(job->schedule, dst, job->srcs, job->n, length, divisor, own.ready);
    for (int lane = 0; lane < job->n - 1; lane++) {
        schedule_after(job->schedule, step, job->arrived[recv_peer(job, lane)]);
        if (job->shared && own.src == dst)
            schedule_after(job->schedule, step, *sent_step(job, round, send_peer(job, lane)));
    }
    job->reduced[round % HISTORY] = step;
}

/* Operands of one piece of every block: to its owner, and from everybody for this rank's own. */
static void contribute(struct job *job, size_t round)
{
    const size_t length = cut_length(job->own.count, job->piece, round);
    const struct operand own = own_operand(job, round, length);
    for (int lane = 0; lane < job->n - 1; lane++)
        send_operand(job, round, lane, own);
    if (length > 0)
        reduce_own(job, round, length, own);
}

static bool delivers_to(const struct job *job, int peer)
{
    return job->algorithm == ALGO_TWO_SHOT ||
           (job->algorithm == ALGO_SCATTER_GATHER && peer == job->call->root);
}

/* Results of one piece of every block, from its owner to those who want it. */
static void deliver(struct job *job, size_t round)
{
    const size_t length = cut_length(job->own.count, job->piece, round);
    for (int lane = 0; lane < job->n - 1; lane++) {
        const int peer = send_peer(job, lane);
        if (length > 0 && delivers_to(job, peer))
            job->delivered[round % HISTORY] =
                schedule_send(job->schedule, peer, result_at(job, round), length * job->element,
                              job->reduced[round % HISTORY]);
    }
    for (int lane = 0; lane < job->n - 1 && delivers_to(job, job->rank); lane++) {
        const int peer = recv_peer(job, lane);
        const struct block block = block_of(job, peer);
        const size_t incoming = cut_length(block.count, job->piece, round);
        if (incoming == 0)
            continue;
        /* In place the result overwrites the operand, which may still be on its way out. */
        const uint32_t vacant = block.dst == block.src ? *sent_step(job, round, peer) : STEP_NONE;
        schedule_recv(job->schedule, peer, block.dst + round * piece_bytes(job),
                      incoming * job->element, vacant);
    }
}

/* Sizes, and what depends on them. False if there is nothing to do. */
static bool measure(struct job *job)
{
    const size_t n_peers = (size_t)job->n - 1;
    const bool to_root = job->algorithm == ALGO_SCATTER_GATHER;
    job->shard = cut_shard(job->call->count, to_root ? n_peers : (size_t)job->n, job->element);
    size_t largest = 0;
    for (int owner = 0; owner < job->n; owner++) {
        const struct block block = block_of(job, owner);
        largest = block.count > largest ? block.count : largest;
    }
    if (largest == 0)
        return false;
    const size_t n_slots = n_peers * (job->premultiply && !job->shared ? 2 : 1) + 1;
    const size_t bytes = cut_piped(job->env, largest * job->element, n_slots, 5 * (size_t)job->n);
    job->piece = bytes / job->element;
    job->n_rounds = (largest + job->piece - 1) / job->piece;
    job->depth = job->n_rounds < PIECE_DEPTH ? job->n_rounds : PIECE_DEPTH;
    job->own = block_of(job, job->rank);
    job->lands = !job->premultiply && job->own.src != job->own.dst && n_peers > 0;
    return true;
}

static bool reserve(struct job *job)
{
    const size_t lane_bytes = job->depth * piece_bytes(job);
    const size_t n_peers = (size_t)job->n - 1;
    const bool owns = job->own.count > 0;
    const size_t operands = owns ? (n_peers - (job->lands ? 1 : 0)) * lane_bytes : 0;
    const size_t scaled = job->premultiply && !job->shared ? n_peers * lane_bytes : 0;
    const size_t results = owns && job->own.dst == NULL ? lane_bytes : 0;
    unsigned char *scratch = NULL;
    if (operands + scaled + results > 0)
        scratch = schedule_scratch(job->schedule, operands + scaled + results);
    job->operands = scratch;
    job->scaled = scratch == NULL ? NULL : scratch + operands;
    job->results = scratch == NULL ? NULL : scratch + operands + scaled;
    job->sent = job->few_steps;
    job->srcs = job->few_srcs;
    if (job->n > FEW_RANKS) {
        job->sent = malloc((HISTORY + 1) * (size_t)job->n * sizeof(*job->sent));
        job->srcs = malloc((size_t)job->n * sizeof(*job->srcs));
    }
    if (job->sent == NULL || job->srcs == NULL)
        job->schedule->failed = MCCL_ERR_NO_MEMORY;
    else
        job->arrived = job->sent + HISTORY * (size_t)job->n;
    for (size_t i = 0; i < HISTORY; i++)
        job->delivered[i] = job->reduced[i] = STEP_NONE;
    return job->schedule->failed == MCCL_OK;
}

/* All ranks add the messages of a pair in the order of rounds, operands before results. A message
 * waits only for messages that come earlier in that order, so nothing can block for good, whatever
 * the links buffer. */
void build_owners(const struct coll_call *call, const struct coll_env *env,
                  enum coll_algorithm algorithm, struct schedule *schedule)
{
    struct job job = {.call = call, .env = env, .schedule = schedule, .algorithm = algorithm};
    job.rank = env->rank;
    job.n = env->n_ranks;
    job.element = mccl_dtype_size(call->dtype);
    job.premultiply = call->op == MCCL_PREMUL_SUM;
    job.shared = call->kind == OP_ALL_REDUCE && algorithm != ALGO_TWO_SHOT;
    if (!measure(&job))
        return;
    if (reserve(&job)) {
        for (size_t round = 0; round < job.n_rounds + DELIVERY_LAG; round++) {
            if (round < job.n_rounds)
                contribute(&job, round);
            if (round >= DELIVERY_LAG)
                deliver(&job, round - DELIVERY_LAG);
        }
    }
    if (job.n > FEW_RANKS) {
        free(job.sent);
        free(job.srcs);
    }
}

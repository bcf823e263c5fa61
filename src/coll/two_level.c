/* SPDX-License-Identifier: MIT
 *
 * All-reduce between hosts with several ranks each, so that the vector leaves a host once and not
 * once per rank. It is cut into as many shards as the smallest host has ranks, and on every host
 * shard s belongs to the s-th of its ranks, its holder.
 *
 *   collect   holders reduce their shard over the ranks of their host, in rank order
 *   combine   the holders of a shard are one from each host; each reduces a part of the shard over
 *             the hosts, in order of hosts
 *   spread    and sends it to the other holders
 *   deliver   holders send the shard to the other ranks of their host
 *
 * Every element is reduced once over each host and once over the hosts, so all ranks get the same
 * bits. 16-bit floats travel as float32 until they are summed. Where hosts are not known, all ranks
 * count as one host's. Called by the submitter, through coll_build.
 */
#include "coll/build.h"
#include "coll/cells.h"

#include <stdlib.h>

/* A piece of each shard is in one stage at a time; a later piece is in an earlier stage. Messages
 * that wait for a reduction are added behind those of later pieces that do not. */
enum stage { COLLECT, COMBINE, SPREAD, DELIVER, N_STAGES };
_Static_assert(N_STAGES <= PIECE_DEPTH, "a slot is used again when its piece is through");

struct job {
    const struct coll_call *call;
    struct schedule *schedule;
    int n, rank, n_hosts, host;
    int n_local, local; /* ranks of this host, own position among them */
    int n_shards;
    bool wide, prepared;           /* 16-bit floats as float32; widened or scaled before */
    size_t element, final_element; /* bytes, as summed and as given */
    size_t shard, piece, part;     /* elements; a piece is cut into one part per host */
    int *order, *first;            /* ranks by host and rank; where each host begins, and the end */
    const void **srcs;             /* of one reduction */
    unsigned char *slots;          /* [PIECE_DEPTH][n_slots] */
    size_t n_slots, n_cells;       /* of one piece */
    struct cells cells;            /* [PIECE_DEPTH][n_cells] */
};

/* ---- Cells and slots of a piece ---- */

/* First those in the caller's memory: one for each shard, but one for each part of the own one.
 * Then the slots: prepared operands, operands that arrive, the sum of the host (if wide; one slot,
 * a cell for each part), sums of other hosts. */
static size_t shard_cell(int shard)
{
    return (size_t)shard;
}

static size_t result_cell(const struct job *job, int part)
{
    return (size_t)(job->n_shards + part);
}

static size_t first_slot_cell(const struct job *job)
{
    return (size_t)(job->n_shards + job->n_hosts);
}

static size_t prepared_slot(int shard)
{
    return (size_t)shard;
}

static size_t arrived_slot(const struct job *job, int local)
{
    return (size_t)((job->prepared ? job->n_shards : 0) + local);
}

static size_t other_slot(const struct job *job, int host)
{
    return arrived_slot(job, job->n_local) + (size_t)host;
}

static size_t sum_slot(const struct job *job)
{
    return other_slot(job, job->n_hosts);
}

/* The sum of the host over a part of the own shard. */
static size_t sum_cell(const struct job *job, int part)
{
    return job->wide ? first_slot_cell(job) + sum_slot(job) + (size_t)part : result_cell(job, part);
}

static unsigned char *slot_at(const struct job *job, size_t round, size_t slot)
{
    return job->slots + (round % PIECE_DEPTH * job->n_slots + slot) * job->piece * job->element;
}

static void reads(struct job *job, size_t round, uint32_t step, size_t cell)
{
    cells_read(&job->cells, step, round % PIECE_DEPTH * job->n_cells + cell, 1);
}

static void writes(struct job *job, size_t round, uint32_t step, size_t cell)
{
    cells_write(&job->cells, step, round % PIECE_DEPTH * job->n_cells + cell, 1);
}

/* ---- Lengths and places, in elements ---- */

static size_t piece_length(const struct job *job, int shard, size_t round)
{
    return cut_length(cut_length(job->call->count, job->shard, (size_t)shard), job->piece, round);
}

static size_t part_length(const struct job *job, size_t round, int part)
{
    return cut_length(piece_length(job, job->local, round), job->part, (size_t)part);
}

static size_t piece_offset(const struct job *job, int shard, size_t round)
{
    return (size_t)shard * job->shard + round * job->piece;
}

static unsigned char *result_at(const struct job *job, size_t round, int part)
{
    return (unsigned char *)job->call->recv +
           (piece_offset(job, job->local, round) + (size_t)part * job->part) * job->final_element;
}

/* The sum of the host, of which a part of a shard's piece is needed. */
static unsigned char *sum_at(const struct job *job, size_t round, int part)
{
    return job->wide ? slot_at(job, round, sum_slot(job)) + (size_t)part * job->part * job->element
                     : result_at(job, round, part);
}

static int rank_of(const struct job *job, int host, int local)
{
    return job->order[job->first[host] + local];
}

/* ---- Stages ---- */

/* This rank's operand for a shard, ready to be added or sent: as it is, or made in a slot. */
static const unsigned char *operand(struct job *job, size_t round, int shard)
{
    const size_t length = piece_length(job, shard, round);
    const size_t cell = first_slot_cell(job) + prepared_slot(shard);
    const unsigned char *src = (const unsigned char *)job->call->send +
                               piece_offset(job, shard, round) * job->final_element;
    if (!job->prepared)
        return src;
    unsigned char *dst = slot_at(job, round, prepared_slot(shard));
    uint32_t step;
    if (job->wide) {
        step = schedule_widen(job->schedule, (float *)(void *)dst, src, length, STEP_NONE);
        writes(job, round, step, cell);
        reads(job, round, step, shard_cell(shard)); /* in place the result comes there */
        if (job->call->op != MCCL_PREMUL_SUM)
            return dst;
        src = dst;
    }
    step = schedule_scale(job->schedule, dst, src, length, STEP_NONE);
    if (!job->wide)
        reads(job, round, step, shard_cell(shard));
    writes(job, round, step, cell);
    return dst;
}

static void send_operand(struct job *job, size_t round, int shard)
{
    const size_t length = piece_length(job, shard, round);
    if (length == 0)
        return;
    const unsigned char *src = operand(job, round, shard);
    const uint32_t step = schedule_send(job->schedule, rank_of(job, job->host, shard), src,
                                        length * job->element, STEP_NONE);
    reads(job, round, step,
          job->prepared ? first_slot_cell(job) + prepared_slot(shard) : shard_cell(shard));
}

static void collect(struct job *job, size_t round)
{
    for (int i = 1; i < job->n_local; i++) {
        const int shard = (job->local + i) % job->n_local;
        if (shard < job->n_shards)
            send_operand(job, round, shard);
    }
    const size_t length = job->local < job->n_shards ? piece_length(job, job->local, round) : 0;
    if (length == 0)
        return;
    job->srcs[job->local] = operand(job, round, job->local);
    for (int i = 1; i < job->n_local; i++) {
        const int local = (job->local + job->n_local - i) % job->n_local;
        unsigned char *dst = slot_at(job, round, arrived_slot(job, local));
        writes(job, round,
               schedule_recv(job->schedule, rank_of(job, job->host, local), dst,
                             length * job->element, STEP_NONE),
               first_slot_cell(job) + arrived_slot(job, local));
        job->srcs[local] = dst;
    }
    const bool ends = job->n_hosts == 1 && job->call->op == MCCL_AVG;
    const uint32_t step = schedule_reduce(job->schedule, sum_at(job, round, 0), job->srcs,
                                          job->n_local, length, ends ? job->n : 1, STEP_NONE);
    for (int local = 0; local < job->n_local; local++)
        if (local != job->local)
            reads(job, round, step, first_slot_cell(job) + arrived_slot(job, local));
    if (job->prepared)
        reads(job, round, step, first_slot_cell(job) + prepared_slot(job->local));
    /* In place and widened, the operand is where the result goes. */
    reads(job, round, step, shard_cell(job->local));
    for (int part = 0; part < job->n_hosts; part++)
        writes(job, round, step, sum_cell(job, part));
}

/* Own part of the shard, over all hosts. */
static void reduce_hosts(struct job *job, size_t round)
{
    const size_t length = part_length(job, round, job->host);
    if (length == 0)
        return;
    unsigned char *sum = sum_at(job, round, job->host);
    for (int host = 0; host < job->n_hosts; host++) {
        unsigned char *dst = slot_at(job, round, other_slot(job, host));
        job->srcs[host] = host == job->host ? sum : dst;
        if (host != job->host)
            writes(job, round,
                   schedule_recv(job->schedule, rank_of(job, host, job->local), dst,
                                 length * job->element, STEP_NONE),
                   first_slot_cell(job) + other_slot(job, host));
    }
    const uint32_t step = schedule_reduce(job->schedule, sum, job->srcs, job->n_hosts, length,
                                          job->call->op == MCCL_AVG ? job->n : 1, STEP_NONE);
    for (int host = 0; host < job->n_hosts; host++)
        if (host != job->host)
            reads(job, round, step, first_slot_cell(job) + other_slot(job, host));
    writes(job, round, step, sum_cell(job, job->host));
}

static void combine(struct job *job, size_t round)
{
    if (job->local >= job->n_shards)
        return;
    for (int i = 1; i < job->n_hosts; i++) {
        const int host = (job->host + i) % job->n_hosts;
        const size_t length = part_length(job, round, host);
        if (length > 0)
            reads(job, round,
                  schedule_send(job->schedule, rank_of(job, host, job->local),
                                sum_at(job, round, host), length * job->element, STEP_NONE),
                  sum_cell(job, host));
    }
    if (job->n_hosts > 1)
        reduce_hosts(job, round);
    const size_t length = part_length(job, round, job->host);
    if (!job->wide || length == 0)
        return;
    const uint32_t step = schedule_narrow(
        job->schedule, result_at(job, round, job->host),
        (const float *)(const void *)sum_at(job, round, job->host), length, STEP_NONE);
    reads(job, round, step, sum_cell(job, job->host));
    reads(job, round, step, first_slot_cell(job) + prepared_slot(job->local));
    writes(job, round, step, result_cell(job, job->host));
}

static void spread(struct job *job, size_t round)
{
    if (job->local >= job->n_shards)
        return;
    for (int i = 1; i < job->n_hosts; i++) {
        const int to = (job->host + i) % job->n_hosts;
        const int from = (job->host + job->n_hosts - i) % job->n_hosts;
        const size_t sent = part_length(job, round, job->host);
        const size_t taken = part_length(job, round, from);
        if (sent > 0)
            reads(job, round,
                  schedule_send(job->schedule, rank_of(job, to, job->local),
                                result_at(job, round, job->host), sent * job->final_element,
                                STEP_NONE),
                  result_cell(job, job->host));
        if (taken == 0)
            continue;
        const uint32_t step =
            schedule_recv(job->schedule, rank_of(job, from, job->local),
                          result_at(job, round, from), taken * job->final_element, STEP_NONE);
        if (job->wide) /* in place the operand was there until it was widened */
            reads(job, round, step, first_slot_cell(job) + prepared_slot(job->local));
        writes(job, round, step, result_cell(job, from));
    }
}

static void deliver(struct job *job, size_t round)
{
    for (int i = 1; i < job->n_local; i++) {
        const int to = (job->local + i) % job->n_local;
        const int from = (job->local + job->n_local - i) % job->n_local;
        const size_t sent = job->local < job->n_shards ? piece_length(job, job->local, round) : 0;
        const size_t taken = from < job->n_shards ? piece_length(job, from, round) : 0;
        if (sent > 0) {
            const uint32_t step =
                schedule_send(job->schedule, rank_of(job, job->host, to), result_at(job, round, 0),
                              sent * job->final_element, STEP_NONE);
            for (int part = 0; part < job->n_hosts; part++)
                reads(job, round, step, result_cell(job, part));
        }
        if (taken > 0)
            writes(job, round,
                   schedule_recv(job->schedule, rank_of(job, job->host, from),
                                 (unsigned char *)job->call->recv +
                                     piece_offset(job, from, round) * job->final_element,
                                 taken * job->final_element, STEP_NONE),
                   shard_cell(from));
    }
}

/* ---- Building ---- */

/* Ranks by host. False if memory is short. */
static bool lay_out(struct job *job, const struct coll_env *env)
{
    const int n = env->n_ranks;
    job->n_hosts = 1;
    for (int rank = 0; env->hosts != NULL && rank < n; rank++)
        if (env->hosts[rank] >= job->n_hosts)
            job->n_hosts = env->hosts[rank] + 1;
    job->order = malloc((size_t)(n + job->n_hosts + 1) * sizeof(*job->order));
    job->srcs = malloc((size_t)n * sizeof(*job->srcs));
    if (job->order == NULL || job->srcs == NULL)
        return false;
    job->first = job->order + n;
    job->n_shards = n;
    int used = 0;
    for (int host = 0; host < job->n_hosts; host++) {
        job->first[host] = used;
        for (int rank = 0; rank < n; rank++) {
            if (env->hosts != NULL && env->hosts[rank] != host)
                continue;
            if (rank == env->rank) {
                job->host = host;
                job->local = used - job->first[host];
            }
            job->order[used++] = rank;
        }
        const int here = used - job->first[host];
        job->n_shards = here < job->n_shards ? here : job->n_shards;
    }
    job->first[job->n_hosts] = used;
    job->n_local = job->first[job->host + 1] - job->first[job->host];
    return true;
}

/* Returns the number of pieces of a shard: equal on all ranks, as is their length. */
static size_t measure(struct job *job, const struct coll_env *env)
{
    int most_local = 0;
    for (int host = 0; host < job->n_hosts; host++) {
        const int here = job->first[host + 1] - job->first[host];
        most_local = here > most_local ? here : most_local;
    }
    const size_t n_slots = (size_t)(most_local + job->n_hosts + job->n_shards + 1);
    job->shard = cut_shard(job->call->count, (size_t)job->n_shards, job->element);
    job->piece = cut_piped(env, job->shard * job->element, n_slots, 3 * n_slots) / job->element;
    job->part = cut_shard(job->piece, (size_t)job->n_hosts, job->element);
    job->n_slots = sum_slot(job) + (job->wide ? 1 : 0);
    job->n_cells = first_slot_cell(job) + sum_slot(job) + (size_t)job->n_hosts;
    return (job->shard + job->piece - 1) / job->piece;
}

/* On all ranks the messages of a pair come in the order of rounds, and in a round in the order of
 * stages. A message waits only for those that come earlier in that order. */
static void run(struct job *job, size_t n_rounds)
{
    static void (*const stages[N_STAGES])(struct job *, size_t) = {collect, combine, spread,
                                                                   deliver};
    for (size_t at = 0; at < n_rounds + N_STAGES - 1; at++)
        for (size_t stage = 0; stage < N_STAGES; stage++)
            if (at >= stage && at - stage < n_rounds)
                stages[stage](job, at - stage);
}

void build_two_level(const struct coll_call *call, const struct coll_env *env,
                     enum coll_algorithm algorithm, struct schedule *schedule)
{
    (void)algorithm;
    if (call->count == 0)
        return;
    struct job job = {.call = call, .schedule = schedule, .n = env->n_ranks, .rank = env->rank};
    job.wide = call->dtype == MCCL_FLOAT16 || call->dtype == MCCL_BFLOAT16;
    job.prepared = job.wide || call->op == MCCL_PREMUL_SUM;
    job.final_element = mccl_dtype_size(call->dtype);
    if (job.wide)
        schedule->dtype = MCCL_FLOAT32;
    job.element = mccl_dtype_size(schedule->dtype);
    if (!lay_out(&job, env)) {
        schedule->failed = MCCL_ERR_NO_MEMORY;
    } else {
        const size_t n_rounds = measure(&job, env);
        const size_t depth = n_rounds < PIECE_DEPTH ? n_rounds : PIECE_DEPTH;
        job.slots = schedule_scratch(schedule, depth * job.n_slots * job.piece * job.element);
        if (job.slots != NULL && cells_open(&job.cells, schedule, PIECE_DEPTH * job.n_cells)) {
            run(&job, n_rounds);
            cells_close(&job.cells);
        }
    }
    free(job.order);
    free(job.srcs);
}

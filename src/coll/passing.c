/* SPDX-License-Identifier: MIT
 *
 * Collectives of n blocks in which a rank passes on what others gave it. all_gather RING: each
 * block travels round the ring; BRUCK: in log2(n) steps, in each of which a rank hands on all it
 * has. reduce_scatter RING: the sum for a rank travels once round the ring and ends there; 16-bit
 * floats travel as float32 and are rounded once. Fewer messages than everybody to everybody at
 * once, or cables that are a ring. Called by the submitter, through coll_build.
 */
#include "coll/build.h"
#include "coll/cells.h"

/* ---- all_gather ---- */

static unsigned char *gathered(const struct coll_call *call, int block)
{
    if (call->kind == OP_ALL_GATHER_V)
        return call->recvs[block];
    return (unsigned char *)call->recv + (size_t)block * call->count * mccl_dtype_size(call->dtype);
}

static size_t gathered_bytes(const struct coll_call *call, int block)
{
    return (call->kind == OP_ALL_GATHER_V ? call->recv_counts[block] : call->count) *
           mccl_dtype_size(call->dtype);
}

static void copy_mine(const struct coll_call *call, const struct coll_env *env,
                      struct schedule *schedule)
{
    copy_own(env, schedule, gathered(call, env->rank), call->send, gathered_bytes(call, env->rank));
}

void build_gather_ring(const struct coll_call *call, const struct coll_env *env,
                       enum coll_algorithm algorithm, struct schedule *schedule)
{
    (void)algorithm;
    const int n = env->n_ranks, rank = env->rank;
    size_t largest = 0;
    for (int block = 0; block < n; block++)
        largest = gathered_bytes(call, block) > largest ? gathered_bytes(call, block) : largest;
    const size_t piece = cut_piped(env, largest, 0, 2 * (size_t)n);
    const size_t n_pieces = (largest + piece - 1) / piece;
    struct cells cells;
    if (!cells_open(&cells, schedule, (size_t)n * n_pieces)) {
        cells_close(&cells);
        return;
    }
    for (int s = 0; s < n - 1; s++) {
        const int out = (rank - s + n) % n, in = (rank - s - 1 + n) % n;
        const unsigned char *src = s == 0 ? call->send : gathered(call, out);
        for (size_t i = 0; i < n_pieces; i++) {
            const size_t sent = cut_length(gathered_bytes(call, out), piece, i);
            const size_t taken = cut_length(gathered_bytes(call, in), piece, i);
            if (sent > 0)
                cells_read(
                    &cells,
                    schedule_send(schedule, (rank + 1) % n, src + i * piece, sent, STEP_NONE),
                    (size_t)out * n_pieces + i, 1);
            if (taken > 0)
                cells_write(&cells,
                            schedule_recv(schedule, (rank + n - 1) % n,
                                          gathered(call, in) + i * piece, taken, STEP_NONE),
                            (size_t)in * n_pieces + i, 1);
        }
    }
    copy_mine(call, env, schedule);
    cells_close(&cells);
}

/* Blocks [first, first + n), not beyond the last one, to or from `peer`. */
static void move_blocks(const struct coll_call *call, const struct coll_env *env,
                        struct cells *cells, int peer, int first, int n, bool sends)
{
    const size_t block = gathered_bytes(call, 0), bytes = (size_t)n * block;
    const size_t piece = cut_moved(env, (size_t)env->n_ranks * block);
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t length = cut_length(bytes, piece, at / piece);
        const size_t cell = (size_t)first + at / block;
        const size_t n_cells = (at + length - 1) / block - at / block + 1;
        unsigned char *place = gathered(call, first) + at;
        if (!sends)
            cells_write(cells, schedule_recv(cells->schedule, peer, place, length, STEP_NONE), cell,
                        n_cells);
        else if (n == 1 && first == env->rank)
            schedule_send(cells->schedule, peer, (const unsigned char *)call->send + at, length,
                          STEP_NONE);
        else
            cells_read(cells, schedule_send(cells->schedule, peer, place, length, STEP_NONE), cell,
                       n_cells);
    }
}

/* The same, going on with block 0 after the last one. */
static void move_around(const struct coll_call *call, const struct coll_env *env,
                        struct cells *cells, int peer, int first, int n, bool sends)
{
    const int before = first + n > env->n_ranks ? env->n_ranks - first : n;
    move_blocks(call, env, cells, peer, first, before, sends);
    if (before < n)
        move_blocks(call, env, cells, peer, 0, n - before, sends);
}

void build_gather_bruck(const struct coll_call *call, const struct coll_env *env,
                        enum coll_algorithm algorithm, struct schedule *schedule)
{
    (void)algorithm;
    const int n = env->n_ranks, rank = env->rank;
    struct cells cells;
    if (call->count > 0 && cells_open(&cells, schedule, (size_t)n)) {
        for (int distance = 1; distance < n; distance *= 2) {
            const int n_moved = distance < n - distance ? distance : n - distance;
            const int from = (rank + distance) % n;
            move_around(call, env, &cells, (rank - distance + n) % n, rank, n_moved, true);
            move_around(call, env, &cells, from, from, n_moved, false);
            if (distance > 1)
                continue;
            /* The first step sends from the operand; the others want this rank's block in its
             * row. */
            const uint32_t first_copy = schedule->n_steps;
            copy_mine(call, env, schedule);
            for (uint32_t step = first_copy; step < schedule->n_steps; step++)
                cells_write(&cells, step, (size_t)rank, 1);
        }
        cells_close(&cells);
    }
}

/* ---- reduce_scatter ---- */

/* Pieces of a block that travel at a time; each has a place for the sum that arrives and one for
 * the sum that leaves, and one for this rank's operand if it is not added as it is. */
#define GROUP PIECE_DEPTH

struct job {
    const struct coll_call *call;
    struct schedule *schedule;
    int n, rank;
    bool prepared; /* operands are widened or scaled before they are added */
    bool wide;
    size_t element, final_element; /* bytes, as summed and as given */
    size_t piece;                  /* elements */
    unsigned char *slots;          /* [3][GROUP] */
    struct cells cells;            /* one for each slot */
};

enum { SLOT_EVEN, SLOT_ODD, SLOT_OPERAND }; /* sums that arrive in even and odd steps */

static size_t slot_cell(int which, size_t piece)
{
    return (size_t)which * GROUP + piece % GROUP;
}

static unsigned char *slot_at(const struct job *job, int which, size_t piece)
{
    return job->slots + slot_cell(which, piece) * job->piece * job->element;
}

static size_t block_count(const struct job *job, int block)
{
    return job->call->kind == OP_REDUCE_SCATTER_V ? job->call->send_counts[block]
                                                  : job->call->count;
}

static size_t piece_length(const struct job *job, int block, size_t piece)
{
    return cut_length(block_count(job, block), job->piece, piece);
}

/* This rank's operand, ready to be added or sent: as it is, or made in a slot. */
static const unsigned char *operand(struct job *job, int block, size_t piece, int which)
{
    const struct coll_call *call = job->call;
    const size_t length = piece_length(job, block, piece);
    const unsigned char *src =
        call->kind == OP_REDUCE_SCATTER_V
            ? call->sends[block]
            : (const unsigned char *)call->send + (size_t)block * call->count * job->final_element;
    src += piece * job->piece * job->final_element;
    if (!job->prepared)
        return src;
    unsigned char *dst = slot_at(job, which, piece);
    if (job->wide) {
        cells_write(&job->cells,
                    schedule_widen(job->schedule, (float *)(void *)dst, src, length, STEP_NONE),
                    slot_cell(which, piece), 1);
        src = dst;
    }
    if (call->op == MCCL_PREMUL_SUM)
        cells_write(&job->cells, schedule_scale(job->schedule, dst, src, length, STEP_NONE),
                    slot_cell(which, piece), 1);
    return dst;
}

/* In step `s` a rank sends the sum for block rank - 1 - s and receives the next one. */
static void send_sum(struct job *job, int s, size_t piece)
{
    const int block = (job->rank - 1 - s + 2 * job->n) % job->n, which = (s + 1) % 2;
    const size_t length = piece_length(job, block, piece);
    if (length == 0)
        return;
    const unsigned char *src =
        s == 0 ? operand(job, block, piece, which) : slot_at(job, which, piece);
    const uint32_t step = schedule_send(job->schedule, (job->rank + 1) % job->n, src,
                                        length * job->element, STEP_NONE);
    if (s > 0 || job->prepared)
        cells_read(&job->cells, step, slot_cell(which, piece), 1);
}

static void add_own(struct job *job, int s, size_t piece)
{
    const int block = (job->rank - 2 - s + 2 * job->n) % job->n, which = s % 2;
    const size_t length = piece_length(job, block, piece), cell = slot_cell(which, piece);
    if (length == 0)
        return;
    const bool last = s == job->n - 2;
    unsigned char *sum = slot_at(job, which, piece);
    unsigned char *result =
        (unsigned char *)job->call->recv + piece * job->piece * job->final_element;
    cells_write(&job->cells,
                schedule_recv(job->schedule, (job->rank + job->n - 1) % job->n, sum,
                              length * job->element, STEP_NONE),
                cell, 1);
    const void *srcs[2] = {sum, operand(job, block, piece, SLOT_OPERAND)};
    const bool ends = last && !job->wide;
    const uint32_t step =
        schedule_reduce(job->schedule, ends ? result : sum, srcs, 2, length,
                        last && job->call->op == MCCL_AVG ? job->n : 1, STEP_NONE);
    if (job->prepared)
        cells_read(&job->cells, step, slot_cell(SLOT_OPERAND, piece), 1);
    if (ends)
        cells_read(&job->cells, step, cell, 1);
    else
        cells_write(&job->cells, step, cell, 1);
    if (last && job->wide)
        cells_read(&job->cells,
                   schedule_narrow(job->schedule, result, (const float *)(const void *)sum, length,
                                   STEP_NONE),
                   cell, 1);
}

void build_reduce_ring(const struct coll_call *call, const struct coll_env *env,
                       enum coll_algorithm algorithm, struct schedule *schedule)
{
    (void)algorithm;
    struct job job = {.call = call, .schedule = schedule, .n = env->n_ranks, .rank = env->rank};
    size_t largest = 0;
    for (int block = 0; block < job.n; block++)
        largest = block_count(&job, block) > largest ? block_count(&job, block) : largest;
    if (largest == 0)
        return;
    job.wide = call->dtype == MCCL_FLOAT16 || call->dtype == MCCL_BFLOAT16;
    job.prepared = job.wide || call->op == MCCL_PREMUL_SUM;
    job.final_element = mccl_dtype_size(call->dtype);
    if (job.wide)
        schedule->dtype = MCCL_FLOAT32;
    job.element = mccl_dtype_size(schedule->dtype);
    job.piece = cut_piped(env, largest * job.element, 3, 5 * (size_t)job.n) / job.element;
    const size_t n_pieces = (largest + job.piece - 1) / job.piece;
    job.slots = schedule_scratch(schedule, 3 * GROUP * job.piece * job.element);
    if (job.slots == NULL || !cells_open(&job.cells, schedule, (size_t)3 * GROUP))
        return;
    for (size_t group = 0; group < n_pieces; group += GROUP)
        for (int s = 0; s < job.n - 1; s++)
            for (size_t piece = group; piece < group + GROUP && piece < n_pieces; piece++) {
                send_sum(&job, s, piece);
                add_own(&job, s, piece);
            }
    cells_close(&job.cells);
}

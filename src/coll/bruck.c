/* SPDX-License-Identifier: MIT
 *
 * All-to-all by Bruck's algorithm, for many ranks and small blocks: log2(n) messages of half of the
 * blocks instead of n - 1 of one block. A block for the rank j places further travels the powers of
 * two that j is made of; what takes the same one goes in one message, packed. Called by the
 * submitter, through coll_build.
 */
#include "coll/build.h"
#include "coll/cells.h"

struct job {
    const struct coll_call *call;
    struct schedule *schedule;
    int n, rank, n_steps;
    size_t block, piece, at; /* bytes: of a block, of what one round moves of it, and from where */
    size_t length;           /* of this round's piece */
    unsigned char *scratch;  /* [n_steps][2][half]: leaving and arrived pieces */
    struct cells cells;      /* one for each of them */
};

static size_t half(const struct job *job)
{
    return ((size_t)job->n + 1) / 2;
}

/* The `index`-th piece that leaves, or that arrived, in step `k`. */
static size_t cell_of(const struct job *job, int k, bool arrived, size_t index)
{
    return ((size_t)k * 2 + arrived) * half(job) + index;
}

static unsigned char *place_of(const struct job *job, size_t cell)
{
    return job->scratch + cell * job->piece;
}

/* How many j < `j` take step `k`. */
static size_t index_in(int j, int k)
{
    const size_t period = (size_t)2 << k, rest = (size_t)j % period;
    return (size_t)j / period * (period / 2) + (rest > period / 2 ? rest - period / 2 : 0);
}

/* Copies the piece of block `j` as it is before step `k`. */
static uint32_t take(struct job *job, int j, int k, unsigned char *to)
{
    int last = k - 1;
    while (last >= 0 && !(j >> last & 1))
        last--;
    if (last < 0) {
        const size_t block = (size_t)((job->rank + j) % job->n);
        const unsigned char *src =
            (const unsigned char *)job->call->send + block * job->block + job->at;
        return schedule_copy(job->schedule, to, src, job->length, STEP_NONE);
    }
    const size_t cell = cell_of(job, last, true, index_in(j, last));
    const uint32_t step =
        schedule_copy(job->schedule, to, place_of(job, cell), job->length, STEP_NONE);
    cells_read(&job->cells, step, cell, 1);
    return step;
}

/* Pieces in scratch lie `piece` apart, which is `length` but for the last round. */
static void exchange(struct job *job, int k)
{
    const int distance = 1 << k;
    size_t n_moved = 0;
    for (int j = distance; j < job->n; j++) {
        if (!(j >> k & 1))
            continue;
        const size_t cell = cell_of(job, k, false, n_moved++);
        cells_write(&job->cells, take(job, j, k, place_of(job, cell)), cell, 1);
    }
    const size_t out = cell_of(job, k, false, 0), in = cell_of(job, k, true, 0);
    const size_t bytes = (n_moved - 1) * job->piece + job->length;
    cells_read(&job->cells,
               schedule_send(job->schedule, (job->rank + distance) % job->n, place_of(job, out),
                             bytes, STEP_NONE),
               out, n_moved);
    cells_write(&job->cells,
                schedule_recv(job->schedule, (job->rank - distance + job->n) % job->n,
                              place_of(job, in), bytes, STEP_NONE),
                in, n_moved);
}

void build_bruck(const struct coll_call *call, const struct coll_env *env,
                 enum coll_algorithm algorithm, struct schedule *schedule)
{
    (void)algorithm;
    struct job job = {.call = call, .schedule = schedule, .n = env->n_ranks, .rank = env->rank};
    job.block = call->count * mccl_dtype_size(call->dtype);
    while (1 << job.n_steps < job.n)
        job.n_steps++;
    if (job.block == 0)
        return;
    const size_t n_cells = (size_t)job.n_steps * 2 * half(&job);
    job.piece = cut_piped(env, job.block, n_cells / PIECE_DEPTH + 1, 2 * n_cells);
    if (job.piece > job.block)
        job.piece = job.block;
    job.scratch = schedule_scratch(schedule, n_cells * job.piece);
    if (job.scratch == NULL || !cells_open(&job.cells, schedule, n_cells))
        return;
    for (job.at = 0; job.at < job.block; job.at += job.piece) {
        job.length = cut_length(job.block, job.piece, job.at / job.piece);
        for (int k = 0; k < job.n_steps; k++)
            exchange(&job, k);
        for (int j = 0; j < job.n; j++)
            take(&job, j, job.n_steps,
                 (unsigned char *)call->recv +
                     (size_t)((job.rank - j + job.n) % job.n) * job.block + job.at);
    }
    cells_close(&job.cells);
}

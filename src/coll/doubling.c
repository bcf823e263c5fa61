/* SPDX-License-Identifier: MIT
 *
 * All-reduce between partners whose distance doubles, for many ranks and little data.
 * RECURSIVE_DOUBLING exchanges the whole vector in each of log2(n) steps. RABENSEIFNER exchanges
 * half of what is left (a reduce-scatter), then doubles it again (an all-gather). For other numbers
 * of ranks than powers of two, the first ranks are folded: of each pair the upper one hands its
 * vector to the lower one and gets the result at the end.
 *
 * After each step a rank holds the sum over a group of neighbours in rank order, and combines it
 * with that of the next group, lower ranks first: so both sides of an exchange, and in the end all
 * ranks, hold the same bits. 16-bit floats are widened first and travel as float32 until they are
 * summed. Called by the submitter, through coll_build.
 */
#include "coll/build.h"
#include "coll/cells.h"

struct job {
    const struct coll_call *call;
    const struct coll_env *env;
    struct schedule *schedule;
    int n, rank;
    int folded;     /* pairs of ranks that are folded: ranks 0 .. 2 folded - 1 */
    int n_places;   /* power of two: those that exchange */
    int place;      /* this rank among them, or -1: it is folded into rank - 1 */
    bool wide;      /* 16-bit floats, summed as float32 */
    size_t n_cells; /* of the vector: `n_pieces` for each of the blocks */
    size_t n_pieces;
    size_t block, piece;           /* elements */
    size_t run;                    /* cells in a message; 1 unless a block is one cell */
    size_t element, final_element; /* bytes, while it is summed and afterwards */
    const unsigned char *own;      /* operand; `work` if it is there */
    unsigned char *work;           /* sums; float32 if wide, else `result` */
    unsigned char *result;
    unsigned char *slots; /* PIECE_DEPTH messages that arrive */
    size_t n_arrived;
    /* Those of `work`, then those of `result` if wide, then one for each slot. */
    struct cells cells;
};

/* A stretch of cells. */
struct range {
    size_t first, end;
};

/* Elements before cell `index`. */
static size_t cell_offset(const struct job *job, size_t index)
{
    const size_t at = index / job->n_pieces * job->block + index % job->n_pieces * job->piece;
    return at < job->call->count ? at : job->call->count;
}

/* Elements of some cells of one block, or of some blocks of one cell each. */
static size_t range_length(const struct job *job, struct range range)
{
    const size_t block = cut_length(job->call->count, job->block, range.first / job->n_pieces);
    if (job->run > 1)
        return cell_offset(job, range.end) - cell_offset(job, range.first);
    return cut_length(block, job->piece, range.first % job->n_pieces);
}

/* Message `index` of those that carry `range`; empty at the end. */
static struct range message_range(const struct job *job, struct range range, size_t index)
{
    const size_t first = range.first + index * job->run;
    if (first >= range.end)
        return (struct range){range.end, range.end};
    return (struct range){first, first + job->run < range.end ? first + job->run : range.end};
}

static size_t n_messages(const struct job *job, struct range range)
{
    return (range.end - range.first + job->run - 1) / job->run;
}

static size_t result_cell(const struct job *job, size_t cell)
{
    return cell + (job->wide ? job->n_cells : 0);
}

static int rank_at(const struct job *job, int place)
{
    return place < job->folded ? 2 * place : place + job->folded;
}

/* The sum so far of a cell: still this rank's operand, or in `work`. */
static const unsigned char *sum_at(const struct job *job, size_t cell)
{
    const bool here = job->own == job->work || cells_written(&job->cells, cell);
    return (here ? job->work : job->own) + cell_offset(job, cell) * job->element;
}

static void send_sum(struct job *job, int peer, struct range range)
{
    const size_t length = range_length(job, range);
    if (length == 0)
        return;
    const unsigned char *sum = sum_at(job, range.first);
    const uint32_t step = schedule_send(job->schedule, peer, sum, length * job->element, STEP_NONE);
    /* A partner's sum may arrive in `work` while the operand leaves from elsewhere. */
    if (sum == job->work + cell_offset(job, range.first) * job->element)
        cells_read(&job->cells, step, range.first, range.end - range.first);
}

/* Receives the sum of lower or higher ranks over `range` and adds it to what is here. It arrives
 * in a slot, or where the result goes if nothing is there yet. */
static void reduce_sum(struct job *job, int peer, struct range range, bool lower, bool last)
{
    const size_t length = range_length(job, range), n = range.end - range.first;
    if (length == 0)
        return;
    const unsigned char *mine = sum_at(job, range.first);
    unsigned char *sum = job->work + cell_offset(job, range.first) * job->element;
    const bool lands = mine != sum;
    const size_t slot = lands ? 0 : job->n_arrived++ % PIECE_DEPTH;
    const size_t cell = lands ? range.first : result_cell(job, job->n_cells) + slot;
    unsigned char *theirs = lands ? sum : job->slots + slot * job->run * job->piece * job->element;
    const uint32_t arrived =
        schedule_recv(job->schedule, peer, theirs, length * job->element, STEP_NONE);
    cells_write(&job->cells, arrived, cell, lands ? n : 1);
    const void *srcs[2] = {lower ? theirs : mine, lower ? mine : theirs};
    const int divisor = last && job->call->op == MCCL_AVG ? job->n : 1;
    const uint32_t step = schedule_reduce(job->schedule, sum, srcs, 2, length, divisor, STEP_NONE);
    if (!lands)
        cells_read(&job->cells, step, cell, 1);
    cells_write(&job->cells, step, range.first, n);
}

static void exchange_sums(struct job *job, int partner, struct range give, struct range take,
                          bool last)
{
    const int peer = rank_at(job, partner);
    const size_t n_give = n_messages(job, give), n_take = n_messages(job, take);
    for (size_t i = 0; i < n_give || i < n_take; i++) {
        if (i < n_give)
            send_sum(job, peer, message_range(job, give, i));
        if (i < n_take)
            reduce_sum(job, peer, message_range(job, take, i), partner < job->place, last);
    }
}

/* Results, as they lie in the caller's memory. */
static void send_result(struct job *job, int peer, struct range range)
{
    const size_t length = range_length(job, range) * job->final_element;
    if (length == 0)
        return;
    const uint32_t step = schedule_send(
        job->schedule, peer, job->result + cell_offset(job, range.first) * job->final_element,
        length, STEP_NONE);
    cells_read(&job->cells, step, result_cell(job, range.first), range.end - range.first);
}

static void recv_result(struct job *job, int peer, struct range range)
{
    const size_t length = range_length(job, range) * job->final_element;
    if (length == 0)
        return;
    const uint32_t step = schedule_recv(
        job->schedule, peer, job->result + cell_offset(job, range.first) * job->final_element,
        length, STEP_NONE);
    cells_write(&job->cells, step, result_cell(job, range.first), range.end - range.first);
}

static void exchange_results(struct job *job, int peer, struct range give, struct range take)
{
    const size_t n_give = n_messages(job, give), n_take = n_messages(job, take);
    for (size_t i = 0; i < n_give || i < n_take; i++) {
        if (i < n_give)
            send_result(job, peer, message_range(job, give, i));
        if (i < n_take)
            recv_result(job, peer, message_range(job, take, i));
    }
}

/* Operands that are not sent as they are: widened, scaled or both. */
static void prepare(struct job *job)
{
    const bool scaled = job->call->op == MCCL_PREMUL_SUM;
    for (size_t cell = 0; cell < job->n_cells && (job->wide || scaled); cell++) {
        const size_t length = range_length(job, (struct range){cell, cell + 1});
        const size_t offset = cell_offset(job, cell);
        unsigned char *to = job->work + offset * job->element;
        const unsigned char *from =
            (const unsigned char *)job->call->send + offset * job->final_element;
        if (length == 0)
            continue;
        uint32_t step = STEP_NONE;
        if (job->wide) {
            step = schedule_widen(job->schedule, (float *)(void *)to, from, length, STEP_NONE);
            cells_write(&job->cells, step, cell, 1);
            cells_read(&job->cells, step, result_cell(job, cell), 1); /* in place it is there */
            from = to;
        }
        if (scaled) {
            step = schedule_scale(job->schedule, to, from, length, STEP_NONE);
            cells_write(&job->cells, step, cell, 1);
        }
    }
}

static void narrow(struct job *job, struct range range)
{
    for (size_t cell = range.first; cell < range.end && job->wide; cell++) {
        const size_t length = range_length(job, (struct range){cell, cell + 1});
        const size_t offset = cell_offset(job, cell);
        if (length == 0)
            continue;
        const float *from = (const float *)(const void *)job->work + offset;
        const uint32_t step = schedule_narrow(
            job->schedule, job->result + offset * job->final_element, from, length, STEP_NONE);
        cells_read(&job->cells, step, cell, 1);
        cells_write(&job->cells, step, result_cell(job, cell), 1);
    }
}

static void double_whole(struct job *job)
{
    const struct range all = {0, job->n_cells};
    for (int distance = 1; distance < job->n_places; distance *= 2)
        exchange_sums(job, job->place ^ distance, all, all, 2 * distance == job->n_places);
    narrow(job, all);
}

/* Cells of the blocks [first, first + n). */
static struct range blocks(const struct job *job, size_t first, size_t n)
{
    return (struct range){first * job->n_pieces, (first + n) * job->n_pieces};
}

static void halve_and_double(struct job *job)
{
    size_t first = 0, n = (size_t)job->n_places; /* blocks whose sum this rank goes on with */
    for (int distance = 1; distance < job->n_places; distance *= 2) {
        const bool upper = (job->place & distance) != 0;
        const size_t kept = first + (upper ? n / 2 : 0), given = first + (upper ? 0 : n / 2);
        n /= 2;
        exchange_sums(job, job->place ^ distance, blocks(job, given, n), blocks(job, kept, n),
                      n == 1);
        first = kept;
    }
    narrow(job, blocks(job, first, 1));
    for (int distance = job->n_places / 2; distance > 0; distance /= 2) {
        const size_t sibling = first ^ n; /* ranges are aligned to their length */
        exchange_results(job, rank_at(job, job->place ^ distance), blocks(job, first, n),
                         blocks(job, sibling, n));
        first = first < sibling ? first : sibling;
        n *= 2;
    }
}

static void run(struct job *job, enum coll_algorithm algorithm)
{
    const struct range all = {0, job->n_cells}, none = {0, 0};
    const bool has_pair = job->rank < 2 * job->folded;
    prepare(job);
    if (job->place < 0) {
        for (size_t i = 0; i < n_messages(job, all); i++)
            send_sum(job, job->rank - 1, message_range(job, all, i));
        exchange_results(job, job->rank - 1, none, all);
        return;
    }
    for (size_t i = 0; has_pair && i < n_messages(job, all); i++)
        reduce_sum(job, job->rank + 1, message_range(job, all, i), false, false);
    if (algorithm == ALGO_RABENSEIFNER)
        halve_and_double(job);
    else
        double_whole(job);
    if (has_pair)
        exchange_results(job, job->rank + 1, all, none);
}

/* Blocks, pieces and messages: equal on all ranks. */
static void measure(struct job *job, enum coll_algorithm algorithm)
{
    const struct coll_env *env = job->env;
    const size_t count = job->call->count;
    const size_t n_blocks = algorithm == ALGO_RABENSEIFNER ? (size_t)job->n_places : 1;
    job->block = cut_shard(count, n_blocks, job->element);
    job->piece =
        cut_piped(env, job->block * job->element, 1, 8 * (size_t)job->n_places) / job->element;
    job->n_pieces = (job->block + job->piece - 1) / job->piece;
    job->n_cells = n_blocks * job->n_pieces;
    job->run = 1;
    if (job->n_pieces == 1) {
        const size_t most = cut_piped(env, count * job->element, 1, 8) / job->element;
        while (2 * job->run * job->block <= most)
            job->run *= 2;
    }
}

void build_doubling(const struct coll_call *call, const struct coll_env *env,
                    enum coll_algorithm algorithm, struct schedule *schedule)
{
    if (call->count == 0)
        return;
    struct job job = {.call = call, .env = env, .schedule = schedule};
    job.n = env->n_ranks;
    job.rank = env->rank;
    job.n_places = 1;
    while (2 * job.n_places <= job.n)
        job.n_places *= 2;
    job.folded = job.n - job.n_places;
    job.place = job.rank >= 2 * job.folded ? job.rank - job.folded
                : job.rank % 2 == 0        ? job.rank / 2
                                           : -1;
    job.wide = call->dtype == MCCL_FLOAT16 || call->dtype == MCCL_BFLOAT16;
    job.final_element = mccl_dtype_size(call->dtype);
    if (job.wide)
        schedule->dtype = MCCL_FLOAT32;
    job.element = mccl_dtype_size(schedule->dtype);
    measure(&job, algorithm);
    const size_t wide_bytes = job.wide ? round_up(call->count * job.element, CUT_ALIGN) : 0;
    unsigned char *scratch =
        schedule_scratch(schedule, wide_bytes + PIECE_DEPTH * job.run * job.piece * job.element);
    job.result = call->recv;
    job.work = job.wide ? scratch : job.result;
    job.own = job.wide || call->op == MCCL_PREMUL_SUM ? job.work : call->send;
    job.slots = scratch == NULL ? NULL : scratch + wide_bytes;
    if (schedule->failed == MCCL_OK &&
        cells_open(&job.cells, schedule, result_cell(&job, job.n_cells) + PIECE_DEPTH)) {
        run(&job, algorithm);
        cells_close(&job.cells);
    }
}

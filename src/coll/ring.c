/* SPDX-License-Identifier: MIT
 *
 * All-reduce on one ring or on two in opposite directions: for cabling that is a ring, and where a
 * user asks for it. A segment gathers the operands of the ranks in ring order, so every element is
 * summed by one chain and all ranks get the same bits. 16-bit floats are widened first and travel
 * as float32: rounding at each of n - 1 hops would cost accuracy. Called by the submitter, through
 * coll_build.
 */
#include "base/config.h"
#include "base/error.h"
#include "coll/build.h"

#include <stdlib.h>

/* One direction over one stretch of the vector. */
struct ring {
    const struct coll_call *call;
    struct schedule *schedule;
    int n, place;                    /* ranks; own position, counted in the direction of travel */
    int left, right;                 /* ranks to receive from and to send to */
    size_t element;                  /* bytes, as reduced */
    size_t count;                    /* elements of the stretch */
    size_t segment, piece, n_pieces; /* elements, elements, pieces per segment */
    size_t depth;                    /* slots */
    const unsigned char *own;        /* operand */
    unsigned char *work;             /* result; may be `own` */
    unsigned char *slots;            /* NULL if operands arrive in `work` */
    /* Last writer of a piece of `work`, and last message that reads it: [n][n_pieces]. */
    uint32_t *written, *sent;
};

/* Segment that this rank sends in step `s`, 0 <= s < 2n - 2; step s receives the one that step s +
 * 1 sends. */
static size_t segment_sent(const struct ring *ring, int s)
{
    return (size_t)((ring->place - 1 - s + 2 * ring->n) % ring->n);
}

static size_t piece_length(const struct ring *ring, size_t segment, size_t piece)
{
    return cut_length(cut_length(ring->count, ring->segment, segment), ring->piece, piece);
}

static size_t piece_offset(const struct ring *ring, size_t segment, size_t piece)
{
    return (segment * ring->segment + piece * ring->piece) * ring->element;
}

static void send_piece(struct ring *ring, int s, size_t piece)
{
    const size_t segment = segment_sent(ring, s);
    const size_t index = segment * ring->n_pieces + piece;
    const size_t length = piece_length(ring, segment, piece);
    if (length == 0)
        return;
    const unsigned char *src =
        (s == 0 ? ring->own : ring->work) + piece_offset(ring, segment, piece);
    const uint32_t step = schedule_send(ring->schedule, ring->right, src, length * ring->element,
                                        ring->written[index]);
    if (s > 0 || ring->own == ring->work)
        ring->sent[index] = step;
}

/* Receives a partial result and adds this rank's operand. `slot_users` holds the last reduction
 * from each slot. */
static void reduce_piece(struct ring *ring, int s, size_t piece, uint32_t *slot_users,
                         size_t *n_used)
{
    const size_t segment = segment_sent(ring, s + 1);
    const size_t index = segment * ring->n_pieces + piece;
    const size_t length = piece_length(ring, segment, piece);
    if (length == 0)
        return;
    const size_t offset = piece_offset(ring, segment, piece);
    unsigned char *dst = ring->work + offset;
    unsigned char *partial = dst;
    uint32_t *user = &slot_users[*n_used % ring->depth];
    if (ring->slots != NULL)
        partial = ring->slots + *n_used % ring->depth * ring->piece * ring->element;
    const uint32_t arrived =
        schedule_recv(ring->schedule, ring->left, partial, length * ring->element,
                      ring->slots != NULL ? *user : STEP_NONE);
    const void *srcs[2] = {partial, ring->own + offset};
    const bool last = s == ring->n - 2;
    const int divisor = last && ring->call->op == MCCL_AVG ? ring->n : 1;
    const uint32_t step = schedule_reduce(ring->schedule, dst, srcs, 2, length, divisor, arrived);
    schedule_after(ring->schedule, step, ring->written[index]);
    ring->written[index] = *user = step;
    (*n_used)++;
}

/* Receives a finished piece. What it overwrites here was sent earlier, perhaps not yet completely.
 */
static void gather_piece(struct ring *ring, int s, size_t piece)
{
    const size_t segment = segment_sent(ring, s + 1);
    const size_t index = segment * ring->n_pieces + piece;
    const size_t length = piece_length(ring, segment, piece);
    if (length == 0)
        return;
    const uint32_t step =
        schedule_recv(ring->schedule, ring->left, ring->work + piece_offset(ring, segment, piece),
                      length * ring->element, ring->sent[index]);
    ring->written[index] = step;
}

static void travel(struct ring *ring)
{
    uint32_t slot_users[PIECE_DEPTH] = {STEP_NONE, STEP_NONE, STEP_NONE, STEP_NONE};
    size_t n_used = 0;
    for (int s = 0; s < 2 * ring->n - 2; s++)
        for (size_t piece = 0; piece < ring->n_pieces; piece++) {
            send_piece(ring, s, piece);
            if (s < ring->n - 1)
                reduce_piece(ring, s, piece, slot_users, &n_used);
            else
                gather_piece(ring, s, piece);
        }
}

/* Calls `make` for every piece: what has to happen to the operands before, or to the results after.
 */
static void each_piece(struct ring *ring, size_t first,
                       uint32_t make(const struct ring *, size_t first, size_t offset,
                                     size_t length, uint32_t after))
{
    for (size_t segment = 0; segment < (size_t)ring->n; segment++)
        for (size_t piece = 0; piece < ring->n_pieces; piece++) {
            const size_t length = piece_length(ring, segment, piece);
            uint32_t *written = &ring->written[segment * ring->n_pieces + piece];
            if (length > 0)
                *written = make(ring, first, segment * ring->segment + piece * ring->piece, length,
                                *written);
        }
}

/* `first` and `offset` are elements: of the stretch in the vector, of the piece in the stretch. */
static uint32_t make_wide(const struct ring *ring, size_t first, size_t offset, size_t length,
                          uint32_t after)
{
    const unsigned char *src = (const unsigned char *)ring->call->send +
                               (first + offset) * mccl_dtype_size(ring->call->dtype);
    float *dst = (float *)(void *)ring->work + offset;
    const uint32_t step = schedule_widen(ring->schedule, dst, src, length, after);
    if (ring->call->op != MCCL_PREMUL_SUM)
        return step;
    return schedule_scale(ring->schedule, dst, dst, length, step);
}

static uint32_t make_scaled(const struct ring *ring, size_t first, size_t offset, size_t length,
                            uint32_t after)
{
    const unsigned char *src =
        (const unsigned char *)ring->call->send + (first + offset) * ring->element;
    return schedule_scale(ring->schedule, ring->work + offset * ring->element, src, length, after);
}

static uint32_t make_narrow(const struct ring *ring, size_t first, size_t offset, size_t length,
                            uint32_t after)
{
    unsigned char *dst =
        (unsigned char *)ring->call->recv + (first + offset) * mccl_dtype_size(ring->call->dtype);
    const float *src = (const float *)(const void *)ring->work + offset;
    return schedule_narrow(ring->schedule, dst, src, length, after);
}

static bool is_basic(const struct coll_env *env)
{
    return env->ring_algo == RING_BASIC && env->allreduce_algo != ALLREDUCE_RING_CHUNKED;
}

/* Fills a ring that travels upwards (direction 1) or downwards (-1) through the ranks. */
static void lay_out(struct ring *ring, const struct coll_env *env, int direction, size_t count,
                    size_t n_rings)
{
    const int rank = env->rank;
    ring->n = env->n_ranks;
    ring->place = direction > 0 ? rank : ring->n - 1 - rank;
    ring->right = (rank + direction + ring->n) % ring->n;
    ring->left = (rank - direction + ring->n) % ring->n;
    ring->count = count;
    ring->segment = cut_shard(count, (size_t)ring->n, ring->element);
    ring->piece = ring->segment;
    if (!is_basic(env))
        ring->piece =
            cut_piped(env, ring->segment * ring->element, n_rings, 8 * n_rings * (size_t)ring->n) /
            ring->element;
    ring->n_pieces = (ring->segment + ring->piece - 1) / ring->piece;
    /* Basic: the next segment cannot come before the last one is reduced next door, so one slot
     * does. */
    ring->depth = is_basic(env) ? 1 : PIECE_DEPTH;
}

static void run(struct ring *ring, size_t first, bool wide)
{
    const size_t n_pieces = (size_t)ring->n * ring->n_pieces;
    ring->written = malloc(2 * n_pieces * sizeof(*ring->written));
    if (ring->written == NULL) {
        ring->schedule->failed = MCCL_ERR_NO_MEMORY;
        return;
    }
    ring->sent = ring->written + n_pieces;
    for (size_t i = 0; i < 2 * n_pieces; i++)
        ring->written[i] = STEP_NONE;
    if (wide)
        each_piece(ring, first, make_wide);
    else if (ring->call->op == MCCL_PREMUL_SUM)
        each_piece(ring, first, make_scaled);
    travel(ring);
    if (wide)
        each_piece(ring, first, make_narrow);
    free(ring->written);
}

void build_ring(const struct coll_call *call, const struct coll_env *env,
                enum coll_algorithm algorithm, struct schedule *schedule)
{
    if (call->count == 0)
        return;
    const bool wide = call->dtype == MCCL_FLOAT16 || call->dtype == MCCL_BFLOAT16;
    const bool in_work = wide || call->op == MCCL_PREMUL_SUM || call->send == call->recv;
    const size_t n_rings = algorithm == ALGO_RING_FAST ? 2 : 1;
    if (wide)
        schedule->dtype = MCCL_FLOAT32;
    const size_t element = mccl_dtype_size(schedule->dtype);
    const size_t half = cut_shard(call->count, n_rings, element);
    struct ring rings[2];
    size_t slot_bytes = 0;
    for (size_t i = 0; i < n_rings; i++) {
        rings[i] = (struct ring){.call = call, .schedule = schedule, .element = element};
        lay_out(&rings[i], env, i == 0 ? 1 : -1, cut_length(call->count, half, i), n_rings);
        slot_bytes += in_work ? rings[i].depth * rings[i].piece * element : 0;
    }
    const size_t wide_bytes = wide ? round_up(call->count * element, CUT_ALIGN) : 0;
    unsigned char *scratch = NULL;
    if (slot_bytes + wide_bytes > 0)
        scratch = schedule_scratch(schedule, slot_bytes + wide_bytes);
    if (schedule->failed != MCCL_OK)
        return;
    for (size_t i = 0; i < n_rings; i++) {
        struct ring *ring = &rings[i];
        const size_t first = i * half;
        if (ring->count == 0)
            continue;
        ring->work = (wide ? scratch : (unsigned char *)call->recv) + first * element;
        ring->own = in_work ? ring->work : (const unsigned char *)call->send + first * element;
        if (in_work)
            ring->slots = scratch + wide_bytes + i * rings[0].depth * rings[0].piece * element;
        run(ring, first, wide);
    }
}

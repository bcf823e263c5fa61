/* SPDX-License-Identifier: MIT
 *
 * Owns the memory of a schedule: steps, edges between them, operand lists, scratch. Builders in
 * src/coll add steps and never check for memory: the first addition that cannot grow marks the
 * schedule as failed and the later ones do nothing, so that coll_build looks once, at the end.
 * Called by the submitter while it builds, by the engine's owner while it runs; never by two
 * threads at a time.
 */
#include "comm/schedule.h"

#include "base/error.h"
#include "reduce/reduce.h"

#include <stdlib.h>
#include <string.h>

#define SCRATCH_ALIGN ((size_t)64)
/* Scratch above this is given back at the next reset: a forced ring over 16-bit data needs twice
 * the vector, which an idle schedule must not sit on. What is chosen by default stays below, up to
 * vectors of GiBs. */
#define SCRATCH_KEEP ((size_t)16 << 20)
#define FIRST_CAPACITY 64u

static void fail(struct schedule *schedule)
{
    schedule->failed = MCCL_ERR_NO_MEMORY;
}

/* Returns `items` with room for `wanted` of `item_size` bytes; as it was, and the schedule failed,
 * if memory is short. */
static void *grow(struct schedule *schedule, void *items, uint32_t *capacity, uint32_t wanted,
                  size_t item_size)
{
    if (schedule->failed != MCCL_OK || wanted <= *capacity)
        return items;
    uint32_t next = *capacity < FIRST_CAPACITY ? FIRST_CAPACITY : *capacity;
    while (next < wanted && next <= STEP_NONE / 2)
        next *= 2;
    void *moved = next < wanted ? NULL : realloc(items, next * item_size);
    if (moved == NULL) {
        fail(schedule);
        return items;
    }
    *capacity = next;
    return moved;
}

mccl_result schedule_reset(struct schedule *schedule, int n_ranks, mccl_dtype dtype, mccl_op op)
{
    MCCL_ASSERT(n_ranks >= 1);
    schedule->n_steps = schedule->n_edges = schedule->n_srcs = 0;
    schedule->n_ranks = n_ranks;
    schedule->op = op;
    schedule->dtype = schedule->narrow_dtype = dtype;
    schedule->factor = 1.0;
    schedule->scratch_size = 0;
    schedule->failed = MCCL_OK;
    if (schedule->scratch_cap > SCRATCH_KEEP) {
        free(schedule->scratch);
        schedule->scratch = NULL;
        schedule->scratch_cap = 0;
    }
    if (n_ranks > schedule->cap_ranks) {
        /* One block for the four per-peer arrays; first_send is its start. */
        uint32_t *block = realloc(schedule->first_send, 4 * (size_t)n_ranks * sizeof(*block));
        if (block == NULL) {
            fail(schedule);
            return error_set(MCCL_ERR_NO_MEMORY,
                             "no memory for a schedule of %d ranks; free some and retry", n_ranks);
        }
        schedule->first_send = block;
        schedule->cap_ranks = n_ranks;
    }
    schedule->first_recv = schedule->first_send + n_ranks;
    schedule->last_send = schedule->first_recv + n_ranks;
    schedule->last_recv = schedule->last_send + n_ranks;
    for (size_t i = 0; i < 4 * (size_t)n_ranks; i++)
        schedule->first_send[i] = STEP_NONE;
    return MCCL_OK;
}

void schedule_free(struct schedule *schedule)
{
    free(schedule->steps);
    free(schedule->edges);
    free(schedule->srcs);
    free(schedule->first_send);
    free(schedule->scratch);
    *schedule = (struct schedule){0};
}

void *schedule_scratch(struct schedule *schedule, size_t size)
{
    MCCL_ASSERT(schedule->n_steps == 0 && schedule->scratch_size == 0);
    if (schedule->failed != MCCL_OK)
        return NULL;
    if (size > SIZE_MAX - SCRATCH_ALIGN) {
        fail(schedule);
        return NULL;
    }
    const size_t rounded = (size + SCRATCH_ALIGN - 1) / SCRATCH_ALIGN * SCRATCH_ALIGN;
    if (rounded > schedule->scratch_cap) {
        free(schedule->scratch);
        schedule->scratch = aligned_alloc(SCRATCH_ALIGN, rounded);
        schedule->scratch_cap = schedule->scratch == NULL ? 0 : rounded;
        if (schedule->scratch == NULL) {
            fail(schedule);
            return NULL;
        }
    }
    schedule->scratch_size = size;
    return schedule->scratch;
}

void schedule_after(struct schedule *schedule, uint32_t step, uint32_t after)
{
    if (step == STEP_NONE || after == STEP_NONE)
        return;
    MCCL_ASSERT(after < step && step < schedule->n_steps);
    schedule->edges = grow(schedule, schedule->edges, &schedule->cap_edges, schedule->n_edges + 1,
                           sizeof(*schedule->edges));
    if (schedule->failed != MCCL_OK)
        return;
    const uint32_t edge = schedule->n_edges++;
    schedule->edges[edge] =
        (struct step_edge){.to = step, .next = schedule->steps[after].successors};
    schedule->steps[after].successors = edge;
    schedule->steps[step].waits_for++;
}

/* Appends `step` as it is, plus the one dependency. */
static uint32_t append(struct schedule *schedule, struct step step, uint32_t after)
{
    schedule->steps = grow(schedule, schedule->steps, &schedule->cap_steps, schedule->n_steps + 1,
                           sizeof(*schedule->steps));
    if (schedule->failed != MCCL_OK)
        return STEP_NONE;
    const uint32_t index = schedule->n_steps++;
    step.successors = STEP_NONE;
    step.next_same_peer = STEP_NONE;
    schedule->steps[index] = step;
    schedule_after(schedule, index, after);
    return index;
}

/* Puts message `index` at the end of its peer's queue. */
static void enqueue(struct schedule *schedule, uint32_t *first, uint32_t *last, uint32_t index)
{
    if (index == STEP_NONE)
        return;
    if (*first == STEP_NONE)
        *first = index;
    else
        schedule->steps[*last].next_same_peer = index;
    *last = index;
}

uint32_t schedule_send(struct schedule *schedule, int peer, const void *src, size_t bytes,
                       uint32_t after)
{
    MCCL_ASSERT(peer >= 0 && peer < schedule->n_ranks);
    const struct step step = {.kind = STEP_SEND, .peer = peer, .size = bytes, .src = src};
    const uint32_t index = append(schedule, step, after);
    enqueue(schedule, &schedule->first_send[peer], &schedule->last_send[peer], index);
    return index;
}

uint32_t schedule_recv(struct schedule *schedule, int peer, void *dst, size_t bytes, uint32_t after)
{
    MCCL_ASSERT(peer >= 0 && peer < schedule->n_ranks);
    const struct step step = {.kind = STEP_RECV, .peer = peer, .size = bytes, .dst = dst};
    const uint32_t index = append(schedule, step, after);
    enqueue(schedule, &schedule->first_recv[peer], &schedule->last_recv[peer], index);
    return index;
}

static uint32_t append_unary(struct schedule *schedule, enum step_kind kind, void *dst,
                             const void *src, size_t size, uint32_t after)
{
    MCCL_ASSERT(size > 0);
    const struct step step = {
        .kind = (uint8_t)kind, .peer = -1, .size = size, .dst = dst, .src = src};
    return append(schedule, step, after);
}

uint32_t schedule_copy(struct schedule *schedule, void *dst, const void *src, size_t bytes,
                       uint32_t after)
{
    return append_unary(schedule, STEP_COPY, dst, src, bytes, after);
}

uint32_t schedule_scale(struct schedule *schedule, void *dst, const void *src, size_t count,
                        uint32_t after)
{
    return append_unary(schedule, STEP_SCALE, dst, src, count, after);
}

uint32_t schedule_widen(struct schedule *schedule, float *dst, const void *src, size_t count,
                        uint32_t after)
{
    return append_unary(schedule, STEP_WIDEN, dst, src, count, after);
}

uint32_t schedule_narrow(struct schedule *schedule, void *dst, const float *src, size_t count,
                         uint32_t after)
{
    return append_unary(schedule, STEP_NARROW, dst, src, count, after);
}

uint32_t schedule_reduce(struct schedule *schedule, void *dst, const void *const *srcs, int n_srcs,
                         size_t count, int divisor, uint32_t after)
{
    MCCL_ASSERT(count > 0 && n_srcs >= 1 && n_srcs <= UINT16_MAX);
    schedule->srcs = grow(schedule, schedule->srcs, &schedule->cap_srcs,
                          schedule->n_srcs + (uint32_t)n_srcs, sizeof(*schedule->srcs));
    if (schedule->failed != MCCL_OK)
        return STEP_NONE;
    const struct step step = {.kind = STEP_REDUCE,
                              .peer = -1,
                              .n_srcs = (uint16_t)n_srcs,
                              .first_src = schedule->n_srcs,
                              .divisor = divisor,
                              .size = count,
                              .dst = dst};
    memcpy(&schedule->srcs[schedule->n_srcs], srcs, (size_t)n_srcs * sizeof(*srcs));
    schedule->n_srcs += (uint32_t)n_srcs;
    return append(schedule, step, after);
}

void schedule_compute(const struct schedule *schedule, const struct step *step)
{
    const size_t size = (size_t)step->size;
    switch ((enum step_kind)step->kind) {
    case STEP_REDUCE:
        reduce_run(schedule->op, schedule->dtype, step->dst, &schedule->srcs[step->first_src],
                   step->n_srcs, size, step->divisor);
        return;
    case STEP_COPY:
        memcpy(step->dst, step->src, size);
        return;
    case STEP_SCALE:
        reduce_scale(schedule->dtype, step->dst, step->src, size, schedule->factor);
        return;
    case STEP_WIDEN:
        reduce_widen(schedule->narrow_dtype, step->dst, step->src, size);
        return;
    case STEP_NARROW:
        reduce_narrow(schedule->narrow_dtype, step->dst, step->src, size);
        return;
    case STEP_SEND:
    case STEP_RECV:
        break;
    }
    error_assert_failed("a message is no computation", __FILE__, __LINE__);
}

uint64_t schedule_bytes_sent(const struct schedule *schedule)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < schedule->n_steps; i++)
        if (schedule->steps[i].kind == STEP_SEND)
            bytes += schedule->steps[i].size;
    return bytes;
}

/* SPDX-License-Identifier: MIT
 *
 * A schedule is what one rank does for one collective: a list of steps (send, receive, reduce,
 * copy...) and the order between them. src/coll builds it, the engine carries it out, tests run it
 * without any network.
 *
 * Matching: towards each peer, sends go out and receives are taken in the order in which they were
 * added. The k-th send of rank a to rank b therefore fills the k-th receive that b added for a, and
 * both must have the same length; the engine checks that. Every other order is by explicit
 * dependency only, which is what lets sending, receiving and reducing overlap.
 *
 * One thread at a time touches a schedule: the submitter builds it, then whoever owns the engine
 * runs it.
 */
#ifndef MCCL_COMM_SCHEDULE_H
#define MCCL_COMM_SCHEDULE_H

#include "mccl.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum step_kind {
    STEP_SEND,
    STEP_RECV,
    STEP_REDUCE,
    STEP_COPY,
    STEP_SCALE,
    STEP_WIDEN,
    STEP_NARROW
};

#define STEP_NONE UINT32_MAX /* "no step": as dependency it is ignored */

struct step {
    uint8_t kind;
    uint8_t started;         /* engine only */
    uint16_t n_srcs;         /* REDUCE: sources, at schedule->srcs[first_src] */
    int32_t peer;            /* SEND, RECV */
    int32_t divisor;         /* REDUCE */
    uint32_t waits_for;      /* unfinished dependencies */
    uint32_t successors;     /* head of a list in schedule->edges */
    uint32_t next_same_peer; /* next SEND (RECV) to (from) the same peer, or STEP_NONE */
    uint32_t first_src;
    uint64_t size;   /* bytes for SEND, RECV, COPY; elements otherwise; never 0 except for zero-byte
                        messages */
    void *dst;       /* RECV, REDUCE, COPY, SCALE, WIDEN, NARROW */
    const void *src; /* SEND, COPY, SCALE, WIDEN, NARROW */
};

struct step_edge {
    uint32_t to, next;
};

struct schedule {
    struct step *steps;
    uint32_t n_steps, cap_steps;
    struct step_edge *edges;
    uint32_t n_edges, cap_edges;
    const void **srcs;
    uint32_t n_srcs, cap_srcs;
    uint32_t *first_send, *first_recv, *last_send,
        *last_recv; /* per peer, STEP_NONE if there is none */
    int n_ranks, cap_ranks;
    void *scratch;                    /* owned; pieces of it are operands of steps */
    size_t scratch_size, scratch_cap; /* bytes in use and bytes allocated */
    mccl_op op;                       /* for REDUCE */
    mccl_dtype dtype;        /* for REDUCE and SCALE; FLOAT32 when 16-bit data is reduced widened */
    mccl_dtype narrow_dtype; /* for WIDEN and NARROW; schedule_reset sets it to `dtype` */
    double factor;           /* for SCALE */
    mccl_result
        failed; /* MCCL_ERR_NO_MEMORY once an addition could not grow; additions then do nothing */
};

/* Empties a schedule for n_ranks ranks and keeps its memory; a zeroed struct is a valid empty one.
 */
mccl_result schedule_reset(struct schedule *schedule, int n_ranks, mccl_dtype dtype, mccl_op op);
void schedule_free(struct schedule *schedule);

/* Reserves `size` bytes of scratch, 64-byte aligned, that live as long as the schedule; call it
 * once, before the first step. NULL (and schedule->failed) when memory is short. */
void *schedule_scratch(struct schedule *schedule, size_t size);

/* Each adds a step that runs after `after` (may be STEP_NONE) and returns its index, or STEP_NONE
 * once the schedule has failed. Only messages may be empty. */
uint32_t schedule_send(struct schedule *schedule, int peer, const void *src, size_t bytes,
                       uint32_t after);
uint32_t schedule_recv(struct schedule *schedule, int peer, void *dst, size_t bytes,
                       uint32_t after);
uint32_t schedule_copy(struct schedule *schedule, void *dst, const void *src, size_t bytes,
                       uint32_t after);
uint32_t schedule_scale(struct schedule *schedule, void *dst, const void *src, size_t count,
                        uint32_t after);
uint32_t schedule_widen(struct schedule *schedule, float *dst, const void *src, size_t count,
                        uint32_t after);
uint32_t schedule_narrow(struct schedule *schedule, void *dst, const float *src, size_t count,
                         uint32_t after);
/* dst = srcs[0] op ... op srcs[n_srcs-1], then / divisor; srcs is copied. See reduce_run. */
uint32_t schedule_reduce(struct schedule *schedule, void *dst, const void *const *srcs, int n_srcs,
                         size_t count, int divisor, uint32_t after);
/* `step` runs after `after` too. STEP_NONE on either side is ignored. `after` must be an earlier
 * step. */
void schedule_after(struct schedule *schedule, uint32_t step, uint32_t after);

/* Carries out a REDUCE, COPY, SCALE, WIDEN or NARROW step. */
void schedule_compute(const struct schedule *schedule, const struct step *step);

/* Payload bytes that this rank sends, for tests and statistics. */
uint64_t schedule_bytes_sent(const struct schedule *schedule);

#endif

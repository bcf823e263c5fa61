/* SPDX-License-Identifier: MIT
 *
 * How long the schedules of all ranks take together: a simulation in which each rank has one port
 * out, one port in and one core, all working at once. A message keeps both ports busy and arrives a
 * while later; a port serves one message at a time and its peers in turn. Nothing is moved.
 */
#ifndef MCCL_TESTS_COLL_TIMING_H
#define MCCL_TESTS_COLL_TIMING_H

#include "coll_sim.h"

#include <math.h>

/* In any one unit of time. */
struct timing_rates {
    double latency; /* between the end of sending and the end of receiving */
    double message, byte;
    double operand, copied; /* per byte: of what is combined, of what is copied or converted */
    bool counts_all;        /* the first operand of a reduction costs, too */
};

struct timing_worker { /* what a port or a core is busy with */
    double until;
    uint32_t step; /* finished then, or STEP_NONE */
};

struct timing_arrival {
    double at;
    uint32_t step;
};

struct timing_rank {
    struct schedule *schedule;
    struct timing_worker out, in, core;
    uint32_t send[SIM_MAX_RANKS], recv[SIM_MAX_RANKS]; /* next message to and from each peer */
    uint32_t *ready;                                   /* computations in order of becoming ready */
    struct timing_arrival *arrivals;                   /* in order of time */
    uint32_t n_ready, next_ready, n_arrivals, next_arrival;
    int turn; /* peer that the next message goes to, if it can */
};

struct timing {
    const struct timing_rates *rates;
    int n;
    double now;
    uint64_t n_left;
    struct timing_rank ranks[SIM_MAX_RANKS];
};

static inline void timing_offer(struct timing_rank *rank, uint32_t index)
{
    if (!sim_is_message(&rank->schedule->steps[index]))
        rank->ready[rank->n_ready++] = index;
}

static inline void timing_complete(struct timing *timing, struct timing_rank *rank, uint32_t index)
{
    const struct schedule *schedule = rank->schedule;
    timing->n_left--;
    for (uint32_t e = schedule->steps[index].successors; e != STEP_NONE;
         e = schedule->edges[e].next)
        if (--schedule->steps[schedule->edges[e].to].waits_for == 0)
            timing_offer(rank, schedule->edges[e].to);
}

static inline bool timing_can_start(const struct timing_rank *rank, uint32_t index,
                                    const struct timing_worker *worker)
{
    return index != STEP_NONE && worker->step == STEP_NONE &&
           rank->schedule->steps[index].waits_for == 0;
}

static inline void timing_start_message(struct timing *timing, int from)
{
    struct timing_rank *sender = &timing->ranks[from];
    for (int i = 0; i < timing->n; i++) {
        const int to = (sender->turn + i) % timing->n;
        struct timing_rank *receiver = &timing->ranks[to];
        const uint32_t send = sender->send[to], recv = receiver->recv[from];
        if (!timing_can_start(sender, send, &sender->out) ||
            !timing_can_start(receiver, recv, &receiver->in))
            continue;
        const double cost = (double)sender->schedule->steps[send].size * timing->rates->byte +
                            timing->rates->message;
        sender->out = (struct timing_worker){timing->now + cost, send};
        receiver->in = (struct timing_worker){timing->now + cost, recv};
        sender->send[to] = sender->schedule->steps[send].next_same_peer;
        receiver->recv[from] = receiver->schedule->steps[recv].next_same_peer;
        sender->turn = (to + 1) % timing->n;
        return;
    }
}

static inline double timing_compute_cost(const struct timing *timing,
                                         const struct schedule *schedule, const struct step *step)
{
    if (step->kind == STEP_COPY)
        return (double)step->size * timing->rates->copied;
    const double bytes = (double)step->size * (double)mccl_dtype_size(schedule->dtype);
    if (step->kind != STEP_REDUCE)
        return bytes * timing->rates->copied;
    return bytes * (step->n_srcs - (timing->rates->counts_all ? 0 : 1)) * timing->rates->operand;
}

static inline void timing_start_computing(struct timing *timing, struct timing_rank *rank)
{
    if (rank->core.step != STEP_NONE || rank->next_ready == rank->n_ready)
        return;
    const uint32_t index = rank->ready[rank->next_ready++];
    const struct step *step = &rank->schedule->steps[index];
    rank->core = (struct timing_worker){
        timing->now + timing_compute_cost(timing, rank->schedule, step), index};
}

static inline double timing_next_event(const struct timing *timing)
{
    double next = INFINITY;
    for (int i = 0; i < timing->n; i++) {
        const struct timing_rank *rank = &timing->ranks[i];
        const struct timing_worker *workers[3] = {&rank->out, &rank->in, &rank->core};
        for (int w = 0; w < 3; w++)
            if (workers[w]->step != STEP_NONE && workers[w]->until < next)
                next = workers[w]->until;
        if (rank->next_arrival < rank->n_arrivals && rank->arrivals[rank->next_arrival].at < next)
            next = rank->arrivals[rank->next_arrival].at;
    }
    return next;
}

static inline bool timing_done(const struct timing *timing, const struct timing_worker *worker)
{
    return worker->step != STEP_NONE && worker->until <= timing->now;
}

static inline void timing_finish(struct timing *timing, struct timing_rank *rank)
{
    struct timing_worker *const workers[2] = {&rank->out, &rank->core};
    for (int w = 0; w < 2; w++)
        if (timing_done(timing, workers[w])) {
            const uint32_t index = workers[w]->step;
            workers[w]->step = STEP_NONE;
            timing_complete(timing, rank, index);
        }
    if (timing_done(timing, &rank->in)) {
        rank->arrivals[rank->n_arrivals++] =
            (struct timing_arrival){rank->in.until + timing->rates->latency, rank->in.step};
        rank->in.step = STEP_NONE;
    }
    while (rank->next_arrival < rank->n_arrivals &&
           rank->arrivals[rank->next_arrival].at <= timing->now)
        timing_complete(timing, rank, rank->arrivals[rank->next_arrival++].step);
}

static inline void timing_begin(struct timing *timing, struct schedule *schedules)
{
    for (int i = 0; i < timing->n; i++) {
        struct timing_rank *rank = &timing->ranks[i];
        rank->schedule = &schedules[i];
        rank->out.step = rank->in.step = rank->core.step = STEP_NONE;
        rank->turn = (i + 1) % timing->n;
        timing->n_left += schedules[i].n_steps;
        rank->ready = malloc((schedules[i].n_steps + 1) * sizeof(*rank->ready));
        rank->arrivals = malloc((schedules[i].n_steps + 1) * sizeof(*rank->arrivals));
        CHECK(rank->ready != NULL && rank->arrivals != NULL);
        for (uint32_t step = 0; step < schedules[i].n_steps; step++)
            if (schedules[i].steps[step].waits_for == 0)
                timing_offer(rank, step);
        memcpy(rank->send, schedules[i].first_send, (size_t)timing->n * sizeof(uint32_t));
        memcpy(rank->recv, schedules[i].first_recv, (size_t)timing->n * sizeof(uint32_t));
    }
}

/* When the last rank is done. Uses the schedules up. */
static inline double timing_run(struct schedule *schedules, int n, const struct timing_rates *rates)
{
    static struct timing timing;
    timing = (struct timing){.n = n, .rates = rates};
    timing_begin(&timing, schedules);
    while (timing.n_left > 0) {
        for (int i = 0; i < n; i++) {
            timing_start_message(&timing, i);
            timing_start_computing(&timing, &timing.ranks[i]);
        }
        timing.now = timing_next_event(&timing);
        CHECK(timing.now < INFINITY);
        for (int i = 0; i < n; i++)
            timing_finish(&timing, &timing.ranks[i]);
    }
    for (int i = 0; i < n; i++) {
        free(timing.ranks[i].ready);
        free(timing.ranks[i].arrivals);
    }
    return timing.now;
}

#endif

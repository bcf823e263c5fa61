/* SPDX-License-Identifier: MIT
 *
 * Runs the schedules of all ranks of a collective in one thread, without links, in random order. It
 * allows whatever the engine may do and no more: per ordered pair of ranks messages stay in order,
 * and either at most `capacity` of them are under way (the sender's memory is free once its message
 * is), or, with capacity 0, a message moves only when both sides have come to it. A posted receive
 * owns its memory: it may be scribbled on at any time.
 */
#ifndef MCCL_TESTS_COLL_SIM_H
#define MCCL_TESTS_COLL_SIM_H

#include "comm/schedule.h"
#include "support/check.h"

#define SIM_MAX_RANKS 17

struct sim_message {
    struct sim_message *next;
    uint64_t size;
    unsigned char bytes[];
};

/* Messages from one rank to another. */
struct sim_pair {
    uint32_t send, recv; /* next step of either side */
    struct sim_message *first, *last;
    int n_queued;
};

struct sim {
    struct schedule *schedules;
    int n, capacity;
    uint64_t *random;
    struct sim_pair pairs[SIM_MAX_RANKS][SIM_MAX_RANKS];
    uint32_t *ready[SIM_MAX_RANKS]; /* computations that may run */
    uint32_t n_ready[SIM_MAX_RANKS];
    uint64_t n_left;
    char error[128]; /* what went wrong, or "" */
};

static inline uint64_t sim_random(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static inline bool sim_is_message(const struct step *step)
{
    return step->kind == STEP_SEND || step->kind == STEP_RECV;
}

static inline void sim_finish(struct sim *sim, int rank, uint32_t index)
{
    struct schedule *schedule = &sim->schedules[rank];
    struct step *step = &schedule->steps[index];
    CHECK_EQ_U64(step->waits_for, 0);
    CHECK_EQ_U64(step->started, 0);
    step->started = 1;
    sim->n_left--;
    for (uint32_t e = step->successors; e != STEP_NONE; e = schedule->edges[e].next) {
        struct step *next = &schedule->steps[schedule->edges[e].to];
        CHECK(next->waits_for > 0);
        if (--next->waits_for == 0 && !sim_is_message(next))
            sim->ready[rank][sim->n_ready[rank]++] = schedule->edges[e].to;
    }
}

static inline struct step *sim_step(struct sim *sim, int rank, uint32_t index)
{
    if (index == STEP_NONE || sim->schedules[rank].steps[index].waits_for > 0)
        return NULL;
    return &sim->schedules[rank].steps[index];
}

static inline bool sim_lengths_agree(struct sim *sim, int from, int to, uint64_t sent,
                                     uint64_t wanted)
{
    if (sent != wanted)
        snprintf(sim->error, sizeof(sim->error),
                 "message %d -> %d has %llu bytes, its receive %llu", from, to,
                 (unsigned long long)sent, (unsigned long long)wanted);
    return sent == wanted;
}

/* Both ends of a pair have come to a message. */
static inline bool sim_meet(struct sim *sim, int from, int to)
{
    struct sim_pair *pair = &sim->pairs[from][to];
    struct step *send = sim_step(sim, from, pair->send), *recv = sim_step(sim, to, pair->recv);
    if (send == NULL || recv == NULL || !sim_lengths_agree(sim, from, to, send->size, recv->size))
        return false;
    const uint32_t send_index = pair->send, recv_index = pair->recv;
    if (send->size > 0)
        memcpy(recv->dst, send->src, send->size);
    pair->send = send->next_same_peer;
    pair->recv = recv->next_same_peer;
    sim_finish(sim, from, send_index);
    sim_finish(sim, to, recv_index);
    return true;
}

static inline bool sim_push(struct sim *sim, int from, int to)
{
    struct sim_pair *pair = &sim->pairs[from][to];
    struct step *send = sim_step(sim, from, pair->send);
    if (send == NULL || pair->n_queued >= sim->capacity)
        return false;
    struct sim_message *message = malloc(sizeof(*message) + send->size);
    CHECK(message != NULL);
    message->next = NULL;
    message->size = send->size;
    if (send->size > 0)
        memcpy(message->bytes, send->src, send->size);
    if (pair->first == NULL)
        pair->first = message;
    else
        pair->last->next = message;
    pair->last = message;
    pair->n_queued++;
    const uint32_t index = pair->send;
    pair->send = send->next_same_peer;
    sim_finish(sim, from, index);
    return true;
}

static inline bool sim_pop(struct sim *sim, int from, int to)
{
    struct sim_pair *pair = &sim->pairs[from][to];
    struct step *recv = sim_step(sim, to, pair->recv);
    struct sim_message *message = pair->first;
    if (recv == NULL || message == NULL ||
        !sim_lengths_agree(sim, from, to, message->size, recv->size))
        return false;
    if (message->size > 0)
        memcpy(recv->dst, message->bytes, message->size);
    pair->first = message->next;
    pair->n_queued--;
    free(message);
    const uint32_t index = pair->recv;
    pair->recv = recv->next_same_peer;
    sim_finish(sim, to, index);
    return true;
}

/* A receive at the head of its queue has its memory to itself. */
static inline void sim_scribble(struct sim *sim, int from, int to)
{
    struct step *recv = sim_step(sim, to, sim->pairs[from][to].recv);
    if (recv != NULL && recv->size > 0)
        memset(recv->dst, 0xdb, recv->size);
}

static inline bool sim_compute(struct sim *sim, int rank)
{
    if (sim->n_ready[rank] == 0)
        return false;
    uint32_t *ready = sim->ready[rank];
    const uint32_t pick = (uint32_t)(sim_random(sim->random) % sim->n_ready[rank]);
    const uint32_t index = ready[pick];
    ready[pick] = ready[--sim->n_ready[rank]];
    schedule_compute(&sim->schedules[rank], &sim->schedules[rank].steps[index]);
    sim_finish(sim, rank, index);
    return true;
}

/* Action `which` of n * n + n. */
static inline bool sim_act(struct sim *sim, int which)
{
    if (which >= sim->n * sim->n)
        return sim_compute(sim, which - sim->n * sim->n);
    const int from = which / sim->n, to = which % sim->n;
    if (sim_random(sim->random) % 4 == 0)
        sim_scribble(sim, from, to);
    if (sim->capacity == 0)
        return sim_meet(sim, from, to);
    return sim_random(sim->random) % 2 ? sim_push(sim, from, to) : sim_pop(sim, from, to);
}

static inline void sim_start(struct sim *sim)
{
    for (int rank = 0; rank < sim->n; rank++) {
        struct schedule *schedule = &sim->schedules[rank];
        sim->ready[rank] = malloc((schedule->n_steps + 1) * sizeof(uint32_t));
        CHECK(sim->ready[rank] != NULL);
        sim->n_left += schedule->n_steps;
        for (uint32_t i = 0; i < schedule->n_steps; i++)
            if (schedule->steps[i].waits_for == 0 && !sim_is_message(&schedule->steps[i]))
                sim->ready[rank][sim->n_ready[rank]++] = i;
        for (int peer = 0; peer < sim->n; peer++) {
            sim->pairs[rank][peer].send = schedule->first_send[peer];
            sim->pairs[peer][rank].recv = schedule->first_recv[peer];
        }
    }
}

static inline void sim_drop_rest(struct sim *sim, int from, int to)
{
    struct sim_message *message = sim->pairs[from][to].first;
    if (message != NULL && sim->error[0] == '\0')
        snprintf(sim->error, sizeof(sim->error), "nobody receives a message %d -> %d", from, to);
    while (message != NULL) {
        struct sim_message *next = message->next;
        free(message);
        message = next;
    }
}

/* NULL, or why the schedules do not work: blocked, lengths that differ, or a message that nobody
 * receives. */
static inline const char *sim_run(struct schedule *schedules, int n, int capacity, uint64_t *random)
{
    static struct sim sim;
    sim = (struct sim){.schedules = schedules, .n = n, .capacity = capacity, .random = random};
    sim_start(&sim);
    int n_idle = 0;
    while (sim.n_left > 0 && n_idle < 64 && sim.error[0] == '\0') {
        /* Some ranks and pairs are slow for a while. */
        const uint64_t awake = n_idle > 0 ? UINT64_MAX : sim_random(random);
        bool moved = false;
        const int n_actions = n * n + n;
        const int first = (int)(sim_random(random) % (uint64_t)n_actions);
        for (int i = 0; i < n_actions; i++)
            if (awake >> (i % 64) & 1)
                moved |= sim_act(&sim, (first + i) % n_actions);
        n_idle = moved ? 0 : n_idle + 1;
    }
    if (sim.n_left > 0 && sim.error[0] == '\0')
        snprintf(sim.error, sizeof(sim.error), "blocked with %llu steps left",
                 (unsigned long long)sim.n_left);
    for (int i = 0; i < n; i++) {
        free(sim.ready[i]);
        for (int j = 0; j < n; j++)
            sim_drop_rest(&sim, i, j);
    }
    return sim.error[0] == '\0' ? NULL : sim.error;
}

#endif

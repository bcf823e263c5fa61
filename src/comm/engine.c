/* SPDX-License-Identifier: MIT
 *
 * See engine.h. Who drives, who sleeps, and how operations get in and out; progress.c is what
 * driving does. Any thread; the token decides.
 *
 * The two hand-overs that must not lose a wake-up are of the same shape, with sequentially
 * consistent atomics: one side publishes its need and then looks at the token, the other gives the
 * token back and then looks for needs.
 */
#include "comm/engine.h"

#include "base/log.h"
#include "comm/comm.h"
#include "comm/p2p.h"
#include "comm/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SPIN_NS 50000LL /* polling before yielding: a round trip on loopback is 10 to 30 us */
#define YIELD_ROUNDS \
    20 /* then let other ranks of this host have the core this often before sleeping */
#define PROBE_AFTER_NS \
    (20 * OS_MS) /* no progress for so long: ask the peers whether they do the same thing */
#define CLOCK_EVERY                                                                \
    8 /* rounds between two looks at the deadlines while progress is made; a round \
          moves some MiB and may take milliseconds */

/* Until when to drive. */
struct goal {
    mccl_request *request; /* done, or NULL */
    uint32_t below;        /* n_outstanding below this, or 0 */
    bool unattended;  /* no unattended operation left, or a waiter came, or the thread is to stop */
    int64_t until_ns; /* -1: none */
};

mccl_result engine_init(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    TRY(os_poller_create(&engine->poller));
    pthread_mutex_init(&engine->submit_lock, NULL);
    pthread_mutex_init(&engine->thread_lock, NULL);
    engine->links = calloc((size_t)comm->n_ranks, sizeof *engine->links);
    engine->ready_cap = 64;
    engine->ready = calloc(engine->ready_cap, sizeof *engine->ready);
    engine->p2p = p2p_create(comm);
    if (!engine->links || !engine->ready || !engine->p2p)
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a communicator of %d ranks",
                         comm->n_ranks);
    for (int peer = 0; peer < comm->n_ranks; peer++)
        engine->links[peer].peer = peer;
    return MCCL_OK;
}

static void free_operations(struct operation *operation)
{
    while (operation) {
        struct operation *next = operation->next;
        schedule_free(&operation->schedule);
        free(operation->call);
        free(operation);
        operation = next;
    }
}

void engine_fini(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    for (int i = 0; i < engine->n_incoming; i++)
        engine->incoming[i].link->ops->close(engine->incoming[i].link);
    free(engine->incoming);
    for (int peer = 0; engine->links && peer < comm->n_ranks; peer++)
        if (engine->links[peer].link)
            engine->links[peer].link->ops->close(engine->links[peer].link);
    free_operations(engine->free_operations);
    free_operations(atomic_load(&engine->spare_operation));
    free(atomic_load(&engine->spare_request));
    p2p_destroy(engine->p2p);
    free(engine->ready);
    free(engine->links);
    if (engine->poller) {
        os_poller_destroy(engine->poller);
        pthread_mutex_destroy(&engine->submit_lock);
        pthread_mutex_destroy(&engine->thread_lock);
    }
}

/* ---- the token ---- */

static bool take_token(struct engine *engine)
{
    return atomic_load_explicit(&engine->token, memory_order_relaxed) == 0 &&
           atomic_exchange(&engine->token, 1) == 0;
}

void engine_notify_waiters(struct engine *engine)
{
    if (atomic_load(&engine->n_waiters) > 0) {
        atomic_fetch_add(&engine->events, 1);
        os_wake_all(&engine->events);
    }
}

static void wake_thread(struct engine *engine)
{
    atomic_fetch_add(&engine->thread_signal, 1);
    if (atomic_load(&engine->thread_idle))
        os_wake_all(&engine->thread_signal);
}

/* No operation can start before another one ends. Owner. */
static bool is_full(const struct engine *engine)
{
    return engine->n_active >= ENGINE_ACTIVE;
}

/* Has anything been handed in that the owner has not taken up, and could? */
static bool has_news(const struct mccl_comm *comm, bool full)
{
    const struct engine *engine = &comm->engine;
    return (!full && atomic_load(&engine->n_inbox) > 0) ||
           atomic_load(&engine->n_incoming_hint) > 0 || p2p_has_news(comm);
}

bool engine_enter(struct mccl_comm *comm)
{
    return take_token(&comm->engine);
}

void engine_leave(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    for (;;) {
        const bool full = is_full(engine);
        atomic_store(&engine->token, 0);
        if (!has_news(comm, full) || !take_token(engine))
            break;
        progress_step(comm);
    }
    /* Both: the waiters may have what they wait for, and then none of them takes over. */
    engine_notify_waiters(engine);
    if (atomic_load(&engine->n_unattended) > 0)
        wake_thread(engine);
}

void engine_wake(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    if (atomic_load(&engine->blocked))
        os_poller_wake(engine->poller);
    engine_notify_waiters(engine);
    if (atomic_load(&engine->n_unattended) > 0)
        wake_thread(engine);
}

/* ---- driving ---- */

static bool reached(const struct engine *engine, const struct goal *goal)
{
    if (goal->request && atomic_load_explicit(&goal->request->done, memory_order_acquire))
        return true;
    if (goal->below > 0 && atomic_load(&engine->n_outstanding) < goal->below)
        return true;
    return goal->unattended &&
           (atomic_load(&engine->n_unattended) == 0 || atomic_load(&engine->thread_stop));
}

static void block(struct mccl_comm *comm, const struct goal *goal, int64_t wake_ns)
{
    struct engine *engine = &comm->engine;
    struct os_poll_event events[32];
    if (goal->until_ns >= 0 && goal->until_ns < wake_ns)
        wake_ns = goal->until_ns;
    atomic_store(&engine->blocked, 1);
    int64_t left_ns = wake_ns - os_now_ns();
    /* Somebody may have needed us between the last look and `blocked`; later ones use the poller's
     * wake-up. */
    if (left_ns < 0 || reached(engine, goal) || has_news(comm, is_full(engine)) ||
        (atomic_load(&comm->failed) && !engine->drained) || progress_arm(comm))
        left_ns = 0;
    const int n = os_poller_wait(engine->poller, events, 32, left_ns);
    atomic_store(&engine->blocked, 0);
    progress_on_events(comm, events, n);
}

/* Owner. Moves everything forward until the goal is reached or its time is over. */
static void drive(struct mccl_comm *comm, const struct goal *goal)
{
    struct engine *engine = &comm->engine;
    /* Spinning only pays while every rank of the host can have a core; a background thread never
     * spins, since the core it would take belongs to the computation it hides behind. */
    const bool may_spin = !goal->unattended && comm->may_spin;
    int64_t spin_until_ns = 0;
    int yields = 0;
    bool moved_since = true; /* the last look at the clock; nobody drove before */
    for (unsigned round = 1;; round++) {
        const bool moved = progress_step(comm);
        if (reached(engine, goal))
            return;
        if (moved) {
            moved_since = true;
            spin_until_ns = 0;
            yields = 0;
        }
        if ((moved || may_spin) && round % CLOCK_EVERY != 0) {
            if (!moved)
                os_cpu_relax();
            continue;
        }
        const int64_t now_ns = os_now_ns();
        if (moved_since)
            engine->last_progress_ns = now_ns;
        moved_since = false;
        const int64_t wake_ns = progress_check_time(comm, now_ns, PROBE_AFTER_NS);
        if (goal->until_ns >= 0 && now_ns >= goal->until_ns)
            return;
        if (moved)
            continue;
        if (may_spin && (spin_until_ns == 0 || now_ns < spin_until_ns)) {
            if (spin_until_ns == 0)
                spin_until_ns = now_ns + SPIN_NS;
            os_cpu_relax();
        } else if (!goal->unattended && yields < YIELD_ROUNDS) {
            yields++;
            os_thread_yield();
        } else {
            block(comm, goal, wake_ns);
            yields = YIELD_ROUNDS;
        }
    }
}

static void pursue(struct mccl_comm *comm, const struct goal *goal)
{
    struct engine *engine = &comm->engine;
    while (!reached(engine, goal)) {
        const int64_t now_ns = goal->until_ns >= 0 ? os_now_ns() : 0;
        if (goal->until_ns >= 0 && now_ns >= goal->until_ns)
            return;
        if (take_token(engine)) {
            drive(comm, goal);
            engine_leave(comm);
            continue;
        }
        const uint32_t events = atomic_load(&engine->events);
        atomic_fetch_add(&engine->n_waiters, 1);
        if (!reached(engine, goal) && atomic_load(&engine->token) == 1)
            os_wait(&engine->events, events, goal->until_ns >= 0 ? goal->until_ns - now_ns : -1);
        atomic_fetch_sub(&engine->n_waiters, 1);
    }
}

void engine_wait(struct mccl_comm *comm, mccl_request *request, int64_t until_ns)
{
    pursue(comm, &(struct goal){.request = request, .until_ns = until_ns});
}

void engine_poke(struct mccl_comm *comm)
{
    if (!take_token(&comm->engine))
        return;
    progress_step(comm);
    const int64_t now_ns = os_now_ns();
    progress_check_time(comm, now_ns, PROBE_AFTER_NS);
    engine_leave(comm);
}

/* ---- background thread ---- */

static void background(void *arg)
{
    struct mccl_comm *comm = arg;
    struct engine *engine = &comm->engine;
    while (!atomic_load(&engine->thread_stop)) {
        const uint32_t signal = atomic_load(&engine->thread_signal);
        if (atomic_load(&engine->n_unattended) > 0 && take_token(engine)) {
            drive(comm, &(struct goal){.unattended = true, .until_ns = -1});
            engine_leave(comm);
            continue;
        }
        atomic_store(&engine->thread_idle, true);
        /* A waiter that leaves while something is unattended changes the signal; so do stop and
         * submission. */
        if (!atomic_load(&engine->thread_stop) &&
            !(atomic_load(&engine->n_unattended) > 0 && atomic_load(&engine->token) == 0))
            os_wait(&engine->thread_signal, signal, -1);
        atomic_store(&engine->thread_idle, false);
    }
}

static mccl_result start_thread(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    mccl_result result = MCCL_OK;
    pthread_mutex_lock(&engine->thread_lock);
    if (!engine->thread_started && !atomic_load(&engine->thread_stop)) {
        result = os_thread_start(&engine->thread, background, comm, "mccl-progress");
        engine->thread_started = result == MCCL_OK;
    }
    pthread_mutex_unlock(&engine->thread_lock);
    wake_thread(engine);
    return result;
}

static void ensure_thread(struct mccl_comm *comm)
{
    const mccl_result result = start_thread(comm);
    if (result != MCCL_OK) /* nobody would drive the operation or look at its deadline */
        comm_fail(comm, result, comm->rank, "rank %d has no background thread: %s", comm->rank,
                  error_text());
}

void engine_stop_thread(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    pthread_mutex_lock(&engine->thread_lock);
    atomic_store(&engine->thread_stop, true);
    const bool started = engine->thread_started;
    engine->thread_started = false;
    pthread_mutex_unlock(&engine->thread_lock);
    if (!started)
        return;
    os_poller_wake(engine->poller);
    atomic_fetch_add(&engine->thread_signal, 1);
    os_wake_all(&engine->thread_signal);
    os_thread_join(&engine->thread);
}

void engine_attend_in_background(struct mccl_comm *comm, mccl_request *request)
{
    struct engine *engine = &comm->engine;
    atomic_fetch_add(&engine->n_unattended, 1);
    if (atomic_exchange(&request->unattended, true)) { /* it was already */
        atomic_fetch_sub(&engine->n_unattended, 1);
        return;
    }
    if (atomic_load(&request->done) && atomic_exchange(&request->unattended, false)) {
        atomic_fetch_sub(&engine->n_unattended, 1);
        return;
    }
    ensure_thread(comm);
}

/* ---- submission ---- */

struct operation *engine_operation(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    struct operation *operation = atomic_exchange(&engine->spare_operation, NULL);
    if (!operation) {
        pthread_mutex_lock(&engine->submit_lock);
        operation = engine->free_operations;
        if (operation)
            engine->free_operations = operation->next;
        pthread_mutex_unlock(&engine->submit_lock);
    }
    if (!operation)
        operation = calloc(1, sizeof *operation);
    if (!operation)
        return NULL;
    operation->next = NULL;
    operation->request = NULL;
    operation->alone = operation->started = operation->probed = false;
    operation->asked = operation->oldest = false;
    operation->suspect_until_ns = 0;
    return operation;
}

void engine_operation_free(struct mccl_comm *comm, struct operation *operation)
{
    struct engine *engine = &comm->engine;
    operation = atomic_exchange(&engine->spare_operation, operation);
    if (!operation)
        return;
    pthread_mutex_lock(&engine->submit_lock);
    operation->next = engine->free_operations;
    engine->free_operations = operation;
    pthread_mutex_unlock(&engine->submit_lock);
}

/* submit_lock held. */
static void remember_signature(struct engine *engine, uint32_t seq,
                               const struct signature *signature)
{
    engine->signatures[seq % ENGINE_SIGNATURES] = *signature;
    engine->last_seq = seq;
    engine->any_signature = true;
}

bool engine_signature(struct mccl_comm *comm, uint32_t seq, struct signature *signature,
                      bool *submitted)
{
    struct engine *engine = &comm->engine;
    pthread_mutex_lock(&engine->submit_lock);
    const int32_t ahead = (int32_t)(seq - engine->last_seq);
    *submitted = engine->any_signature && ahead <= 0;
    const bool known = *submitted && ahead > -ENGINE_SIGNATURES;
    if (known)
        *signature = engine->signatures[seq % ENGINE_SIGNATURES];
    pthread_mutex_unlock(&engine->submit_lock);
    return known;
}

mccl_result engine_make_room(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    const uint32_t depth = (uint32_t)comm->settings.max_queue_depth;
    if (atomic_load(&engine->n_outstanding) < depth)
        return MCCL_OK;
    /* Bounded: every outstanding operation has a deadline, and one that passes it ends them all. */
    pursue(comm, &(struct goal){.below = depth, .until_ns = -1});
    return atomic_load(&comm->failed) ? comm_cause(comm) : MCCL_OK;
}

void engine_count_in(struct mccl_comm *comm, mccl_request *request, bool attended)
{
    atomic_fetch_add(&comm->engine.n_outstanding, 1);
    if (!attended) {
        atomic_fetch_add(&comm->engine.n_unattended, 1);
        atomic_store(&request->unattended, true);
    }
}

void engine_kick(struct mccl_comm *comm, bool attended)
{
    struct engine *engine = &comm->engine;
    /* A waiter's own first step comes soon enough. */
    if (!attended && take_token(engine)) {
        progress_step(comm);
        engine_leave(comm);
    } else if (atomic_load(&engine->blocked)) {
        os_poller_wake(engine->poller);
    }
    if (!attended && atomic_load(&engine->n_unattended) > 0)
        ensure_thread(comm);
}

bool engine_next_seq(struct mccl_comm *comm, const struct signature *signature, uint32_t *seq)
{
    struct engine *engine = &comm->engine;
    pthread_mutex_lock(&engine->submit_lock);
    const bool next = !engine->inbox;
    if (next) {
        *seq = engine->next_seq++;
        remember_signature(engine, *seq, signature);
    }
    pthread_mutex_unlock(&engine->submit_lock);
    if (next && atomic_load(&engine->n_probes_pending) > 0)
        control_check_probes(comm, *seq, signature);
    return next;
}

uint32_t engine_peek_seq(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    pthread_mutex_lock(&engine->submit_lock);
    const uint32_t seq = engine->next_seq;
    pthread_mutex_unlock(&engine->submit_lock);
    return seq;
}

mccl_result engine_submit(struct mccl_comm *comm, struct operation *operation, bool attended)
{
    struct engine *engine = &comm->engine;
    engine_count_in(comm, operation->request, attended);
    pthread_mutex_lock(&engine->submit_lock);
    operation->seq = operation->request->seq = engine->next_seq++;
    remember_signature(engine, operation->seq, &operation->signature);
    operation->next = NULL;
    if (engine->inbox_last)
        engine->inbox_last->next = operation;
    else
        engine->inbox = operation;
    engine->inbox_last = operation;
    atomic_fetch_add(&engine->n_inbox, 1);
    const uint32_t seq = operation->seq;
    const struct signature signature = operation->signature;
    pthread_mutex_unlock(&engine->submit_lock);
    if (atomic_load(&engine->n_probes_pending) > 0)
        control_check_probes(comm, seq, &signature);
    engine_kick(comm, attended);
    return MCCL_OK;
}

mccl_result engine_add_link(struct mccl_comm *comm, int peer, struct link *link, bool p2p)
{
    struct engine *engine = &comm->engine;
    pthread_mutex_lock(&engine->submit_lock);
    if (engine->n_incoming == engine->cap_incoming) {
        const int cap = engine->cap_incoming ? 2 * engine->cap_incoming : 8;
        struct incoming_link *grown = realloc(engine->incoming, (size_t)cap * sizeof *grown);
        if (!grown) {
            pthread_mutex_unlock(&engine->submit_lock);
            link->ops->close(link);
            return error_set(MCCL_ERR_NO_MEMORY, "no memory for the link to rank %d", peer);
        }
        engine->incoming = grown;
        engine->cap_incoming = cap;
    }
    const bool agrees = p2p && link_agreeing(link);
    if (agrees)
        atomic_fetch_add(&engine->n_unattended, 1);
    engine->incoming[engine->n_incoming++] = (struct incoming_link){link, peer, p2p};
    atomic_fetch_add(&engine->n_incoming_hint, 1);
    pthread_mutex_unlock(&engine->submit_lock);
    engine_wake(comm);
    /* The other rank's message leaves only when both agree, and nobody here need be waiting. */
    return agrees ? start_thread(comm) : MCCL_OK;
}

void engine_let_go(struct mccl_comm *comm)
{
    atomic_fetch_sub(&comm->engine.n_unattended, 1);
}

void engine_finish(struct mccl_comm *comm, int64_t at_most_ns)
{
    if (atomic_load(&comm->engine.n_outstanding) > 0)
        pursue(comm, &(struct goal){.below = 1, .until_ns = os_now_ns() + at_most_ns});
}

void engine_quiesce(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    while (!take_token(engine)) {
        const uint32_t events = atomic_load(&engine->events);
        atomic_fetch_add(&engine->n_waiters, 1);
        if (atomic_load(&engine->blocked))
            os_poller_wake(engine->poller);
        os_wait(&engine->events, events, OS_MS);
        atomic_fetch_sub(&engine->n_waiters, 1);
    }
    progress_step(comm); /* fails everything */
    engine_leave(comm);
}

/* ---- completion ---- */

void engine_complete(struct mccl_comm *comm, mccl_request *request, mccl_result result, char *text)
{
    struct engine *engine = &comm->engine;
    atomic_fetch_add_explicit(&engine->operations_done, 1, memory_order_relaxed);
    if (result != MCCL_OK)
        atomic_fetch_add_explicit(&engine->errors, 1, memory_order_relaxed);
    request_finish(request, result, text);
    if (atomic_exchange(&request->unattended, false))
        atomic_fetch_sub(&engine->n_unattended, 1);
    atomic_fetch_sub(&engine->n_outstanding, 1);
    engine_notify_waiters(engine);
    request_release(request);
}

void engine_fail_request(struct mccl_comm *comm, mccl_request *request)
{
    const struct cause *cause = &comm->cause;
    char signature[160];
    signature_format(&request->signature, signature, sizeof signature);
    char *text = malloc(ERROR_TEXT_BYTES);
    if (text)
        snprintf(text, ERROR_TEXT_BYTES,
                 "%s seq %u on rank %d of %d, group '%s': %s (%llu bytes had arrived)", signature,
                 request->seq, comm->rank, comm->n_ranks, comm->name, cause->text,
                 (unsigned long long)atomic_load(&request->bytes_done));
    engine_complete(comm, request, cause->result, text);
}

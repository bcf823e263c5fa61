/* SPDX-License-Identifier: MIT
 *
 * See progress.h. Every function here runs with the engine's token held. A failed communicator does
 * one thing only: it fails whatever is in flight; links are not touched any more, so no user memory
 * is either.
 */
#include "comm/progress.h"

#include "base/log.h"
#include "comm/comm.h"
#include "comm/p2p.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RECEIVE_BURST \
    8 /* messages of one link before the others and the reductions get their turn */
#define COMPUTE_BURST 2 /* reductions (of at most a piece each) before the links get theirs */

#define SUSPECT_NS                                                                 \
    (300 * OS_MS) /* for the answer to a probe: several round trips of any network \
                   */

#define LAST_ROUNDS 64 /* after a failure; enough for what socket buffers hold */

/* ---- steps and operations ---- */

static void push_ready(struct mccl_comm *comm, struct operation *operation, uint32_t step)
{
    struct engine *engine = &comm->engine;
    if (engine->ready_tail - engine->ready_head == engine->ready_cap) {
        /* Unroll the ring into twice the room. */
        struct ready_step *grown = malloc(2 * engine->ready_cap * sizeof *grown);
        if (!grown) {
            comm_fail(comm, MCCL_ERR_NO_MEMORY, comm->rank, "no memory for the list of reductions");
            return;
        }
        for (uint32_t i = 0; i < engine->ready_cap; i++)
            grown[i] = engine->ready[(engine->ready_head + i) % engine->ready_cap];
        free(engine->ready);
        engine->ready = grown;
        engine->ready_head = 0;
        engine->ready_tail = engine->ready_cap;
        engine->ready_cap *= 2;
    }
    engine->ready[engine->ready_tail++ % engine->ready_cap] = (struct ready_step){operation, step};
}

static bool is_message(const struct step *step)
{
    return step->kind == STEP_SEND || step->kind == STEP_RECV;
}

static void finish_operation(struct mccl_comm *comm, struct operation *operation)
{
    struct engine *engine = &comm->engine;
    struct operation *before = NULL;
    for (struct operation *other = engine->active; other != operation; other = other->next)
        before = other;
    if (before)
        before->next = operation->next;
    else
        engine->active = operation->next;
    if (engine->active_last == operation)
        engine->active_last = before;
    engine->n_active--;
    mccl_request *request = operation->request;
    engine_operation_free(comm, operation);
    engine_complete(comm, request, MCCL_OK, NULL);
}

static void step_done(struct mccl_comm *comm, struct operation *operation, uint32_t index)
{
    struct schedule *schedule = &operation->schedule;
    for (uint32_t edge = schedule->steps[index].successors; edge != STEP_NONE;
         edge = schedule->edges[edge].next) {
        const uint32_t to = schedule->edges[edge].to;
        if (--schedule->steps[to].waits_for == 0 && !is_message(&schedule->steps[to]))
            push_ready(comm, operation, to);
    }
    if (--operation->steps_left == 0)
        finish_operation(comm, operation);
}

/* First operation from `operation` on that still has sends (receives) for this peer. */
static void aim_send(struct engine_link *link, struct operation *operation)
{
    while (operation && operation->schedule.first_send[link->peer] == STEP_NONE)
        operation = operation->next;
    link->send_op = operation;
    link->send_step = operation ? operation->schedule.first_send[link->peer] : STEP_NONE;
}

static void aim_recv(struct engine_link *link, struct operation *operation)
{
    while (operation && operation->schedule.first_recv[link->peer] == STEP_NONE)
        operation = operation->next;
    link->recv_op = operation;
    link->recv_step = operation ? operation->schedule.first_recv[link->peer] : STEP_NONE;
}

static void start_operation(struct mccl_comm *comm, struct operation *operation)
{
    struct engine *engine = &comm->engine;
    operation->next = NULL;
    if (engine->active_last)
        engine->active_last->next = operation;
    else
        engine->active = operation;
    engine->active_last = operation;
    engine->n_active++;
    engine->any_active = true;
    engine->last_active_seq = operation->seq;

    const mccl_result result = operation->build(comm, operation);
    if (result != MCCL_OK) {
        comm_fail(comm, result, comm->rank, "rank %d cannot start %s: %s", comm->rank,
                  op_kind_name(operation->signature.kind), error_text());
        return;
    }
    const struct schedule *schedule = &operation->schedule;
    operation->started = true;
    operation->steps_left = schedule->n_steps;
    if (schedule->n_steps == 0) {
        finish_operation(comm, operation);
        return;
    }
    for (int peer = 0; peer < comm->n_ranks; peer++) {
        struct engine_link *link = &engine->links[peer];
        if (!link->send_op && schedule->first_send[peer] != STEP_NONE)
            aim_send(link, operation);
        if (!link->recv_op && schedule->first_recv[peer] != STEP_NONE)
            aim_recv(link, operation);
    }
    for (uint32_t i = 0; i < schedule->n_steps; i++)
        if (schedule->steps[i].waits_for == 0 && !is_message(&schedule->steps[i]))
            push_ready(comm, operation, i);
}

static struct operation *take_from_inbox(struct engine *engine)
{
    if (atomic_load(&engine->n_inbox) == 0)
        return NULL;
    pthread_mutex_lock(&engine->submit_lock);
    struct operation *operation = engine->inbox;
    if (operation) {
        engine->inbox = operation->next;
        if (!engine->inbox)
            engine->inbox_last = NULL;
        atomic_fetch_sub(&engine->n_inbox, 1);
    }
    pthread_mutex_unlock(&engine->submit_lock);
    return operation;
}

static bool start_operations(struct mccl_comm *comm)
{
    bool moved = false;
    while (comm->engine.n_active < ENGINE_ACTIVE) {
        struct operation *operation = take_from_inbox(&comm->engine);
        if (!operation)
            break;
        start_operation(comm, operation);
        moved = true;
    }
    return moved;
}

static bool compute(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    int n = 0;
    while (n < COMPUTE_BURST && engine->ready_head != engine->ready_tail) {
        const struct ready_step ready = engine->ready[engine->ready_head++ % engine->ready_cap];
        schedule_compute(&ready.operation->schedule, &ready.operation->schedule.steps[ready.step]);
        step_done(comm, ready.operation, ready.step);
        n++;
    }
    return n > 0;
}

/* ---- links ---- */

static void take_over(struct mccl_comm *comm, const struct incoming_link *incoming)
{
    struct engine *engine = &comm->engine;
    if (incoming->p2p) {
        p2p_add_link(comm, incoming->peer, incoming->link);
        return;
    }
    struct engine_link *link = &engine->links[incoming->peer];
    link->link = incoming->link;
    link->readable = true;
    for (unsigned i = 0;; i++) {
        const int fd = link->link->ops->descriptor(link->link, i);
        if (fd < 0)
            break;
        const mccl_result result =
            os_poller_add(engine->poller, fd, OS_POLL_READ | OS_POLL_WRITE | OS_POLL_EDGE, link);
        if (result != MCCL_OK) {
            comm_fail(comm, result, incoming->peer, "cannot watch the link to rank %d: %s",
                      incoming->peer, error_text());
            break;
        }
    }
}

/* Links that the service thread has brought since the last round; a failed communicator closes
 * them. */
static void take_over_links(struct mccl_comm *comm, bool failed)
{
    struct engine *engine = &comm->engine;
    if (atomic_load(&engine->n_incoming_hint) == 0)
        return;
    pthread_mutex_lock(&engine->submit_lock);
    struct incoming_link *incoming = engine->incoming;
    const int n = engine->n_incoming;
    engine->incoming = NULL;
    engine->n_incoming = engine->cap_incoming = 0;
    atomic_store(&engine->n_incoming_hint, 0);
    pthread_mutex_unlock(&engine->submit_lock);
    /* Without the lock: a failure takes the endpoint's, which comes first in the order. */
    for (int i = 0; i < n; i++) {
        struct link *link = incoming[i].link;
        if (!failed)
            take_over(comm, &incoming[i]);
        else if (incoming[i].p2p)
            p2p_drop_link(comm, link);
        else
            link->ops->close(link);
    }
    free(incoming);
}

void progress_link_failed(struct mccl_comm *comm, int peer)
{
    /* The text is copied: asking the control link may overwrite it. */
    char why[256];
    snprintf(why, sizeof why, "%.250s", error_text());
    control_link_lost(comm, peer, why);
}

struct wire_frame progress_frame(const struct signature *signature, uint32_t seq, uint64_t length)
{
    return (struct wire_frame){.magic = WIRE_FRAME_MAGIC,
                               .version = WIRE_VERSION,
                               .type = FRAME_DATA,
                               .kind = signature->kind,
                               .dtype = signature->dtype,
                               .reduce_op = signature->reduce_op,
                               .seq = seq,
                               .aux = signature->root,
                               .count = signature->count,
                               .length = length};
}

static bool may_run(const struct engine *engine, const struct operation *operation)
{
    return !operation->alone || operation == engine->active;
}

static bool pump_sends(struct mccl_comm *comm, struct engine_link *link)
{
    struct engine *engine = &comm->engine;
    struct link *transport = link->link;
    bool moved = false;
    while (link->send_op && link->n_posted - link->n_completed < LINK_POSTED) {
        struct operation *operation = link->send_op;
        const struct step *step = &operation->schedule.steps[link->send_step];
        if (step->waits_for > 0 || !may_run(engine, operation))
            break;
        const struct wire_frame frame =
            progress_frame(&operation->signature, operation->seq, step->size);
        if (transport->ops->send(transport, &frame, step->src) != MCCL_OK)
            break;
        link->posted[link->n_posted++ % LINK_POSTED] =
            (struct ready_step){operation, link->send_step};
        if (step->next_same_peer != STEP_NONE)
            link->send_step = step->next_same_peer;
        else
            aim_send(link, operation->next);
        moved = true;
    }
    if (link->n_posted == link->n_completed)
        return moved;
    const uint64_t before = transport->moved;
    const mccl_result result = transport->ops->flush(transport);
    if (result != MCCL_OK && result != MCCL_IN_PROGRESS) {
        progress_link_failed(comm, link->peer);
        return true;
    }
    while (link->n_completed < transport->n_sent) {
        const struct ready_step sent = link->posted[link->n_completed++ % LINK_POSTED];
        const uint64_t size = sent.operation->schedule.steps[sent.step].size;
        atomic_fetch_add_explicit(&engine->bytes_sent, size, memory_order_relaxed);
        step_done(comm, sent.operation, sent.step);
    }
    return moved || transport->moved != before;
}

static void mismatch(struct mccl_comm *comm, int peer, const struct wire_frame *frame,
                     const struct signature *own)
{
    const struct signature theirs = {frame->kind, frame->dtype, frame->reduce_op,
                                     (uint16_t)frame->aux, frame->count};
    comm_mismatch(comm, peer, frame->seq, own, &theirs);
}

/* The peer has gone past `operation` and we still wait for its data. Its answer to a probe names
 * both sides' values; without one (same signature, but counts by rank that differ) the wait ends a
 * little later all the same. */
static void suspect(struct mccl_comm *comm, int peer, struct operation *operation)
{
    if (operation->suspect_until_ns != 0)
        return;
    operation->suspect_until_ns = os_now_ns() + SUSPECT_NS;
    operation->suspect = peer;
    control_probe(comm, peer, operation->seq, &operation->signature);
}

/* Does the waiting frame fit the receive that is due? True: start taking its payload. */
static bool match(struct mccl_comm *comm, struct engine_link *link)
{
    const struct engine *engine = &comm->engine;
    const struct wire_frame *frame = &link->frame;
    struct operation *operation = link->recv_op;
    if (frame->type != FRAME_DATA) {
        comm_fail(comm, MCCL_ERR_PEER_LOST, link->peer,
                  "rank %d sent a frame of type %u where data belongs", link->peer, frame->type);
        return false;
    }
    if (!operation || operation->seq != frame->seq) {
        struct signature own;
        bool submitted;
        const bool known = engine_signature(comm, frame->seq, &own, &submitted);
        const bool early =
            !engine->any_active || (int32_t)(frame->seq - engine->last_active_seq) > 0;
        if (!operation && early)
            return false;       /* ours is still to come */
        if (operation && early) /* past ours, without having sent what we expect for it */
            suspect(comm, link->peer, operation);
        else
            mismatch(comm, link->peer, frame, known ? &own : NULL);
        return false;
    }
    if (!may_run(engine, operation))
        return false;
    const struct signature *own = &operation->signature;
    if (frame->kind != own->kind || frame->dtype != own->dtype ||
        frame->reduce_op != own->reduce_op || frame->aux != own->root ||
        frame->count != own->count) {
        mismatch(comm, link->peer, frame, own);
        return false;
    }
    const struct step *step = &operation->schedule.steps[link->recv_step];
    if (frame->length != step->size) {
        comm_fail(comm, MCCL_ERR_MISMATCH, link->peer,
                  "ranks disagree in %s seq %u: rank %d sends %llu bytes, rank %d expects %llu; "
                  "make the counts of "
                  "both sides agree",
                  op_kind_name(own->kind), frame->seq, link->peer,
                  (unsigned long long)frame->length, comm->rank, (unsigned long long)step->size);
        return false;
    }
    return step->waits_for == 0;
}

static void received(struct mccl_comm *comm, struct engine_link *link)
{
    struct operation *operation = link->recv_op;
    const uint32_t index = link->recv_step;
    const struct step *step = &operation->schedule.steps[index];
    link->receiving = link->has_frame = false;
    atomic_fetch_add_explicit(&comm->engine.bytes_received, step->size, memory_order_relaxed);
    atomic_fetch_add_explicit(&operation->request->bytes_done, step->size, memory_order_relaxed);
    if (step->next_same_peer != STEP_NONE)
        link->recv_step = step->next_same_peer;
    else
        aim_recv(link, operation->next);
    step_done(comm, operation, index);
}

static bool pump_receives(struct mccl_comm *comm, struct engine_link *link)
{
    struct link *transport = link->link;
    const uint64_t before = transport->moved;
    bool moved = false;
    for (int n = 0; n < RECEIVE_BURST; n++) {
        mccl_result result = MCCL_OK;
        if (!link->has_frame) {
            result = transport->ops->peek(transport, &link->frame);
            link->has_frame = result == MCCL_OK;
        }
        if (link->has_frame && !link->receiving) {
            if (!match(comm, link))
                break; /* stays readable: nothing new has to arrive for the next look */
            link->receiving = true;
        }
        if (link->receiving) {
            result = transport->ops->receive(transport,
                                             link->recv_op->schedule.steps[link->recv_step].dst);
            if (result == MCCL_OK) {
                received(comm, link);
                moved = true;
                continue;
            }
        }
        if (result == MCCL_IN_PROGRESS) {
            link->readable = false;
            if (transport->at_end && link->recv_op) {
                error_set(MCCL_ERR_PEER_LOST, "connection closed");
                progress_link_failed(comm, link->peer);
            }
            break;
        }
        progress_link_failed(comm, link->peer);
        break;
    }
    return moved || transport->moved != before;
}

/* Where a message from `peer` is to arrive, here and as an operand. */
static void redirect(struct schedule *schedule, int peer, void *dst)
{
    struct step *step = &schedule->steps[schedule->first_recv[peer]];
    for (uint32_t i = 0; i < schedule->n_srcs; i++)
        if (schedule->srcs[i] == step->dst)
            schedule->srcs[i] = dst;
    step->dst = dst;
}

void progress_resume(struct mccl_comm *comm, struct operation *operation, uint32_t arrived)
{
    struct engine *engine = &comm->engine;
    if (engine->drained) {
        mccl_request *request = operation->request;
        engine_operation_free(comm, operation);
        engine_fail_request(comm, request);
        return;
    }
    start_operation(comm, operation);
    if (!operation->started) /* and so the communicator has failed */
        return;
    for (int peer = 0; peer < comm->n_ranks; peer++) {
        struct engine_link *link = &engine->links[peer];
        if (peer == comm->rank)
            continue;
        MCCL_ASSERT(link->send_op == operation && link->recv_op == operation);
        redirect(&operation->schedule, peer, engine->small[peer]);
        link->posted[link->n_posted++ % LINK_POSTED] =
            (struct ready_step){operation, link->send_step};
        aim_send(link, operation->next);
    }
    /* The last one may not end it: none of the sends is counted yet. */
    for (int peer = 0; peer < comm->n_ranks; peer++)
        if (peer != comm->rank && (arrived >> peer & 1))
            received(comm, &engine->links[peer]);
}

/* ---- failure ---- */

static void fail_everything(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    if (!engine->drained) {
        engine->drained = true;
        engine->ready_head = engine->ready_tail;
        /* Sockets close when the communicator goes; until then nothing watches them. */
        for (int peer = 0; peer < comm->n_ranks; peer++) {
            struct engine_link *link = &engine->links[peer];
            for (unsigned i = 0; link->link && link->link->ops->descriptor(link->link, i) >= 0; i++)
                os_poller_remove(engine->poller, link->link->ops->descriptor(link->link, i));
            link->send_op = link->recv_op = NULL;
        }
        p2p_fail_all(comm);
        struct operation *operation = engine->active;
        engine->active = engine->active_last = NULL;
        engine->n_active = 0;
        while (operation) {
            struct operation *next = operation->next;
            mccl_request *request = operation->request;
            engine_operation_free(comm, operation);
            engine_fail_request(comm, request);
            operation = next;
        }
    }
    for (struct operation *operation; (operation = take_from_inbox(engine)) != NULL;) {
        mccl_request *request = operation->request;
        engine_operation_free(comm, operation);
        engine_fail_request(comm, request);
    }
    p2p_fail_all(comm);
}

/* ---- one round ---- */

bool progress_reads_blindly(const struct mccl_comm *comm)
{
    return comm->n_ranks <= 4;
}

/* Which links have something, where that is not found out by reading and somebody waits for it. */
static void ask_poller(struct mccl_comm *comm)
{
    struct os_poll_event events[32];
    if (!progress_reads_blindly(comm) && (comm->engine.n_active > 0 || p2p_is_live(comm)))
        progress_on_events(comm, events, os_poller_wait(comm->engine.poller, events, 32, 0));
}

static bool move_collectives(struct mccl_comm *comm)
{
    struct engine *engine = &comm->engine;
    const bool read_blindly = progress_reads_blindly(comm);
    bool moved = false;
    for (int i = 1; i < comm->n_ranks; i++) {
        const int peer = (comm->rank + i) % comm->n_ranks;
        struct engine_link *link = &engine->links[peer];
        if (!link->link)
            continue;
        if (link->send_op || link->n_posted != link->n_completed)
            moved |= pump_sends(comm, link);
        /* A stream at its end has no more events to tell, also of a receive that comes later. */
        if (link->readable ||
            (link->recv_op && (read_blindly || link->link->at_end || link->link->silent)))
            moved |= pump_receives(comm, link);
    }
    moved |= compute(comm);
    return moved;
}

/* News of a failure travels on another connection than data and may overtake it: what is here
 * already still counts, so that a rank does not lose an operation which all others have finished.
 * Not after an abort of our own. */
static void finish_what_has_arrived(struct mccl_comm *comm)
{
    const struct cause *cause = &comm->cause;
    if (comm->engine.drained || (cause->result == MCCL_ERR_ABORTED && cause->rank == comm->rank))
        return;
    bool moved = true;
    for (int round = 0; round < LAST_ROUNDS && moved; round++) {
        ask_poller(comm);
        moved = move_collectives(comm);
    }
}

bool progress_step(struct mccl_comm *comm)
{
    if (atomic_load_explicit(&comm->failed, memory_order_acquire)) {
        take_over_links(comm, true);
        finish_what_has_arrived(comm);
        fail_everything(comm);
        return false;
    }
    take_over_links(comm, false);
    ask_poller(comm);
    bool moved = start_operations(comm);
    moved |= move_collectives(comm);
    moved |= p2p_step(comm);
    return moved;
}

bool progress_arm(struct mccl_comm *comm)
{
    bool news = false;
    for (int peer = 0; peer < comm->n_ranks && !atomic_load(&comm->failed); peer++) {
        const struct engine_link *link = &comm->engine.links[peer];
        if (link->link && link->link->silent)
            news |= link->link->ops->arm(link->link,
                                         link->recv_op && (!link->has_frame || link->receiving));
    }
    if (!atomic_load(&comm->failed))
        news |= p2p_arm(comm);
    return news;
}

void progress_on_events(struct mccl_comm *comm, const struct os_poll_event *events, int n_events)
{
    struct engine *engine = &comm->engine;
    for (int i = 0; i < n_events; i++) {
        struct engine_link *link = events[i].data;
        if (link >= engine->links && link < engine->links + comm->n_ranks)
            link->readable |= (events[i].events & (OS_POLL_READ | OS_POLL_HUP)) != 0;
        else
            p2p_on_event(comm, events[i].data);
    }
}

/* ---- time ---- */

static bool waits_for(const struct mccl_comm *comm, const struct operation *operation, int peer)
{
    const struct engine_link *link = &comm->engine.links[peer];
    bool waits = link->recv_op == operation || link->send_op == operation;
    for (uint64_t i = link->n_completed; i < link->n_posted; i++)
        waits |= link->posted[i % LINK_POSTED].operation == operation;
    return waits;
}

/* Has the peer begun `operation`? False if we do not know. */
static bool is_there(struct mccl_comm *comm, const struct operation *operation, int peer)
{
    const struct wire_frame *last = &comm->engine.links[peer].frame;
    if (last->type == FRAME_DATA && (int32_t)(last->seq - operation->seq) >= 0)
        return true;
    return control_has_probed(comm, peer, operation->seq);
}

/* "2, 3": the ranks that `operation` waits for. A neighbour that is there waits itself, perhaps for
 * a rank with which we do not talk; so that is named of which nothing was heard. */
static int waited_for(struct mccl_comm *comm, const struct operation *operation, char *text,
                      size_t size)
{
    static const char more[] = " and more";
    int n = 0;
    size_t used = 0;
    text[0] = '\0';
    for (int attempt = 0; n == 0 && attempt < 3; attempt++)
        for (int peer = 0; peer < comm->n_ranks; peer++) {
            const bool neighbour = waits_for(comm, operation, peer);
            const bool missing = peer != comm->rank && !is_there(comm, operation, peer);
            /* Of operations behind the oldest one other ranks have not been asked. */
            const bool named[] = {neighbour && missing, missing && operation->oldest, neighbour};
            if (!named[attempt])
                continue;
            char number[16];
            const int length = snprintf(number, sizeof number, "%s%d", n ? ", " : "", peer);
            n++;
            if (used + (size_t)length + sizeof more > size) {
                memcpy(text + used, more, sizeof more);
                return n;
            }
            memcpy(text + used, number, (size_t)length + 1);
            used += (size_t)length;
        }
    return n;
}

/* Those that it waits for, or all. */
static void ask_peers(struct mccl_comm *comm, const struct operation *operation, bool all)
{
    for (int peer = 0; peer < comm->n_ranks; peer++)
        if (peer != comm->rank && (all || comm->engine.links[peer].recv_op == operation))
            control_probe(comm, peer, operation->seq, &operation->signature);
}

/* All ranks tell each other that they are there, in time for the texts that name who is not. */
static int64_t ask_all_ns(const struct operation *operation)
{
    const int64_t first_ns =
        operation->warn_ns < operation->deadline_ns ? operation->warn_ns : operation->deadline_ns;
    return operation->submitted_ns + (first_ns - operation->submitted_ns) / 2;
}

/* "Timed out waiting 1000ms" are the words of torch's other backends, which programs look for. */
static void time_out(struct mccl_comm *comm, const struct operation *operation)
{
    const long long waited_ms = (operation->deadline_ns - operation->submitted_ns) / OS_MS;
    char ranks[128];
    const int n = operation->started ? waited_for(comm, operation, ranks, sizeof ranks) : 0;
    if (n > 0)
        comm_fail(comm, MCCL_ERR_TIMEOUT, -1,
                  "%s seq %u on rank %d: Timed out waiting %lldms for rank%s %s; look at what they "
                  "do, or raise the time-out",
                  op_kind_name(operation->signature.kind), operation->seq, comm->rank, waited_ms,
                  n > 1 ? "s" : "", ranks);
    else
        comm_fail(
            comm, MCCL_ERR_TIMEOUT, -1,
            "%s seq %u on rank %d: Timed out waiting %lldms behind earlier operations of its group",
            op_kind_name(operation->signature.kind), operation->seq, comm->rank, waited_ms);
}

/* Operations that are not started yet have deadlines, too. Returns the next one. */
static int64_t check_inbox(struct mccl_comm *comm, int64_t now_ns)
{
    struct engine *engine = &comm->engine;
    struct operation late = {.started = false};
    int64_t next_ns = INT64_MAX;
    if (atomic_load(&engine->n_inbox) == 0)
        return next_ns;
    pthread_mutex_lock(&engine->submit_lock);
    for (const struct operation *operation = engine->inbox; operation;
         operation = operation->next) {
        if (operation->deadline_ns < next_ns) {
            next_ns = operation->deadline_ns;
            late.signature = operation->signature;
            late.seq = operation->seq;
            late.submitted_ns = operation->submitted_ns;
            late.deadline_ns = operation->deadline_ns;
        }
    }
    pthread_mutex_unlock(&engine->submit_lock);
    if (next_ns <= now_ns)
        time_out(comm, &late);
    return next_ns;
}

static void give_up_on_suspect(struct mccl_comm *comm, const struct operation *operation)
{
    comm_fail(
        comm, MCCL_ERR_MISMATCH, operation->suspect,
        "ranks disagree in %s seq %u: rank %d went on without sending all that rank %d expects; "
        "make the counts of both sides agree",
        op_kind_name(operation->signature.kind), operation->seq, operation->suspect, comm->rank);
}

/* One line for one stall: what waits behind the oldest operation begins to count when that is done.
 * Returns when to look again. */
static int64_t watch_oldest(struct mccl_comm *comm, struct operation *operation, int64_t now_ns)
{
    if (!operation->oldest && operation->warn_ns <= now_ns)
        operation->warn_ns = now_ns + comm->warn_ms * OS_MS;
    operation->oldest = true;
    const int64_t ask_ns = ask_all_ns(operation);
    if (!operation->asked && now_ns >= ask_ns) {
        operation->asked = true;
        ask_peers(comm, operation, true);
    }
    if (now_ns >= operation->warn_ns) {
        char ranks[128];
        const int n = waited_for(comm, operation, ranks, sizeof ranks);
        log_warn("rank %d of %d, group '%s': %s seq %u has been waiting for %.1f s%s%s "
                 "(MCCL_WATCHDOG_TIMEOUT_MS)",
                 comm->rank, comm->n_ranks, comm->name, op_kind_name(operation->signature.kind),
                 operation->seq, (double)(now_ns - operation->submitted_ns) / 1e9,
                 n == 0   ? ""
                 : n == 1 ? " for rank "
                          : " for ranks ",
                 ranks);
        operation->warn_ns = INT64_MAX;
    }
    return operation->asked ? operation->warn_ns : ask_ns;
}

int64_t progress_check_time(struct mccl_comm *comm, int64_t now_ns, int64_t probe_after_ns)
{
    struct engine *engine = &comm->engine;
    int64_t next_ns = now_ns + OS_SEC;
    for (struct operation *operation = engine->active; operation; operation = operation->next) {
        if (now_ns >= operation->deadline_ns) {
            time_out(comm, operation);
            return now_ns;
        }
        if (operation->suspect_until_ns != 0 && now_ns >= operation->suspect_until_ns) {
            give_up_on_suspect(comm, operation);
            return now_ns;
        }
        if (operation->suspect_until_ns != 0 && operation->suspect_until_ns < next_ns)
            next_ns = operation->suspect_until_ns;
        if (operation->deadline_ns < next_ns)
            next_ns = operation->deadline_ns;
    }
    struct operation *oldest = engine->active;
    if (oldest) {
        const int64_t watch_ns = watch_oldest(comm, oldest, now_ns);
        next_ns = watch_ns < next_ns ? watch_ns : next_ns;
    }
    if (oldest && !oldest->probed) {
        const int64_t probe_ns = engine->last_progress_ns + probe_after_ns;
        if (now_ns >= probe_ns) {
            oldest->probed = true;
            ask_peers(comm, oldest, false);
        } else if (probe_ns < next_ns)
            next_ns = probe_ns;
    }
    const int64_t inbox_ns = check_inbox(comm, now_ns);
    const int64_t p2p_ns = p2p_check_time(comm, now_ns);
    next_ns = inbox_ns < next_ns ? inbox_ns : next_ns;
    return p2p_ns < next_ns ? p2p_ns : next_ns;
}

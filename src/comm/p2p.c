/* SPDX-License-Identifier: MIT
 *
 * See p2p.h. From submission to completion: submissions come in through a list under a lock;
 * everything else belongs to the owner of the engine.
 */
#include "comm/p2p_state.h"
#include "comm/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct p2p *p2p_create(struct mccl_comm *comm)
{
    struct p2p *p2p = calloc(1, sizeof *p2p);
    if (!p2p)
        return NULL;
    p2p->peers = calloc((size_t)comm->n_ranks, sizeof *p2p->peers);
    if (!p2p->peers) {
        free(p2p);
        return NULL;
    }
    p2p->n_ranks = comm->n_ranks;
    for (int peer = 0; peer < comm->n_ranks; peer++)
        p2p->peers[peer].peer = peer;
    pthread_mutex_init(&p2p->lock, NULL);
    return p2p;
}

void p2p_destroy(struct p2p *p2p)
{
    if (!p2p)
        return;
    for (int i = 0; i < p2p->n_ranks; i++) {
        struct p2p_peer *peer = &p2p->peers[i];
        for (struct item *item = peer->first, *next; item; item = next) {
            next = item->next;
            free(item);
        }
        for (; peer->n_completed < peer->n_posted; peer->n_completed++)
            free(peer->posted[peer->n_completed % LINK_POSTED]);
        if (peer->link)
            peer->link->ops->close(peer->link);
    }
    for (struct early *early = p2p->early, *next; early; early = next) {
        next = early->next;
        p2p_early_free(early);
    }
    pthread_mutex_destroy(&p2p->lock);
    free(p2p->peers);
    free(p2p);
}

mccl_result p2p_submit(struct mccl_comm *comm, mccl_request *request, void *buffer, size_t bytes,
                       bool is_send, int64_t deadline_ns, bool attended)
{
    struct p2p *p2p = comm->engine.p2p;
    struct message *message = calloc(1, sizeof *message);
    if (!message)
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a message");
    *message = (struct message){.request = request,
                                .buffer = buffer,
                                .bytes = bytes,
                                .is_send = is_send,
                                .peer = request->peer,
                                .tag = request->tag,
                                .deadline_ns = deadline_ns,
                                .submitted_ns = os_now_ns()};
    engine_count_in(comm, request, attended);
    pthread_mutex_lock(&p2p->lock);
    request->seq = p2p->next_seq++;
    if (p2p->inbox_last)
        p2p->inbox_last->next_in_line = message;
    else
        p2p->inbox = message;
    p2p->inbox_last = message;
    atomic_fetch_add(&p2p->n_inbox, 1);
    pthread_mutex_unlock(&p2p->lock);
    engine_kick(comm, attended);
    return MCCL_OK;
}

bool p2p_has_news(const struct mccl_comm *comm)
{
    return atomic_load(&comm->engine.p2p->n_inbox) > 0;
}

bool p2p_is_live(const struct mccl_comm *comm)
{
    return comm->engine.p2p->live != NULL;
}

/* ---- owner: life of a message ---- */

void p2p_live_add(struct p2p *p2p, struct message *message)
{
    message->next = p2p->live;
    message->previous = NULL;
    if (p2p->live)
        p2p->live->previous = message;
    p2p->live = message;
}

static void live_remove(struct p2p *p2p, struct message *message)
{
    if (message->previous)
        message->previous->next = message->next;
    else
        p2p->live = message->next;
    if (message->next)
        message->next->previous = message->previous;
}

void p2p_message_done(struct mccl_comm *comm, struct message *message)
{
    mccl_request *request = message->request;
    live_remove(comm->engine.p2p, message);
    atomic_store(&request->bytes_done, message->bytes);
    if (!message->is_send) {
        request->source = message->peer;
        request->source_tag = message->tag;
        atomic_fetch_add_explicit(&comm->engine.bytes_received, message->bytes,
                                  memory_order_relaxed);
    } else {
        atomic_fetch_add_explicit(&comm->engine.bytes_sent, message->bytes, memory_order_relaxed);
    }
    free(message);
    engine_complete(comm, request, MCCL_OK, NULL);
}

bool p2p_queue_item(struct mccl_comm *comm, int peer, struct item wanted)
{
    struct p2p_peer *to = &comm->engine.p2p->peers[peer];
    if (to->parted || p2p_has_left(comm, peer))
        return true; /* it would not listen; p2p_check_left ends what depends on it */
    struct item *item = malloc(sizeof *item);
    if (!item) {
        comm_fail(comm, MCCL_ERR_NO_MEMORY, comm->rank, "no memory for a message to rank %d", peer);
        return false;
    }
    *item = wanted;
    item->next = NULL;
    if (to->last)
        to->last->next = item;
    else
        to->first = item;
    to->last = item;
    if (!to->link && !to->wanted) {
        to->wanted = true;
        control_want_p2p(comm, peer);
    }
    return true;
}

/* ---- owner's entry points ---- */

static void stop_agreeing(struct mccl_comm *comm, struct p2p_peer *peer)
{
    if (peer->agreeing)
        engine_let_go(comm);
    peer->agreeing = false;
}

void p2p_drop_link(struct mccl_comm *comm, struct link *link)
{
    if (link_agreeing(link))
        engine_let_go(comm);
    link->ops->close(link);
}

void p2p_add_link(struct mccl_comm *comm, int index, struct link *link)
{
    struct p2p *p2p = comm->engine.p2p;
    struct p2p_peer *peer = &p2p->peers[index];
    if (peer->link) { /* dialled twice: the first one is in use */
        p2p_drop_link(comm, link);
        return;
    }
    peer->link = link;
    peer->agreeing = link_agreeing(link);
    peer->readable = true;
    peer->wanted = true;
    p2p->active = true;
    const mccl_result result = os_poller_add(comm->engine.poller, link->ops->descriptor(link, 0),
                                             OS_POLL_READ | OS_POLL_WRITE | OS_POLL_EDGE, peer);
    if (result != MCCL_OK)
        comm_fail(comm, result, index, "cannot watch the point-to-point link to rank %d: %s", index,
                  error_text());
}

bool p2p_arm(struct mccl_comm *comm)
{
    struct p2p *p2p = comm->engine.p2p;
    bool news = false;
    for (int i = 0; p2p->active && i < p2p->n_ranks; i++) {
        struct p2p_peer *peer = &p2p->peers[i];
        if (peer->link && peer->link->silent && !peer->ended)
            news |= peer->link->ops->arm(peer->link, true) ||
                    (peer->agreeing && !link_agreeing(peer->link));
    }
    return news;
}

void p2p_on_event(struct mccl_comm *comm, void *data)
{
    (void)comm;
    struct p2p_peer *peer = data;
    peer->readable = true;
}

bool p2p_step(struct mccl_comm *comm)
{
    struct p2p *p2p = comm->engine.p2p;
    bool moved = p2p_take_inbox(comm);
    if (!p2p->active)
        return false;
    const bool read_blindly = p2p->live && progress_reads_blindly(comm);
    for (int i = 0; i < p2p->n_ranks && !atomic_load(&comm->failed); i++) {
        struct p2p_peer *peer = &p2p->peers[i];
        if (!peer->link)
            continue;
        if (!peer->parted && p2p_has_left(comm, i))
            p2p_part(peer);
        if (peer->first || peer->n_posted != peer->n_completed)
            moved |= p2p_pump_out(comm, peer);
        /* A silent link is read even if nobody waits: what comes early must not stop its sender. */
        if ((peer->readable || read_blindly || peer->link->silent) && !peer->ended &&
            !atomic_load(&comm->failed))
            moved |= p2p_pump_in(comm, peer);
        if (peer->agreeing && (peer->ended || !link_agreeing(peer->link)))
            stop_agreeing(comm, peer);
    }
    if (atomic_load(&comm->n_left) > 0 && !atomic_load(&comm->failed))
        p2p_check_left(comm);
    return moved;
}

void p2p_fail_all(struct mccl_comm *comm)
{
    struct p2p *p2p = comm->engine.p2p;
    const bool leaves = !p2p->failed && p2p_leaves(comm);
    p2p->failed = true;
    if (leaves)
        p2p_leave_begin(comm);
    for (int i = 0; i < p2p->n_ranks; i++) {
        struct p2p_peer *peer = &p2p->peers[i];
        peer->target = NULL;
        stop_agreeing(comm, peer);
    }
    p2p->receives = p2p->receives_last = NULL;
    for (;;) {
        pthread_mutex_lock(&p2p->lock);
        struct message *message = p2p->inbox;
        if (message) {
            p2p->inbox = message->next_in_line;
            if (!p2p->inbox)
                p2p->inbox_last = NULL;
            atomic_fetch_sub(&p2p->n_inbox, 1);
        }
        pthread_mutex_unlock(&p2p->lock);
        if (!message)
            break;
        p2p_live_add(p2p, message);
    }
    while (p2p->live) {
        struct message *message = p2p->live;
        mccl_request *request = message->request;
        live_remove(p2p, message);
        free(message);
        engine_fail_request(comm, request);
    }
    if (leaves)
        p2p_leave_end(comm);
}

int64_t p2p_check_time(struct mccl_comm *comm, int64_t now_ns)
{
    int64_t next_ns = INT64_MAX;
    for (const struct message *message = comm->engine.p2p->live; message; message = message->next) {
        if (now_ns >= message->deadline_ns) {
            char peer[32] = "any rank";
            if (message->peer >= 0)
                snprintf(peer, sizeof peer, "rank %d", message->peer);
            comm_fail(
                comm, MCCL_ERR_TIMEOUT, message->peer,
                "%s seq %u on rank %d: Timed out waiting %lldms for %s (tag %d); look at what it "
                "does, or raise the time-out",
                message->is_send ? "send" : "recv", message->request->seq, comm->rank,
                (long long)(message->deadline_ns - message->submitted_ns) / OS_MS, peer,
                message->tag);
            return now_ns;
        }
        if (message->deadline_ns < next_ns)
            next_ns = message->deadline_ns;
    }
    return next_ns;
}

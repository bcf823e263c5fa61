/* SPDX-License-Identifier: MIT
 *
 * How point-to-point links end. What a rank was told to be sent must arrive although its sender
 * leaves at once, and a socket that is closed while the other side still writes to it answers with
 * a reset, which throws away what is on its way. So nobody writes to a rank that has said goodbye,
 * and who leaves ends its streams, and closes only when nothing more can come that would matter.
 * Owner of the engine.
 */
#include "comm/conn.h"
#include "comm/dial.h"
#include "comm/p2p_state.h"

#include <stdlib.h>

#define LEAVE_NS OS_SEC /* the longest that leaving waits for ranks that do not look */
#define DRAIN_BURST 64  /* frames of one link before the others get their turn */

/* ---- the other side leaves ---- */

bool p2p_has_left(const struct mccl_comm *comm, int peer)
{
    return atomic_load_explicit(&comm->peers[peer].goodbye, memory_order_relaxed);
}

bool p2p_learns_goodbye(struct mccl_comm *comm, int peer)
{
    endpoint_lock(comm->endpoint);
    struct conn *control = comm->peers[peer].control;
    if (control)
        conn_on_event(control, OS_POLL_READ);
    endpoint_unlock(comm->endpoint);
    return p2p_has_left(comm, peer);
}

void p2p_part(struct p2p_peer *peer)
{
    if (peer->parted)
        return;
    peer->parted = true;
    /* Their messages stay alive: what can never be done any more is check_left's to find. */
    while (peer->first) {
        struct item *item = peer->first;
        peer->first = item->next;
        free(item);
    }
    peer->last = NULL;
    for (; peer->n_completed < peer->n_posted; peer->n_completed++)
        free(peer->posted[peer->n_completed % LINK_POSTED]);
    if (peer->link)
        peer->link->ops->end(peer->link);
}

/* Announcements that nobody can fetch from any more must not catch a receive from any source. */
static void forget_announced(struct p2p *p2p, int peer)
{
    for (struct early *early = p2p->early, *next; early; early = next) {
        next = early->next;
        if (early->peer != peer || early->frame.type != FRAME_P2P_READY)
            continue;
        p2p_early_remove(p2p, early);
        p2p_early_free(early);
    }
}

void p2p_stream_ended(struct p2p *p2p, struct p2p_peer *peer)
{
    struct early *cut = peer->storing;
    peer->ended = true;
    peer->readable = false;
    peer->has_frame = peer->taking = false;
    peer->target = NULL; /* is alive still, and can never be done */
    peer->storing = NULL;
    if (cut) {
        if (cut->claimed)
            cut->claimed->peer = peer->peer;
        peer->stored -= cut->frame.length;
        p2p_early_remove(p2p, cut);
        p2p_early_free(cut);
    }
    forget_announced(p2p, peer->peer);
    p2p_part(peer);
}

/* A rank that has left may have got through the handshake of a link, used it, and been faster with
 * its goodbye than we were with its last word. */
static bool link_arrives(struct mccl_comm *comm, int peer)
{
    bool arrives = false;
    endpoint_lock(comm->endpoint);
    for (const struct conn *conn = comm->endpoint->conns; conn; conn = conn->next)
        arrives |= conn->state == CONN_WAIT_ACCEPT && conn->hello.purpose == PURPOSE_P2P &&
                   conn->dial && conn->dial->comm == comm && conn->dial->peer == peer;
    endpoint_unlock(comm->endpoint);
    return arrives || atomic_load(&comm->engine.n_incoming_hint) > 0;
}

/* It has said goodbye, and nothing of it can come any more. */
static bool is_gone(const struct mccl_comm *comm, int peer)
{
    const struct p2p_peer *from = &comm->engine.p2p->peers[peer];
    return atomic_load(&comm->peers[peer].left) && (!from->link || from->ended);
}

static bool all_gone(const struct mccl_comm *comm)
{
    for (int peer = 0; peer < comm->n_ranks; peer++)
        if (peer != comm->rank && !is_gone(comm, peer))
            return false;
    return true;
}

static bool any_link_arrives(struct mccl_comm *comm, int peer)
{
    if (peer >= 0)
        return !comm->engine.p2p->peers[peer].link && link_arrives(comm, peer);
    for (int other = 0; other < comm->n_ranks; other++)
        if (other != comm->rank && any_link_arrives(comm, other))
            return true;
    return false;
}

void p2p_check_left(struct mccl_comm *comm)
{
    const bool alone = (int)atomic_load(&comm->n_left) == comm->n_ranks - 1 && all_gone(comm);
    for (const struct message *message = comm->engine.p2p->live; message; message = message->next) {
        const int peer = message->peer;
        if (peer == comm->rank || (peer >= 0 ? !is_gone(comm, peer) : !alone))
            continue;
        if (any_link_arrives(comm, peer))
            continue;
        if (peer >= 0)
            comm_fail(comm, MCCL_ERR_PEER_LOST, peer,
                      "rank %d has left the group (it destroyed its communicator)", peer);
        else
            comm_fail(comm, MCCL_ERR_PEER_LOST, -1,
                      "all other ranks have left the group (they destroyed their communicators), "
                      "so rank %d receives from any source in vain",
                      comm->rank);
        return;
    }
}

/* ---- this side leaves ---- */

bool p2p_leaves(struct mccl_comm *comm)
{
    endpoint_lock(comm->endpoint);
    const bool closing = comm->closing;
    endpoint_unlock(comm->endpoint);
    return closing && comm->cause.result == MCCL_ERR_ABORTED && comm->cause.rank == comm->rank;
}

void p2p_leave_begin(struct mccl_comm *comm)
{
    struct p2p *p2p = comm->engine.p2p;
    for (int i = 0; i < p2p->n_ranks; i++) {
        struct p2p_peer *peer = &p2p->peers[i];
        if (!peer->link || peer->ended)
            continue;
        if (!peer->parted)
            (void)peer->link->ops->flush(peer->link);
        peer->owes_fetch = peer->announced != NULL;
        p2p_part(peer);
    }
}

/* Nothing that the peer has to say could meet a closed socket. */
static bool is_settled(const struct p2p_peer *peer)
{
    return !peer->link || peer->ended || (!peer->owes_fetch && peer->eager_out < P2P_CREDIT_BYTES);
}

/* Reads and discards what is there. True: look again at once. */
static bool drain(struct p2p_peer *peer)
{
    struct link *link = peer->link;
    for (int n = 0; n < DRAIN_BURST; n++) {
        mccl_result result = link->ops->peek(link, &peer->frame);
        if (result == MCCL_OK)
            result = link->ops->receive(link, NULL);
        if (result != MCCL_OK) {
            peer->ended = result != MCCL_IN_PROGRESS || link->at_end;
            return false;
        }
        if (peer->frame.type == FRAME_P2P_CREDIT)
            p2p_take_credit(peer);
    }
    return true;
}

void p2p_leave_end(struct mccl_comm *comm)
{
    struct p2p *p2p = comm->engine.p2p;
    const int64_t until_ns = os_now_ns() + LEAVE_NS;
    for (;;) {
        bool settled = true, again = false;
        for (int i = 0; i < p2p->n_ranks; i++) {
            struct p2p_peer *peer = &p2p->peers[i];
            if (peer->link && !peer->ended)
                again |= drain(peer);
            settled &= is_settled(peer);
        }
        const int64_t left_ns = until_ns - os_now_ns();
        if (settled || left_ns <= 0)
            return;
        struct os_poll_event events[32];
        if (!again && !p2p_arm(comm))
            os_poller_wait(comm->engine.poller, events, 32, left_ns);
    }
}

/* SPDX-License-Identifier: MIT
 *
 * The frames of point-to-point: EAGER carries a whole small message; READY announces a large one,
 * FETCH asks for it, DATA brings it in pieces; CREDIT returns room in the store for early arrivals.
 * Owner of the engine.
 */
#include "comm/p2p_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- sending ---- */

static void pop_item(struct p2p_peer *peer)
{
    peer->first = peer->first->next;
    if (!peer->first)
        peer->last = NULL;
}

/* The frame and payload that `item` puts on the wire now. */
static struct wire_frame item_frame(const struct mccl_comm *comm, struct p2p_peer *peer,
                                    struct item *item, const void **payload)
{
    struct wire_frame frame = {.magic = WIRE_FRAME_MAGIC, .version = WIRE_VERSION, .seq = item->id};
    *payload = NULL;
    switch (item->kind) {
    case ITEM_MESSAGE: {
        struct message *message = item->message;
        const bool eager = message->bytes <= P2P_EAGER_BYTES &&
                           peer->eager_out + message->bytes <= P2P_STORE_BYTES;
        message->id = peer->next_id++;
        item->last = eager;
        *payload = message->buffer;
        return p2p_message_frame(message, eager ? FRAME_P2P_EAGER : FRAME_P2P_READY);
    }
    case ITEM_FETCH:
        frame.type = FRAME_P2P_FETCH;
        return frame;
    case ITEM_CREDIT:
        frame.type = FRAME_P2P_CREDIT;
        frame.count = item->value;
        return frame;
    case ITEM_DATA:
        break;
    }
    const size_t left = item->message->bytes - item->offset;
    const size_t chunk = (size_t)comm->settings.chunk_bytes;
    item->size = left < chunk ? left : chunk;
    item->last = item->size == left;
    frame.type = FRAME_P2P_DATA;
    frame.count = item->offset;
    frame.length = item->size;
    *payload = item->message->buffer + item->offset;
    return frame;
}

static void item_sent(struct mccl_comm *comm, struct item *item)
{
    const bool completes = (item->kind == ITEM_MESSAGE || item->kind == ITEM_DATA) && item->last;
    struct message *message = item->message;
    free(item);
    if (completes)
        p2p_message_done(comm, message);
}

static void after_posting(struct mccl_comm *comm, struct p2p_peer *peer, const struct item *item)
{
    if (item->kind == ITEM_MESSAGE && item->last) {
        peer->eager_out += item->message->bytes;
    } else if (item->kind == ITEM_MESSAGE) {
        item->message->next_in_line = peer->announced;
        peer->announced = item->message;
    } else if (item->kind == ITEM_DATA &&
               !item->last) { /* behind what else waits, so that small ones get through */
        p2p_queue_item(comm, peer->peer,
                       (struct item){.kind = ITEM_DATA,
                                     .message = item->message,
                                     .id = item->id,
                                     .offset = item->offset + item->size});
    }
}

/* A rank that has said goodbye does not read any more; what it sent is still to be had. */
static void writing_failed(struct mccl_comm *comm, struct p2p_peer *peer)
{
    char why[256];
    snprintf(why, sizeof why, "%.250s", error_text());
    if (!p2p_learns_goodbye(comm, peer->peer)) {
        control_link_lost(comm, peer->peer, why);
        return;
    }
    p2p_part(peer);
    peer->readable = true;
}

bool p2p_pump_out(struct mccl_comm *comm, struct p2p_peer *peer)
{
    struct link *link = peer->link;
    bool moved = false;
    while (peer->first && peer->n_posted - peer->n_completed < LINK_POSTED - 1) {
        struct item *item = peer->first;
        const void *payload;
        const struct wire_frame frame = item_frame(comm, peer, item, &payload);
        if (link->ops->send(link, &frame, payload) != MCCL_OK)
            break;
        pop_item(peer);
        peer->posted[peer->n_posted++ % LINK_POSTED] = item;
        after_posting(comm, peer, item);
        moved = true;
    }
    if (peer->n_posted == peer->n_completed)
        return moved;
    const uint64_t before = link->moved;
    const mccl_result result = link->ops->flush(link);
    if (result != MCCL_OK && result != MCCL_IN_PROGRESS) {
        writing_failed(comm, peer);
        return true;
    }
    while (peer->n_completed < link->n_sent)
        item_sent(comm, peer->posted[peer->n_completed++ % LINK_POSTED]);
    return moved || link->moved != before;
}

/* ---- receiving ---- */

static bool protocol_error(struct mccl_comm *comm, const struct p2p_peer *peer, const char *what)
{
    comm_fail(comm, MCCL_ERR_PEER_LOST, peer->peer,
              "rank %d broke the point-to-point protocol: %s (frame type %u, length %llu)",
              peer->peer, what, peer->frame.type, (unsigned long long)peer->frame.length);
    return false;
}

static bool on_eager(struct mccl_comm *comm, struct p2p_peer *peer)
{
    const struct wire_frame *frame = &peer->frame;
    struct p2p *p2p = comm->engine.p2p;
    if (frame->length > P2P_EAGER_BYTES)
        return protocol_error(comm, peer, "eager message too long");
    struct message *receive = p2p_take_receive(p2p, peer->peer, (int32_t)frame->aux);
    if (receive) {
        if (!p2p_agree(comm, receive, peer->peer, frame))
            return false;
        if (frame->length != receive->bytes)
            return protocol_error(comm, peer, "length does not match count");
        peer->target = receive;
        return true;
    }
    if (peer->stored + frame->length > P2P_STORE_BYTES)
        return protocol_error(comm, peer, "store for early arrivals overrun");
    struct early *early = calloc(1, sizeof *early);
    if (early)
        early->data = malloc(frame->length ? (size_t)frame->length : 1);
    if (!early || !early->data) {
        free(early);
        comm_fail(comm, MCCL_ERR_NO_MEMORY, comm->rank,
                  "no memory for an early message from rank %d", peer->peer);
        return false;
    }
    early->peer = peer->peer;
    early->frame = *frame;
    peer->stored += frame->length;
    p2p_early_append(p2p, early);
    peer->storing = early;
    return true;
}

static bool on_ready(struct mccl_comm *comm, struct p2p_peer *peer)
{
    struct message *receive =
        p2p_take_receive(comm->engine.p2p, peer->peer, (int32_t)peer->frame.aux);
    if (receive) {
        if (p2p_agree(comm, receive, peer->peer, &peer->frame))
            p2p_fetch(comm, receive, peer->peer, peer->frame.seq);
        return true;
    }
    struct early *early = calloc(1, sizeof *early);
    if (!early) {
        comm_fail(comm, MCCL_ERR_NO_MEMORY, comm->rank,
                  "no memory for an early message from rank %d", peer->peer);
        return false;
    }
    early->peer = peer->peer;
    early->frame = peer->frame;
    early->complete = true;
    p2p_early_append(comm->engine.p2p, early);
    return true;
}

static bool on_fetch(struct mccl_comm *comm, struct p2p_peer *peer)
{
    for (struct message **at = &peer->announced; *at; at = &(*at)->next_in_line) {
        struct message *message = *at;
        if (message->id != peer->frame.seq)
            continue;
        *at = message->next_in_line;
        message->next_in_line = NULL;
        return p2p_queue_item(
            comm, peer->peer,
            (struct item){.kind = ITEM_DATA, .message = message, .id = message->id});
    }
    return protocol_error(comm, peer, "fetch of an unknown message");
}

static bool on_data(struct mccl_comm *comm, struct p2p_peer *peer)
{
    const struct wire_frame *frame = &peer->frame;
    for (struct message *message = comm->engine.p2p->live; message; message = message->next) {
        if (message->is_send || !message->fetching || message->peer != peer->peer ||
            message->id != frame->seq)
            continue;
        if (frame->count != message->done || frame->length > message->bytes - message->done)
            return protocol_error(comm, peer, "piece out of place");
        peer->target = message;
        return true;
    }
    return protocol_error(comm, peer, "data of an unknown message");
}

void p2p_take_credit(struct p2p_peer *peer)
{
    const uint64_t bytes = peer->frame.count;
    peer->eager_out -= bytes < peer->eager_out ? bytes : peer->eager_out;
}

/* Decides where the payload of the peeked frame goes. */
static bool on_frame(struct mccl_comm *comm, struct p2p_peer *peer)
{
    struct wire_frame *frame = &peer->frame;
    const bool carries = frame->type == FRAME_P2P_EAGER || frame->type == FRAME_P2P_DATA;
    if (!carries && frame->length != 0)
        return protocol_error(comm, peer, "payload where none belongs");
    switch (frame->type) {
    case FRAME_P2P_EAGER:
        return on_eager(comm, peer);
    case FRAME_P2P_READY:
        return on_ready(comm, peer);
    case FRAME_P2P_FETCH:
        return on_fetch(comm, peer);
    case FRAME_P2P_DATA:
        return on_data(comm, peer);
    case FRAME_P2P_CREDIT:
        p2p_take_credit(peer);
        return true;
    default:
        return protocol_error(comm, peer, "unknown frame");
    }
}

static void payload_done(struct mccl_comm *comm, struct p2p_peer *peer)
{
    struct message *target = peer->target;
    struct early *storing = peer->storing;
    peer->target = NULL;
    peer->storing = NULL;
    peer->has_frame = peer->taking = false;
    if (target) {
        target->done += (size_t)peer->frame.length;
        atomic_store_explicit(&target->request->bytes_done, target->done, memory_order_relaxed);
        if (peer->frame.type == FRAME_P2P_EAGER)
            p2p_credit(comm, peer->peer, peer->frame.length);
        if (target->done == target->bytes)
            p2p_message_done(comm, target);
    } else if (storing) {
        storing->complete = true;
        if (storing->claimed) {
            p2p_early_remove(comm->engine.p2p, storing);
            p2p_meet(comm, storing->claimed, storing);
        }
    }
}

static bool peer_needed(const struct p2p *p2p, int peer)
{
    for (const struct message *message = p2p->live; message; message = message->next)
        if (message->peer == peer)
            return true;
    return false;
}

/* The stream is at its end or has broken. Both only matter if somebody still counts on it, but a
 * stream that breaks without a goodbye is a rank that is lost. */
static void reading_ended(struct mccl_comm *comm, struct p2p_peer *peer)
{
    char why[256];
    if (peer->link->at_end)
        error_set(MCCL_ERR_PEER_LOST, "connection closed");
    snprintf(why, sizeof why, "%.250s", error_text());
    if (!peer->link->at_end && !p2p_learns_goodbye(comm, peer->peer)) {
        control_link_lost(comm, peer->peer, why);
        return;
    }
    p2p_stream_ended(comm->engine.p2p, peer);
    if (peer_needed(comm->engine.p2p, peer->peer))
        control_link_lost(comm, peer->peer, why);
}

bool p2p_pump_in(struct mccl_comm *comm, struct p2p_peer *peer)
{
    struct link *link = peer->link;
    const uint64_t before = link->moved;
    bool moved = false;
    for (int n = 0; n < 8 && !atomic_load(&comm->failed); n++) {
        mccl_result result = MCCL_OK;
        if (!peer->has_frame) {
            result = link->ops->peek(link, &peer->frame);
            peer->has_frame = result == MCCL_OK;
        }
        if (peer->has_frame && !peer->taking) {
            if (!on_frame(comm, peer))
                return true;
            peer->taking = true;
        }
        if (peer->taking) {
            unsigned char *to = NULL;
            if (peer->target)
                to = peer->target->buffer + peer->target->done;
            else if (peer->storing)
                to = peer->storing->data;
            result = link->ops->receive(link, to);
            if (result == MCCL_OK) {
                payload_done(comm, peer);
                moved = true;
                continue;
            }
        }
        if (result == MCCL_IN_PROGRESS) {
            peer->readable = false;
            if (!link->at_end)
                break;
        }
        reading_ended(comm, peer);
        break;
    }
    return moved || link->moved != before;
}

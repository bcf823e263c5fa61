/* SPDX-License-Identifier: MIT
 *
 * See p2p.h. Submissions come in through a list under a lock; everything else belongs to the owner
 * of the engine. Frames: EAGER carries a whole small message; READY announces a large one, FETCH
 * asks for it, DATA brings it in pieces; CREDIT returns room in the store for early arrivals.
 */
#include "comm/p2p.h"

#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum item_kind { ITEM_MESSAGE, ITEM_FETCH, ITEM_DATA, ITEM_CREDIT };

/* A send or a receive in flight. */
struct message {
    struct message *next, *previous; /* all live messages */
    struct message
        *next_in_line; /* inbox, posted receives, or a peer's messages that wait to be fetched */
    mccl_request *request;
    unsigned char *buffer;
    size_t bytes, done;
    bool is_send;
    int peer; /* receive: MCCL_ANY_SOURCE until matched */
    int32_t tag;
    uint32_t id;   /* sender's number of an announced message */
    bool fetching; /* receive: FETCH was queued */
    int64_t deadline_ns, submitted_ns;
};

struct item {
    struct item *next;
    enum item_kind kind;
    struct message *message;
    uint32_t id;
    uint64_t value;      /* CREDIT: bytes */
    size_t offset, size; /* DATA: the piece; size is set when it is posted */
    bool last;
};

/* A message that came before its receive. */
struct early {
    struct early *next;
    int peer;
    struct wire_frame frame;
    unsigned char *data;     /* EAGER: the payload */
    struct message *claimed; /* receive that waits for the rest of the payload */
    struct message *local;   /* send to oneself that waits to be copied */
    bool complete;
};

struct p2p_peer {
    struct link *link;
    int peer;
    bool readable, wanted;
    struct item *first, *last; /* to be sent */
    struct item *posted[LINK_POSTED];
    uint64_t n_posted, n_completed;
    struct message *announced; /* sends that wait for FETCH */
    uint32_t next_id;
    uint64_t eager_out;          /* eager bytes not yet credited back */
    uint64_t credit_due, stored; /* receiver's side */
    bool has_frame, taking;
    struct wire_frame frame;
    struct message *target; /* payload goes to its buffer */
    struct early *storing;  /* or there */
};

struct p2p {
    pthread_mutex_t lock;
    struct message *inbox, *inbox_last; /* lock */
    _Atomic uint32_t n_inbox;
    uint32_t next_seq; /* lock */
    /* owner */
    struct message *live;
    struct message *receives, *receives_last; /* posted, unmatched */
    struct early *early, *early_last;
    struct p2p_peer *peers;
    int n_ranks;
    bool active; /* any link or live message: else the step has nothing to do */
};

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

static void free_early(struct early *early)
{
    free(early->data);
    free(early);
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
        if (peer->storing)
            free_early(peer->storing);
        if (peer->link)
            peer->link->ops->close(peer->link);
    }
    for (struct early *early = p2p->early, *next; early; early = next) {
        next = early->next;
        free_early(early);
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
    const mccl_result room = engine_make_room(comm);
    if (room != MCCL_OK) {
        free(message);
        return room;
    }
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

/* ---- owner: life of a message ---- */

static void live_add(struct p2p *p2p, struct message *message)
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

static void message_done(struct mccl_comm *comm, struct message *message)
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

static bool queue_item(struct mccl_comm *comm, int peer, struct item wanted)
{
    struct p2p_peer *to = &comm->engine.p2p->peers[peer];
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

/* ---- matching ---- */

static bool fits(const struct message *receive, int peer, int32_t tag)
{
    return (receive->peer == MCCL_ANY_SOURCE || receive->peer == peer) &&
           (receive->tag == MCCL_ANY_TAG || receive->tag == tag);
}

/* Both sides must mean the same. False: the communicator has just failed. */
static bool agree(struct mccl_comm *comm, const struct message *receive, int peer,
                  const struct wire_frame *frame)
{
    const struct signature *own = &receive->request->signature;
    if (own->dtype == frame->dtype && own->count == frame->count)
        return true;
    const struct signature theirs = {OP_SEND, frame->dtype, SIGNATURE_NO_OP, SIGNATURE_NO_ROOT,
                                     frame->count};
    char here[160], there[160];
    signature_format(own, here, sizeof here);
    signature_format(&theirs, there, sizeof there);
    comm_fail(
        comm, MCCL_ERR_MISMATCH, peer,
        "rank %d calls %s to rank %d with tag %d, rank %d calls %s; make counts and dtypes agree",
        peer, there, comm->rank, (int)(int32_t)frame->aux, comm->rank, here);
    return false;
}

static struct message *take_receive(struct p2p *p2p, int peer, int32_t tag)
{
    struct message *before = NULL;
    for (struct message *receive = p2p->receives; receive;
         before = receive, receive = receive->next_in_line) {
        if (!fits(receive, peer, tag))
            continue;
        if (before)
            before->next_in_line = receive->next_in_line;
        else
            p2p->receives = receive->next_in_line;
        if (p2p->receives_last == receive)
            p2p->receives_last = before;
        receive->next_in_line = NULL;
        receive->peer = peer;
        receive->tag = tag;
        return receive;
    }
    return NULL;
}

static void credit(struct mccl_comm *comm, int peer, uint64_t bytes)
{
    struct p2p_peer *from = &comm->engine.p2p->peers[peer];
    from->credit_due += bytes;
    if (from->credit_due < P2P_STORE_BYTES / 4)
        return;
    if (queue_item(comm, peer, (struct item){.kind = ITEM_CREDIT, .value = from->credit_due}))
        from->credit_due = 0;
}

static void fetch(struct mccl_comm *comm, struct message *receive, int peer, uint32_t id)
{
    receive->id = id;
    receive->fetching = true;
    receive->next_in_line = NULL;
    queue_item(comm, peer, (struct item){.kind = ITEM_FETCH, .id = id});
}

static void copy_local(struct mccl_comm *comm, struct message *receive, struct message *send)
{
    if (receive->bytes > 0)
        memmove(receive->buffer, send->buffer, receive->bytes);
    message_done(comm, receive);
    message_done(comm, send);
}

/* A receive meets a message that came before it. */
static void meet(struct mccl_comm *comm, struct message *receive, struct early *early)
{
    receive->peer = early->peer;
    receive->tag = (int32_t)early->frame.aux;
    if (!agree(comm, receive, early->peer, &early->frame)) {
        free_early(early);
        return;
    }
    if (early->local) {
        copy_local(comm, receive, early->local);
    } else if (early->frame.type == FRAME_P2P_READY) {
        fetch(comm, receive, early->peer, early->frame.seq);
    } else {
        if (receive->bytes > 0)
            memcpy(receive->buffer, early->data, receive->bytes);
        if (early->peer != comm->rank) {
            comm->engine.p2p->peers[early->peer].stored -= receive->bytes;
            credit(comm, early->peer, receive->bytes);
        }
        message_done(comm, receive);
    }
    free_early(early);
}

static void early_append(struct p2p *p2p, struct early *early)
{
    early->next = NULL;
    if (p2p->early_last)
        p2p->early_last->next = early;
    else
        p2p->early = early;
    p2p->early_last = early;
}

static void early_remove(struct p2p *p2p, struct early *early)
{
    struct early *before = NULL;
    for (struct early *other = p2p->early; other != early; other = other->next)
        before = other;
    if (before)
        before->next = early->next;
    else
        p2p->early = early->next;
    if (p2p->early_last == early)
        p2p->early_last = before;
}

static void post_receive(struct mccl_comm *comm, struct message *receive)
{
    struct p2p *p2p = comm->engine.p2p;
    for (struct early *early = p2p->early; early; early = early->next) {
        if (early->claimed || !fits(receive, early->peer, (int32_t)early->frame.aux))
            continue;
        if (early->complete) {
            early_remove(p2p, early);
            meet(comm, receive, early);
        } else {
            early->claimed = receive; /* the rest of its payload is on the way */
        }
        return;
    }
    receive->next_in_line = NULL;
    if (p2p->receives_last)
        p2p->receives_last->next_in_line = receive;
    else
        p2p->receives = receive;
    p2p->receives_last = receive;
}

static struct wire_frame message_frame(const struct message *message, enum wire_type type)
{
    const struct signature *signature = &message->request->signature;
    return (struct wire_frame){.magic = WIRE_FRAME_MAGIC,
                               .version = WIRE_VERSION,
                               .type = (uint8_t)type,
                               .kind = OP_SEND,
                               .dtype = signature->dtype,
                               .reduce_op = SIGNATURE_NO_OP,
                               .seq = message->id,
                               .aux = (uint32_t)message->tag,
                               .count = signature->count,
                               .length = type == FRAME_P2P_EAGER ? message->bytes : 0};
}

static void send_to_self(struct mccl_comm *comm, struct message *send)
{
    struct p2p *p2p = comm->engine.p2p;
    const struct wire_frame frame = message_frame(send, FRAME_P2P_EAGER);
    struct message *receive = take_receive(p2p, comm->rank, send->tag);
    if (receive) {
        if (agree(comm, receive, comm->rank, &frame))
            copy_local(comm, receive, send);
        return;
    }
    struct early *early = calloc(1, sizeof *early);
    const bool store = send->bytes <= P2P_EAGER_BYTES;
    if (early && store)
        early->data = malloc(send->bytes ? send->bytes : 1);
    if (!early || (store && !early->data)) {
        free(early);
        comm_fail(comm, MCCL_ERR_NO_MEMORY, comm->rank, "no memory for a message to oneself");
        return;
    }
    early->peer = comm->rank;
    early->frame = frame;
    early->complete = true;
    early_append(p2p, early);
    if (!store) {
        early->local = send;
        return;
    }
    if (send->bytes > 0)
        memcpy(early->data, send->buffer, send->bytes);
    message_done(comm, send);
}

static bool take_inbox(struct mccl_comm *comm)
{
    struct p2p *p2p = comm->engine.p2p;
    if (atomic_load(&p2p->n_inbox) == 0)
        return false;
    pthread_mutex_lock(&p2p->lock);
    struct message *message = p2p->inbox;
    p2p->inbox = p2p->inbox_last = NULL;
    atomic_store(&p2p->n_inbox, 0);
    pthread_mutex_unlock(&p2p->lock);
    p2p->active = true;
    for (struct message *next; message; message = next) {
        next = message->next_in_line;
        message->next_in_line = NULL;
        live_add(p2p, message);
        if (!message->is_send)
            post_receive(comm, message);
        else if (message->peer == comm->rank)
            send_to_self(comm, message);
        else
            queue_item(comm, message->peer,
                       (struct item){.kind = ITEM_MESSAGE, .message = message});
    }
    return true;
}

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
        return message_frame(message, eager ? FRAME_P2P_EAGER : FRAME_P2P_READY);
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
        message_done(comm, message);
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
        queue_item(comm, peer->peer,
                   (struct item){.kind = ITEM_DATA,
                                 .message = item->message,
                                 .id = item->id,
                                 .offset = item->offset + item->size});
    }
}

static void peer_failed(struct mccl_comm *comm, struct p2p_peer *peer)
{
    char why[256];
    snprintf(why, sizeof why, "%.250s", error_text());
    control_link_lost(comm, peer->peer, why);
}

static bool pump_out(struct mccl_comm *comm, struct p2p_peer *peer)
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
        peer_failed(comm, peer);
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
    struct message *receive = take_receive(p2p, peer->peer, (int32_t)frame->aux);
    if (receive) {
        if (!agree(comm, receive, peer->peer, frame))
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
    early_append(p2p, early);
    peer->storing = early;
    return true;
}

static bool on_ready(struct mccl_comm *comm, struct p2p_peer *peer)
{
    struct message *receive = take_receive(comm->engine.p2p, peer->peer, (int32_t)peer->frame.aux);
    if (receive) {
        if (agree(comm, receive, peer->peer, &peer->frame))
            fetch(comm, receive, peer->peer, peer->frame.seq);
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
    early_append(comm->engine.p2p, early);
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
        return queue_item(comm, peer->peer,
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
        peer->eager_out -= frame->count < peer->eager_out ? frame->count : peer->eager_out;
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
            credit(comm, peer->peer, peer->frame.length);
        if (target->done == target->bytes)
            message_done(comm, target);
    } else if (storing) {
        storing->complete = true;
        if (storing->claimed) {
            early_remove(comm->engine.p2p, storing);
            meet(comm, storing->claimed, storing);
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

static bool pump_in(struct mccl_comm *comm, struct p2p_peer *peer)
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
            if (link->at_end && peer_needed(comm->engine.p2p, peer->peer)) {
                error_set(MCCL_ERR_PEER_LOST, "connection closed");
                peer_failed(comm, peer);
            }
            break;
        }
        peer_failed(comm, peer);
        break;
    }
    return moved || link->moved != before;
}

/* ---- owner's entry points ---- */

void p2p_add_link(struct mccl_comm *comm, int index, struct link *link)
{
    struct p2p *p2p = comm->engine.p2p;
    struct p2p_peer *peer = &p2p->peers[index];
    if (peer->link) { /* dialled twice: the first one is in use */
        link->ops->close(link);
        return;
    }
    peer->link = link;
    peer->readable = true;
    peer->wanted = true;
    p2p->active = true;
    const mccl_result result = os_poller_add(comm->engine.poller, link->ops->descriptor(link),
                                             OS_POLL_READ | OS_POLL_WRITE | OS_POLL_EDGE, peer);
    if (result != MCCL_OK)
        comm_fail(comm, result, index, "cannot watch the point-to-point link to rank %d: %s", index,
                  error_text());
}

void p2p_on_event(struct mccl_comm *comm, void *data)
{
    (void)comm;
    struct p2p_peer *peer = data;
    peer->readable = true;
}

/* Somebody waits for a rank that has said goodbye and has no link (any more) to deliver by. */
static void check_left(struct mccl_comm *comm)
{
    struct p2p *p2p = comm->engine.p2p;
    for (const struct message *message = p2p->live; message; message = message->next) {
        if (message->peer < 0 || message->peer == comm->rank ||
            !atomic_load(&comm->peers[message->peer].left))
            continue;
        const struct p2p_peer *peer = &p2p->peers[message->peer];
        if (peer->link && !peer->link->at_end)
            continue;
        comm_fail(comm, MCCL_ERR_PEER_LOST, message->peer,
                  "rank %d has left the group (it destroyed its communicator)", message->peer);
        return;
    }
}

bool p2p_step(struct mccl_comm *comm)
{
    struct p2p *p2p = comm->engine.p2p;
    bool moved = take_inbox(comm);
    if (!p2p->active)
        return false;
    for (int i = 0; i < p2p->n_ranks && !atomic_load(&comm->failed); i++) {
        struct p2p_peer *peer = &p2p->peers[i];
        if (!peer->link)
            continue;
        if (peer->first || peer->n_posted != peer->n_completed)
            moved |= pump_out(comm, peer);
        if (peer->readable && !atomic_load(&comm->failed))
            moved |= pump_in(comm, peer);
    }
    if (atomic_load(&comm->n_left) > 0 && !atomic_load(&comm->failed))
        check_left(comm);
    return moved;
}

void p2p_fail_all(struct mccl_comm *comm)
{
    struct p2p *p2p = comm->engine.p2p;
    for (int i = 0; i < p2p->n_ranks; i++)
        p2p->peers[i].target = NULL;
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
        live_add(p2p, message);
    }
    while (p2p->live) {
        struct message *message = p2p->live;
        mccl_request *request = message->request;
        live_remove(p2p, message);
        free(message);
        engine_fail_request(comm, request);
    }
}

int64_t p2p_check_time(struct mccl_comm *comm, int64_t now_ns)
{
    int64_t next_ns = INT64_MAX;
    for (const struct message *message = comm->engine.p2p->live; message; message = message->next) {
        if (now_ns >= message->deadline_ns) {
            char peer[32] = "any rank";
            if (message->peer >= 0)
                snprintf(peer, sizeof peer, "rank %d", message->peer);
            comm_fail(comm, MCCL_ERR_TIMEOUT, message->peer,
                      "%s seq %u timed out on rank %d after %.1f s waiting for %s (tag %d); look "
                      "at what it does, or raise the time-out",
                      message->is_send ? "send" : "recv", message->request->seq, comm->rank,
                      (double)(now_ns - message->submitted_ns) / 1e9, peer, message->tag);
            return now_ns;
        }
        if (message->deadline_ns < next_ns)
            next_ns = message->deadline_ns;
    }
    return next_ns;
}

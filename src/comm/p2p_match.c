/* SPDX-License-Identifier: MIT
 *
 * Which message meets which receive: posted receives and early messages, both in order of arrival.
 * Owner of the engine.
 */
#include "comm/p2p_state.h"

#include <stdlib.h>
#include <string.h>

void p2p_early_free(struct early *early)
{
    free(early->data);
    free(early);
}

static bool fits(const struct message *receive, int peer, int32_t tag)
{
    return (receive->peer == MCCL_ANY_SOURCE || receive->peer == peer) &&
           (receive->tag == MCCL_ANY_TAG || receive->tag == tag);
}

/* Both sides must mean the same. False: the communicator has just failed. */
bool p2p_agree(struct mccl_comm *comm, const struct message *receive, int peer,
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

struct message *p2p_take_receive(struct p2p *p2p, int peer, int32_t tag)
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

void p2p_credit(struct mccl_comm *comm, int peer, uint64_t bytes)
{
    struct p2p_peer *from = &comm->engine.p2p->peers[peer];
    from->credit_due += bytes;
    if (from->credit_due < P2P_CREDIT_BYTES)
        return;
    if (p2p_queue_item(comm, peer, (struct item){.kind = ITEM_CREDIT, .value = from->credit_due}))
        from->credit_due = 0;
}

void p2p_fetch(struct mccl_comm *comm, struct message *receive, int peer, uint32_t id)
{
    receive->id = id;
    receive->fetching = true;
    receive->next_in_line = NULL;
    p2p_queue_item(comm, peer, (struct item){.kind = ITEM_FETCH, .id = id});
}

static void copy_local(struct mccl_comm *comm, struct message *receive, struct message *send)
{
    if (receive->bytes > 0)
        memmove(receive->buffer, send->buffer, receive->bytes);
    p2p_message_done(comm, receive);
    p2p_message_done(comm, send);
}

/* A receive meets a message that came before it. */
void p2p_meet(struct mccl_comm *comm, struct message *receive, struct early *early)
{
    receive->peer = early->peer;
    receive->tag = (int32_t)early->frame.aux;
    if (!p2p_agree(comm, receive, early->peer, &early->frame)) {
        p2p_early_free(early);
        return;
    }
    if (early->local) {
        copy_local(comm, receive, early->local);
    } else if (early->frame.type == FRAME_P2P_READY) {
        p2p_fetch(comm, receive, early->peer, early->frame.seq);
    } else {
        if (receive->bytes > 0)
            memcpy(receive->buffer, early->data, receive->bytes);
        if (early->peer != comm->rank) {
            comm->engine.p2p->peers[early->peer].stored -= receive->bytes;
            p2p_credit(comm, early->peer, receive->bytes);
        }
        p2p_message_done(comm, receive);
    }
    p2p_early_free(early);
}

void p2p_early_append(struct p2p *p2p, struct early *early)
{
    early->next = NULL;
    if (p2p->early_last)
        p2p->early_last->next = early;
    else
        p2p->early = early;
    p2p->early_last = early;
}

void p2p_early_remove(struct p2p *p2p, struct early *early)
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
            p2p_early_remove(p2p, early);
            p2p_meet(comm, receive, early);
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

struct wire_frame p2p_message_frame(const struct message *message, enum wire_type type)
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
    const struct wire_frame frame = p2p_message_frame(send, FRAME_P2P_EAGER);
    struct message *receive = p2p_take_receive(p2p, comm->rank, send->tag);
    if (receive) {
        if (p2p_agree(comm, receive, comm->rank, &frame))
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
    p2p_early_append(p2p, early);
    if (!store) {
        early->local = send;
        return;
    }
    if (send->bytes > 0)
        memcpy(early->data, send->buffer, send->bytes);
    p2p_message_done(comm, send);
}

bool p2p_take_inbox(struct mccl_comm *comm)
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
        p2p_live_add(p2p, message);
        if (!message->is_send)
            post_receive(comm, message);
        else if (message->peer == comm->rank)
            send_to_self(comm, message);
        else
            p2p_queue_item(comm, message->peer,
                           (struct item){.kind = ITEM_MESSAGE, .message = message});
    }
    return true;
}

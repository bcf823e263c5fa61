/* SPDX-License-Identifier: MIT
 *
 * What the files of point-to-point share: p2p.c (life and time of messages), p2p_match.c (which
 * message meets which receive), p2p_link.c (frames), p2p_end.c (leaving). Everything belongs to the
 * owner of the engine but for the inbox.
 */
#ifndef MCCL_COMM_P2P_STATE_H
#define MCCL_COMM_P2P_STATE_H

#include "comm/comm.h"
#include "comm/p2p.h"

#define P2P_CREDIT_BYTES (P2P_STORE_BYTES / 4) /* credit comes in lots of at least this */

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
    bool parted;     /* nothing is sent any more */
    bool ended;      /* nothing comes any more */
    bool owes_fetch; /* leaving: the peer may still ask for a message that was announced */
    bool agreeing;   /* counted in engine.n_unattended until the link is through with it */
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
    bool failed; /* p2p_fail_all has run */
    bool active; /* any link or live message: else the step has nothing to do */
};

/* ---- p2p.c ---- */
void p2p_live_add(struct p2p *p2p, struct message *message);
/* The buffer is complete (receive) or may be reused (send): finishes the request and frees the
 * message. */
void p2p_message_done(struct mccl_comm *comm, struct message *message);
/* Puts a copy of `wanted` in line for `peer`, and asks for a link if there is none. False: the
 * communicator failed. */
bool p2p_queue_item(struct mccl_comm *comm, int peer, struct item wanted);

/* ---- p2p_match.c ---- */
bool p2p_take_inbox(struct mccl_comm *comm);
/* The oldest posted receive for this peer and tag, taken out of the list; NULL if there is none. */
struct message *p2p_take_receive(struct p2p *p2p, int peer, int32_t tag);
/* Both sides must mean the same count and dtype. False: the communicator has just failed. */
bool p2p_agree(struct mccl_comm *comm, const struct message *receive, int peer,
               const struct wire_frame *frame);
/* A receive meets a message that came before it; frees `early`, which is in no list any more. */
void p2p_meet(struct mccl_comm *comm, struct message *receive, struct early *early);
/* Asks the sender for an announced message. */
void p2p_fetch(struct mccl_comm *comm, struct message *receive, int peer, uint32_t id);
/* Eager bytes have left the store (or never entered it): gives the sender its room back, in lots.
 */
void p2p_credit(struct mccl_comm *comm, int peer, uint64_t bytes);
void p2p_early_append(struct p2p *p2p, struct early *early);
void p2p_early_remove(struct p2p *p2p, struct early *early);
void p2p_early_free(struct early *early);
struct wire_frame p2p_message_frame(const struct message *message, enum wire_type type);

/* ---- p2p_link.c ---- */
bool p2p_pump_out(struct mccl_comm *comm, struct p2p_peer *peer);
bool p2p_pump_in(struct mccl_comm *comm, struct p2p_peer *peer);
/* The peeked frame is a CREDIT. */
void p2p_take_credit(struct p2p_peer *peer);

/* ---- p2p_end.c ---- */
/* The peer has said goodbye. */
bool p2p_has_left(const struct mccl_comm *comm, int peer);
/* The same after reading what its control link has to say. Takes the endpoint's lock; may fail the
 * communicator, and changes the error text. */
bool p2p_learns_goodbye(struct mccl_comm *comm, int peer);
/* Drops what waits to be sent and ends our side of the stream; reading goes on. */
void p2p_part(struct p2p_peer *peer);
/* Nothing more can be read, perhaps in the middle of a message. */
void p2p_stream_ended(struct p2p *p2p, struct p2p_peer *peer);
/* Does somebody wait for a rank that has left and can deliver nothing any more? Fails the
 * communicator then. */
void p2p_check_left(struct mccl_comm *comm);
/* The failed communicator is destroyed in an orderly way: nothing else made it fail. */
bool p2p_leaves(struct mccl_comm *comm);
/* Ends all streams, while the buffers of messages are still ours; then, when all requests are
 * final, waits until the sockets may be closed without harm. */
void p2p_leave_begin(struct mccl_comm *comm);
void p2p_leave_end(struct mccl_comm *comm);

#endif

/* SPDX-License-Identifier: MIT
 *
 * The transport contract: one link joins two ranks of one communicator and moves framed messages in
 * order. tcp, shm and rdma implement the same table; everything above knows nothing else about
 * them.
 *
 * Threads: only the owner of the communicator's engine calls a link. No function blocks, none calls
 * back. Results: MCCL_OK, MCCL_IN_PROGRESS ("not now": the other side or the system is not ready),
 * or an error with its text set, after which only `close` is allowed. Ordering: messages arrive in
 * the order of `send`. There is no matching: the receiver looks at each header and then says where
 * the payload goes.
 */
#ifndef MCCL_NET_LINK_H
#define MCCL_NET_LINK_H

#include "mccl.h"
#include "net/wire.h"

#include <stdbool.h>

struct link;

struct link_ops {
    /* Queues one message; copies *frame, borrows `payload` (frame->length bytes) until the message
     * counts as sent. MCCL_IN_PROGRESS: queue full. Does not have to write anything: `flush`
     * does. */
    mccl_result (*send)(struct link *link, const struct wire_frame *frame, const void *payload);

    /* Writes what it can. MCCL_OK: all queued messages are handed over; link->n_sent counts
     * them. */
    mccl_result (*flush)(struct link *link);

    /* Header of the next message. MCCL_OK: *frame is set and the link stays at this message until
     * `receive` has taken its payload. link->at_end is set, with MCCL_IN_PROGRESS, when the peer
     * has closed in an orderly way between two messages. */
    mccl_result (*peek)(struct link *link, struct wire_frame *frame);

    /* Moves the payload of the peeked message into `buffer`; call again with the same buffer until
     * MCCL_OK. buffer == NULL discards it. */
    mccl_result (*receive)(struct link *link, void *buffer);

    /* The owner is about to sleep on the descriptor, which from now on tells what happens; until
     * then it may not. `receiving`: what arrives is of interest. True if something can be done at
     * once. For links that are `silent`. */
    bool (*arm)(struct link *link, bool receiving);

    /* Whether both sides still agree on how to talk: that takes both owners, and nothing is sent
     * before. NULL: there is nothing to agree on. */
    bool (*agreeing)(const struct link *link);

    /* Nothing more will be sent: drops what is not handed over; the peer sees the end of the stream
     * after what is. Reading goes on. */
    void (*end)(struct link *link);

    /* The i-th descriptor for the poller (edge-triggered, both directions), or -1 past the last: a
     * link over several sockets has as many. */
    int (*descriptor)(const struct link *link, unsigned i);

    /* Closes and frees. NULL is ignored. If the peer has sent something that was not read, or sends
     * more, it may lose what it has not read yet. */
    void (*close)(struct link *link);
};

struct link {
    const struct link_ops *ops;
    bool silent;     /* the descriptor tells only after `arm`: look at it in every round */
    uint64_t n_sent; /* messages completely handed over, in order of `send` */
    uint64_t bytes_sent, bytes_received; /* payload of complete messages */
    uint64_t moved; /* every byte in or out: tells the engine whether a call got anywhere */
    bool at_end;    /* the peer closed in an orderly way and everything was read */
};

static inline bool link_agreeing(const struct link *link)
{
    return link->ops->agreeing && link->ops->agreeing(link);
}

struct link_tcp_options {
    size_t sock_bufsize;  /* 0: the system's own tuning */
    bool bufsize_chosen;  /* by the user, who is warned if the system grants less */
    size_t notsent_lowat; /* 0: off */
};

/* Takes ownership of a connected, authenticated, non-blocking socket. `early` bytes were already
 * read from it behind the handshake. On error the socket is closed. */
mccl_result link_tcp_create(int fd, const void *early, size_t early_size, struct link **link);
/* A link over n such sockets, 2 .. WIRE_CHANNELS_MAX, in the same order on both sides: large
 * messages are cut over all (see wire_part). Takes ownership of all. */
mccl_result link_tcp_create_channels(const int *fds, unsigned n, struct link **link);
/* Sets the socket options that have to be there before connect or listen. Reports clamping in the
 * log. */
void link_tcp_prepare(int fd, const struct link_tcp_options *options);

#endif

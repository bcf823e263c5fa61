/* SPDX-License-Identifier: MIT
 *
 * A stream of bytes both ways, and the link that sends messages over it. TCP and shared memory are
 * streams; what a message is they share.
 *
 * Threads: as a link's, whose owner is the only one to call.
 */
#ifndef MCCL_NET_STREAM_H
#define MCCL_NET_STREAM_H

#include "net/link.h"

#include <stddef.h>
#include <sys/uio.h>

struct stream;

struct stream_ops {
    /* As os_socket_send and os_socket_recv: bytes moved, which may be fewer than asked for; 0 at
     * the end of the stream (recv); -1 for not now; -2 for an error, with errno. */
    ptrdiff_t (*send)(struct stream *stream, const struct iovec *iov, int n);
    ptrdiff_t (*recv)(struct stream *stream, const struct iovec *iov, int n);
    /* See struct link_ops. `sending`: something waits to be sent. NULL: the descriptor always
     * tells. */
    bool (*arm)(struct stream *stream, bool sending, bool receiving);
    /* See struct link_ops. NULL: there is nothing to agree on. */
    bool (*agreeing)(const struct stream *stream);
    /* Nothing more will be sent. */
    void (*end)(struct stream *stream);
    int (*descriptor)(const struct stream *stream);
    void (*close)(struct stream *stream);
};

struct stream {
    const struct stream_ops *ops;
};

/* Takes ownership of the stream. `early` bytes were already read from it. On error it is closed. */
mccl_result link_over_stream(struct stream *stream, const void *early, size_t early_size,
                             struct link **link);
/* A new link over a stream: of messages that are cut over n channels it carries the header and the
 * first part only. Its frames tell the whole length all the same. */
void link_stream_is_first_of(struct link *link, unsigned n);

#endif

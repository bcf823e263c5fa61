/* SPDX-License-Identifier: MIT
 *
 * The TCP link. Owns one socket. Outgoing messages wait in a short ring and leave by vectored
 * writes that join header and payload, and several messages if they fit. Incoming bytes pass
 * through a small read-ahead buffer, so that a small message costs one system call; large payloads
 * go straight into the caller's buffer. Called by the owner of the engine only.
 */
#include "net/link.h"

#include "base/error.h"
#include "base/log.h"
#include "os/os.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

enum {
    RING = 16,            /* messages in the send ring; a power of two */
    READ_AHEAD = 16384,   /* holds a header and a typical small payload */
    WRITE_BURST = 1 << 20 /* at most this much per flush, so that receiving gets its turn */
};

struct outgoing {
    struct wire_frame frame;
    const unsigned char *payload;
    size_t done; /* bytes of header + payload already written */
};

struct tcp_link {
    struct link base;
    int fd;
    unsigned head, tail; /* ring indices, free-running: tail - head messages wait */
    struct outgoing ring[RING];
    struct wire_frame incoming;
    bool have_header;
    uint64_t payload_done; /* bytes of the incoming payload already taken */
    size_t ahead_start, ahead_end;
    unsigned char ahead[READ_AHEAD];
};

static struct tcp_link *self(struct link *link)
{
    return (struct tcp_link *)(void *)link;
}

static mccl_result broken(const char *what)
{
    const int error = errno;
    return error_set(MCCL_ERR_PEER_LOST, "%s: %s", what, strerror(error));
}

static mccl_result tcp_send(struct link *link, const struct wire_frame *frame, const void *payload)
{
    struct tcp_link *tcp = self(link);
    if (tcp->tail - tcp->head == RING)
        return MCCL_IN_PROGRESS;
    struct outgoing *out = &tcp->ring[tcp->tail++ % RING];
    out->frame = *frame;
    out->payload = payload;
    out->done = 0;
    return MCCL_OK;
}

/* Lists what is left to write; returns the number of entries and adds up the bytes. */
static int gather_iov(struct tcp_link *tcp, struct iovec *iov, size_t *total)
{
    int n = 0;
    *total = 0;
    for (unsigned i = tcp->head; i != tcp->tail && *total < WRITE_BURST; i++) {
        struct outgoing *out = &tcp->ring[i % RING];
        size_t done = out->done;
        if (done < sizeof out->frame) {
            iov[n].iov_base = (unsigned char *)&out->frame + done;
            iov[n].iov_len = sizeof out->frame - done;
            *total += iov[n++].iov_len;
            done = sizeof out->frame;
        }
        const size_t offset = done - sizeof out->frame;
        size_t left = (size_t)out->frame.length - offset;
        if (left > WRITE_BURST - (*total < WRITE_BURST ? *total : WRITE_BURST))
            left = WRITE_BURST - (*total < WRITE_BURST ? *total : WRITE_BURST);
        if (left > 0) {
            union {
                const void *in;
                void *out;
            } payload = {.in = out->payload + offset};
            iov[n].iov_base = payload.out;
            iov[n].iov_len = left;
            *total += iov[n++].iov_len;
        }
    }
    return n;
}

static void account_written(struct tcp_link *tcp, size_t written)
{
    while (written > 0) {
        struct outgoing *out = &tcp->ring[tcp->head % RING];
        const size_t whole = sizeof out->frame + (size_t)out->frame.length;
        const size_t step = written < whole - out->done ? written : whole - out->done;
        out->done += step;
        written -= step;
        if (out->done < whole)
            return;
        tcp->base.bytes_sent += out->frame.length;
        tcp->base.n_sent++;
        tcp->head++;
    }
}

static mccl_result tcp_flush(struct link *link)
{
    struct tcp_link *tcp = self(link);
    size_t budget = WRITE_BURST;
    while (tcp->head != tcp->tail) {
        struct iovec iov[2 * RING];
        size_t total;
        const int n = gather_iov(tcp, iov, &total);
        const ptrdiff_t written = os_socket_send(tcp->fd, iov, n);
        if (written == -1)
            return MCCL_IN_PROGRESS;
        if (written < 0)
            return broken("sending failed");
        tcp->base.moved += (size_t)written;
        account_written(tcp, (size_t)written);
        if ((size_t)written < total)
            return MCCL_IN_PROGRESS;
        if ((size_t)written >= budget)
            return tcp->head == tcp->tail ? MCCL_OK : MCCL_IN_PROGRESS;
        budget -= (size_t)written;
    }
    return MCCL_OK;
}

/* Reads into `direct` first and lets the rest fall into the read-ahead buffer, which must be empty.
 * MCCL_OK with *got bytes of `direct` filled; MCCL_IN_PROGRESS when nothing is there or the peer
 * closed. */
static mccl_result fill(struct tcp_link *tcp, void *direct, size_t size, size_t *got)
{
    struct iovec iov[2] = {{direct, size}, {tcp->ahead, sizeof tcp->ahead}};
    const int first = size == 0;
    /* A large payload gets a read of its own while it is far from its end: the header behind it is
     * not there yet. */
    const int n = size >= 4 * sizeof tcp->ahead ? 1 : 2 - first;
    const ptrdiff_t received = os_socket_recv(tcp->fd, iov + first, n);
    *got = 0;
    if (received == -1)
        return MCCL_IN_PROGRESS;
    if (received == -2)
        return broken("receiving failed");
    if (received == 0) {
        if (tcp->have_header || size > 0)
            return error_set(MCCL_ERR_PEER_LOST, "connection closed in the middle of a message");
        tcp->base.at_end = true;
        return MCCL_IN_PROGRESS;
    }
    tcp->base.moved += (size_t)received;
    *got = (size_t)received < size ? (size_t)received : size;
    tcp->ahead_start = 0;
    tcp->ahead_end = (size_t)received - *got;
    return MCCL_OK;
}

static mccl_result tcp_peek(struct link *link, struct wire_frame *frame)
{
    struct tcp_link *tcp = self(link);
    while (!tcp->have_header) {
        const size_t there = tcp->ahead_end - tcp->ahead_start;
        if (there >= sizeof tcp->incoming) {
            memcpy(&tcp->incoming, tcp->ahead + tcp->ahead_start, sizeof tcp->incoming);
            tcp->ahead_start += sizeof tcp->incoming;
            if (tcp->incoming.magic != WIRE_FRAME_MAGIC || tcp->incoming.version != WIRE_VERSION)
                return error_set(MCCL_ERR_PEER_LOST,
                                 "the stream is not in step: bad frame header 0x%04x version %u",
                                 tcp->incoming.magic, tcp->incoming.version);
            tcp->have_header = true;
            tcp->payload_done = 0;
            break;
        }
        if (tcp->base.at_end)
            return MCCL_IN_PROGRESS;
        /* Keep the partial header at the front and read on behind it. */
        memmove(tcp->ahead, tcp->ahead + tcp->ahead_start, there);
        struct iovec iov = {tcp->ahead + there, sizeof tcp->ahead - there};
        tcp->ahead_start = 0;
        tcp->ahead_end = there;
        const ptrdiff_t received = os_socket_recv(tcp->fd, &iov, 1);
        if (received == -1)
            return MCCL_IN_PROGRESS;
        if (received == -2)
            return broken("receiving failed");
        if (received == 0) {
            if (there > 0)
                return error_set(MCCL_ERR_PEER_LOST, "connection closed in the middle of a header");
            tcp->base.at_end = true;
            return MCCL_IN_PROGRESS;
        }
        tcp->base.moved += (size_t)received;
        tcp->ahead_end += (size_t)received;
    }
    *frame = tcp->incoming;
    return MCCL_OK;
}

static mccl_result tcp_receive(struct link *link, void *buffer)
{
    struct tcp_link *tcp = self(link);
    MCCL_ASSERT(tcp->have_header);
    unsigned char discard[4096];
    while (tcp->payload_done < tcp->incoming.length) {
        const uint64_t left = tcp->incoming.length - tcp->payload_done;
        const size_t there = tcp->ahead_end - tcp->ahead_start;
        unsigned char *to = buffer ? (unsigned char *)buffer + tcp->payload_done : discard;
        size_t want = buffer || left < sizeof discard ? (size_t)left : sizeof discard;
        size_t got;
        if (there > 0) {
            got = there < want ? there : want;
            memcpy(to, tcp->ahead + tcp->ahead_start, got);
            tcp->ahead_start += got;
        } else {
            const mccl_result result = fill(tcp, to, want, &got);
            if (result != MCCL_OK)
                return result;
        }
        tcp->payload_done += got;
    }
    tcp->base.bytes_received += tcp->incoming.length;
    tcp->have_header = false;
    return MCCL_OK;
}

static void tcp_end(struct link *link)
{
    struct tcp_link *tcp = self(link);
    tcp->head = tcp->tail;
    (void)shutdown(tcp->fd, SHUT_WR); /* fails when the connection has ended already */
}

static int tcp_descriptor(const struct link *link)
{
    return ((const struct tcp_link *)(const void *)link)->fd;
}

static void tcp_close(struct link *link)
{
    if (!link)
        return;
    os_fd_close(self(link)->fd);
    free(link);
}

static const struct link_ops tcp_ops = {
    .name = "tcp",
    .send = tcp_send,
    .flush = tcp_flush,
    .peek = tcp_peek,
    .receive = tcp_receive,
    .end = tcp_end,
    .descriptor = tcp_descriptor,
    .close = tcp_close,
};

mccl_result link_tcp_create(int fd, const void *early, size_t early_size, struct link **link)
{
    MCCL_ASSERT(early_size <= READ_AHEAD);
    struct tcp_link *tcp = calloc(1, sizeof *tcp);
    if (!tcp) {
        os_fd_close(fd);
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a TCP link");
    }
    tcp->base.ops = &tcp_ops;
    tcp->fd = fd;
    if (early_size > 0)
        memcpy(tcp->ahead, early, early_size);
    tcp->ahead_end = early_size;
    *link = &tcp->base;
    return MCCL_OK;
}

void link_tcp_prepare(int fd, const struct link_tcp_options *options)
{
    static _Atomic bool clamping_reported;
    if (options->sock_bufsize > 0) {
        size_t granted = 0;
        if (os_socket_buffers(fd, options->sock_bufsize, &granted) != MCCL_OK)
            log_warn("MCCL_SOCK_BUFSIZE=%zu: the system refused it: %s", options->sock_bufsize,
                     error_text());
        else if (granted < options->sock_bufsize && options->bufsize_chosen &&
                 !atomic_exchange(&clamping_reported, true))
            log_warn("MCCL_SOCK_BUFSIZE=%zu: the system granted %zu", options->sock_bufsize,
                     granted);
        else
            log_info("socket buffers: asked for %zu, granted %zu", options->sock_bufsize, granted);
    }
    if (options->notsent_lowat > 0 &&
        os_socket_notsent_lowat(fd, options->notsent_lowat) == MCCL_OK)
        log_debug("TCP_NOTSENT_LOWAT %zu", options->notsent_lowat);
    /* bbr, the default of many Linux hosts, paces even loopback and halves its rate
     * (docs/rationale.md); where the system does not allow the change the default stays. */
    if (os_socket_congestion(fd, "cubic") == MCCL_OK)
        log_debug("congestion control: cubic");
}

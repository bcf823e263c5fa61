/* SPDX-License-Identifier: MIT
 *
 * Messages over a stream. Outgoing messages wait in a short ring and leave by vectored writes that
 * join header and payload, and several messages if they fit. Incoming bytes pass through a small
 * read-ahead buffer, so that a small message costs one call of the stream; large payloads go
 * straight into the caller's buffer. Called by the owner of the engine only.
 */
#include "net/stream.h"

#include "base/error.h"

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
    size_t size; /* bytes of it that go by this stream */
    size_t done; /* bytes of header + payload already written */
};

struct stream_link {
    struct link base;
    struct stream *stream;
    unsigned n_channels; /* that share large messages; this is the first of them */
    unsigned head, tail; /* ring indices, free-running: tail - head messages wait */
    struct outgoing ring[RING];
    struct wire_frame incoming;
    bool have_header;
    uint64_t payload_size; /* bytes of the incoming payload that come by this stream */
    uint64_t payload_done; /* of these, already taken */
    size_t ahead_start, ahead_end;
    unsigned char ahead[READ_AHEAD];
};

static struct stream_link *of(struct link *link)
{
    return (struct stream_link *)(void *)link;
}

static mccl_result broken(const char *what)
{
    const int error = errno;
    return error_set(MCCL_ERR_PEER_LOST, "%s: %s", what, strerror(error));
}

static mccl_result stream_send(struct link *link, const struct wire_frame *frame,
                               const void *payload)
{
    struct stream_link *self = of(link);
    if (self->tail - self->head == RING)
        return MCCL_IN_PROGRESS;
    struct outgoing *out = &self->ring[self->tail++ % RING];
    out->frame = *frame;
    out->payload = payload;
    out->size = (size_t)wire_part(frame->length, self->n_channels);
    out->done = 0;
    return MCCL_OK;
}

/* Lists what is left to write; returns the number of entries and adds up the bytes. */
static int gather_iov(struct stream_link *self, struct iovec *iov, size_t *total)
{
    int n = 0;
    *total = 0;
    for (unsigned i = self->head; i != self->tail && *total < WRITE_BURST; i++) {
        struct outgoing *out = &self->ring[i % RING];
        size_t done = out->done;
        if (done < sizeof out->frame) {
            iov[n].iov_base = (unsigned char *)&out->frame + done;
            iov[n].iov_len = sizeof out->frame - done;
            *total += iov[n++].iov_len;
            done = sizeof out->frame;
        }
        const size_t offset = done - sizeof out->frame;
        size_t left = out->size - offset;
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

static void account_written(struct stream_link *self, size_t written)
{
    while (written > 0) {
        struct outgoing *out = &self->ring[self->head % RING];
        const size_t whole = sizeof out->frame + out->size;
        const size_t step = written < whole - out->done ? written : whole - out->done;
        out->done += step;
        written -= step;
        if (out->done < whole)
            return;
        self->base.bytes_sent += out->frame.length;
        self->base.n_sent++;
        self->head++;
    }
}

static mccl_result stream_flush(struct link *link)
{
    struct stream_link *self = of(link);
    size_t budget = WRITE_BURST;
    while (self->head != self->tail) {
        struct iovec iov[2 * RING];
        size_t total;
        const int n = gather_iov(self, iov, &total);
        const ptrdiff_t written = self->stream->ops->send(self->stream, iov, n);
        if (written == -1)
            return MCCL_IN_PROGRESS;
        if (written < 0)
            return broken("sending failed");
        self->base.moved += (size_t)written;
        account_written(self, (size_t)written);
        if ((size_t)written < total)
            return MCCL_IN_PROGRESS;
        if ((size_t)written >= budget)
            return self->head == self->tail ? MCCL_OK : MCCL_IN_PROGRESS;
        budget -= (size_t)written;
    }
    return MCCL_OK;
}

/* Reads into `direct` first and lets the rest fall into the read-ahead buffer, which must be empty.
 * MCCL_OK with *got bytes of `direct` filled; MCCL_IN_PROGRESS when nothing is there or the peer
 * closed. */
static mccl_result fill(struct stream_link *self, void *direct, size_t size, size_t *got)
{
    struct iovec iov[2] = {{direct, size}, {self->ahead, sizeof self->ahead}};
    const int first = size == 0;
    /* A large payload gets a read of its own while it is far from its end: the header behind it is
     * not there yet. */
    const int n = size >= 4 * sizeof self->ahead ? 1 : 2 - first;
    const ptrdiff_t received = self->stream->ops->recv(self->stream, iov + first, n);
    *got = 0;
    if (received == -1)
        return MCCL_IN_PROGRESS;
    if (received == -2)
        return broken("receiving failed");
    if (received == 0) {
        if (self->have_header || size > 0)
            return error_set(MCCL_ERR_PEER_LOST, "connection closed in the middle of a message");
        self->base.at_end = true;
        return MCCL_IN_PROGRESS;
    }
    self->base.moved += (size_t)received;
    *got = (size_t)received < size ? (size_t)received : size;
    self->ahead_start = 0;
    self->ahead_end = (size_t)received - *got;
    return MCCL_OK;
}

static mccl_result stream_peek(struct link *link, struct wire_frame *frame)
{
    struct stream_link *self = of(link);
    while (!self->have_header) {
        const size_t there = self->ahead_end - self->ahead_start;
        if (there >= sizeof self->incoming) {
            memcpy(&self->incoming, self->ahead + self->ahead_start, sizeof self->incoming);
            self->ahead_start += sizeof self->incoming;
            if (self->incoming.magic != WIRE_FRAME_MAGIC || self->incoming.version != WIRE_VERSION)
                return error_set(MCCL_ERR_PEER_LOST,
                                 "the stream is not in step: bad frame header 0x%04x version %u",
                                 self->incoming.magic, self->incoming.version);
            self->have_header = true;
            self->payload_size = wire_part(self->incoming.length, self->n_channels);
            self->payload_done = 0;
            break;
        }
        if (self->base.at_end)
            return MCCL_IN_PROGRESS;
        /* Keep the partial header at the front and read on behind it. */
        memmove(self->ahead, self->ahead + self->ahead_start, there);
        struct iovec iov = {self->ahead + there, sizeof self->ahead - there};
        self->ahead_start = 0;
        self->ahead_end = there;
        const ptrdiff_t received = self->stream->ops->recv(self->stream, &iov, 1);
        if (received == -1)
            return MCCL_IN_PROGRESS;
        if (received == -2)
            return broken("receiving failed");
        if (received == 0) {
            if (there > 0)
                return error_set(MCCL_ERR_PEER_LOST, "connection closed in the middle of a header");
            self->base.at_end = true;
            return MCCL_IN_PROGRESS;
        }
        self->base.moved += (size_t)received;
        self->ahead_end += (size_t)received;
    }
    *frame = self->incoming;
    return MCCL_OK;
}

static mccl_result stream_receive(struct link *link, void *buffer)
{
    struct stream_link *self = of(link);
    MCCL_ASSERT(self->have_header);
    unsigned char discard[4096];
    while (self->payload_done < self->payload_size) {
        const uint64_t left = self->payload_size - self->payload_done;
        const size_t there = self->ahead_end - self->ahead_start;
        unsigned char *to = buffer ? (unsigned char *)buffer + self->payload_done : discard;
        size_t want = buffer || left < sizeof discard ? (size_t)left : sizeof discard;
        size_t got;
        if (there > 0) {
            got = there < want ? there : want;
            memcpy(to, self->ahead + self->ahead_start, got);
            self->ahead_start += got;
        } else {
            const mccl_result result = fill(self, to, want, &got);
            if (result != MCCL_OK)
                return result;
        }
        self->payload_done += got;
    }
    self->base.bytes_received += self->incoming.length;
    self->have_header = false;
    return MCCL_OK;
}

static void stream_end(struct link *link)
{
    struct stream_link *self = of(link);
    self->head = self->tail;
    self->stream->ops->end(self->stream);
}

static int stream_descriptor(const struct link *link, unsigned i)
{
    const struct stream *stream = ((const struct stream_link *)(const void *)link)->stream;
    return i == 0 ? stream->ops->descriptor(stream) : -1;
}

static void stream_close(struct link *link)
{
    if (!link)
        return;
    struct stream *stream = of(link)->stream;
    stream->ops->close(stream);
    free(link);
}

static bool stream_arm(struct link *link, bool receiving)
{
    struct stream_link *self = of(link);
    return self->stream->ops->arm(self->stream, self->head != self->tail, receiving);
}

static bool stream_agreeing(const struct link *link)
{
    const struct stream *stream = ((const struct stream_link *)(const void *)link)->stream;
    return stream->ops->agreeing && stream->ops->agreeing(stream);
}

static const struct link_ops ops = {
    .send = stream_send,
    .flush = stream_flush,
    .peek = stream_peek,
    .receive = stream_receive,
    .arm = stream_arm,
    .agreeing = stream_agreeing,
    .end = stream_end,
    .descriptor = stream_descriptor,
    .close = stream_close,
};

mccl_result link_over_stream(struct stream *stream, const void *early, size_t early_size,
                             struct link **link)
{
    MCCL_ASSERT(early_size <= READ_AHEAD);
    struct stream_link *self = calloc(1, sizeof *self);
    if (!self) {
        stream->ops->close(stream);
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a link");
    }
    self->base.ops = &ops;
    self->base.silent = stream->ops->arm != NULL;
    self->stream = stream;
    self->n_channels = 1;
    if (early_size > 0)
        memcpy(self->ahead, early, early_size);
    self->ahead_end = early_size;
    *link = &self->base;
    return MCCL_OK;
}

void link_stream_is_first_of(struct link *link, unsigned n)
{
    of(link)->n_channels = n;
}

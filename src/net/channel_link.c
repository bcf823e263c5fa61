/* SPDX-License-Identifier: MIT
 *
 * Channel 0 is a link of its own, which knows that it has only the first part of long messages. The
 * others carry bare parts, without headers: both sides know from the header on channel 0 what comes
 * next on each. A message counts as sent, or received, when all its parts are. Called by the owner
 * of the engine only.
 */
#include "net/channel_link.h"

#include "base/error.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

enum {
    RING = 16,              /* messages under way, as in stream_link.c; a power of two */
    WRITE_BURST = 512 << 10 /* per channel and flush, so that the next channel gets its turn */
};

struct part {
    const unsigned char *bytes;
    size_t size;
};

/* One of channels 1 .. n - 1. */
struct channel {
    struct stream *stream;
    uint64_t head, tail; /* parts ever sent, ever queued */
    struct part ring[RING];
    size_t sent; /* bytes of the part at `head` */
    size_t got;  /* bytes of the incoming part */
};

struct channel_link {
    struct link base;
    struct link *first; /* channel 0 */
    unsigned n;
    uint64_t n_queued;     /* messages; n_queued - base.n_sent are under way */
    uint64_t n_cut;        /* of base.n_sent, those that were cut */
    uint64_t length[RING]; /* of the messages under way */
    uint64_t moved;        /* bytes by the channels but the first */
    struct wire_frame incoming;
    bool first_done; /* channel 0 has all its bytes of `incoming`, others have not */
    struct channel others[];
};

static struct channel_link *of(struct link *link)
{
    return (struct channel_link *)(void *)link;
}

static mccl_result broken(const char *what, unsigned i)
{
    const int error = errno;
    return error_set(MCCL_ERR_PEER_LOST, "%s on channel %u: %s", what, i, strerror(error));
}

/* The part of a message of `length` bytes that channel i has. */
static uint64_t part_size(const struct channel_link *self, uint64_t length, unsigned i)
{
    const uint64_t part = wire_part(length, self->n);
    return i < self->n - 1 ? part : length - part * i;
}

static bool is_cut(const struct channel_link *self, uint64_t length)
{
    return wire_part(length, self->n) < length;
}

/* ---- sending ---- */

static mccl_result channels_send(struct link *link, const struct wire_frame *frame,
                                 const void *payload)
{
    struct channel_link *self = of(link);
    if (self->n_queued - self->base.n_sent == RING)
        return MCCL_IN_PROGRESS;
    TRY(self->first->ops->send(self->first, frame, payload));
    self->length[self->n_queued++ % RING] = frame->length;
    if (!is_cut(self, frame->length))
        return MCCL_OK;
    for (unsigned i = 1; i < self->n; i++) {
        struct channel *channel = &self->others[i - 1];
        channel->ring[channel->tail++ % RING] =
            (struct part){(const unsigned char *)payload + i * wire_part(frame->length, self->n),
                          (size_t)part_size(self, frame->length, i)};
    }
    return MCCL_OK;
}

static int gather(const struct channel *channel, struct iovec *iov, size_t *total)
{
    int n = 0;
    size_t skip = channel->sent;
    *total = 0;
    for (uint64_t at = channel->head; at != channel->tail && *total < WRITE_BURST; at++) {
        const struct part *part = &channel->ring[at % RING];
        const size_t room = WRITE_BURST - *total, left = part->size - skip;
        union {
            const void *in;
            void *out;
        } bytes = {.in = part->bytes + skip};
        iov[n].iov_base = bytes.out;
        iov[n].iov_len = left < room ? left : room;
        *total += iov[n++].iov_len;
        skip = 0;
    }
    return n;
}

static mccl_result flush_channel(struct channel_link *self, unsigned i)
{
    struct channel *channel = &self->others[i - 1];
    struct iovec iov[RING];
    size_t total;
    if (channel->head == channel->tail)
        return MCCL_OK;
    const int n = gather(channel, iov, &total);
    const ptrdiff_t written = channel->stream->ops->send(channel->stream, iov, n);
    if (written == -1)
        return MCCL_IN_PROGRESS;
    if (written < 0)
        return broken("sending failed", i);
    self->moved += (size_t)written;
    channel->sent += (size_t)written;
    while (channel->head != channel->tail &&
           channel->sent >= channel->ring[channel->head % RING].size)
        channel->sent -= channel->ring[channel->head++ % RING].size;
    return channel->head == channel->tail ? MCCL_OK : MCCL_IN_PROGRESS;
}

/* Counts the messages of which all parts have left. */
static void account_sent(struct channel_link *self)
{
    while (self->base.n_sent < self->first->n_sent) {
        const uint64_t length = self->length[self->base.n_sent % RING];
        if (is_cut(self, length)) {
            for (unsigned i = 1; i < self->n; i++)
                if (self->others[i - 1].head == self->n_cut)
                    return;
            self->n_cut++;
        }
        self->base.bytes_sent += length;
        self->base.n_sent++;
    }
}

static mccl_result channels_flush(struct link *link)
{
    struct channel_link *self = of(link);
    mccl_result result = self->first->ops->flush(self->first);
    for (unsigned i = 1; i < self->n && (result == MCCL_OK || result == MCCL_IN_PROGRESS); i++) {
        const mccl_result other = flush_channel(self, i);
        result = other == MCCL_OK ? result : other;
    }
    account_sent(self);
    self->base.moved = self->first->moved + self->moved;
    return result;
}

/* ---- receiving ---- */

static mccl_result channels_peek(struct link *link, struct wire_frame *frame)
{
    struct channel_link *self = of(link);
    if (!self->first_done) { /* else the first link is past this message */
        const mccl_result result = self->first->ops->peek(self->first, &self->incoming);
        self->base.moved = self->first->moved + self->moved;
        self->base.at_end = self->first->at_end;
        if (result != MCCL_OK)
            return result;
    }
    *frame = self->incoming;
    return MCCL_OK;
}

/* `buffer` is where the part begins, or NULL. */
static mccl_result receive_part(struct channel_link *self, unsigned i, unsigned char *buffer)
{
    struct channel *channel = &self->others[i - 1];
    const size_t size = (size_t)part_size(self, self->incoming.length, i);
    unsigned char discard[4096];
    while (channel->got < size) {
        struct iovec iov = {buffer ? buffer + channel->got : discard, size - channel->got};
        if (!buffer && iov.iov_len > sizeof discard)
            iov.iov_len = sizeof discard;
        const ptrdiff_t received = channel->stream->ops->recv(channel->stream, &iov, 1);
        if (received == -1)
            return MCCL_IN_PROGRESS;
        if (received == -2)
            return broken("receiving failed", i);
        if (received == 0)
            return error_set(MCCL_ERR_PEER_LOST,
                             "connection of channel %u closed in the middle of a message", i);
        self->moved += (size_t)received;
        channel->got += (size_t)received;
    }
    return MCCL_OK;
}

static mccl_result receive_parts(struct channel_link *self, unsigned char *buffer)
{
    mccl_result result = MCCL_OK;
    if (!self->first_done)
        result = self->first->ops->receive(self->first, buffer);
    self->first_done = result == MCCL_OK;
    if (!is_cut(self, self->incoming.length))
        return result;
    const size_t part = (size_t)wire_part(self->incoming.length, self->n);
    for (unsigned i = 1; i < self->n && (result == MCCL_OK || result == MCCL_IN_PROGRESS); i++) {
        const mccl_result other = receive_part(self, i, buffer ? buffer + i * part : NULL);
        result = other == MCCL_OK ? result : other;
    }
    return result;
}

static mccl_result channels_receive(struct link *link, void *buffer)
{
    struct channel_link *self = of(link);
    const mccl_result result = receive_parts(self, buffer);
    self->base.moved = self->first->moved + self->moved;
    if (result != MCCL_OK)
        return result;
    self->base.bytes_received += self->incoming.length;
    self->first_done = false;
    for (unsigned i = 1; i < self->n; i++)
        self->others[i - 1].got = 0;
    return MCCL_OK;
}

/* ---- life ---- */

static void channels_end(struct link *link)
{
    struct channel_link *self = of(link);
    self->first->ops->end(self->first);
    for (unsigned i = 1; i < self->n; i++) {
        struct channel *channel = &self->others[i - 1];
        channel->head = channel->tail;
        channel->stream->ops->end(channel->stream);
    }
}

static int channels_descriptor(const struct link *link, unsigned i)
{
    const struct channel_link *self = (const struct channel_link *)(const void *)link;
    if (i == 0)
        return self->first->ops->descriptor(self->first, 0);
    if (i >= self->n)
        return -1;
    const struct stream *stream = self->others[i - 1].stream;
    return stream->ops->descriptor(stream);
}

static void channels_close(struct link *link)
{
    if (!link)
        return;
    struct channel_link *self = of(link);
    self->first->ops->close(self->first);
    for (unsigned i = 1; i < self->n; i++)
        self->others[i - 1].stream->ops->close(self->others[i - 1].stream);
    free(self);
}

static const struct link_ops ops = {
    .send = channels_send,
    .flush = channels_flush,
    .peek = channels_peek,
    .receive = channels_receive,
    .end = channels_end,
    .descriptor = channels_descriptor,
    .close = channels_close,
};

mccl_result link_over_channels(struct stream *const *streams, unsigned n, struct link **link)
{
    struct channel_link *self = calloc(1, sizeof *self + (n - 1) * sizeof self->others[0]);
    mccl_result result =
        self ? link_over_stream(streams[0], NULL, 0, &self->first)
             : error_set(MCCL_ERR_NO_MEMORY, "no memory for a link of %u channels", n);
    if (result != MCCL_OK) {
        for (unsigned i = self ? 1 : 0; i < n; i++) /* the first one is closed already */
            streams[i]->ops->close(streams[i]);
        free(self);
        return result;
    }
    link_stream_is_first_of(self->first, n);
    self->base.ops = &ops;
    self->n = n;
    for (unsigned i = 1; i < n; i++)
        self->others[i - 1].stream = streams[i];
    *link = &self->base;
    return MCCL_OK;
}

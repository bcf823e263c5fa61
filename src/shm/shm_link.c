/* SPDX-License-Identifier: MIT
 *
 * A stream through shared memory: one ring of bytes each way. The socket brings the two sides
 * together, wakes one that sleeps (a byte, whose value says nothing), and ends when a process does.
 *
 * Each side writes only its ring's data, what it has `written`, what it has `taken` from the other
 * ring, and its wish to be woken. What the other side writes is checked before use: a process that
 * has gone wild breaks the link, not us.
 */
#include "shm/shm_link.h"

#include "base/error.h"
#include "base/log.h"
#include "net/stream.h"
#include "os/os.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define RING_BYTES \
    ((size_t)512 << 10) /* a power of two; two of them stay in a second-level cache */
#define GRAIN \
    ((size_t)16 << 10) /* copied at a time, then the other side is told: both copy at once */
#define LINE 128       /* of a cache, on Apple's processors; 64 elsewhere */
#define OFFER_MAGIC 0x4d48534du /* "MSHM" */

struct ring {
    _Alignas(LINE) _Atomic uint64_t written; /* bytes ever; by the writer */
    _Alignas(LINE) _Atomic uint64_t taken;   /* by the reader */
    _Alignas(LINE) _Atomic uint32_t reader_sleeps;
    _Alignas(LINE) _Atomic uint32_t writer_sleeps; /* until there is room */
    _Alignas(LINE) unsigned char data[RING_BYTES];
};

#define NONCE_BYTES 16

/* Rings: by the one that dialled, then by the other one. The nonce is that of the offer: a process
 * id means another process in another container. */
struct segment {
    struct ring rings[2];
    unsigned char nonce[NONCE_BYTES];
};

/* What the dialling side says first, and the answer: fd is -1 if there will be no sharing. */
struct offer {
    uint32_t magic;
    int32_t pid, fd;
    uint32_t ring_bytes;
    unsigned char nonce[NONCE_BYTES];
};

enum state {
    OFFERING,  /* dialled: the offer has not left yet */
    PROPOSED,  /* dialled: waits for the answer */
    EXPECTING, /* waits for the offer */
    ANSWERING, /* the answer has not left yet */
    SHARING,
    PLAIN /* over the socket */
};

struct shm_stream {
    struct stream base;
    int fd, memory_fd;
    enum state state;
    bool willing;
    bool ended;           /* the other side has closed the socket */
    struct offer message; /* on its way out or in */
    size_t done;          /* bytes of it */
    struct segment *segment;
    struct ring *in, *out;
    uint64_t in_taken, out_written;
};

static struct shm_stream *of(struct stream *stream)
{
    return (struct shm_stream *)(void *)stream;
}

/* ---- agreeing ---- */

static void forget_memory(struct shm_stream *self)
{
    os_shm_close(self->segment, sizeof *self->segment);
    os_fd_close(self->memory_fd);
    self->segment = NULL;
    self->memory_fd = -1;
}

static void share(struct shm_stream *self, bool dialled)
{
    self->out = &self->segment->rings[dialled ? 0 : 1];
    self->in = &self->segment->rings[dialled ? 1 : 0];
    self->state = SHARING;
}

static void settle_for_socket(struct shm_stream *self, const char *why)
{
    log_info("no shared memory with a rank of this host, TCP instead: %s", why);
    forget_memory(self);
    self->state = PLAIN;
}

static void make_offer(struct shm_stream *self)
{
    void *memory = NULL;
    self->message = (struct offer){
        .magic = OFFER_MAGIC, .pid = os_pid(), .fd = -1, .ring_bytes = (uint32_t)RING_BYTES};
    if (os_random(self->message.nonce, NONCE_BYTES) == MCCL_OK &&
        os_shm_create(sizeof *self->segment, &memory, &self->memory_fd) == MCCL_OK) {
        self->segment = memory;
        memcpy(self->segment->nonce, self->message.nonce, NONCE_BYTES);
        self->message.fd = self->memory_fd;
    } else {
        log_info("shared memory: %s", error_text());
    }
}

/* The offer is there: maps what it names and leaves the answer in its place. */
static bool take_offer(struct shm_stream *self)
{
    void *memory = NULL;
    const struct offer offer = self->message;
    if (offer.magic != OFFER_MAGIC)
        return false;
    const char *why = "the other rank has none to offer";
    self->message.fd = -1;
    if (offer.fd >= 0 && !self->willing) {
        why = "MCCL_TRANSPORT says so here";
    } else if (offer.fd >= 0 && offer.ring_bytes != RING_BYTES) {
        why = "the other rank has another version";
    } else if (offer.fd >= 0 &&
               os_shm_open(offer.pid, offer.fd, sizeof *self->segment, &memory) != MCCL_OK) {
        why = error_text();
    } else if (offer.fd >= 0) {
        self->segment = memory;
        if (memcmp(self->segment->nonce, offer.nonce, NONCE_BYTES) == 0) {
            self->message.fd = offer.fd;
        } else {
            forget_memory(self);
            why = "the other rank's processes are not visible here";
        }
    }
    if (!self->segment)
        log_info("no shared memory with a rank of this host, TCP instead: %s", why);
    return true;
}

/* Moves the offer or the answer. True when all of it is through, else *result is for the caller. A
 * side that goes before it has read all answers and bells resets the connection, which is an end
 * like any other. */
static bool exchange(struct shm_stream *self, bool sending, ptrdiff_t *result)
{
    struct iovec iov = {(char *)&self->message + self->done, sizeof self->message - self->done};
    const ptrdiff_t n =
        sending ? os_socket_send(self->fd, &iov, 1) : os_socket_recv(self->fd, &iov, 1);
    if (n <= 0) {
        *result = n == -1 ? -1 : 0;
        return false;
    }
    self->done += (size_t)n;
    *result = -1;
    if (self->done < sizeof self->message)
        return false;
    self->done = 0;
    return true;
}

static bool shm_agreeing(const struct stream *stream)
{
    const struct shm_stream *self = (const struct shm_stream *)(const void *)stream;
    return self->state != SHARING && self->state != PLAIN;
}

/* True when it is decided how to talk; else *result is what send or recv returns. */
static bool agree(struct shm_stream *self, ptrdiff_t *result)
{
    for (;;) {
        const enum state state = self->state;
        if (!shm_agreeing(&self->base))
            return true;
        if (!exchange(self, state == OFFERING || state == ANSWERING, result))
            return false;
        switch (state) {
        case OFFERING:
            self->state = PROPOSED;
            break;
        case PROPOSED:
            if (self->message.magic != OFFER_MAGIC) {
                errno = EPROTO;
                *result = -2;
                return false;
            }
            if (self->segment && self->message.fd == self->memory_fd) {
                os_fd_close(self->memory_fd);
                self->memory_fd = -1;
                share(self, true);
            } else {
                settle_for_socket(self, "the other rank does not share it");
            }
            break;
        case EXPECTING:
            if (!take_offer(self)) {
                errno = EPROTO;
                *result = -2;
                return false;
            }
            self->state = ANSWERING;
            break;
        default:
            if (self->segment)
                share(self, false);
            else
                self->state = PLAIN;
        }
    }
}

/* ---- talking ---- */

/* Wakes the other side if it has asked for it since it was woken last. A full socket will do: it
 * has enough bytes to wake up by. */
static void ring_bell(struct shm_stream *self, _Atomic uint32_t *sleeps)
{
    /* Orders our counter, written before, with the look at its wish; its side does the reverse. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(sleeps, memory_order_relaxed) == 0 || atomic_exchange(sleeps, 0) == 0)
        return;
    char byte = 0;
    (void)os_socket_send(self->fd, &(struct iovec){&byte, 1}, 1);
}

static ptrdiff_t out_of_step(void)
{
    errno = EPROTO;
    return -2;
}

/* Bytes that can be written; more than a ring if the other side lies. */
static uint64_t room(const struct shm_stream *self)
{
    const uint64_t taken = atomic_load_explicit(&self->out->taken, memory_order_acquire);
    return RING_BYTES - (self->out_written - taken);
}

static uint64_t waiting(const struct shm_stream *self)
{
    return atomic_load_explicit(&self->in->written, memory_order_acquire) - self->in_taken;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void publish_written(struct shm_stream *self)
{
    atomic_store_explicit(&self->out->written, self->out_written, memory_order_release);
    ring_bell(self, &self->out->reader_sleeps);
}

static void publish_taken(struct shm_stream *self)
{
    atomic_store_explicit(&self->in->taken, self->in_taken, memory_order_release);
    ring_bell(self, &self->in->writer_sleeps);
}

/* Up to the end of the ring, or a grain. What is left of the last one is for the caller to
 * publish. */
static void put(struct shm_stream *self, const unsigned char *from, size_t size)
{
    while (size > 0) {
        const size_t start = (size_t)self->out_written % RING_BYTES;
        const size_t n = least(least(size, RING_BYTES - start), GRAIN);
        memcpy(self->out->data + start, from, n);
        self->out_written += n;
        from += n;
        size -= n;
        if (n == GRAIN)
            publish_written(self);
    }
}

static void get(struct shm_stream *self, unsigned char *to, size_t size)
{
    while (size > 0) {
        const size_t start = (size_t)self->in_taken % RING_BYTES;
        const size_t n = least(least(size, RING_BYTES - start), GRAIN);
        memcpy(to, self->in->data + start, n);
        self->in_taken += n;
        to += n;
        size -= n;
        if (n == GRAIN)
            publish_taken(self);
    }
}

static ptrdiff_t shm_send(struct stream *stream, const struct iovec *iov, int n)
{
    struct shm_stream *self = of(stream);
    ptrdiff_t result;
    if (!agree(self, &result))
        return result == 0 ? -1 : result; /* at the end, which reading will find */
    if (self->state == PLAIN)
        return os_socket_send(self->fd, iov, n);
    uint64_t left = room(self);
    size_t sent = 0;
    if (left > RING_BYTES)
        return out_of_step();
    for (int i = 0; i < n && left > 0; i++) {
        const size_t size = least(iov[i].iov_len, (size_t)left);
        put(self, iov[i].iov_base, size);
        sent += size;
        left -= size;
    }
    if (sent == 0)
        return -1;
    publish_written(self);
    return (ptrdiff_t)sent;
}

static ptrdiff_t shm_recv(struct stream *stream, const struct iovec *iov, int n)
{
    struct shm_stream *self = of(stream);
    ptrdiff_t result;
    if (!agree(self, &result))
        return result;
    if (self->state == PLAIN)
        return os_socket_recv(self->fd, iov, n);
    const bool ended = self->ended; /* known before the look for what came first */
    const uint64_t there = waiting(self);
    size_t got = 0;
    if (there > RING_BYTES)
        return out_of_step();
    if (there == 0)
        return ended ? 0 : -1;
    for (int i = 0; i < n && got < there; i++) {
        const size_t size = least(iov[i].iov_len, (size_t)there - got);
        get(self, iov[i].iov_base, size);
        got += size;
    }
    publish_taken(self);
    return (ptrdiff_t)got;
}

/* Takes the bytes of bells, and the news that the other side is gone. */
static void listen_to_socket(struct shm_stream *self)
{
    char bytes[64];
    ptrdiff_t n;
    do
        n = os_socket_recv(self->fd, &(struct iovec){bytes, sizeof bytes}, 1);
    while (n > 0);
    self->ended = n != -1;
}

static bool shm_arm(struct stream *stream, bool sending, bool receiving)
{
    struct shm_stream *self = of(stream);
    ptrdiff_t result;
    if (!agree(self, &result) || self->state == PLAIN)
        return false; /* the socket tells */
    const bool over = self->ended;
    if (!over)
        listen_to_socket(self);
    if (receiving)
        atomic_store_explicit(&self->in->reader_sleeps, 1, memory_order_relaxed);
    if (sending)
        atomic_store_explicit(&self->out->writer_sleeps, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* see ring_bell */
    return (receiving && waiting(self) > 0) || (sending && room(self) > 0) || self->ended != over;
}

static void shm_end(struct stream *stream)
{
    (void)shutdown(of(stream)->fd, SHUT_WR); /* fails when the connection has ended already */
}

static int shm_descriptor(const struct stream *stream)
{
    return ((const struct shm_stream *)(const void *)stream)->fd;
}

static void shm_close(struct stream *stream)
{
    struct shm_stream *self = of(stream);
    forget_memory(self);
    os_fd_close(self->fd);
    free(self);
}

static const struct stream_ops shm_ops = {
    .send = shm_send,
    .recv = shm_recv,
    .arm = shm_arm,
    .agreeing = shm_agreeing,
    .end = shm_end,
    .descriptor = shm_descriptor,
    .close = shm_close,
};

mccl_result link_shm_create(int fd, bool dialled, bool willing, struct link **link)
{
    struct shm_stream *self = calloc(1, sizeof *self);
    if (!self) {
        os_fd_close(fd);
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a link");
    }
    self->base.ops = &shm_ops;
    self->fd = fd;
    self->memory_fd = -1;
    self->willing = willing;
    self->state = dialled ? OFFERING : EXPECTING;
    if (dialled)
        make_offer(self);
    return link_over_stream(&self->base, NULL, 0, link);
}

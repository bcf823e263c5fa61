/* SPDX-License-Identifier: MIT
 *
 * A link through shared memory whose other side is written out here: it does what none of ours
 * would. Whatever it offers or writes, the link falls back to the socket or breaks with a reason.
 */
#include "net/wire.h"
#include "os/os.h"
#include "shm/shm_link.h"
#include "support/check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

/* As in shm_link.c. */
enum { RING_BYTES = 512 << 10, LINE = 128 };
struct ring {
    _Alignas(LINE) _Atomic uint64_t written;
    _Alignas(LINE) _Atomic uint64_t taken;
    _Alignas(LINE) _Atomic uint32_t reader_sleeps;
    _Alignas(LINE) _Atomic uint32_t writer_sleeps;
    _Alignas(LINE) unsigned char data[RING_BYTES];
};
struct segment {
    struct ring to_link, from_link;
    unsigned char nonce[16];
};
struct offer {
    uint32_t magic;
    int32_t pid, fd;
    uint32_t ring_bytes;
    unsigned char nonce[16];
};
static const struct offer honest = {0x4d48534du, 0, -1, RING_BYTES, "fifteen letters"};

struct side {
    int fd, memory_fd;
    struct segment *segment;
    struct link *link;
};

/* A link that was dialled, and our end of its socket. */
static struct side meet(bool willing)
{
    struct side side = {.memory_fd = -1};
    void *memory;
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    side.fd = ends[0];
    CHECK_EQ_I64(link_shm_create(ends[1], false, willing, &side.link), MCCL_OK);
    CHECK_EQ_I64(os_shm_create(sizeof *side.segment, &memory, &side.memory_fd), MCCL_OK);
    side.segment = memory;
    memcpy(side.segment->nonce, honest.nonce, sizeof honest.nonce);
    return side;
}

static void part(struct side *side)
{
    side->link->ops->close(side->link);
    close(side->fd);
    os_fd_close(side->memory_fd);
    os_shm_close(side->segment, sizeof *side->segment);
}

/* Sends the offer; what the link answers. */
static struct offer offer(struct side *side, struct offer offer)
{
    struct wire_frame frame;
    struct offer answer;
    CHECK_EQ_I64(write(side->fd, &offer, sizeof offer), (ptrdiff_t)sizeof offer);
    CHECK_EQ_I64(side->link->ops->peek(side->link, &frame), MCCL_IN_PROGRESS);
    CHECK_EQ_I64(read(side->fd, &answer, sizeof answer), (ptrdiff_t)sizeof answer);
    CHECK_EQ_U64(answer.magic, offer.magic);
    return answer;
}

static struct offer offer_of(const struct side *side)
{
    struct offer offer = honest;
    offer.pid = os_pid();
    offer.fd = side->memory_fd;
    return offer;
}

static struct wire_frame frame_of(uint64_t length)
{
    return (struct wire_frame){
        .magic = WIRE_FRAME_MAGIC, .version = WIRE_VERSION, .type = FRAME_DATA, .length = length};
}

/* Messages of many sizes both ways, through a ring that they go round several times. */
static void test_talks(void)
{
    struct side side = meet(true);
    CHECK_EQ_I64(offer(&side, offer_of(&side)).fd, side.memory_fd);
    static unsigned char payload[40000], got[40000];
    struct ring *in = &side.segment->to_link, *out = &side.segment->from_link;
    for (int i = 0; i < 100; i++) {
        const size_t size = (size_t)(i * 397) % sizeof payload;
        const size_t whole = sizeof(struct wire_frame) + size;
        struct wire_frame frame = frame_of(size), found;
        for (size_t k = 0; k < size; k++)
            payload[k] = (unsigned char)(k * 7 + (size_t)i);

        uint64_t at = atomic_load(&in->written);
        for (size_t k = 0; k < whole; k++)
            in->data[(at + k) % RING_BYTES] =
                k < sizeof frame ? ((unsigned char *)&frame)[k] : payload[k - sizeof frame];
        atomic_store(&in->written, at + whole);
        CHECK_EQ_I64(side.link->ops->peek(side.link, &found), MCCL_OK);
        CHECK_EQ_MEM(&found, &frame, sizeof frame);
        CHECK_EQ_I64(side.link->ops->receive(side.link, got), MCCL_OK);
        CHECK_EQ_MEM(got, payload, size);
        CHECK_EQ_U64(atomic_load(&in->taken), at + whole);

        at = atomic_load(&out->written);
        CHECK_EQ_I64(side.link->ops->send(side.link, &frame, payload), MCCL_OK);
        CHECK_EQ_I64(side.link->ops->flush(side.link), MCCL_OK);
        CHECK_EQ_U64(atomic_load(&out->written), at + whole);
        for (size_t k = 0; k < whole; k++)
            CHECK_EQ_I64(out->data[(at + k) % RING_BYTES], k < sizeof frame
                                                               ? ((unsigned char *)&frame)[k]
                                                               : payload[k - sizeof frame]);
        atomic_store(&out->taken, at + whole);
    }
    part(&side);
}

/* It wakes who has asked for it, once, and asks to be woken before it sleeps. */
static void test_bells(void)
{
    struct side side = meet(true);
    const struct wire_frame frame = frame_of(0);
    struct wire_frame found;
    char byte;
    (void)offer(&side, offer_of(&side));
    struct ring *in = &side.segment->to_link, *out = &side.segment->from_link;
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_I64(side.link->ops->send(side.link, &frame, NULL), MCCL_OK);
        CHECK_EQ_I64(side.link->ops->flush(side.link), MCCL_OK);
        CHECK_EQ_I64(read(side.fd, &byte, 1), i == 0 ? -1 : 1);
        CHECK_EQ_I64(read(side.fd, &byte, 1), -1);
        atomic_store(&out->reader_sleeps, 1);
    }
    CHECK(!side.link->ops->arm(side.link, false));
    CHECK_EQ_U64(atomic_load(&in->reader_sleeps), 0);
    CHECK(!side.link->ops->arm(side.link, true));
    CHECK_EQ_U64(atomic_load(&in->reader_sleeps), 1);
    memcpy(in->data, &frame, sizeof frame);
    atomic_store(&in->written, sizeof frame);
    CHECK(side.link->ops->arm(side.link, true));
    CHECK(!side.link->ops->arm(side.link, false));
    CHECK_EQ_I64(side.link->ops->peek(side.link, &found), MCCL_OK);
    CHECK_EQ_I64(side.link->ops->receive(side.link, NULL), MCCL_OK);

    /* A full ring: the writer waits for room. */
    static unsigned char payload[RING_BYTES];
    const struct wire_frame large = frame_of(sizeof payload);
    CHECK_EQ_I64(side.link->ops->send(side.link, &large, payload), MCCL_OK);
    CHECK_EQ_I64(side.link->ops->flush(side.link), MCCL_IN_PROGRESS);
    CHECK(!side.link->ops->arm(side.link, false));
    CHECK_EQ_U64(atomic_load(&out->writer_sleeps), 1);
    atomic_store(&out->taken, atomic_load(&out->written));
    CHECK(side.link->ops->arm(side.link, false));
    CHECK_EQ_I64(side.link->ops->flush(side.link), MCCL_OK);
    part(&side);
}

/* What was written before the end is still read. */
static void test_end(void)
{
    struct side side = meet(true);
    const struct wire_frame frame = frame_of(0);
    struct wire_frame found;
    (void)offer(&side, offer_of(&side));
    memcpy(side.segment->to_link.data, &frame, sizeof frame);
    atomic_store(&side.segment->to_link.written, sizeof frame);
    CHECK(shutdown(side.fd, SHUT_WR) == 0);
    CHECK(side.link->ops->arm(side.link, true));
    CHECK_EQ_I64(side.link->ops->peek(side.link, &found), MCCL_OK);
    CHECK_EQ_I64(side.link->ops->receive(side.link, NULL), MCCL_OK);
    CHECK(!side.link->at_end);
    CHECK_EQ_I64(side.link->ops->peek(side.link, &found), MCCL_IN_PROGRESS);
    CHECK(side.link->at_end);
    part(&side);
}

/* In the middle of a message it is an error. */
static void test_end_too_early(void)
{
    struct side side = meet(true);
    const struct wire_frame frame = frame_of(100);
    struct wire_frame found;
    unsigned char got[100];
    (void)offer(&side, offer_of(&side));
    memcpy(side.segment->to_link.data, &frame, sizeof frame);
    atomic_store(&side.segment->to_link.written, sizeof frame + 10);
    CHECK(shutdown(side.fd, SHUT_WR) == 0);
    CHECK(side.link->ops->arm(side.link, true));
    CHECK_EQ_I64(side.link->ops->peek(side.link, &found), MCCL_OK);
    CHECK_EQ_I64(side.link->ops->receive(side.link, got), MCCL_ERR_PEER_LOST);
    CHECK_HAS(mccl_last_error(), "in the middle of a message");
    part(&side);
}

/* Offers that cannot be taken: the two talk over the socket. */
static void test_refused(void)
{
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int i = 0; i < 7; i++) {
        struct side side = meet(i != 0);
        struct offer wrong = offer_of(&side);
        void *small = NULL;
        int small_fd = -1;
        CHECK_EQ_I64(os_shm_create(4096, &small, &small_fd), MCCL_OK);
        switch (i) {
        case 1:
            wrong.fd = -1;
            break;
        case 2:
            wrong.fd = null;
            break;
        case 3:
            wrong.fd = small_fd;
            break;
        case 4:
            wrong.pid = 0x7fffffff;
            break;
        case 5:
            wrong.ring_bytes++;
            break;
        case 6: /* right in all but that it is not the one that was meant */
            wrong.nonce[15]++;
            break;
        default:
            break;
        }
        CHECK_EQ_I64(offer(&side, wrong).fd, -1);
        const struct wire_frame frame = frame_of(0);
        struct wire_frame found;
        CHECK_EQ_I64(write(side.fd, &frame, sizeof frame), (ptrdiff_t)sizeof frame);
        CHECK_EQ_I64(side.link->ops->peek(side.link, &found), MCCL_OK);
        CHECK_EQ_MEM(&found, &frame, sizeof frame);
        CHECK_EQ_I64(side.link->ops->send(side.link, &frame, NULL), MCCL_OK);
        CHECK_EQ_I64(side.link->ops->flush(side.link), MCCL_OK);
        CHECK_EQ_I64(read(side.fd, &found, sizeof found), (ptrdiff_t)sizeof found);
        os_fd_close(small_fd);
        os_shm_close(small, 4096);
        part(&side);
    }
    close(null);
}

/* Counters that cannot be: the link breaks. */
static void test_wild(void)
{
    static const uint64_t wild[] = {RING_BYTES + 1, UINT64_MAX,    UINT64_MAX / 2, 1,
                                    RING_BYTES,     UINT64_MAX / 2};
    for (int i = 0; i < 6; i++) {
        struct side side = meet(true);
        const struct wire_frame frame = frame_of(0);
        struct wire_frame found;
        (void)offer(&side, offer_of(&side));
        if (i < 3) {
            atomic_store(&side.segment->to_link.written, wild[i]);
            CHECK_EQ_I64(side.link->ops->peek(side.link, &found), MCCL_ERR_PEER_LOST);
        } else {
            atomic_store(&side.segment->from_link.taken, wild[i]);
            CHECK_EQ_I64(side.link->ops->send(side.link, &frame, NULL), MCCL_OK);
            CHECK_EQ_I64(side.link->ops->flush(side.link), MCCL_ERR_PEER_LOST);
        }
        part(&side);
    }
    struct side side = meet(true);
    struct offer wrong = offer_of(&side);
    struct wire_frame found;
    wrong.magic++;
    CHECK_EQ_I64(write(side.fd, &wrong, sizeof wrong), (ptrdiff_t)sizeof wrong);
    CHECK_EQ_I64(side.link->ops->peek(side.link, &found), MCCL_ERR_PEER_LOST);
    part(&side);
}

int main(void)
{
    void *memory;
    int fd;
    if (os_shm_create(4096, &memory, &fd) == MCCL_ERR_UNSUPPORTED)
        return 77;
    os_fd_close(fd);
    os_shm_close(memory, 4096);
    test_talks();
    test_bells();
    test_end();
    test_end_too_early();
    test_refused();
    test_wild();
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * A link over several sockets: what goes by which, messages of sizes around the limit of cutting in
 * order and whole through sockets that take little at a time, and channels that end.
 */
#include "net/link.h"
#include "support/check.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define BYTES_MAX ((size_t)600000)

/* Two links that are joined by socket pairs. */
struct pair {
    unsigned n;
    struct link *a, *b;
};

static void make_sockets(unsigned n, int a[], int b[])
{
    for (unsigned i = 0; i < n; i++) {
        const int small = 4096; /* so that nothing fits in one call; the system makes more of it */
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
        CHECK(setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
        CHECK(setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
        a[i] = ends[0];
        b[i] = ends[1];
    }
}

static struct pair meet(unsigned n)
{
    struct pair pair = {.n = n};
    int a[WIRE_CHANNELS_MAX], b[WIRE_CHANNELS_MAX];
    make_sockets(n, a, b);
    CHECK_EQ_I64(link_tcp_create_channels(a, n, &pair.a), MCCL_OK);
    CHECK_EQ_I64(link_tcp_create_channels(b, n, &pair.b), MCCL_OK);
    for (unsigned i = 0; i < n; i++) {
        CHECK_EQ_I64(pair.a->ops->descriptor(pair.a, i), a[i]);
        CHECK_EQ_I64(pair.b->ops->descriptor(pair.b, i), b[i]);
    }
    CHECK_EQ_I64(pair.a->ops->descriptor(pair.a, n), -1);
    return pair;
}

static void part(struct pair *pair)
{
    pair->a->ops->close(pair->a);
    pair->b->ops->close(pair->b);
}

static struct wire_frame frame_of(uint64_t length, uint32_t seq)
{
    return (struct wire_frame){.magic = WIRE_FRAME_MAGIC,
                               .version = WIRE_VERSION,
                               .type = FRAME_DATA,
                               .seq = seq,
                               .length = length};
}

/* Differs by message and position. */
static unsigned char byte_of(uint32_t seq, size_t i)
{
    const uint64_t mixed = (i + 1) * 2654435761u + seq * 40503u;
    return (unsigned char)(mixed >> 13);
}

static unsigned char *message(uint32_t seq, size_t size)
{
    unsigned char *bytes = malloc(size + 1);
    CHECK(bytes != NULL);
    for (size_t i = 0; i < size; i++)
        bytes[i] = byte_of(seq, i);
    return bytes;
}

/* ---- order, sizes, partial writes ---- */

/* One direction of a conversation. */
struct flow {
    struct link *from, *to;
    const size_t *sizes;
    uint32_t n, n_queued, n_received;
    unsigned char **payloads;
    unsigned char *got;
    bool at_message, discards;
};

static void queue_some(struct flow *flow)
{
    while (flow->n_queued < flow->n) {
        const size_t size = flow->sizes[flow->n_queued];
        const struct wire_frame frame = frame_of(size, flow->n_queued);
        if (!flow->payloads[flow->n_queued])
            flow->payloads[flow->n_queued] = message(flow->n_queued, size);
        const mccl_result result =
            flow->from->ops->send(flow->from, &frame, flow->payloads[flow->n_queued]);
        if (result == MCCL_IN_PROGRESS)
            return;
        CHECK_EQ_I64(result, MCCL_OK);
        flow->n_queued++;
    }
}

static void take_some(struct flow *flow)
{
    struct wire_frame frame;
    for (;;) {
        const mccl_result peeked = flow->to->ops->peek(flow->to, &frame);
        if (peeked == MCCL_IN_PROGRESS) {
            CHECK(!flow->at_message);
            return;
        }
        CHECK_EQ_I64(peeked, MCCL_OK);
        CHECK_EQ_U64(frame.seq, flow->n_received);
        CHECK_EQ_U64(frame.length, flow->sizes[frame.seq]);
        flow->at_message = true;
        const bool discard = flow->discards && frame.seq % 3 == 1;
        const mccl_result result = flow->to->ops->receive(flow->to, discard ? NULL : flow->got);
        if (result == MCCL_IN_PROGRESS)
            return;
        CHECK_EQ_I64(result, MCCL_OK);
        if (!discard)
            CHECK_EQ_MEM(flow->got, flow->payloads[frame.seq], frame.length);
        memset(flow->got, 0xee, BYTES_MAX);
        flow->at_message = false;
        flow->n_received++;
    }
}

/* Both directions at once, with other sizes each. A message that has been received counted as sent.
 */
static void converse(unsigned n, const size_t sizes[2][64], uint32_t n_messages)
{
    struct pair pair = meet(n);
    struct flow flows[2];
    for (int i = 0; i < 2; i++) {
        flows[i] = (struct flow){.from = i ? pair.b : pair.a,
                                 .to = i ? pair.a : pair.b,
                                 .sizes = sizes[i],
                                 .n = n_messages,
                                 .discards = i == 1};
        flows[i].payloads = calloc(n_messages, sizeof *flows[i].payloads);
        flows[i].got = malloc(BYTES_MAX);
        CHECK(flows[i].payloads != NULL && flows[i].got != NULL);
    }
    while (flows[0].n_received < n_messages || flows[1].n_received < n_messages)
        for (int i = 0; i < 2; i++) {
            const uint64_t before = flows[i].from->moved + flows[i].to->moved;
            queue_some(&flows[i]);
            const mccl_result result = flows[i].from->ops->flush(flows[i].from);
            CHECK(result == MCCL_OK || result == MCCL_IN_PROGRESS);
            CHECK_EQ_I64(result == MCCL_OK, flows[i].from->n_sent == flows[i].n_queued);
            take_some(&flows[i]);
            CHECK_LE_I64(flows[i].n_received, flows[i].from->n_sent);
            CHECK(flows[i].n_received == n_messages ||
                  flows[i].from->moved + flows[i].to->moved > before);
        }
    uint64_t total = 0;
    for (uint32_t i = 0; i < n_messages; i++)
        total += sizes[0][i];
    CHECK_EQ_U64(pair.a->bytes_sent, total);
    CHECK_EQ_U64(pair.b->bytes_received, total);
    CHECK_EQ_U64(pair.a->n_sent, n_messages);
    for (int i = 0; i < 2; i++) {
        for (uint32_t k = 0; k < n_messages; k++)
            free(flows[i].payloads[k]);
        free(flows[i].payloads);
        free(flows[i].got);
    }
    part(&pair);
}

static void test_sizes(unsigned n)
{
    const size_t limit = n * (size_t)WIRE_PART_MIN;
    const size_t corners[] = {
        0,         1,          31,         limit - 1,  limit,      limit + 1,
        7,         limit + 63, limit + 64, limit + 65, 64 * n - 1, limit * 2 - 1,
        limit * 2, 262144,     300007,     0,          599999,     limit - 64};
    size_t sizes[2][64];
    for (int i = 0; i < 60; i++) {
        sizes[0][i] = corners[i % 18];
        sizes[1][i] = corners[(i * 7 + 5) % 18];
    }
    converse(n, sizes, 60);
}

/* ---- what goes by which socket ---- */

static void read_exactly(int fd, void *data, size_t size)
{
    CHECK_EQ_I64(recv(fd, data, size, 0), (ptrdiff_t)size);
}

static void expect_part(int fd, uint32_t seq, size_t from, size_t size)
{
    unsigned char *got = malloc(size + 1);
    CHECK(got != NULL);
    if (size > 0)
        read_exactly(fd, got, size);
    for (size_t i = 0; i < size; i++)
        CHECK_EQ_I64(got[i], byte_of(seq, from + i));
    CHECK(recv(fd, got, 1, 0) < 0 && errno == EAGAIN);
    free(got);
}

static void test_wire(void)
{
    static const size_t sizes[] = {98303, 98304, 98304 + 200};
    int a[3], b[3];
    struct link *link;
    for (int i = 0; i < 3; i++) {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
        a[i] = ends[0];
        b[i] = ends[1];
    }
    CHECK_EQ_I64(link_tcp_create_channels(a, 3, &link), MCCL_OK);
    for (uint32_t seq = 0; seq < 3; seq++) {
        const struct wire_frame frame = frame_of(sizes[seq], seq);
        struct wire_frame got;
        unsigned char *payload = message(seq, sizes[seq]);
        CHECK_EQ_I64(link->ops->send(link, &frame, payload), MCCL_OK);
        CHECK_EQ_I64(link->ops->flush(link), MCCL_OK);
        CHECK_EQ_U64(link->n_sent, seq + 1);
        read_exactly(b[0], &got, sizeof got);
        CHECK_EQ_MEM(&got, &frame, sizeof got);
        /* Too short to be cut; 3 x 32768; a third of 98504, down to a multiple of 64. */
        const size_t part = seq == 0 ? sizes[0] : seq == 1 ? 32768 : 32832;
        expect_part(b[0], seq, 0, part);
        expect_part(b[1], seq, part, seq == 0 ? 0 : part);
        expect_part(b[2], seq, 2 * part, seq == 0 ? 0 : sizes[seq] - 2 * part);
        free(payload);
    }
    link->ops->close(link);
    for (int i = 0; i < 3; i++)
        close(b[i]);
}

/* ---- limits and ends ---- */

/* At most 16 under way, also when channel 0 has sent its share of all. */
static void test_full(void)
{
    int a[2], b[2];
    struct link *link;
    static unsigned char payload[65536];
    const struct wire_frame frame = frame_of(sizeof payload, 0);
    const int large = 4 << 20;
    make_sockets(2, a, b);
    CHECK(setsockopt(a[0], SOL_SOCKET, SO_SNDBUFFORCE, &large, sizeof large) == 0 ||
          setsockopt(a[0], SOL_SOCKET, SO_SNDBUF, &large, sizeof large) == 0);
    CHECK_EQ_I64(link_tcp_create_channels(a, 2, &link), MCCL_OK);
    int n = 0;
    mccl_result result;
    while ((result = link->ops->send(link, &frame, payload)) == MCCL_OK) {
        CHECK_EQ_I64(link->ops->flush(link), MCCL_IN_PROGRESS);
        CHECK_LE_I64(++n, 16);
    }
    CHECK_EQ_I64(result, MCCL_IN_PROGRESS);
    CHECK_EQ_I64(n, 16);
    CHECK_EQ_U64(link->n_sent, 0); /* channel 1 took no part whole */
    static unsigned char sink[1 << 20];
    ptrdiff_t got;
    while ((got = recv(b[1], sink, sizeof sink, 0)) > 0 ||
           link->ops->flush(link) != MCCL_OK) /* room again, until all has left */
        while (recv(b[0], sink, sizeof sink, 0) > 0)
            continue;
    CHECK_EQ_U64(link->n_sent, 16);
    CHECK_EQ_I64(link->ops->send(link, &frame, payload), MCCL_OK);
    link->ops->close(link);
    close(b[0]);
    close(b[1]);
}

/* The header and its part have come by channel 0, of the other part the first bytes; then channel
 * `closed` ends. */
static void test_ends_amid_message(int closed)
{
    int a[2], b[2];
    struct link *link;
    struct wire_frame got;
    unsigned char *payload = message(0, 65536), *to = malloc(65536);
    const struct wire_frame frame = frame_of(65536, 0);
    CHECK(to != NULL);
    make_sockets(2, a, b);
    CHECK_EQ_I64(link_tcp_create_channels(b, 2, &link), MCCL_OK);
    CHECK_EQ_I64(link->ops->peek(link, &got), MCCL_IN_PROGRESS);
    CHECK_EQ_I64(send(a[0], &frame, sizeof frame, 0), sizeof frame);
    CHECK_EQ_I64(link->ops->peek(link, &got), MCCL_OK);
    CHECK_EQ_I64(link->ops->receive(link, to), MCCL_IN_PROGRESS);
    CHECK_EQ_I64(send(a[1], payload + 32768, 100, 0), 100);
    CHECK_EQ_I64(link->ops->receive(link, to), MCCL_IN_PROGRESS);
    CHECK_EQ_MEM(to + 32768, payload + 32768, 100);
    close(a[closed]);
    CHECK_EQ_I64(link->ops->receive(link, to), MCCL_ERR_PEER_LOST);
    CHECK_HAS(mccl_last_error(), "closed in the middle of a message");
    if (closed == 1)
        CHECK_HAS(mccl_last_error(), "channel 1");
    CHECK(!link->at_end);
    link->ops->close(link);
    close(a[1 - closed]);
    free(payload);
    free(to);
}

/* A channel that is dead for sending breaks the link as soon as it is needed. */
static void test_broken_for_sending(unsigned broken)
{
    struct pair pair = meet(3);
    static unsigned char payload[200000];
    const struct wire_frame frame = frame_of(sizeof payload, 0), small = frame_of(0, 0);
    CHECK(shutdown(pair.b->ops->descriptor(pair.b, broken), SHUT_RDWR) == 0);
    CHECK_EQ_I64(pair.a->ops->send(pair.a, &small, NULL), MCCL_OK);
    CHECK_EQ_I64(pair.a->ops->flush(pair.a), broken == 0 ? MCCL_ERR_PEER_LOST : MCCL_OK);
    if (broken > 0) {
        CHECK_EQ_I64(pair.a->ops->send(pair.a, &frame, payload), MCCL_OK);
        CHECK_EQ_I64(pair.a->ops->flush(pair.a), MCCL_ERR_PEER_LOST);
        CHECK_HAS(mccl_last_error(), broken == 1 ? "channel 1" : "channel 2");
    }
    part(&pair);
}

/* What was sent before an orderly end is read, then the link is at its end. */
static void test_end(void)
{
    struct pair pair = meet(2);
    struct wire_frame got;
    static unsigned char payload[3000], to[3000];
    const struct wire_frame frame = frame_of(sizeof payload, 0);
    CHECK_EQ_I64(pair.a->ops->send(pair.a, &frame, payload), MCCL_OK);
    CHECK_EQ_I64(pair.a->ops->flush(pair.a), MCCL_OK);
    pair.a->ops->end(pair.a);
    CHECK_EQ_I64(pair.b->ops->peek(pair.b, &got), MCCL_OK);
    CHECK_EQ_I64(pair.b->ops->receive(pair.b, to), MCCL_OK);
    CHECK(!pair.b->at_end);
    CHECK_EQ_I64(pair.b->ops->peek(pair.b, &got), MCCL_IN_PROGRESS);
    CHECK(pair.b->at_end);
    CHECK_EQ_I64(recv(pair.b->ops->descriptor(pair.b, 1), to, 1, 0), 0);
    /* Reading goes on after one's own end. */
    CHECK_EQ_I64(pair.b->ops->send(pair.b, &frame, payload), MCCL_OK);
    CHECK_EQ_I64(pair.b->ops->flush(pair.b), MCCL_OK);
    CHECK_EQ_I64(pair.a->ops->peek(pair.a, &got), MCCL_OK);
    CHECK_EQ_I64(pair.a->ops->receive(pair.a, NULL), MCCL_OK);
    part(&pair);
}

/* A length from the wire that no operation expects must do no harm before it is compared. */
static void test_absurd_length(void)
{
    int a[8], b[8];
    struct link *link;
    make_sockets(8, a, b);
    CHECK_EQ_I64(link_tcp_create_channels(b, 8, &link), MCCL_OK);
    const struct wire_frame frame = frame_of(UINT64_MAX, 0);
    struct wire_frame got;
    CHECK_EQ_I64(send(a[0], &frame, sizeof frame, 0), sizeof frame);
    CHECK_EQ_I64(link->ops->peek(link, &got), MCCL_OK);
    CHECK_EQ_U64(got.length, UINT64_MAX);
    CHECK_EQ_I64(link->ops->peek(link, &got), MCCL_OK);
    for (unsigned n = 1; n <= 8; n++)
        CHECK(wire_part(UINT64_MAX, n) <= UINT64_MAX / n);
    link->ops->close(link);
    for (int i = 0; i < 8; i++)
        close(a[i]);
}

int main(void)
{
    for (unsigned n = 2; n <= WIRE_CHANNELS_MAX; n++)
        test_sizes(n);
    test_wire();
    test_full();
    test_ends_amid_message(0);
    test_ends_amid_message(1);
    for (unsigned i = 0; i < 3; i++)
        test_broken_for_sending(i);
    test_end();
    test_absurd_length();
    return 0;
}

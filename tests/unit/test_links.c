/* SPDX-License-Identifier: MIT
 *
 * A member that does what none of ours would: it dials its links twice, before and after the group
 * is ready, and as the maker of an id it refuses with the code of success. Its side of the protocol
 * is written out here; the others are the library's, all in one process.
 */
#include "base/config.h"
#include "comm/bootstrap.h"
#include "support/check.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

enum { N = 3, FAKE = 2 };

static mccl_unique_id public_id;
static struct unique_id id;
static uint8_t key[HANDSHAKE_KEY_BYTES];

static void read_all(int fd, void *data, size_t size)
{
    CHECK_EQ_I64(recv(fd, data, size, MSG_WAITALL), (ptrdiff_t)size);
}

static void write_all(int fd, const void *data, size_t size)
{
    CHECK_EQ_I64(send(fd, data, size, MSG_NOSIGNAL), (ptrdiff_t)size);
}

static void make_id(void)
{
    CHECK_OK(mccl_get_unique_id(&public_id));
    memcpy(&id, public_id.opaque, sizeof id);
    handshake_derive_key(id.secret, id.comm_id, "", key);
}

/* A socket whose reads end after a while. */
static int patient_socket(void)
{
    const struct timeval patience = {10, 0};
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    return fd;
}

/* Dials as rank FAKE and says hello. */
static int say_hello(enum wire_purpose purpose, uint8_t channel, uint32_t target,
                     struct wire_hello *hello, struct wire_challenge *challenge)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(id.addresses[0].port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = patient_socket();
    CHECK(connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    *hello = (struct wire_hello){.magic = WIRE_HELLO_MAGIC,
                                 .version_min = WIRE_VERSION,
                                 .version_max = WIRE_VERSION,
                                 .purpose = (uint8_t)purpose,
                                 .channel = channel,
                                 .rank = FAKE,
                                 .target_rank = target,
                                 .n_ranks = N,
                                 .generation = id.generation};
    memcpy(hello->comm_id, id.comm_id, sizeof hello->comm_id);
    write_all(fd, hello, sizeof *hello);
    read_all(fd, challenge, sizeof *challenge);
    return fd;
}

/* Does the whole handshake; *status is the acceptor's last word. */
static int dial(enum wire_purpose purpose, uint8_t channel, uint32_t target, uint32_t *status)
{
    struct wire_hello hello;
    struct wire_challenge challenge;
    struct wire_proof proof;
    struct wire_accept accept;
    const int fd = say_hello(purpose, channel, target, &hello, &challenge);
    CHECK_EQ_I64(challenge.status, STATUS_OK);
    CHECK(handshake_check_challenge(key, &hello, &challenge));
    handshake_make_proof(key, &hello, &challenge, &proof);
    write_all(fd, &proof, sizeof proof);
    read_all(fd, &accept, sizeof accept);
    *status = accept.status;
    return fd;
}

static int dial_channel(uint8_t channel, uint32_t target)
{
    uint32_t status;
    const int fd = dial(PURPOSE_DATA, channel, target, &status);
    CHECK_EQ_I64(status, STATUS_OK);
    return fd;
}

static int dial_ok(enum wire_purpose purpose, uint32_t target)
{
    uint32_t status;
    const int fd = dial(purpose, 0, target, &status);
    CHECK_EQ_I64(status, STATUS_OK);
    return fd;
}

/* No such channel: the answer comes before any proof. */
static void expect_unknown(enum wire_purpose purpose, uint8_t channel, uint32_t target)
{
    struct wire_hello hello;
    struct wire_challenge challenge;
    close(say_hello(purpose, channel, target, &hello, &challenge));
    CHECK_EQ_I64(challenge.status, STATUS_UNKNOWN);
}

static void expect_busy(enum wire_purpose purpose, uint8_t channel, uint32_t target)
{
    uint32_t status;
    char byte;
    const int fd = dial(purpose, channel, target, &status);
    CHECK_EQ_I64(status, STATUS_BUSY);
    CHECK_EQ_I64(recv(fd, &byte, 1, 0), 0); /* and it is closed */
    close(fd);
}

/* A link that a second one has replaced is closed, not kept. */
static void expect_closed(int fd)
{
    char bytes[256];
    ptrdiff_t got;
    do /* what was said before */
        got = recv(fd, bytes, sizeof bytes, 0);
    while (got > 0);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
    close(fd);
}

static void send_frame(int fd, uint8_t type, const void *payload, size_t size)
{
    const struct wire_frame frame = {
        .magic = WIRE_FRAME_MAGIC, .version = WIRE_VERSION, .type = type, .length = size};
    write_all(fd, &frame, sizeof frame);
    if (size > 0)
        write_all(fd, payload, size);
}

/* Reads up to the first frame of this type; its payload is dropped. */
static void await_frame(int fd, uint8_t type)
{
    static char payload[8192];
    struct wire_frame frame;
    do {
        read_all(fd, &frame, sizeof frame);
        CHECK(frame.length <= sizeof payload);
        if (frame.length > 0)
            read_all(fd, payload, (size_t)frame.length);
    } while (frame.type != type);
}

static void check_in(const char *own_settings)
{
    struct wire_member member = {.rank = FAKE, .n_ranks = N, .n_addresses = 0};
    struct settings settings;
    CHECK_OK(config_load(own_settings, &settings));
    bootstrap_agree_on(&settings, &member);
    const int fd = dial_ok(PURPOSE_BOOTSTRAP, 0);
    send_frame(fd, FRAME_CHECK_IN, &member, sizeof member);
    await_frame(fd, FRAME_TABLE);
    close(fd);
}

static void expect_no_error(mccl_comm *comm)
{
    mccl_result error;
    CHECK_OK(mccl_comm_get_async_error(comm, &error));
    CHECK_EQ_I64(error, MCCL_OK);
}

/* Real ranks 0 and 1, and ours. */
static void links_dialled_twice(void)
{
    mccl_comm *comms[FAKE];
    int control[FAKE], data[FAKE];
    make_id();
    for (int rank = 0; rank < FAKE; rank++) {
        mccl_config config = MCCL_CONFIG_INIT;
        config.flags = MCCL_CONFIG_NONBLOCKING;
        config.timeout_ms = 20000;
        CHECK_OK(mccl_comm_init_rank(&comms[rank], N, &public_id, rank, &config));
    }
    check_in(NULL);
    for (uint32_t rank = 0; rank < FAKE; rank++) {
        const int first_control = dial_ok(PURPOSE_CONTROL, rank);
        const int first_data = dial_ok(PURPOSE_DATA, rank);
        /* Half a message on a link that is about to be replaced. */
        const struct wire_frame early = {
            .magic = WIRE_FRAME_MAGIC, .version = WIRE_VERSION, .type = FRAME_DATA, .length = 100};
        write_all(first_data, &early, sizeof early);
        control[rank] = dial_ok(PURPOSE_CONTROL, rank);
        data[rank] = dial_ok(PURPOSE_DATA, rank);
        expect_closed(first_control);
        close(first_data);
    }
    for (int rank = 0; rank < FAKE; rank++)
        send_frame(control[rank], FRAME_READY, NULL, 0);
    for (int rank = 0; rank < FAKE; rank++) {
        CHECK_OK(mccl_comm_wait_ready(comms[rank], 10000));
        await_frame(control[rank], FRAME_READY);
        expect_busy(PURPOSE_CONTROL, 0, (uint32_t)rank);
        expect_busy(PURPOSE_DATA, 0, (uint32_t)rank);
    }
    /* Works as before: the links in use are the second ones. */
    int64_t sent = 7, got = 0;
    mccl_request *request;
    CHECK_OK(mccl_recv(&got, 1, MCCL_INT64, 0, comms[1], NULL, &request));
    CHECK_OK(mccl_send(&sent, 1, MCCL_INT64, 1, comms[0], NULL, NULL));
    CHECK_OK(mccl_request_wait(request, 10000));
    CHECK_OK(mccl_request_free(request));
    CHECK_EQ_I64(got, 7);
    for (int rank = 0; rank < FAKE; rank++)
        expect_no_error(comms[rank]);
    for (int rank = 0; rank < FAKE; rank++) {
        CHECK_OK(mccl_comm_destroy(comms[rank]));
        close(control[rank]);
        close(data[rank]);
    }
}

/* Reads a message of `size` bytes that is cut over two channels and sends it back. */
static void echo_cut(const int channels[2], size_t size)
{
    static unsigned char payload[1 << 20];
    struct wire_frame frame;
    const size_t first = size / 2 / 64 * 64;
    CHECK(size <= sizeof payload);
    read_all(channels[0], &frame, sizeof frame);
    CHECK_EQ_U64(frame.length, size);
    read_all(channels[0], payload, first);
    read_all(channels[1], payload + first, size - first);
    write_all(channels[1], payload + first, size - first);
    write_all(channels[0], &frame, sizeof frame);
    write_all(channels[0], payload, first);
}

/* Each connection of a data link may be dialled again, in any order, until all ranks are ready, and
 * the last one of each number counts. A link that lacks one is no link. */
static void channels_dialled_twice(void)
{
    mccl_comm *comms[FAKE];
    int control[FAKE], data[FAKE][2];
    make_id();
    for (int rank = 0; rank < FAKE; rank++) {
        mccl_config config = MCCL_CONFIG_INIT;
        config.flags = MCCL_CONFIG_NONBLOCKING;
        config.timeout_ms = 20000;
        config.settings = "channels=2; chunk_bytes=65536";
        CHECK_OK(mccl_comm_init_rank(&comms[rank], N, &public_id, rank, &config));
    }
    check_in("channels=2; chunk_bytes=65536");
    for (uint32_t rank = 0; rank < FAKE; rank++) {
        expect_unknown(PURPOSE_DATA, 2, rank);
        expect_unknown(PURPOSE_DATA, 255, rank);
        expect_unknown(PURPOSE_CONTROL, 1, rank);
        control[rank] = dial_ok(PURPOSE_CONTROL, rank);
        const int early = dial_channel(1, rank); /* before number 0 */
        data[rank][1] = dial_channel(1, rank);
        expect_closed(early);
        const int first = dial_channel(0, rank); /* now it is complete */
        data[rank][0] = dial_channel(0, rank);
        expect_closed(first);
        const int second = data[rank][1];
        data[rank][1] = dial_channel(1, rank);
        expect_closed(second);
    }
    for (int rank = 0; rank < FAKE; rank++)
        send_frame(control[rank], FRAME_READY, NULL, 0);
    for (int rank = 0; rank < FAKE; rank++) {
        CHECK_OK(mccl_comm_wait_ready(comms[rank], 10000));
        await_frame(control[rank], FRAME_READY);
        expect_busy(PURPOSE_DATA, 0, (uint32_t)rank);
        expect_busy(PURPOSE_DATA, 1, (uint32_t)rank);
    }
    /* The sockets in use are the last ones: all_to_all of blocks that are one cut message each. */
    enum { BLOCK = 65536 };
    static unsigned char send[FAKE][N * BLOCK], got[FAKE][N * BLOCK];
    mccl_request *requests[FAKE];
    for (int rank = 0; rank < FAKE; rank++) {
        for (size_t i = 0; i < sizeof send[rank]; i++)
            send[rank][i] = (unsigned char)(i * 31 + i / 251 + (size_t)rank * 7);
        CHECK_OK(mccl_all_to_all(send[rank], got[rank], BLOCK, MCCL_UINT8, comms[rank], NULL,
                                 &requests[rank]));
    }
    for (int rank = 0; rank < FAKE; rank++)
        echo_cut(data[rank], BLOCK);
    for (int rank = 0; rank < FAKE; rank++) {
        CHECK_OK(mccl_request_wait(requests[rank], 10000));
        CHECK_OK(mccl_request_free(requests[rank]));
        CHECK_EQ_MEM(got[rank] + FAKE * BLOCK, send[rank] + FAKE * BLOCK, BLOCK);
        CHECK_EQ_MEM(got[rank] + (1 - rank) * BLOCK, send[1 - rank] + rank * BLOCK, BLOCK);
    }
    for (int rank = 0; rank < FAKE; rank++) {
        CHECK_OK(mccl_comm_destroy(comms[rank]));
        close(control[rank]);
        close(data[rank][0]);
        close(data[rank][1]);
    }
}

/* ---- a maker that refuses with `kind` ---- */

static int refusing_listener;
static uint8_t refusing_kind;

static void *refuse(void *arg)
{
    struct wire_hello hello;
    struct wire_challenge challenge;
    struct wire_proof proof;
    struct wire_member member;
    struct wire_frame frame;
    const struct wire_accept accepted = {WIRE_HELLO_MAGIC, STATUS_OK};
    const int fd = accept(refusing_listener, NULL, NULL);
    (void)arg;
    CHECK(fd >= 0);
    read_all(fd, &hello, sizeof hello);
    CHECK(handshake_read_hello(&hello, 0, &challenge));
    memset(challenge.nonce, 5, sizeof challenge.nonce);
    handshake_sign_challenge(key, &hello, &challenge);
    write_all(fd, &challenge, sizeof challenge);
    read_all(fd, &proof, sizeof proof);
    write_all(fd, &accepted, sizeof accepted);
    read_all(fd, &frame, sizeof frame);
    read_all(fd, &member, sizeof member);
    frame = (struct wire_frame){.magic = WIRE_FRAME_MAGIC,
                                .version = WIRE_VERSION,
                                .type = FRAME_REFUSE,
                                .kind = refusing_kind,
                                .length = 2};
    write_all(fd, &frame, sizeof frame);
    write_all(fd, "no", 2);
    char byte;
    CHECK_EQ_I64(recv(fd, &byte, 1, 0), 0);
    close(fd);
    return NULL;
}

static void refused_with(uint8_t kind, mccl_result expected)
{
    struct sockaddr_in here = {.sin_family = AF_INET};
    socklen_t size = sizeof here;
    pthread_t thread;
    mccl_comm *comm = NULL;
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    refusing_listener = patient_socket();
    CHECK(bind(refusing_listener, (struct sockaddr *)&here, size) == 0);
    CHECK(listen(refusing_listener, 1) == 0);
    CHECK(getsockname(refusing_listener, (struct sockaddr *)&here, &size) == 0);
    make_id();
    id.addresses[0].port = ntohs(here.sin_port);
    memcpy(public_id.opaque, &id, sizeof id);
    refusing_kind = kind;
    CHECK(pthread_create(&thread, NULL, refuse, NULL) == 0);
    CHECK_RESULT(mccl_comm_init_rank(&comm, 2, &public_id, 1, NULL), expected);
    CHECK_HAS(mccl_last_error(), "no");
    pthread_join(thread, NULL);
    close(refusing_listener);
}

int main(void)
{
    CHECK_OK(mccl_set_defaults("port_base=0; listen_addr=loopback"));
    links_dialled_twice();
    channels_dialled_twice();
    refused_with(MCCL_OK, MCCL_ERR_ABORTED);
    refused_with(MCCL_IN_PROGRESS, MCCL_ERR_ABORTED);
    refused_with(0xff, MCCL_ERR_ABORTED);
    refused_with(MCCL_ERR_MISMATCH, MCCL_ERR_MISMATCH);
    return 0;
}

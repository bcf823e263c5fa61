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

/* Dials as rank FAKE and does the handshake; *status is the acceptor's last word. */
static int dial(enum wire_purpose purpose, uint32_t target, uint32_t *status)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(id.addresses[0].port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = patient_socket();
    CHECK(connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    struct wire_hello hello = {.magic = WIRE_HELLO_MAGIC,
                               .version_min = WIRE_VERSION,
                               .version_max = WIRE_VERSION,
                               .purpose = (uint8_t)purpose,
                               .rank = FAKE,
                               .target_rank = target,
                               .n_ranks = N,
                               .generation = id.generation};
    struct wire_challenge challenge;
    struct wire_proof proof;
    struct wire_accept accept;
    memcpy(hello.comm_id, id.comm_id, sizeof hello.comm_id);
    write_all(fd, &hello, sizeof hello);
    read_all(fd, &challenge, sizeof challenge);
    CHECK_EQ_I64(challenge.status, STATUS_OK);
    CHECK(handshake_check_challenge(key, &hello, &challenge));
    handshake_make_proof(key, &hello, &challenge, &proof);
    write_all(fd, &proof, sizeof proof);
    read_all(fd, &accept, sizeof accept);
    *status = accept.status;
    return fd;
}

static int dial_ok(enum wire_purpose purpose, uint32_t target)
{
    uint32_t status;
    const int fd = dial(purpose, target, &status);
    CHECK_EQ_I64(status, STATUS_OK);
    return fd;
}

static void expect_busy(enum wire_purpose purpose, uint32_t target)
{
    uint32_t status;
    char byte;
    const int fd = dial(purpose, target, &status);
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

static void check_in(void)
{
    struct wire_member member = {.rank = FAKE, .n_ranks = N, .n_addresses = 0};
    struct settings settings;
    CHECK_OK(config_load(NULL, &settings));
    member.agreed[0] = settings.chunk_bytes;
    member.agreed[1] = settings.small_msg_threshold;
    member.agreed[2] = settings.allreduce_algo;
    member.agreed[3] = settings.ring_algo;
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
    check_in();
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
        expect_busy(PURPOSE_CONTROL, (uint32_t)rank);
        expect_busy(PURPOSE_DATA, (uint32_t)rank);
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
    refused_with(MCCL_OK, MCCL_ERR_ABORTED);
    refused_with(MCCL_IN_PROGRESS, MCCL_ERR_ABORTED);
    refused_with(0xff, MCCL_ERR_ABORTED);
    refused_with(MCCL_ERR_MISMATCH, MCCL_ERR_MISMATCH);
    return 0;
}

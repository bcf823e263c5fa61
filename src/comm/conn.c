/* SPDX-License-Identifier: MIT
 *
 * See conn.h. A small state machine: each state knows how many bytes it needs and reads exactly
 * those, so nothing of the next protocol is ever swallowed.
 */
#include "comm/conn.h"

#include "base/error.h"
#include "comm/bootstrap.h"
#include "comm/comm.h"
#include "comm/dial.h"
#include "net/link.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define HANDSHAKE_NS (5 * OS_SEC) /* a stranger may hold a place for so long */
#define IN_BYTES 2048 /* control and server-side frames; bootstrap clients grow for the table */
#define OUT_MAX (1u << 20) /* a control link that does not take this much is dead */

static struct conn *conn_create(struct endpoint *endpoint, int fd, enum conn_state state,
                                unsigned events)
{
    struct conn *conn = calloc(1, sizeof *conn);
    if (!conn || os_poller_add(endpoint->poller, fd, events, conn) != MCCL_OK) {
        free(conn);
        os_fd_close(fd);
        return NULL;
    }
    conn->endpoint = endpoint;
    conn->fd = fd;
    conn->state = state;
    conn->deadline_ns = os_now_ns() + HANDSHAKE_NS;
    conn->peer = -1;
    conn->in = conn->fixed;
    conn->in_cap = sizeof conn->fixed;
    conn->next = endpoint->conns;
    endpoint->conns = conn;
    return conn;
}

struct conn *conn_accept(struct endpoint *endpoint, int fd, const struct sockaddr_storage *peer)
{
    struct conn *conn = conn_create(endpoint, fd, CONN_WAIT_HELLO, OS_POLL_READ);
    if (!conn)
        return NULL;
    os_address_from_sockaddr(peer, &conn->address);
    endpoint->n_handshakes++;
    return conn;
}

struct conn *conn_dial(struct endpoint *endpoint, struct dial *dial,
                       const struct sockaddr_storage *to, socklen_t to_size,
                       const struct os_address *from)
{
    const int fd = os_socket_stream(to->ss_family);
    if (fd < 0) {
        error_set(MCCL_ERR_SYSTEM, "socket: %s", strerror(errno));
        return NULL;
    }
    comm_prepare_socket(dial->comm, fd);
    struct sockaddr_storage source;
    if (from && from->family) {
        const socklen_t size = os_address_to_sockaddr(from, 0, &source);
        if (bind(fd, (struct sockaddr *)&source, size) != 0) {
            error_set(MCCL_ERR_SYSTEM, "bind: %s", strerror(errno));
            os_fd_close(fd);
            return NULL;
        }
    }
    if (connect(fd, (const struct sockaddr *)to, to_size) != 0 && errno != EINPROGRESS &&
        errno != EINTR) {
        error_set(MCCL_ERR_CONNECT, "%s", strerror(errno));
        os_fd_close(fd);
        return NULL;
    }
    struct conn *conn = conn_create(endpoint, fd, CONN_CONNECTING, OS_POLL_WRITE);
    if (!conn) {
        error_set(MCCL_ERR_NO_MEMORY, "no memory for a connection");
        return NULL;
    }
    conn->dial = dial;
    os_address_from_sockaddr(to, &conn->address);
    return conn;
}

/* Accepted, and nobody knows by whom: counted in n_handshakes. */
static bool is_unproven(const struct conn *conn)
{
    return conn->state == CONN_WAIT_HELLO || conn->state == CONN_WAIT_PROOF;
}

static void close_socket(struct conn *conn)
{
    if (is_unproven(conn))
        conn->endpoint->n_handshakes--;
    if (conn->fd >= 0) {
        os_poller_remove(conn->endpoint->poller, conn->fd);
        os_fd_close(conn->fd);
    }
    conn->fd = -1;
    conn->state = CONN_DEAD;
}

void conn_kill(struct conn *conn, const char *why)
{
    (void)why;
    if (conn->state != CONN_DEAD)
        close_socket(conn);
    conn->dial = NULL;
    conn->comm = NULL;
    conn->session = NULL;
}

int conn_detach(struct conn *conn)
{
    const int fd = conn->fd;
    os_poller_remove(conn->endpoint->poller, fd);
    conn->fd = -1;
    conn_kill(conn, "detached");
    return fd;
}

void conn_free(struct conn *conn)
{
    if (conn->in != conn->fixed)
        free(conn->in);
    free(conn->out);
    free(conn);
}

/* Ends it and tells whoever it was for. */
static void conn_fail(struct conn *conn, const char *why, bool refused)
{
    struct dial *dial = conn->dial;
    struct mccl_comm *comm = conn->comm;
    struct session *session = conn->session;
    const int peer = conn->peer;
    const bool frames = conn->state == CONN_FRAMES;
    const uint8_t purpose = conn->hello.purpose;
    if (conn->state == CONN_DEAD)
        return;
    if (is_unproven(conn))
        conn->endpoint->n_strangers++;
    if (dial)
        dial_attempt_failed(dial, conn, why, refused);
    conn_kill(conn, why);
    if (!frames)
        return;
    if (session)
        bootstrap_on_client_end(session, conn);
    else if (comm && purpose == PURPOSE_BOOTSTRAP)
        bootstrap_on_server_end(comm, conn, why);
    else if (comm)
        control_on_end(comm, peer, why);
}

/* The connection ended. Whoever left our handshake without a word of his own was no stranger: a
 * rank that reached us by another address first does so. */
static void conn_lost(struct conn *conn, const char *why)
{
    if (is_unproven(conn) && conn->in_size == 0)
        conn_kill(conn, why);
    else
        conn_fail(conn, why, false);
}

/* Small writes of the handshake: a fresh socket always has room for them. */
static bool write_all(struct conn *conn, const void *data, size_t size)
{
    union {
        const void *in;
        void *out;
    } cast = {.in = data};
    const struct iovec iov = {cast.out, size};
    if (os_socket_send(conn->fd, &iov, 1) == (ptrdiff_t)size)
        return true;
    conn_lost(conn, "the connection broke during the handshake");
    return false;
}

/* Reads towards `need` bytes. False: not there yet, or the connection has failed. */
static bool read_up_to(struct conn *conn, size_t need)
{
    while (conn->in_size < need) {
        const struct iovec iov = {conn->in + conn->in_size, need - conn->in_size};
        const ptrdiff_t got = os_socket_recv(conn->fd, &iov, 1);
        if (got == -1)
            return false;
        if (got <= 0) {
            conn_lost(conn, got == 0 ? "the other side closed the connection" : strerror(errno));
            return false;
        }
        conn->in_size += (size_t)got;
    }
    return true;
}

static void use_frames(struct conn *conn, size_t in_cap)
{
    conn->in_size = 0;
    conn->deadline_ns = 0;
    uint8_t *in = malloc(in_cap);
    if (!in) {
        conn_fail(conn, "no memory", false);
        return;
    }
    conn->in = in;
    conn->in_cap = in_cap;
    conn->state = CONN_FRAMES;
}

/* ---- dialler ---- */

/* The other side is whom we look for, and will not have us. */
static void denied(struct conn *conn, mccl_result verdict, const char *why)
{
    conn->dial->verdict = verdict;
    conn_fail(conn, why, true);
}

static void on_connected(struct conn *conn)
{
    const int error = os_socket_error(conn->fd);
    if (error != 0) {
        conn_fail(conn, strerror(error), error == ECONNREFUSED);
        return;
    }
    const struct dial *dial = conn->dial;
    const struct mccl_comm *comm = dial->comm;
    const bool moves_data = dial->purpose == PURPOSE_DATA || dial->purpose == PURPOSE_P2P;
    const bool shares = moves_data && comm_offers_memory(comm, dial->peer);
    conn->hello = (struct wire_hello){.magic = WIRE_HELLO_MAGIC,
                                      .version_min = WIRE_VERSION,
                                      .version_max = WIRE_VERSION,
                                      .purpose = (uint8_t)dial->purpose,
                                      .channel = dial->channel,
                                      .flags = shares ? HELLO_SHM : 0,
                                      .rank = (uint32_t)comm->rank,
                                      .target_rank = (uint32_t)dial->peer,
                                      .n_ranks = (uint32_t)comm->n_ranks,
                                      .generation = comm->generation};
    memcpy(conn->hello.comm_id, comm->id, sizeof conn->hello.comm_id);
    memcpy(conn->key, comm->key, sizeof conn->key);
    if (os_random(conn->hello.nonce, sizeof conn->hello.nonce) != MCCL_OK) {
        conn_fail(conn, error_text(), false);
        return;
    }
    if (os_poller_modify(conn->endpoint->poller, conn->fd, OS_POLL_READ, conn) != MCCL_OK) {
        conn_fail(conn, error_text(), false);
        return;
    }
    if (write_all(conn, &conn->hello, sizeof conn->hello))
        conn->state = CONN_WAIT_CHALLENGE;
}

static void on_challenge(struct conn *conn)
{
    if (!read_up_to(conn, sizeof conn->challenge))
        return;
    memcpy(&conn->challenge, conn->in, sizeof conn->challenge);
    conn->in_size = 0;
    const struct wire_challenge *challenge = &conn->challenge;
    if (challenge->magic != WIRE_HELLO_MAGIC) {
        conn_fail(conn, "whoever listens there does not speak MCCL", false);
    } else if (challenge->status == STATUS_VERSION) {
        char why[96];
        snprintf(why, sizeof why,
                 "protocol versions differ: %u here, %u there; install the same MCCL on all hosts",
                 WIRE_VERSION, challenge->version);
        denied(conn, MCCL_ERR_UNSUPPORTED, why);
    } else if (challenge->status != STATUS_OK) {
        conn_fail(conn, "the process there does not (yet) know this group and rank", true);
    } else if (!handshake_check_challenge(conn->key, &conn->hello, challenge)) {
        static const struct wire_proof none; /* so that the other side's log tells it as well */
        if (write_all(conn, &none, sizeof none))
            denied(conn, MCCL_ERR_AUTH,
                   "the process there has another secret (MCCL_AUTH_KEY differs?)");
    } else if (!dial_choose(conn->dial, conn)) {
        conn_kill(conn, "another address was faster");
    } else {
        struct wire_proof proof;
        handshake_make_proof(conn->key, &conn->hello, challenge, &proof);
        if (write_all(conn, &proof, sizeof proof))
            conn->state = CONN_WAIT_ACCEPT;
    }
}

static void on_accept(struct conn *conn)
{
    struct wire_accept accept;
    if (!read_up_to(conn, sizeof accept))
        return;
    memcpy(&accept, conn->in, sizeof accept);
    if (accept.magic == WIRE_HELLO_MAGIC && accept.status == STATUS_AUTH) {
        denied(conn, MCCL_ERR_AUTH,
               "refused our proof of the job's secret (MCCL_AUTH_KEY differs?)");
        return;
    }
    if (accept.magic != WIRE_HELLO_MAGIC || accept.status != STATUS_OK) {
        conn_fail(conn, "the other side is busy", accept.status == STATUS_BUSY);
        return;
    }
    struct dial *dial = conn->dial;
    conn->peer = dial->peer;
    conn->comm = dial->comm;
    conn->dial = NULL;
    if (conn->hello.purpose == PURPOSE_CONTROL)
        use_frames(conn, IN_BYTES);
    else if (conn->hello.purpose == PURPOSE_BOOTSTRAP)
        use_frames(conn, sizeof(struct wire_frame) +
                             (size_t)conn->comm->n_ranks * sizeof(struct wire_member) +
                             WIRE_CONTROL_MAX);
    if (conn->state == CONN_DEAD)
        return;
    struct mccl_comm *comm = conn->comm;
    dial_succeeded(dial, conn);
    comm_on_connection(comm, conn);
}

/* ---- acceptor ---- */

static void refuse(struct conn *conn, enum wire_status status)
{
    conn->challenge.status = (uint8_t)status;
    if (write_all(conn, &conn->challenge, sizeof conn->challenge))
        conn_kill(conn, "refused"); /* no stranger: a rank that is early, late or lost */
}

static bool has_channel(const struct mccl_comm *comm, const struct wire_hello *hello)
{
    const bool several = hello->purpose == PURPOSE_DATA && !(hello->flags & HELLO_SHM);
    return hello->channel < (several ? comm->settings.channels : 1);
}

static void on_hello(struct conn *conn)
{
    if (!read_up_to(conn, sizeof(uint32_t)))
        return;
    uint32_t magic;
    memcpy(&magic, conn->in, sizeof magic);
    if (magic != WIRE_HELLO_MAGIC) { /* before waiting for more from a port scanner */
        conn_fail(conn, "not MCCL", false);
        return;
    }
    if (!read_up_to(conn, sizeof conn->hello))
        return;
    memcpy(&conn->hello, conn->in, sizeof conn->hello);
    conn->in_size = 0;
    struct wire_hello *hello = &conn->hello;
    if (!handshake_read_hello(hello, hello->target_rank, &conn->challenge)) {
        conn_fail(conn, "not MCCL", false);
        return;
    }
    if (conn->challenge.status != STATUS_OK) {
        refuse(conn, STATUS_VERSION);
        return;
    }
    const uint8_t *key = NULL;
    if (hello->purpose == PURPOSE_BOOTSTRAP) {
        conn->session = bootstrap_find(conn->endpoint, hello->comm_id);
        key = conn->session ? bootstrap_key(conn->session) : NULL;
    } else {
        conn->comm = endpoint_find_comm(conn->endpoint, hello->comm_id, hello->target_rank);
        if (conn->comm && hello->rank < (uint32_t)conn->comm->n_ranks &&
            hello->rank != hello->target_rank && hello->n_ranks == (uint32_t)conn->comm->n_ranks &&
            has_channel(conn->comm, hello))
            key = conn->comm->key;
    }
    if (!key) {
        conn->comm = NULL;
        conn->session = NULL;
        refuse(conn, STATUS_UNKNOWN);
        return;
    }
    memcpy(conn->key, key, sizeof conn->key);
    if (os_random(conn->challenge.nonce, sizeof conn->challenge.nonce) != MCCL_OK) {
        conn_fail(conn, error_text(), false);
        return;
    }
    handshake_sign_challenge(conn->key, hello, &conn->challenge);
    if (write_all(conn, &conn->challenge, sizeof conn->challenge))
        conn->state = CONN_WAIT_PROOF;
}

/* A rank that said READY has its control and data link to us and dials them once only: another one
 * would take the place of a link in use. Before that it may have missed our last word. */
static bool is_surplus(const struct conn *conn)
{
    const uint8_t purpose = conn->hello.purpose;
    if (!conn->comm || (purpose != PURPOSE_CONTROL && purpose != PURPOSE_DATA))
        return false;
    return atomic_load(&conn->comm->phase) == COMM_READY ||
           conn->comm->peers[conn->hello.rank].ready;
}

static void on_proof(struct conn *conn)
{
    struct wire_proof proof;
    if (!read_up_to(conn, sizeof proof))
        return;
    memcpy(&proof, conn->in, sizeof proof);
    conn->in_size = 0; /* all that was said has been heard: see conn_lost */
    struct wire_accept accept = {WIRE_HELLO_MAGIC, STATUS_OK};
    if (!handshake_check_proof(conn->key, &conn->hello, &conn->challenge, &proof)) {
        accept.status = STATUS_AUTH;
        if (write_all(conn, &accept, sizeof accept))
            conn_fail(conn, "wrong proof", false);
        return;
    }
    if (is_surplus(conn))
        accept.status = STATUS_BUSY;
    if (!write_all(conn, &accept, sizeof accept))
        return;
    if (accept.status != STATUS_OK) {
        conn_kill(conn, "the link is there already"); /* no stranger */
        return;
    }
    conn->endpoint->n_handshakes--;
    conn->state = CONN_WAIT_ACCEPT; /* through: no longer counted */
    conn->peer = (int)conn->hello.rank;
    if (conn->hello.purpose == PURPOSE_CONTROL || conn->hello.purpose == PURPOSE_BOOTSTRAP)
        use_frames(conn, IN_BYTES);
    if (conn->state == CONN_DEAD)
        return;
    if (conn->session)
        bootstrap_on_client(conn->session, conn);
    else
        comm_on_connection(conn->comm, conn);
}

/* ---- frames ---- */

static void on_frames(struct conn *conn)
{
    struct wire_frame frame;
    while (conn->state == CONN_FRAMES) {
        if (!read_up_to(conn, sizeof frame))
            return;
        memcpy(&frame, conn->in, sizeof frame);
        if (frame.magic != WIRE_FRAME_MAGIC || frame.version != WIRE_VERSION ||
            frame.length > conn->in_cap - sizeof frame) {
            conn_fail(conn, "bad frame", false);
            return;
        }
        if (!read_up_to(conn, sizeof frame + (size_t)frame.length))
            return;
        conn->in_size = 0;
        const void *payload = conn->in + sizeof frame;
        if (conn->session)
            bootstrap_on_client_frame(conn->session, conn, &frame, payload);
        else if (conn->hello.purpose == PURPOSE_BOOTSTRAP)
            bootstrap_on_server_frame(conn->comm, conn, &frame, payload);
        else
            control_on_frame(conn->comm, conn->peer, &frame, payload);
    }
}

static void write_out(struct conn *conn)
{
    while (conn->out_size > 0) {
        const struct iovec iov = {conn->out, conn->out_size};
        const ptrdiff_t sent = os_socket_send(conn->fd, &iov, 1);
        if (sent == -1)
            return;
        if (sent < 0) {
            conn_fail(conn, strerror(errno), false);
            return;
        }
        conn->out_size -= (size_t)sent;
        memmove(conn->out, conn->out + sent, conn->out_size);
    }
    os_poller_modify(conn->endpoint->poller, conn->fd, OS_POLL_READ, conn);
}

bool conn_send_frame(struct conn *conn, const struct wire_frame *frame, const void *payload)
{
    if (conn->state != CONN_FRAMES)
        return false;
    struct wire_frame header = *frame;
    header.magic = WIRE_FRAME_MAGIC;
    header.version = WIRE_VERSION;
    const size_t size = sizeof header + (size_t)header.length;
    const bool idle = conn->out_size == 0;
    if (conn->out_size + size > conn->out_cap) {
        const size_t cap = conn->out_size + size;
        uint8_t *out = cap <= OUT_MAX || idle ? realloc(conn->out, cap) : NULL;
        if (!out) {
            /* The service thread ends it: the caller may be in the middle of the owner's work. */
            conn->deadline_ns = 1;
            return false;
        }
        conn->out = out;
        conn->out_cap = cap;
    }
    memcpy(conn->out + conn->out_size, &header, sizeof header);
    if (header.length > 0)
        memcpy(conn->out + conn->out_size + sizeof header, payload, (size_t)header.length);
    conn->out_size += size;
    if (!idle)
        return true;
    const struct iovec iov = {conn->out, conn->out_size};
    const ptrdiff_t sent = os_socket_send(conn->fd, &iov, 1);
    if (sent > 0) {
        conn->out_size -= (size_t)sent;
        memmove(conn->out, conn->out + sent, conn->out_size);
    }
    if (conn->out_size > 0) /* also after an error: the event that follows reports it */
        os_poller_modify(conn->endpoint->poller, conn->fd, OS_POLL_READ | OS_POLL_WRITE, conn);
    return true;
}

void conn_on_event(struct conn *conn, unsigned events)
{
    switch (conn->state) {
    case CONN_CONNECTING:
        on_connected(conn);
        break;
    case CONN_WAIT_HELLO:
        on_hello(conn);
        break;
    case CONN_WAIT_CHALLENGE:
        on_challenge(conn);
        break;
    case CONN_WAIT_PROOF:
        on_proof(conn);
        break;
    case CONN_WAIT_ACCEPT:
        on_accept(conn);
        break;
    case CONN_FRAMES:
        if (events & OS_POLL_WRITE)
            write_out(conn);
        if (conn->state == CONN_FRAMES && (events & (OS_POLL_READ | OS_POLL_HUP)))
            on_frames(conn);
        break;
    case CONN_DEAD:
        break;
    }
}

void conn_on_time(struct conn *conn)
{
    switch (conn->state) {
    case CONN_FRAMES:
        conn_fail(conn, "the other side does not read what it is sent", false);
        break;
    case CONN_CONNECTING:
        conn_fail(conn, "no answer", false);
        break;
    default:
        conn_fail(conn, "no answer to the handshake", false);
        break;
    }
}

/* SPDX-License-Identifier: MIT
 *
 * What the machine can do without a library: two processes move the bytes that an operation has to
 * move over one loopback TCP connection, with the socket options that MCCL sets, and poll without
 * sleeping.
 */
#include "lineup.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#define SYSCALL_BYTES ((size_t)256 << 10) /* measured best for exchanges from 64 KiB to 64 MiB */
#define NOTSENT_LOWAT 131072              /* the default of MCCL_TCP_LOWAT */

static const struct job *own;
static int listening = -1, connection = -1;

static void check(bool ok, const char *what)
{
    if (!ok)
        fail("raw: %s: %s", what, strerror(errno));
}

static void open_socket(struct job *job)
{
    own = job;
    check(job->n == 2, "it takes two ranks");
}

static struct sockaddr_in loopback(unsigned port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static void new_id(char *text)
{
    struct sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    listening = socket(AF_INET, SOCK_STREAM, 0);
    check(listening >= 0 && bind(listening, (struct sockaddr *)&address, size) == 0 &&
              listen(listening, 1) == 0 &&
              getsockname(listening, (struct sockaddr *)&address, &size) == 0,
          "listen");
    snprintf(text, ID_BYTES, "%u", (unsigned)ntohs(address.sin_port));
}

static void join(const char *id)
{
    const int on = 1, lowat = NOTSENT_LOWAT;
    if (own->rank == 0) {
        connection = accept(listening, NULL, NULL);
        close(listening);
    } else {
        const struct sockaddr_in address = loopback((unsigned)atoi(id));
        connection = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(connection, (const struct sockaddr *)&address, sizeof address) == 0,
              "connect");
    }
    check(connection >= 0, "connection");
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(connection, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof lowat);
    check(fcntl(connection, F_SETFL, O_NONBLOCK) == 0, "fcntl");
}

static void version(char *text, size_t size)
{
    snprintf(text, size, "one socket, %zu KiB a call", SYSCALL_BYTES >> 10);
}

/* Bytes moved: 0 if the socket is not ready. */
static size_t moved(ssize_t n, const char *what)
{
    check(n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)), what);
    return n > 0 ? (size_t)n : 0;
}

static void exchange(const unsigned char *out, size_t to_send, unsigned char *in, size_t to_receive)
{
    struct patience wait = {0};
    while (to_send > 0 || to_receive > 0) {
        size_t sent = 0, received = 0;
        if (to_send > 0)
            sent =
                moved(send(connection, out, to_send < SYSCALL_BYTES ? to_send : SYSCALL_BYTES, 0),
                      "send");
        if (to_receive > 0)
            received = moved(
                recv(connection, in, to_receive < SYSCALL_BYTES ? to_receive : SYSCALL_BYTES, 0),
                "recv");
        out += sent;
        to_send -= sent;
        in += received;
        to_receive -= received;
        if (sent + received > 0)
            wait = (struct patience){0};
        else
            wait_a_little(&wait, own, "the other side's bytes");
    }
}

static void call(const struct call *c)
{
    unsigned char out = 0, in;
    if (c->op == OP_barrier)
        exchange(&out, 1, &in, 1);
    else
        exchange(c->send, c->send_bytes, c->recv, c->recv_bytes);
}

static void leave(void)
{
    close(connection);
}

const struct library lib_raw = {
    .name = "raw",
    .only_moves = true,
    .open = open_socket,
    .new_id = new_id,
    .join = join,
    .version = version,
    .call = call,
    .leave = leave,
};

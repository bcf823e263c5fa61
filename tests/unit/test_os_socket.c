/* SPDX-License-Identifier: MIT
 *
 * os_socket: properties of sockets, partial transfers, full buffers, end of stream, resets,
 * options.
 */
#include "base/error.h"
#include "os_test.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>

#define PAYLOAD (8u << 20) /* more than the socket buffers hold */

static uint8_t pattern(size_t position)
{
    return (uint8_t)(position * 131 + (position >> 8) * 17 + 5);
}

static int int_option(int fd, int level, int option)
{
    int value = -1;
    socklen_t size = sizeof(value);

    CHECK_EQ_I64(getsockopt(fd, level, option, &value, &size), 0);
    return value;
}

static void test_properties(void)
{
    int pair[2];

    test_tcp_pair(pair);
    for (int i = 0; i < 2; i++) { /* the dialled and the accepted one alike */
        CHECK((fcntl(pair[i], F_GETFL) & O_NONBLOCK) != 0);
        CHECK((fcntl(pair[i], F_GETFD) & FD_CLOEXEC) != 0);
        CHECK(int_option(pair[i], IPPROTO_TCP, TCP_NODELAY) != 0);
        CHECK_EQ_I64(os_socket_error(pair[i]), 0);
        os_fd_close(pair[i]);
        CHECK_EQ_I64(fcntl(pair[i], F_GETFD), -1);
    }
    CHECK_EQ_I64(os_socket_stream(12345), -1);

    const int local = os_socket_stream(AF_UNIX);
    CHECK(local >= 0 && (fcntl(local, F_GETFL) & O_NONBLOCK) != 0);
    CHECK_EQ_I64(os_socket_notsent_lowat(local, 1), MCCL_ERR_UNSUPPORTED);
    CHECK_EQ_I64(os_socket_congestion(local, "reno"), MCCL_ERR_UNSUPPORTED);
    os_fd_close(local);
}

/* Cuts what is left of `data` into three pieces of odd lengths. */
static int pieces(uint8_t *data, size_t size, struct iovec iov[3])
{
    const size_t first = size / 3, second = size / 5;

    iov[0] = (struct iovec){.iov_base = data, .iov_len = first};
    iov[1] = (struct iovec){.iov_base = data + first, .iov_len = second};
    iov[2] = (struct iovec){.iov_base = data + first + second, .iov_len = size - first - second};
    return 3;
}

static void test_transfer(void)
{
    uint8_t *out = malloc(PAYLOAD), *in = malloc(PAYLOAD + 1);
    size_t sent = 0, received = 0;
    struct iovec iov[3];
    bool was_full = false, was_partial = false;
    int pair[2];

    CHECK(out != NULL && in != NULL);
    for (size_t i = 0; i < PAYLOAD; i++)
        out[i] = pattern(i);
    test_tcp_pair(pair);
    CHECK_EQ_I64(test_recv(pair[1], in, 1), -1); /* nothing there yet */
    while (received < PAYLOAD) {
        while (sent < PAYLOAD) {
            const ptrdiff_t n =
                os_socket_send(pair[0], iov, pieces(out + sent, PAYLOAD - sent, iov));
            CHECK(n == -1 || n > 0);
            if (n == -1) {
                was_full = true;
                break;
            }
            was_partial |= (size_t)n < PAYLOAD - sent;
            sent += (size_t)n;
        }
        const ptrdiff_t n =
            os_socket_recv(pair[1], iov, pieces(in + received, PAYLOAD + 1 - received, iov));
        CHECK(n == -1 || n > 0);
        received += n > 0 ? (size_t)n : 0;
    }
    CHECK(was_full && was_partial);
    CHECK_EQ_I64(received, PAYLOAD);
    for (size_t i = 0; i < PAYLOAD; i++)
        CHECK_EQ_I64(in[i], pattern(i));

    os_fd_close(pair[0]);
    ptrdiff_t n;
    while ((n = test_recv(pair[1], in, 1)) == -1)
        os_thread_yield();
    CHECK_EQ_I64(n, 0); /* end of stream */
    os_fd_close(pair[1]);
    free(out);
    free(in);
}

/* Many entries and empty ones: what one call cannot take is a partial transfer. */
static void test_many_entries(void)
{
    enum { N = 150 };
    struct iovec iov[N];
    uint8_t out[N * 3], in[N * 3];
    size_t sent = 0, received = 0;
    int pair[2], entry = 0;

    for (int i = 0; i < N; i++)
        iov[i] = (struct iovec){.iov_base = out + 3 * i, .iov_len = i % 7 == 3 ? 0 : 3};
    for (size_t i = 0; i < sizeof(out); i++)
        out[i] = pattern(i);
    test_tcp_pair(pair);
    while (entry < N) {
        ptrdiff_t n = os_socket_send(pair[0], iov + entry, N - entry);
        CHECK(n > 0);
        sent += (size_t)n;
        while (entry < N &&
               (size_t)n >= iov[entry].iov_len) /* small messages end between entries */
            n -= (ptrdiff_t)iov[entry++].iov_len;
        CHECK_EQ_I64(n, 0);
    }
    while (received < sent) {
        const ptrdiff_t n = test_recv(pair[1], in + received, sizeof(in) - received);
        CHECK(n == -1 || n > 0);
        received += n > 0 ? (size_t)n : 0;
    }
    size_t at = 0;
    for (size_t i = 0; i < N; i++) {
        for (size_t j = 0; j < iov[i].iov_len; j++)
            CHECK_EQ_I64(in[at++], pattern(3 * i + j));
    }
    CHECK_EQ_I64(at, received);
    os_fd_close(pair[0]);
    os_fd_close(pair[1]);
}

static void test_reset(void)
{
    int pair[2];
    char byte;
    ptrdiff_t n;

    signal(SIGPIPE, SIG_DFL); /* it would end this program */
    test_tcp_pair(pair);
    os_socket_reset_on_close(pair[0]);
    os_fd_close(pair[0]);
    while ((n = test_recv(pair[1], &byte, 1)) == -1)
        os_thread_yield();
    CHECK_EQ_I64(n, -2);
    CHECK_EQ_I64(errno, ECONNRESET);
    CHECK_EQ_I64(test_send(pair[1], "x", 1), -2);
    CHECK_EQ_I64(errno, EPIPE);
    os_fd_close(pair[1]);
}

static void test_accept(void)
{
    struct sockaddr_storage peer;
    struct os_address address;
    char text[64];
    uint16_t port;
    const int listener = test_listen(&port);

    CHECK_EQ_I64(os_socket_accept(listener, &peer), -1);
    CHECK_EQ_I64(errno, EAGAIN);
    const int dialled = test_dial(port);
    const int accepted = os_socket_accept(listener, &peer);
    CHECK(accepted >= 0);
    os_address_from_sockaddr(&peer, &address);
    CHECK(address.port != 0 && os_address_is_loopback(&address));
    address.port = 0;
    os_address_format(&address, text, sizeof(text));
    CHECK_EQ_STR(text, "127.0.0.1");
    os_fd_close(dialled);
    os_fd_close(accepted);
    os_fd_close(listener);
}

static void test_options(void)
{
    size_t granted = 0, granted_more = 0;
    const int fd = os_socket_stream(AF_INET);

    CHECK_EQ_I64(os_socket_buffers(fd, 100000, &granted), MCCL_OK);
    CHECK_EQ_I64(granted, 100000);
    CHECK_EQ_I64(os_socket_buffers(fd, (size_t)1 << 40, &granted_more),
                 MCCL_OK); /* clamped, and told */
    CHECK(granted_more >= granted && granted_more < (size_t)1 << 40);
    CHECK_EQ_I64(os_socket_notsent_lowat(fd, 131072), MCCL_OK);
    CHECK_EQ_I64(int_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT), 131072);
    CHECK_EQ_I64(os_socket_congestion(fd, "no such thing"), MCCL_ERR_UNSUPPORTED);
    CHECK_HAS(error_text(), "'no such thing'");
    os_socket_keepalive(fd, 7);
    CHECK(int_option(fd, SOL_SOCKET, SO_KEEPALIVE) != 0);
#if defined(__linux__)
    CHECK_EQ_I64(int_option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 7);
#else
    CHECK_EQ_I64(int_option(fd, IPPROTO_TCP, TCP_KEEPALIVE), 7);
#endif
    os_fd_close(fd);
    CHECK_EQ_I64(os_socket_buffers(-1, 1000, &granted), MCCL_ERR_SYSTEM);
}

int main(void)
{
    test_properties();
    test_transfer();
    test_many_entries();
    test_reset();
    test_accept();
    test_options();
    return 0;
}

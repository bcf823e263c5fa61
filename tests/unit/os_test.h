/* SPDX-License-Identifier: MIT
 *
 * What the tests of src/os share: a connected pair of TCP sockets, and calls with one buffer.
 */
#ifndef MCCL_TESTS_OS_TEST_H
#define MCCL_TESTS_OS_TEST_H

#include "os/os.h"
#include "support/check.h"

#include <errno.h>
#include <netinet/in.h>
#include <sys/uio.h>

/* A listener on 127.0.0.1; *port is what the system chose. */
static inline int test_listen(uint16_t *port)
{
    struct sockaddr_storage storage;
    socklen_t size = sizeof(storage);
    struct os_address address;
    const int listener = os_socket_stream(AF_INET);

    CHECK(listener >= 0);
    CHECK(os_address_parse("127.0.0.1", &address));
    const socklen_t length = os_address_to_sockaddr(&address, 0, &storage);
    CHECK_EQ_I64(bind(listener, (struct sockaddr *)&storage, length), 0);
    CHECK_EQ_I64(listen(listener, 16), 0);
    CHECK_EQ_I64(getsockname(listener, (struct sockaddr *)&storage, &size), 0);
    os_address_from_sockaddr(&storage, &address);
    *port = address.port;
    return listener;
}

/* Starts connecting to 127.0.0.1:port; returns the socket. */
static inline int test_dial(uint16_t port)
{
    struct sockaddr_storage storage;
    struct os_address address;
    const int fd = os_socket_stream(AF_INET);

    CHECK(fd >= 0);
    CHECK(os_address_parse("127.0.0.1", &address));
    address.port = port;
    const socklen_t length = os_address_to_sockaddr(&address, 0, &storage);
    CHECK(connect(fd, (struct sockaddr *)&storage, length) == 0 || errno == EINPROGRESS);
    return fd;
}

/* A connected pair: pair[0] dialled, pair[1] was accepted. */
static inline void test_tcp_pair(int pair[2])
{
    struct sockaddr_storage peer;
    uint16_t port;
    const int listener = test_listen(&port);

    pair[0] = test_dial(port);
    while ((pair[1] = os_socket_accept(listener, &peer)) == -1) {
        CHECK_EQ_I64(errno, EAGAIN);
        os_thread_yield();
    }
    os_fd_close(listener);
}

static inline ptrdiff_t test_send(int fd, const void *data, size_t size)
{
    const struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = size};

    return os_socket_send(fd, &iov, 1);
}

static inline ptrdiff_t test_recv(int fd, void *data, size_t size)
{
    const struct iovec iov = {.iov_base = data, .iov_len = size};

    return os_socket_recv(fd, &iov, 1);
}

#endif

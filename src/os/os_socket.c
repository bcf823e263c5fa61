/* SPDX-License-Identifier: MIT
 *
 * Stream sockets with the differences between Linux and macOS evened out. Any thread; each socket
 * belongs to one thread at a time per direction.
 */
#include "os/os_internal.h"

#include "base/error.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/uio.h>

#if defined(__APPLE__)
#define SEND_FLAGS 0 /* SO_NOSIGPIPE does it: MSG_NOSIGNAL is not in every kernel */
#define TCP_IDLE_OPTION TCP_KEEPALIVE
#else
#define SEND_FLAGS MSG_NOSIGNAL
#define TCP_IDLE_OPTION TCP_KEEPIDLE
#endif

#define MAX_CALL_BYTES ((size_t)1 << 30) /* macOS refuses more than INT_MAX, Linux cuts there */
#define MAX_CALL_IOVECS 64
#define MIN_BUFFER_BYTES 65536
#define PROBE_INTERVAL_S 3
#define PROBE_COUNT 5

static int set_int(int fd, int level, int option, int value)
{
    return setsockopt(fd, level, option, &value, sizeof(value));
}

static int to_int(size_t value)
{
    return value > INT_MAX ? INT_MAX : (int)value;
}

/* What an accepted or a new socket needs on either system. False and errno. */
static bool prepare(int fd, int family)
{
#if defined(__APPLE__)
    if (!os_fd_set_flags(fd) || set_int(fd, SOL_SOCKET, SO_NOSIGPIPE, 1) != 0)
        return false;
#endif
    return (family != AF_INET && family != AF_INET6) ||
           set_int(fd, IPPROTO_TCP, TCP_NODELAY, 1) == 0;
}

int os_socket_stream(int family)
{
    os_fd_open_begin();
#if defined(__APPLE__)
    const int fd = os_fd_open_end(socket(family, SOCK_STREAM, 0));
#else
    const int fd = os_fd_open_end(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
#endif
    if (fd != -1 && !prepare(fd, family)) {
        os_fd_close(fd);
        return -1;
    }
    return fd;
}

static int accept_once(int listener, struct sockaddr_storage *peer)
{
    socklen_t size = sizeof(*peer);

    memset(peer, 0, sizeof(*peer));
    os_fd_open_begin();
#if defined(__APPLE__)
    const int fd = os_fd_open_end(accept(listener, (struct sockaddr *)peer, &size));
#else
    const int fd = os_fd_open_end(
        accept4(listener, (struct sockaddr *)peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC));
#endif
    if (fd != -1 && !prepare(fd, peer->ss_family)) {
        os_fd_close(fd);
        errno = ECONNABORTED; /* macOS: a connection that was reset in the queue takes no options */
        return -1;
    }
    return fd;
}

int os_socket_accept(int listener, struct sockaddr_storage *peer)
{
    int fd;

    do /* a connection that died in the queue is no news to the caller: take the next */
        fd = accept_once(listener, peer);
    while (fd == -1 && (errno == EINTR || errno == ECONNABORTED || errno == EPROTO));
    return fd;
}

/* Copies as much of `iov` into `part` as one call may carry; returns the number of entries. */
static int cut(const struct iovec *iov, int n_iov, struct iovec part[MAX_CALL_IOVECS])
{
    size_t room = MAX_CALL_BYTES;
    int n = 0;

    for (; n < n_iov && n < MAX_CALL_IOVECS && room > 0; n++) {
        part[n] = iov[n];
        if (part[n].iov_len > room)
            part[n].iov_len = room;
        room -= part[n].iov_len;
    }
    return n;
}

/* Sorts errno of a failed transfer into -1 (try again) and -2 (error). */
static ptrdiff_t transfer_failure(void)
{
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
        return -1;
    if (errno == EPROTOTYPE) /* macOS: the socket is being torn down by a reset */
        errno = ECONNRESET;
    return -2;
}

ptrdiff_t os_socket_send(int fd, const struct iovec *iov, int n_iov)
{
    struct iovec part[MAX_CALL_IOVECS];
    struct msghdr message = {.msg_iov = part};
    ptrdiff_t n;

    const int n_part = cut(iov, n_iov, part);
    message.msg_iovlen = (__typeof__(message.msg_iovlen))n_part; /* size_t on Linux, int on macOS */
    do
        n = sendmsg(fd, &message, SEND_FLAGS);
    while (n < 0 && errno == EINTR);
    return n < 0 ? transfer_failure() : n;
}

ptrdiff_t os_socket_recv(int fd, const struct iovec *iov, int n_iov)
{
    struct iovec part[MAX_CALL_IOVECS];
    struct msghdr message = {.msg_iov = part};
    ptrdiff_t n;

    const int n_part = cut(iov, n_iov, part);
    message.msg_iovlen = (__typeof__(message.msg_iovlen))n_part;
    do
        n = recvmsg(fd, &message, 0);
    while (n < 0 && errno == EINTR);
    return n < 0 ? transfer_failure() : n;
}

int os_socket_error(int fd)
{
    int error = 0;
    socklen_t size = sizeof(error);

    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

/* Sets one buffer and returns what the system made of it, or 0 and errno. */
static size_t set_buffer(int fd, int option, size_t bytes)
{
    int granted = 0;
    socklen_t size = sizeof(granted);

    /* Linux clamps silently; macOS does so too or says ENOBUFS, depending on the release. */
    while (set_int(fd, SOL_SOCKET, option, to_int(bytes)) != 0) {
        if (errno != ENOBUFS || bytes <= MIN_BUFFER_BYTES)
            return 0;
        bytes /= 2;
    }
    if (getsockopt(fd, SOL_SOCKET, option, &granted, &size) != 0)
        return 0;
#if defined(__linux__)
    granted /= 2; /* Linux reports twice the value: the other half is for its own bookkeeping */
#endif
    return (size_t)granted;
}

mccl_result os_socket_buffers(int fd, size_t bytes, size_t *granted)
{
    const size_t send_bytes = set_buffer(fd, SO_SNDBUF, bytes);

    if (send_bytes == 0)
        return os_error("setsockopt SO_SNDBUF");
    const size_t recv_bytes = set_buffer(fd, SO_RCVBUF, bytes);
    if (recv_bytes == 0)
        return os_error("setsockopt SO_RCVBUF");
    *granted = send_bytes < recv_bytes ? send_bytes : recv_bytes;
    return MCCL_OK;
}

mccl_result os_socket_notsent_lowat(int fd, size_t bytes)
{
#if defined(TCP_NOTSENT_LOWAT)
    if (set_int(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, to_int(bytes)) == 0)
        return MCCL_OK;
    return error_set(MCCL_ERR_UNSUPPORTED, "setsockopt TCP_NOTSENT_LOWAT %zu failed: %s (errno %d)",
                     bytes, strerror(errno), errno);
#else
    (void)fd;
    return error_set(MCCL_ERR_UNSUPPORTED,
                     "this system has no TCP_NOTSENT_LOWAT (%zu was asked for)", bytes);
#endif
}

mccl_result os_socket_congestion(int fd, const char *name)
{
#if defined(TCP_CONGESTION)
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name)) == 0)
        return MCCL_OK;
    return error_set(
        MCCL_ERR_UNSUPPORTED,
        "congestion control '%s' was refused: %s (errno %d); this host's are listed in "
        "/proc/sys/net/ipv4/tcp_available_congestion_control",
        name, strerror(errno), errno);
#else
    (void)fd;
    return error_set(MCCL_ERR_UNSUPPORTED, "congestion control '%s': this system offers no choice",
                     name);
#endif
}

void os_socket_congestion_name(int fd, char *name, size_t size)
{
    name[0] = '\0';
#if defined(TCP_CONGESTION)
    socklen_t length = (socklen_t)size - 1;
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0)
        name[length] = '\0';
#else
    (void)fd;
    (void)size;
#endif
}

void os_socket_keepalive(int fd, int idle_s)
{
    set_int(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_int(fd, IPPROTO_TCP, TCP_IDLE_OPTION, idle_s);
    set_int(fd, IPPROTO_TCP, TCP_KEEPINTVL, PROBE_INTERVAL_S);
    set_int(fd, IPPROTO_TCP, TCP_KEEPCNT, PROBE_COUNT);
}

void os_socket_reset_on_close(int fd)
{
    const struct linger now = {.l_onoff = 1, .l_linger = 0};

    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
}

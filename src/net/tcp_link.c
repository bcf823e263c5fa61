/* SPDX-License-Identifier: MIT
 *
 * TCP: a socket as a stream, and the options of sockets.
 */
#include "net/stream.h"

#include "base/error.h"
#include "base/log.h"
#include "os/os.h"

#include <stdlib.h>

struct tcp_stream {
    struct stream base;
    int fd;
};

static int fd_of(const struct stream *stream)
{
    return ((const struct tcp_stream *)(const void *)stream)->fd;
}

static ptrdiff_t tcp_send(struct stream *stream, const struct iovec *iov, int n)
{
    return os_socket_send(fd_of(stream), iov, n);
}

static ptrdiff_t tcp_recv(struct stream *stream, const struct iovec *iov, int n)
{
    return os_socket_recv(fd_of(stream), iov, n);
}

static void tcp_end(struct stream *stream)
{
    (void)shutdown(fd_of(stream), SHUT_WR); /* fails when the connection has ended already */
}

static void tcp_close(struct stream *stream)
{
    os_fd_close(fd_of(stream));
    free(stream);
}

static const struct stream_ops tcp_ops = {
    .send = tcp_send,
    .recv = tcp_recv,
    .end = tcp_end,
    .descriptor = fd_of,
    .close = tcp_close,
};

mccl_result link_tcp_create(int fd, const void *early, size_t early_size, struct link **link)
{
    struct tcp_stream *tcp = calloc(1, sizeof *tcp);
    if (!tcp) {
        os_fd_close(fd);
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a TCP link");
    }
    tcp->base.ops = &tcp_ops;
    tcp->fd = fd;
    return link_over_stream(&tcp->base, early, early_size, link);
}

void link_tcp_prepare(int fd, const struct link_tcp_options *options)
{
    static _Atomic bool clamping_reported;
    if (options->sock_bufsize > 0) {
        size_t granted = 0;
        if (os_socket_buffers(fd, options->sock_bufsize, &granted) != MCCL_OK)
            log_warn("MCCL_SOCK_BUFSIZE=%zu: the system refused it: %s", options->sock_bufsize,
                     error_text());
        else if (granted < options->sock_bufsize && options->bufsize_chosen &&
                 !atomic_exchange(&clamping_reported, true))
            log_warn("MCCL_SOCK_BUFSIZE=%zu: the system granted %zu", options->sock_bufsize,
                     granted);
        else
            log_info("socket buffers: asked for %zu, granted %zu", options->sock_bufsize, granted);
    }
    if (options->notsent_lowat > 0 &&
        os_socket_notsent_lowat(fd, options->notsent_lowat) == MCCL_OK)
        log_debug("TCP_NOTSENT_LOWAT %zu", options->notsent_lowat);
    /* bbr, the default of many Linux hosts, paces even loopback and halves its rate
     * (docs/rationale.md); where the system does not allow the change the default stays. */
    if (os_socket_congestion(fd, "cubic") == MCCL_OK)
        log_debug("congestion control: cubic");
}

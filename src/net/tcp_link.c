/* SPDX-License-Identifier: MIT
 *
 * TCP: a socket as a stream, and the options of sockets.
 */
#include "net/channel_link.h"

#include "base/error.h"
#include "base/log.h"
#include "os/os.h"

#include <stdlib.h>
#include <string.h>

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

/* NULL when memory is short; the socket is closed then. */
static struct stream *wrap(int fd)
{
    struct tcp_stream *tcp = calloc(1, sizeof *tcp);
    if (!tcp) {
        os_fd_close(fd);
        error_set(MCCL_ERR_NO_MEMORY, "no memory for a TCP link");
        return NULL;
    }
    tcp->base.ops = &tcp_ops;
    tcp->fd = fd;
    return &tcp->base;
}

mccl_result link_tcp_create(int fd, const void *early, size_t early_size, struct link **link)
{
    struct stream *stream = wrap(fd);
    return stream ? link_over_stream(stream, early, early_size, link) : MCCL_ERR_NO_MEMORY;
}

mccl_result link_tcp_create_channels(const int *fds, unsigned n, struct link **link)
{
    struct stream *streams[WIRE_CHANNELS_MAX];
    bool complete = true;
    MCCL_ASSERT(n >= 2 && n <= WIRE_CHANNELS_MAX);
    for (unsigned i = 0; i < n; i++) {
        streams[i] = wrap(fds[i]);
        complete = complete && streams[i];
    }
    if (complete)
        return link_over_channels(streams, n, link);
    for (unsigned i = 0; i < n; i++)
        if (streams[i])
            tcp_close(streams[i]);
    return MCCL_ERR_NO_MEMORY;
}

/* bbr, the default of many Linux hosts, paces even loopback and halves its rate
 * (docs/rationale.md); everything else is the system's business. Every process may have reno, and
 * cubic where the system allows it. */
static void avoid_pacing(int fd)
{
    static const char *const instead[] = {"cubic", "reno"};
    static _Atomic bool reported;
    char name[16];
    os_socket_congestion_name(fd, name, sizeof name);
    if (strncmp(name, "bbr", 3) != 0)
        return;
    for (size_t i = 0; i < sizeof instead / sizeof *instead; i++)
        if (os_socket_congestion(fd, instead[i]) == MCCL_OK) {
            if (!atomic_exchange(&reported, true))
                log_info("congestion control: %s instead of the system's %s", instead[i], name);
            return;
        }
    if (!atomic_exchange(&reported, true))
        log_info("congestion control: %s stays, which is slow within a host: %s", name,
                 error_text());
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
    avoid_pacing(fd);
}

/* SPDX-License-Identifier: MIT
 *
 * The poller on Linux: epoll, with an eventfd for wake-ups. One thread waits; any thread adds,
 * removes, wakes.
 */
#include "os/os_internal.h"

#include "base/error.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define BATCH 64 /* events taken from the system in one call */

struct os_poller {
    int epoll_fd;
    int wake_fd; /* registered with data NULL, level-triggered: a wake-up waits until it is read */
};

mccl_result os_poller_create(struct os_poller **poller)
{
    struct epoll_event wake = {.events = EPOLLIN, .data.ptr = NULL};
    mccl_result result;
    struct os_poller *self = malloc(sizeof(*self));

    if (self == NULL)
        return error_set(MCCL_ERR_NO_MEMORY, "out of memory for a poller");
    self->wake_fd = -1;
    os_fd_open_begin();
    self->epoll_fd = os_fd_open_end(epoll_create1(EPOLL_CLOEXEC));
    if (self->epoll_fd == -1) {
        result = os_error("epoll_create1");
        goto fail;
    }
    os_fd_open_begin();
    self->wake_fd = os_fd_open_end(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (self->wake_fd == -1) {
        result = os_error("eventfd");
        goto fail;
    }
    if (epoll_ctl(self->epoll_fd, EPOLL_CTL_ADD, self->wake_fd, &wake) != 0) {
        result = os_error("epoll_ctl");
        goto fail;
    }
    *poller = self;
    return MCCL_OK;

fail:
    os_poller_destroy(self);
    return result;
}

void os_poller_destroy(struct os_poller *poller)
{
    if (poller == NULL)
        return;
    os_fd_close(poller->wake_fd);
    os_fd_close(poller->epoll_fd);
    free(poller);
}

static mccl_result control(struct os_poller *poller, int operation, int fd, unsigned events,
                           void *data)
{
    struct epoll_event event = {.events = EPOLLRDHUP, .data.ptr = data};

    MCCL_ASSERT(data != NULL);
    if (events & OS_POLL_READ)
        event.events |= EPOLLIN;
    if (events & OS_POLL_WRITE)
        event.events |= EPOLLOUT;
    if (events & OS_POLL_EDGE)
        event.events |= EPOLLET;
    return epoll_ctl(poller->epoll_fd, operation, fd, &event) == 0 ? MCCL_OK
                                                                   : os_error("epoll_ctl");
}

mccl_result os_poller_add(struct os_poller *poller, int fd, unsigned events, void *data)
{
    return control(poller, EPOLL_CTL_ADD, fd, events, data);
}

mccl_result os_poller_modify(struct os_poller *poller, int fd, unsigned events, void *data)
{
    return control(poller, EPOLL_CTL_MOD, fd, events, data);
}

void os_poller_remove(struct os_poller *poller, int fd)
{
    epoll_ctl(poller->epoll_fd, EPOLL_CTL_DEL, fd, NULL); /* fails only if it is not there */
}

static int to_ms(int64_t timeout_ns)
{
    if (timeout_ns < 0)
        return -1;
    return timeout_ns >= INT_MAX * OS_MS ? INT_MAX : (int)((timeout_ns + OS_MS - 1) / OS_MS);
}

static unsigned from_epoll(uint32_t events)
{
    return (events & EPOLLIN ? OS_POLL_READ : 0u) | (events & EPOLLOUT ? OS_POLL_WRITE : 0u) |
           (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR) ? OS_POLL_HUP : 0u);
}

int os_poller_wait(struct os_poller *poller, struct os_poll_event *events, int max_events,
                   int64_t timeout_ns)
{
    struct epoll_event batch[BATCH];
    int n_events = 0;
    uint64_t wake_ups;

    MCCL_ASSERT(max_events > 0);
    const int n = epoll_wait(poller->epoll_fd, batch, max_events < BATCH ? max_events : BATCH,
                             to_ms(timeout_ns));
    MCCL_ASSERT(n >= 0 || errno == EINTR);
    for (int i = 0; i < n; i++) {
        if (batch[i].data.ptr == NULL) {
            (void)!read(poller->wake_fd, &wake_ups,
                        sizeof(wake_ups)); /* another event may have read it: fine */
            continue;
        }
        events[n_events++] = (struct os_poll_event){.data = batch[i].data.ptr,
                                                    .events = from_epoll(batch[i].events)};
    }
    return n_events;
}

void os_poller_wake(struct os_poller *poller)
{
    const int saved_errno = errno;
    const uint64_t one = 1;

    (void)!write(poller->wake_fd, &one,
                 sizeof(one)); /* EAGAIN: 2^64 wake-ups are pending, one is enough */
    errno = saved_errno;
}

/* SPDX-License-Identifier: MIT
 *
 * The poller on macOS: kqueue, with an EVFILT_USER event for wake-ups. One thread waits; any thread
 * adds, removes, wakes.
 *
 * kqueue has one entry per (descriptor, filter) where epoll has one per descriptor; os_poller_wait
 * folds the two of a descriptor into one event when they come in the same batch. The end of a
 * stream is seen by the filters that are registered: the other side's close() by READ only.
 */
#include "os/os_internal.h"

#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/event.h>
#include <time.h>

#define BATCH 64 /* events taken from the system in one call */
#define WAKE_IDENT 0

struct os_poller {
    int kqueue_fd;
};

static int change(int kqueue_fd, int fd, int16_t filter, uint16_t flags, uint32_t fflags,
                  void *data)
{
    struct kevent event;
    int result;

    EV_SET(&event, (uintptr_t)fd, filter, flags, fflags, 0, data);
    do
        result = kevent(kqueue_fd, &event, 1, NULL, 0, NULL);
    while (result == -1 && errno == EINTR);
    return result;
}

mccl_result os_poller_create(struct os_poller **poller)
{
    mccl_result result;
    struct os_poller *self = malloc(sizeof(*self));

    if (self == NULL)
        return error_set(MCCL_ERR_NO_MEMORY, "out of memory for a poller");
    os_fd_open_begin();
    self->kqueue_fd = os_fd_open_end(kqueue());
    if (self->kqueue_fd == -1) {
        result = os_error("kqueue");
        goto fail;
    }
    fcntl(self->kqueue_fd, F_SETFD, FD_CLOEXEC); /* a kqueue has no non-blocking mode to set */
    if (change(self->kqueue_fd, WAKE_IDENT, EVFILT_USER, EV_ADD | EV_CLEAR, 0, NULL) != 0) {
        result = os_error("kevent");
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
    os_fd_close(poller->kqueue_fd);
    free(poller);
}

/* Brings one filter of `fd` to the wanted state. Deleting first makes edge mode and re-arming
 * behave as with epoll: what is ready now is reported again. */
static mccl_result set_filter(int kqueue_fd, int fd, int16_t filter, bool wanted, bool edge,
                              void *data)
{
    if (change(kqueue_fd, fd, filter, EV_DELETE, 0, NULL) != 0 && errno != ENOENT)
        return os_error("kevent");
    if (wanted && change(kqueue_fd, fd, filter, edge ? EV_ADD | EV_CLEAR : EV_ADD, 0, data) != 0)
        return os_error("kevent");
    return MCCL_OK;
}

mccl_result os_poller_modify(struct os_poller *poller, int fd, unsigned events, void *data)
{
    const bool edge = (events & OS_POLL_EDGE) != 0;

    MCCL_ASSERT(data != NULL);
    TRY(set_filter(poller->kqueue_fd, fd, EVFILT_READ, (events & OS_POLL_READ) != 0, edge, data));
    return set_filter(poller->kqueue_fd, fd, EVFILT_WRITE, (events & OS_POLL_WRITE) != 0, edge,
                      data);
}

mccl_result os_poller_add(struct os_poller *poller, int fd, unsigned events, void *data)
{
    return os_poller_modify(poller, fd, events, data);
}

void os_poller_remove(struct os_poller *poller, int fd)
{
    change(poller->kqueue_fd, fd, EVFILT_READ, EV_DELETE, 0,
           NULL); /* each fails only if it is not there */
    change(poller->kqueue_fd, fd, EVFILT_WRITE, EV_DELETE, 0, NULL);
}

static unsigned from_kevent(const struct kevent *event)
{
    return (event->filter == EVFILT_READ ? OS_POLL_READ : OS_POLL_WRITE) |
           (event->flags & (EV_EOF | EV_ERROR) ? OS_POLL_HUP : 0u);
}

/* Position in idents[0..n) of `ident`, or n. */
static int find_ident(const uintptr_t *idents, int n, uintptr_t ident)
{
    int i = 0;

    while (i < n && idents[i] != ident)
        i++;
    return i;
}

int os_poller_wait(struct os_poller *poller, struct os_poll_event *events, int max_events,
                   int64_t timeout_ns)
{
    struct kevent batch[BATCH];
    uintptr_t idents[BATCH]; /* descriptor behind events[i] */
    int n_events = 0;
    const struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / OS_SEC),
                                     .tv_nsec = (long)(timeout_ns % OS_SEC)};

    MCCL_ASSERT(max_events > 0);
    const int n = kevent(poller->kqueue_fd, NULL, 0, batch, max_events < BATCH ? max_events : BATCH,
                         timeout_ns < 0 ? NULL : &timeout);
    MCCL_ASSERT(n >= 0 || errno == EINTR);
    for (int i = 0; i < n; i++) {
        if (batch[i].filter == EVFILT_USER)
            continue;
        const int at = find_ident(idents, n_events, batch[i].ident);
        if (at == n_events) {
            idents[n_events] = batch[i].ident;
            events[n_events++] = (struct os_poll_event){.data = batch[i].udata};
        }
        events[at].events |= from_kevent(&batch[i]);
    }
    return n_events;
}

void os_poller_wake(struct os_poller *poller)
{
    const int saved_errno = errno;

    change(poller->kqueue_fd, WAKE_IDENT, EVFILT_USER, 0, NOTE_TRIGGER, NULL);
    errno = saved_errno;
}

/* SPDX-License-Identifier: MIT
 *
 * Knows every descriptor that MCCL holds, so that a forked child can close them at once. Without
 * that a data loader's worker would keep our sockets open, and peers would not notice for a long
 * time that a rank died. Any thread.
 *
 * One bit per descriptor number, under a mutex that the fork handlers take too: a fork never falls
 * between the making of a descriptor and its entry here, nor between its removal and close(). The
 * table covers numbers below 2^20, the default of fs.nr_open; a higher one is merely close-on-exec.
 */
#include "os/os_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#define MAX_FDS (1 << 20)
#define WORD_BITS 64

static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t
    g_tracked[MAX_FDS / WORD_BITS]; /* under g_lock; 128 KiB, pages untouched until used */
static int g_used_words;            /* under g_lock; words above are zero */
static _Atomic uint32_t g_generation;

static void before_fork(void)
{
    pthread_mutex_lock(&g_lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&g_lock);
}

/* Only async-signal-safe work here: the child may have been a thread among many. */
static void after_fork_in_child(void)
{
    for (int word = 0; word < g_used_words; word++) {
        for (; g_tracked[word] != 0; g_tracked[word] &= g_tracked[word] - 1)
            close(word * WORD_BITS + __builtin_ctzll(g_tracked[word]));
    }
    g_used_words = 0;
    atomic_fetch_add_explicit(&g_generation, 1,
                              memory_order_relaxed); /* the child has one thread */
    pthread_mutex_unlock(&g_lock);
}

static void register_handlers(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void os_fork_init(void)
{
    pthread_once(&g_once, register_handlers);
}

uint32_t os_fork_generation(void)
{
    os_fork_init(); /* whoever keeps the number wants later forks counted */
    return atomic_load_explicit(&g_generation, memory_order_relaxed);
}

static void track_locked(int fd)
{
    const int word = fd / WORD_BITS;

    if (fd < 0 || fd >= MAX_FDS)
        return;
    g_tracked[word] |= UINT64_C(1) << (fd % WORD_BITS);
    if (g_used_words <= word)
        g_used_words = word + 1;
}

static bool untrack_locked(int fd)
{
    const uint64_t bit = UINT64_C(1) << (fd % WORD_BITS);

    if (fd >= MAX_FDS || (g_tracked[fd / WORD_BITS] & bit) == 0)
        return false;
    g_tracked[fd / WORD_BITS] &= ~bit;
    return true;
}

void os_fd_track(int fd)
{
    os_fd_open_begin();
    os_fd_open_end(fd);
}

void os_fd_open_begin(void)
{
    os_fork_init();
    pthread_mutex_lock(&g_lock);
}

int os_fd_open_end(int fd)
{
    const int saved_errno = errno;

    track_locked(fd);
    pthread_mutex_unlock(&g_lock);
    errno = saved_errno;
    return fd;
}

void os_fd_close(int fd)
{
    const int saved_errno = errno;

    if (fd < 0)
        return;
    os_fork_init();
    pthread_mutex_lock(&g_lock);
    /* A forked child that takes down an object of its parent must not touch the number: the
     * descriptor was closed by the fork handler, and the number may be a file of the program's by
     * now. */
    if (untrack_locked(fd) || atomic_load_explicit(&g_generation, memory_order_relaxed) == 0)
        close(fd); /* never repeated on EINTR: the number is free again on Linux and on macOS */
    pthread_mutex_unlock(&g_lock);
    errno = saved_errno;
}

int os_fd_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > INT_MAX) /* or infinite */
        return INT_MAX;
    return (int)limit.rlim_cur;
}

int os_fd_free(int wanted)
{
    const int limit = os_fd_limit();
    int n_free = 0;

    for (int fd = 0; fd < limit && n_free < wanted; fd++)
        n_free += fcntl(fd, F_GETFD) == -1;
    return n_free;
}

bool os_fd_set_flags(int fd)
{
    const int flags = fcntl(fd, F_GETFL);

    return flags != -1 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) != -1 &&
           fcntl(fd, F_SETFD, FD_CLOEXEC) != -1;
}

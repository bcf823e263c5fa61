/* SPDX-License-Identifier: MIT
 *
 * os_fd and fork: a child has none of MCCL's descriptors, the parent keeps them all, the other side
 * of a connection learns of a death at once although a child lives, and a child cannot close what
 * is not its own.
 */
#include "os_test.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

static void expect_exit_0(pid_t child)
{
    int status;

    CHECK_EQ_I64(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    CHECK_EQ_I64(WEXITSTATUS(status), 0);
}

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD) != -1;
}

static int count_open(void)
{
    int n = 0;

    for (int fd = 0; fd < 4096; fd++)
        n += is_open(fd);
    return n;
}

static void test_child_has_none(void)
{
    const int n_before = count_open();
    const uint32_t generation = os_fork_generation();
    struct os_poller *poller;
    int pair[2], plain;

    CHECK_EQ_I64(os_poller_create(&poller), MCCL_OK);
    test_tcp_pair(pair);
    plain = open("/dev/null", O_RDONLY);         /* the program's own: stays */
    const int high = fcntl(plain, F_DUPFD, 900); /* ours, far up */
    CHECK(high >= 900);
    os_fd_track(high);
    CHECK(count_open() > n_before + 4);

    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_EQ_I64(count_open(), n_before + 1);
        CHECK(is_open(plain) && !is_open(pair[0]) && !is_open(pair[1]) && !is_open(high));
        CHECK_EQ_I64(os_fork_generation(), generation + 1);
        /* The number is the program's now; an object of the parent must not take it away. */
        CHECK_EQ_I64(dup2(plain, pair[0]), pair[0]);
        os_fd_close(pair[0]);
        CHECK(is_open(pair[0]));
        os_poller_destroy(poller);
        const int own = os_socket_stream(AF_INET); /* the child may start anew */
        CHECK(own >= 0);
        os_fd_close(own);
        CHECK(!is_open(own));
        exit(0); /* not _exit: leaks are looked for on the way */
    }
    expect_exit_0(child);
    CHECK_EQ_I64(os_fork_generation(), generation);
    CHECK(is_open(pair[0]) && is_open(pair[1]) && is_open(high));
    CHECK_EQ_I64(test_send(pair[0], "x", 1), 1); /* and they work */

    errno = 4242;
    os_fd_close(high);
    os_fd_close(-1);
    CHECK_EQ_I64(errno, 4242);
    close(plain);
    os_fd_close(pair[0]);
    os_fd_close(pair[1]);
    os_poller_destroy(poller);
    CHECK_EQ_I64(count_open(), n_before);
}

/* A grandchild counts two forks and has its parent's new descriptors closed as well. */
static void test_grandchild(void)
{
    const uint32_t generation = os_fork_generation();
    const pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        const int own = os_socket_stream(AF_INET);
        const pid_t grandchild = fork();
        if (grandchild == 0) {
            CHECK_EQ_I64(os_fork_generation(), generation + 2);
            CHECK(!is_open(own));
            exit(0);
        }
        expect_exit_0(grandchild);
        CHECK(is_open(own));
        os_fd_close(own);
        exit(0);
    }
    expect_exit_0(child);
}

static _Atomic bool stop;

static void open_and_close(void *arg)
{
    (void)arg;
    while (!atomic_load(&stop)) {
        const int fd = os_socket_stream(AF_INET);
        CHECK(fd >= 0);
        os_fd_close(fd);
    }
}

/* Forks in the middle of another thread's opening and closing: no child ever sees a stray
 * descriptor. */
static void test_race(void)
{
    const int n_before = count_open();
    struct os_thread thread;

    CHECK_EQ_I64(os_thread_start(&thread, open_and_close, NULL, "opener"), MCCL_OK);
    for (int i = 0; i < 200; i++) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            _exit(count_open() == n_before ? 0 : 1);
        expect_exit_0(child);
    }
    atomic_store(&stop, true);
    os_thread_join(&thread);
}

/* The end of a connection shows although a child that was forked beside it is alive. */
static void test_death_shows(void)
{
    int pair[2], ends[2];
    char byte;
    ptrdiff_t n;

    test_tcp_pair(pair);
    CHECK_EQ_I64(pipe(ends), 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(ends[1]);
        _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1); /* lives until the parent lets go */
    }
    os_fd_close(pair[0]);
    const int64_t deadline = os_now_ns() + 5 * OS_SEC;
    while ((n = test_recv(pair[1], &byte, 1)) == -1 && os_now_ns() < deadline)
        os_thread_yield();
    CHECK_EQ_I64(n, 0);
    os_fd_close(pair[1]);
    close(ends[0]);
    close(ends[1]);
    expect_exit_0(child);
}

int main(void)
{
    test_child_has_none();
    test_grandchild();
    test_race();
    test_death_shows();
    return 0;
}

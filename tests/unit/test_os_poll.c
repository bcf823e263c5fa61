/* SPDX-License-Identifier: MIT
 *
 * os_poller: readiness, level and edge mode, end of stream, wake-ups from other threads, time-outs.
 */
#include "os_test.h"

#include <signal.h>
#include <unistd.h>

static int marks[3]; /* their addresses are the events' data */

/* Waits for an event of one descriptor and checks whose it is; returns its flags. */
static unsigned expect_event(struct os_poller *poller, const void *data)
{
    struct os_poll_event events[4]; /* room for kqueue to bring both directions together */

    CHECK_EQ_I64(os_poller_wait(poller, events, 4, 5 * OS_SEC), 1);
    CHECK(events[0].data == data);
    return events[0].events;
}

static void expect_nothing(struct os_poller *poller)
{
    struct os_poll_event events[4];

    CHECK_EQ_I64(os_poller_wait(poller, events, 4, 0), 0);
}

static void fill(int fd)
{
    static char block[65536];
    ptrdiff_t n;

    while ((n = test_send(fd, block, sizeof(block))) > 0)
        ;
    CHECK_EQ_I64(n, -1);
}

static size_t drain(int fd)
{
    static char block[65536];
    size_t total = 0;
    ptrdiff_t n;

    while ((n = test_recv(fd, block, sizeof(block))) > 0)
        total += (size_t)n;
    CHECK(n >= -1);
    return total;
}

static void test_level(struct os_poller *poller)
{
    int pair[2];
    char byte;

    test_tcp_pair(pair);
    CHECK_EQ_I64(os_poller_add(poller, pair[1], OS_POLL_READ, &marks[0]), MCCL_OK);
    expect_nothing(poller);
    CHECK_EQ_I64(test_send(pair[0], "ab", 2), 2);
    CHECK_EQ_I64(expect_event(poller, &marks[0]), OS_POLL_READ);
    CHECK_EQ_I64(test_recv(pair[1], &byte, 1), 1);
    CHECK_EQ_I64(expect_event(poller, &marks[0]), OS_POLL_READ); /* as long as it holds */
    CHECK_EQ_I64(test_recv(pair[1], &byte, 1), 1);
    expect_nothing(poller);

    CHECK_EQ_I64(os_poller_modify(poller, pair[1], OS_POLL_READ | OS_POLL_WRITE, &marks[1]),
                 MCCL_OK);
    CHECK_EQ_I64(expect_event(poller, &marks[1]), OS_POLL_WRITE);
    CHECK_EQ_I64(test_send(pair[0], "c", 1), 1);
    while (expect_event(poller, &marks[1]) != (OS_POLL_READ | OS_POLL_WRITE)) /* one event, both */
        ;
    CHECK_EQ_I64(os_poller_modify(poller, pair[1], OS_POLL_WRITE, &marks[1]), MCCL_OK);
    CHECK_EQ_I64(expect_event(poller, &marks[1]), OS_POLL_WRITE);
    fill(pair[1]);
    expect_nothing(poller);
    while (drain(pair[0]) > 0 || os_poller_wait(poller, &(struct os_poll_event){0}, 1, OS_MS) == 0)
        ;
    CHECK_EQ_I64(expect_event(poller, &marks[1]), OS_POLL_WRITE);

    os_poller_remove(poller, pair[1]);
    expect_nothing(poller);
    os_fd_close(pair[0]);
    os_fd_close(pair[1]);
}

static void test_edge(struct os_poller *poller)
{
    int pair[2];
    char byte;

    test_tcp_pair(pair);
    CHECK_EQ_I64(os_poller_add(poller, pair[1], OS_POLL_READ | OS_POLL_EDGE, &marks[0]), MCCL_OK);
    CHECK_EQ_I64(test_send(pair[0], "ab", 2), 2);
    CHECK_EQ_I64(expect_event(poller, &marks[0]), OS_POLL_READ);
    CHECK_EQ_I64(test_recv(pair[1], &byte, 1), 1);
    expect_nothing(poller); /* one byte is left, but nothing changed */
    CHECK_EQ_I64(test_send(pair[0], "c", 1), 1);
    CHECK_EQ_I64(expect_event(poller, &marks[0]), OS_POLL_READ); /* new data arms it again */
    expect_nothing(poller);
    os_poller_remove(poller, pair[1]);

    CHECK_EQ_I64(os_poller_add(poller, pair[0], OS_POLL_WRITE | OS_POLL_EDGE, &marks[1]), MCCL_OK);
    CHECK_EQ_I64(expect_event(poller, &marks[1]), OS_POLL_WRITE);
    expect_nothing(poller);
    fill(pair[0]);
    struct os_poll_event event = {0};
    for (int i = 0; i < 5000 && event.data == NULL;
         i++) { /* room in the buffer is a change again */
        drain(pair[1]);
        os_poller_wait(poller, &event, 1, OS_MS);
    }
    CHECK(event.data == &marks[1]);
    CHECK_EQ_I64(event.events, OS_POLL_WRITE);
    os_fd_close(pair[0]);
    os_fd_close(pair[1]);
}

static void test_hup(struct os_poller *poller)
{
    int pair[2];
    char text[8];

    test_tcp_pair(pair);
    CHECK_EQ_I64(os_poller_add(poller, pair[1], OS_POLL_READ, &marks[2]), MCCL_OK);
    CHECK_EQ_I64(test_send(pair[0], "last", 4), 4);
    CHECK_EQ_I64(expect_event(poller, &marks[2]), OS_POLL_READ);
    os_fd_close(pair[0]);
    while (expect_event(poller, &marks[2]) != (OS_POLL_READ | OS_POLL_HUP))
        ;
    CHECK_EQ_I64(test_recv(pair[1], text, sizeof(text)), 4); /* unread data is still there */
    CHECK(memcmp(text, "last", 4) == 0);
    CHECK_EQ_I64(test_recv(pair[1], text, sizeof(text)), 0);
    os_fd_close(pair[1]);

    test_tcp_pair(pair);
    CHECK_EQ_I64(os_poller_add(poller, pair[1], OS_POLL_READ, &marks[2]), MCCL_OK);
    os_socket_reset_on_close(pair[0]);
    os_fd_close(pair[0]);
    CHECK((expect_event(poller, &marks[2]) & OS_POLL_HUP) != 0);
    CHECK_EQ_I64(test_recv(pair[1], text, sizeof(text)), -2);
    CHECK_EQ_I64(errno, ECONNRESET);
    os_fd_close(pair[1]);
}

static void test_connect(struct os_poller *poller)
{
    uint16_t port;
    const int listener = test_listen(&port);
    const int good = test_dial(port);

    CHECK_EQ_I64(os_poller_add(poller, good, OS_POLL_WRITE, &marks[0]), MCCL_OK);
    CHECK_EQ_I64(expect_event(poller, &marks[0]), OS_POLL_WRITE);
    CHECK_EQ_I64(os_socket_error(good), 0);
    os_fd_close(good);
    os_fd_close(listener);

    const int refused = os_socket_stream(AF_INET);
    struct sockaddr_in nobody = {.sin_family = AF_INET, .sin_port = htons(port)};
    nobody.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(refused, (struct sockaddr *)&nobody, sizeof(nobody)) == 0 || errno == EINPROGRESS) {
        CHECK_EQ_I64(os_poller_add(poller, refused, OS_POLL_WRITE, &marks[1]), MCCL_OK);
        CHECK_EQ_I64(expect_event(poller, &marks[1]), OS_POLL_WRITE | OS_POLL_HUP);
        CHECK_EQ_I64(os_socket_error(refused), ECONNREFUSED);
    } else {
        CHECK_EQ_I64(errno, ECONNREFUSED);
    }
    os_fd_close(refused);
}

static void test_batch(struct os_poller *poller)
{
    enum { N = 100 }; /* more than one batch of the implementation */
    static int pairs[N][2], seen[N];
    struct os_poll_event events[7];
    int n_seen = 0;

    for (int i = 0; i < N; i++) {
        test_tcp_pair(pairs[i]);
        CHECK_EQ_I64(os_poller_add(poller, pairs[i][1], OS_POLL_READ | OS_POLL_EDGE, &seen[i]),
                     MCCL_OK);
        CHECK_EQ_I64(test_send(pairs[i][0], "x", 1), 1);
    }
    while (n_seen < N) {
        const int n = os_poller_wait(poller, events, 7, 5 * OS_SEC);
        CHECK(n > 0);
        for (int i = 0; i < n; i++) {
            CHECK_EQ_I64(++*(int *)events[i].data, 1); /* each exactly once */
            n_seen++;
        }
    }
    expect_nothing(poller);
    for (int i = 0; i < N; i++) {
        os_fd_close(pairs[i][0]);
        os_fd_close(pairs[i][1]);
    }
}

static void wake_later(void *arg)
{
    usleep(50000);
    os_poller_wake(arg);
}

static void test_wake(struct os_poller *poller)
{
    struct os_poll_event event;
    struct os_thread thread;
    int64_t started;

    for (int i = 0; i < 3; i++)
        os_poller_wake(poller); /* before the wait; several count as one */
    started = os_now_ns();
    CHECK_EQ_I64(os_poller_wait(poller, &event, 1, 20 * OS_SEC), 0);
    CHECK(os_now_ns() - started < 10 * OS_SEC);
    started = os_now_ns();
    CHECK_EQ_I64(os_poller_wait(poller, &event, 1, 30 * OS_MS), 0); /* used up */
    CHECK(os_now_ns() - started >= 30 * OS_MS);

    CHECK_EQ_I64(os_thread_start(&thread, wake_later, poller, "waker"), MCCL_OK);
    CHECK_EQ_I64(os_poller_wait(poller, &event, 1, -1),
                 0); /* during the wait; hangs if it is lost */
    os_thread_join(&thread);
}

static void on_alarm(int number)
{
    (void)number;
}

static void test_timeout(struct os_poller *poller)
{
    static const int64_t timeouts_ns[] = {1, 999999, OS_MS, 1500000, 20 * OS_MS};
    struct os_poll_event event;
    const struct sigaction action = {.sa_handler = on_alarm};

    for (size_t i = 0; i < sizeof(timeouts_ns) / sizeof(timeouts_ns[0]); i++) {
        const int64_t started = os_now_ns();
        CHECK_EQ_I64(os_poller_wait(poller, &event, 1, timeouts_ns[i]), 0);
        CHECK(os_now_ns() - started >=
              timeouts_ns[i]); /* late is the machine's right, early is not */
    }
    CHECK_EQ_I64(sigaction(SIGALRM, &action, NULL), 0);
    alarm(1);
    CHECK_EQ_I64(os_poller_wait(poller, &event, 1, -1), 0); /* a signal ends the wait */
}

int main(void)
{
    struct os_poller *poller;

    CHECK_EQ_I64(os_poller_create(&poller), MCCL_OK);
    test_level(poller);
    test_edge(poller);
    test_hup(poller);
    test_connect(poller);
    test_batch(poller);
    test_wake(poller);
    test_timeout(poller);
    CHECK_EQ_I64(os_poller_add(poller, -1, OS_POLL_READ, &marks[0]), MCCL_ERR_SYSTEM);
    os_poller_destroy(poller);
    os_poller_destroy(NULL);
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * os_thread, clock and host: threads run with their signals blocked and their names cut, the clock
 * goes forward, the host's identity is stable and its random bytes are not.
 */
#include "os_test.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

struct report {
    sigset_t blocked;
    char name[64];
    int value;
};

static void look_around(void *arg)
{
    struct report *report = arg;

    pthread_sigmask(SIG_SETMASK, NULL, &report->blocked);
    pthread_getname_np(pthread_self(), report->name, sizeof(report->name));
    report->value = 4711;
}

static void test_thread(void)
{
    struct report report = {.value = 0};
    struct os_thread thread;
    sigset_t before, after;

    pthread_sigmask(SIG_SETMASK, NULL, &before);
    CHECK_EQ_I64(os_thread_start(&thread, look_around, &report, "a-name-that-is-too-long"),
                 MCCL_OK);
    os_thread_join(&thread);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    CHECK_EQ_I64(report.value, 4711);
    CHECK_EQ_STR(report.name, "a-name-that-is-");
    CHECK(sigismember(&report.blocked, SIGINT) == 1);
    CHECK(sigismember(&report.blocked, SIGTERM) == 1);
    CHECK(sigismember(&report.blocked, SIGCHLD) == 1);
    CHECK(sigismember(&report.blocked, SIGSEGV) == 0); /* a crash handler still gets it */
    CHECK(sigismember(&after, SIGINT) == sigismember(&before, SIGINT));
}

static void test_clock(void)
{
    int64_t last = os_now_ns();

    for (int i = 0; i < 100000; i++) {
        const int64_t now = os_now_ns();
        CHECK(now >= last);
        last = now;
    }
    usleep(20000);
    CHECK(os_now_ns() - last >= 20 * OS_MS);
    os_cpu_relax();
    os_thread_yield();
}

static void test_host(void)
{
    static const uint8_t zeros[16];
    uint8_t id[16] = {0}, again[16] = {0}, from_child[16] = {0};
    int ends[2], status;
    char name[64], cut[4];

    CHECK(os_cpu_count() >= 1 && os_cpu_count() <= 65536);
    CHECK_EQ_I64(os_pid(), getpid());
    os_host_name(name, sizeof(name));
    CHECK(name[0] != '\0' && strchr(name, '.') == NULL);
    os_host_name(cut, sizeof(cut));
    CHECK_EQ_I64(strncmp(cut, name, 3), 0);
    CHECK(strlen(cut) <= 3);

    os_host_id(id);
    os_host_id(again);
    CHECK(memcmp(id, again, 16) == 0);
    CHECK(memcmp(id, zeros, 16) != 0);
    CHECK_EQ_I64(pipe(ends), 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        os_host_id(again);
        _exit(write(ends[1], again, 16) == 16 ? 0 : 1);
    }
    CHECK_EQ_I64(read(ends[0], from_child, 16), 16);
    CHECK_EQ_I64(waitpid(child, &status, 0), child);
    CHECK(memcmp(id, from_child, 16) == 0); /* another process of this host */
    close(ends[0]);
    close(ends[1]);
}

static void test_random(void)
{
    enum { SIZE = 100003 }; /* odd, and more than some systems give in one call */
    static uint8_t a[SIZE + 1], b[SIZE + 1];
    int counts[256] = {0};

    a[SIZE] = 0x5a;
    CHECK_EQ_I64(os_random(a, SIZE), MCCL_OK);
    CHECK_EQ_I64(os_random(b, SIZE), MCCL_OK);
    CHECK_EQ_I64(a[SIZE], 0x5a);
    CHECK(memcmp(a, b, SIZE) != 0);
    CHECK(memcmp(a + SIZE - 16, b + SIZE - 16, 16) != 0); /* filled to the end */
    for (int i = 0; i < SIZE; i++)
        counts[a[i]]++;
    for (int i = 0; i < 256; i++) /* 390 expected, sigma 20: ten of them */
        CHECK(counts[i] > 190 && counts[i] < 590);
    CHECK_EQ_I64(os_random(NULL, 0), MCCL_OK);
}

int main(void)
{
    test_thread();
    test_clock();
    test_host();
    test_random();
    return 0;
}

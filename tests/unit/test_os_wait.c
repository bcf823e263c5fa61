/* SPDX-License-Identifier: MIT
 *
 * os_wait and os_wake_all: nothing lost between four threads, time-outs not early, no sleep on
 * another value.
 */
#include "os_test.h"

#include <unistd.h>

#define N_THREADS 4
#define N_ROUNDS 2000

static _Atomic uint32_t round_word, arrived;
static uint64_t sums[N_THREADS]; /* each thread writes its own; handed over by `arrived` */
static uint64_t published;       /* main writes before round_word, threads read after */

static void wait_for(const _Atomic uint32_t *word, uint32_t until)
{
    uint32_t seen;

    while ((seen = atomic_load_explicit(word, memory_order_acquire)) < until)
        os_wait(word, seen, -1); /* hangs here if a wake-up is lost */
}

static void follow(void *arg)
{
    uint64_t *sum = arg;

    for (uint32_t round = 1; round <= N_ROUNDS; round++) {
        wait_for(&round_word, round);
        *sum += published;
        if (atomic_fetch_add_explicit(&arrived, 1, memory_order_acq_rel) + 1 == round * N_THREADS)
            os_wake_all(&arrived);
    }
}

static void test_rounds(void)
{
    struct os_thread threads[N_THREADS];
    uint64_t expected = 0;

    for (int i = 0; i < N_THREADS; i++)
        CHECK_EQ_I64(os_thread_start(&threads[i], follow, &sums[i], "follower"), MCCL_OK);
    for (uint32_t round = 1; round <= N_ROUNDS; round++) {
        published = (uint64_t)round * round;
        expected += published;
        atomic_store_explicit(&round_word, round, memory_order_release);
        os_wake_all(&round_word); /* all four at once */
        wait_for(&arrived, round * N_THREADS);
    }
    for (int i = 0; i < N_THREADS; i++) {
        os_thread_join(&threads[i]);
        CHECK_EQ_I64(sums[i], expected);
    }
}

static void test_timeout(void)
{
    static const int64_t timeouts_ns[] = {1, 300000, 5 * OS_MS, 30 * OS_MS};
    _Atomic uint32_t word = 7;

    for (size_t i = 0; i < sizeof(timeouts_ns) / sizeof(timeouts_ns[0]); i++) {
        const int64_t started = os_now_ns();
        int64_t left = timeouts_ns[i];
        while (left >
               0) { /* spurious wake-ups are allowed, a busy loop is what they must not become */
            os_wait(&word, 7, left);
            left = timeouts_ns[i] - (os_now_ns() - started);
        }
        CHECK(os_now_ns() - started < 10 * OS_SEC);
    }
    os_wait(&word, 8, -1); /* another value: returns at once, or never */
    os_wait(&word, 7, 0);  /* no time: the same */
    os_wake_all(&word);    /* nobody there */
}

/* A time-out must really sleep: this would find one that returns at once each time. */
static void test_sleeps(void)
{
    _Atomic uint32_t word = 1;
    const int64_t started = os_now_ns();
    int n_waits = 0;

    while (os_now_ns() - started < 50 * OS_MS) {
        os_wait(&word, 1, 50 * OS_MS);
        n_waits++;
    }
    CHECK(n_waits < 100);
}

int main(void)
{
    test_rounds();
    test_timeout();
    test_sleeps();
    return 0;
}

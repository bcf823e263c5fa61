/* SPDX-License-Identifier: MIT
 *
 * A group that nobody uses costs next to nothing: processor time while its threads are there, and
 * memory that does not grow with the sizes of what it has done.
 */
/* limit: 120 s */
#include "support/check.h"
#include "support/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define IDLE_MS 3000
#define IDLE_CPU_NS                                                                        \
    4500000 /* 0.1 % of a core over IDLE_MS is promised: 3 ms; half as much again for slow \
               machines */
#define COUNT (1 << 20)
#define BIG_COUNT (16 << 20) /* 64 MiB of float32 */

static int64_t cpu_ns(void)
{
    struct timespec now;
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now) == 0);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void reduce(struct rank *self, mccl_comm *comm, float *data, size_t count, bool attended)
{
    for (size_t i = 0; i < count; i++)
        data[i] = (float)((i + 3 * (size_t)self->rank) % 50);
    mccl_request *request = NULL;
    CHECK_OK(mccl_all_reduce(data, data, count, MCCL_FLOAT32, MCCL_SUM, comm, NULL,
                             attended ? NULL : &request));
    if (!attended) { /* through a queue, so that the background thread has to do it */
        mccl_queue *queue;
        uint64_t user;
        mccl_result result;
        CHECK_OK(mccl_queue_create(&queue));
        CHECK_OK(mccl_queue_add(queue, request, 7));
        CHECK_OK(mccl_queue_wait(queue, 60000, &user, &result));
        CHECK_OK(result);
        CHECK_OK(mccl_request_free(request));
        CHECK_OK(mccl_queue_close(queue));
        CHECK_OK(mccl_queue_destroy(queue));
    }
    for (size_t i = 0; i < count; i += 997) {
        float sum = 0;
        for (int rank = 0; rank < self->n; rank++)
            sum += (float)((i + 3 * (size_t)rank) % 50);
        CHECK(data[i] == sum);
    }
}

static void idle(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, self->arg, 60000);
    float *data = malloc(COUNT * sizeof *data);
    CHECK(data != NULL);
    for (int i = 0; i < 4; i++)
        reduce(self, comm, data, COUNT, i % 2 == 0);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    const int64_t before_ns = cpu_ns();
    sleep_ms(IDLE_MS);
    const int64_t used_ns = cpu_ns() - before_ns;
    printf("rank %d: %.3f ms of processor time in %d ms\n", self->rank, (double)used_ns / 1e6,
           IDLE_MS);
    fflush(stdout); /* the harness ends ranks without it */
    CHECK_LE_I64(used_ns, IDLE_CPU_NS);
    free(data);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

/* What is this process's own, and its part of what it shares with peers (rings of shared memory:
 * half of each), KiB. */
static int64_t private_kib(void)
{
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    CHECK(file != NULL);
    char line[256];
    int64_t sum = 0;
    long long kib;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "Private_Dirty: %lld", &kib) == 1 ||
            sscanf(line, "Private_Clean: %lld", &kib) == 1 ||
            sscanf(line, "Pss_Shmem: %lld", &kib) == 1)
            sum += kib;
    fclose(file);
    return sum;
}

/* 8 MiB, and 2 MiB for each peer. */
static void memory(struct rank *self)
{
    float *data = malloc(BIG_COUNT * sizeof *data);
    CHECK(data != NULL);
    memset(data, 1, BIG_COUNT * sizeof *data);
    const int64_t before = private_kib();
    mccl_comm *comm = rank_connect_with(self, self->arg, 60000);
    const int64_t connected = private_kib();
    reduce(self, comm, data, BIG_COUNT, true);
    reduce(self, comm, data, BIG_COUNT, false);
    const int64_t used = private_kib();
    const int64_t bound = 8 * 1024 + 2 * 1024 * (self->n - 1);
    printf("memory: n %d rank %d: %lld KiB connected, %lld KiB after 64 MiB, bound %lld\n", self->n,
           self->rank, (long long)(connected - before), (long long)(used - before),
           (long long)bound);
    fflush(stdout); /* the harness ends ranks without it */
    CHECK_LE_I64(used - before, bound);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
    free(data);
}

static void memory_of(int n, const char *settings)
{
    struct team *team = team_start(n, 100, memory, settings);
    for (int rank = 0; rank < n; rank++)
        team_expect_ok(team, rank);
    team_end(team);
}

#else

static void memory_of(int n, const char *settings)
{
    (void)n, (void)settings; /* a sanitizer's own memory would be measured */
}

#endif

int main(void)
{
    team_run(2, 60, idle, NULL);
    static const int sizes[] = {2, 4, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        memory_of(sizes[i], NULL);
#ifdef __linux__
        memory_of(sizes[i], "transport=shm");
#endif
    }
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * Ranks as threads of one process: every collective with a few dtypes and counts, blocking; then
 * several communicators used at once by several threads of each rank. This is the program that a
 * thread sanitizer learns most from.
 */
/* limit: 60 s */
#include "support/cases.h"
#include "support/check.h"
#include "support/harness.h"

#include <pthread.h>

#define N_COMMS 3
#define N_ROUNDS 20

static const size_t counts[] = {0, 1, 255, 4097, 70001};
static const mccl_dtype dtypes[] = {MCCL_FLOAT32, MCCL_BFLOAT16, MCCL_INT8, MCCL_COMPLEX128};

static void run_kind(mccl_comm *comm, enum case_kind kind, int n)
{
    struct collective_case test = {.kind = kind, .op = MCCL_SUM, .seed = 1};
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            test.dtype = dtypes[d];
            test.count = counts[c];
            test.root = case_has_root(kind) ? (int)(d + c) % n : 0;
            test.in_place = case_can_be_in_place(kind) && (d + c) % 2 == 1;
            test.seed++;
            case_run(comm, &test);
        }
    }
}

static void all_kinds(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 60000);
    for (int kind = 0; kind < N_CASE_KINDS; kind++)
        run_kind(comm, (enum case_kind)kind, self->n);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* One of several threads of a rank, with a communicator of its own. */
struct worker {
    pthread_t thread;
    mccl_comm *comm;
    uint64_t seed;
};

static void *worker_main(void *arg)
{
    const struct worker *worker = arg;
    for (int round = 0; round < N_ROUNDS; round++) {
        const struct collective_case test = {.kind = CASE_ALL_REDUCE,
                                             .dtype = MCCL_FLOAT32,
                                             .op = MCCL_SUM,
                                             .count = (size_t)(1 + round * 997),
                                             .in_place = round % 2 == 1,
                                             .seed = worker->seed + (uint64_t)round};
        case_run(worker->comm, &test);
    }
    return NULL;
}

/* Communicators do not order each other: threads use them in no order at all. */
static void communicators_at_once(struct rank *self)
{
    struct worker workers[N_COMMS];
    for (int i = 0; i < N_COMMS; i++)
        workers[i] = (struct worker){.comm = rank_connect_with(self, NULL, 60000),
                                     .seed = 1000u * (unsigned)(i + 1)};
    for (int i = 0; i < N_COMMS; i++)
        CHECK(pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]) == 0);
    for (int i = 0; i < N_COMMS; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_OK(mccl_comm_destroy(workers[i].comm));
    }
}

int main(void)
{
    for (int n = 1; n <= 4; n++)
        threads_run(n, all_kinds, NULL);
    for (int n = 2; n <= 3; n++)
        threads_run(n, communicators_at_once, NULL);
    return 0;
}

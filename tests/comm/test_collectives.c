/* SPDX-License-Identifier: MIT
 *
 * Every collective x dtype x op x count x number of ranks, in place and out of place, exact. Small
 * counts take every root; counts of 1 MiB and a bit take one root and one placing for each
 * combination, chosen so that all of them occur. One communicator serves all cases of an n.
 */
/* limit: 240 s */
/* sanitize: not thread */
/* the full product takes too long there; test_collectives_threads.c is made for it */
#include "support/cases.h"
#include "support/check.h"
#include "support/harness.h"

#define BIG_BYTES (1024 * 1024)

static const size_t small_counts[] = {0, 1, 3, 17, 255, 4097};
#define N_SMALL (sizeof small_counts / sizeof small_counts[0])

static void run_small(mccl_comm *comm, struct collective_case test, int n)
{
    const int n_roots = case_has_root(test.kind) ? n : 1;
    for (size_t i = 0; i < N_SMALL; i++) {
        test.count = small_counts[i];
        for (test.root = 0; test.root < n_roots; test.root++) {
            for (int placed = 0; placed <= case_can_be_in_place(test.kind); placed++) {
                test.in_place = placed == 1;
                test.seed++;
                case_run(comm, &test);
            }
        }
    }
}

static void run_big(mccl_comm *comm, struct collective_case test, int n)
{
    const int turn = (int)test.dtype + (int)test.op;
    test.count = BIG_BYTES / mccl_dtype_size(test.dtype) + 3;
    test.root = case_has_root(test.kind) ? turn % n : 0;
    test.in_place = case_can_be_in_place(test.kind) && turn / n % 2 == 1;
    test.seed += 1000;
    case_run(comm, &test);
}

static void run_kind(mccl_comm *comm, enum case_kind kind, int n)
{
    struct collective_case test = {.kind = kind};
    for (int dtype = 0; dtype < MCCL_N_DTYPES; dtype++) {
        test.dtype = (mccl_dtype)dtype;
        for (int op = 0; op < (case_reduces(kind) ? (int)MCCL_N_OPS : 1); op++) {
            test.op = (mccl_op)op;
            if (case_reduces(kind) && !mccl_op_supports(test.op, test.dtype))
                continue;
            test.seed = 10000u * (unsigned)(dtype * 16 + op);
            run_small(comm, test, n);
            run_big(comm, test, n);
        }
    }
}

static void rank_main(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 60000);
    for (int kind = 0; kind < N_CASE_KINDS; kind++) {
        run_kind(comm, (enum case_kind)kind, self->n);
        CHECK_OK(mccl_barrier(comm, NULL, NULL));
    }
    CHECK_OK(mccl_comm_destroy(comm));
}

int main(void)
{
    static const int sizes[] = {1, 2, 3, 5, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const int64_t start = now_ms();
        team_run(sizes[i], 200, rank_main, NULL);
        printf("n=%d: %.1f s\n", sizes[i], (double)(now_ms() - start) / 1000.0);
        fflush(stdout);
    }
    return 0;
}

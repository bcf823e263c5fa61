/* SPDX-License-Identifier: MIT
 *
 * Who shares memory with whom, by default and with MCCL_TRANSPORT=shm, what a rank that does not
 * want to changes, and that waiting costs no processor. Most of the other tests run over shared
 * memory too, since it is the default; cmake/tests.cmake names those that run over TCP as well.
 */
#include "support/check.h"
#include "support/harness.h"
#include "support/pattern.h"

#include <time.h>

#define COUNT ((size_t)400 * 1000) /* float32: a ring several times */

/* Mappings of memory that MCCL has made. */
static int n_shared(void)
{
    char line[512];
    int n = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps))
        n += strstr(line, "/memfd:mccl") != NULL;
    fclose(maps);
    return n;
}

static void sum_up(const struct rank *self, mccl_comm *comm, size_t count)
{
    static float data[COUNT], expected[COUNT];
    pattern_fill(data, count, MCCL_FLOAT32, MCCL_SUM, 5, self->rank, self->n, 0);
    pattern_reduced(expected, count, MCCL_FLOAT32, MCCL_SUM, 5, self->n, 0);
    CHECK_OK(mccl_all_reduce(data, data, count, MCCL_FLOAT32, MCCL_SUM, comm, NULL, NULL));
    CHECK_EQ_MEM(data, expected, count * sizeof data[0]);
}

/* To the right neighbour, from the left one: small enough to come early, and not. */
static void pass_on(const struct rank *self, mccl_comm *comm, size_t count)
{
    static float sent[COUNT], data[COUNT], expected[COUNT];
    const int right = (self->rank + 1) % self->n, left = (self->rank + self->n - 1) % self->n;
    mccl_request *request = NULL;
    pattern_fill(sent, count, MCCL_FLOAT32, MCCL_SUM, 6, self->rank, self->n, 0);
    pattern_fill(expected, count, MCCL_FLOAT32, MCCL_SUM, 6, left, self->n, 0);
    CHECK_OK(mccl_send(sent, count, MCCL_FLOAT32, right, comm, NULL, &request));
    sum_up(self, comm, 33); /* what comes early waits for its receive */
    CHECK_OK(mccl_recv(data, count, MCCL_FLOAT32, left, comm, NULL, NULL));
    CHECK_OK(mccl_request_wait(request, 20000));
    CHECK_OK(mccl_request_free(request));
    CHECK_EQ_MEM(data, expected, count * sizeof data[0]);
}

/* `settings`: NULL or that asks for it. */
static void shares_with(struct rank *self, const char *settings)
{
    mccl_comm *comm = rank_connect_with(self, settings, 20000);
    static const size_t counts[] = {1, 3, 4095, 70001, COUNT};
    for (int i = 0; i < 5; i++)
        sum_up(self, comm, counts[i]);
    CHECK_EQ_I64(n_shared(), self->n - 1);
    CHECK_OK(mccl_barrier(comm, NULL, NULL)); /* before anybody makes more of them */
    for (int i = 0; i < 5; i++)
        pass_on(self, comm, counts[i]);
    CHECK_EQ_I64(n_shared(), self->n - 1 + (self->n > 2 ? 2 : 1));
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
    CHECK_EQ_I64(n_shared(), 0);
}

static void shares(struct rank *self)
{
    shares_with(self, self->arg);
}

/* The first rank, which the others dial, and the last one, which dials: two that do not want to. */
static void some_do_not(struct rank *self)
{
    const bool wants = self->rank != 0 && self->rank != self->n - 1;
    mccl_comm *comm = rank_connect_with(self, wants ? "transport=shm" : "transport=tcp", 20000);
    sum_up(self, comm, 1);
    sum_up(self, comm, COUNT);
    CHECK_EQ_I64(n_shared(), wants ? self->n - 3 : 0);
    CHECK_OK(mccl_comm_destroy(comm));
}

static void waits_asleep(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, "transport=shm", 20000);
    sum_up(self, comm, 1);
    if (self->rank == 0)
        sleep_ms(1500);
    const clock_t before = clock();
    sum_up(self, comm, 1);
    sum_up(self, comm, COUNT);
    const int64_t busy_ms = (int64_t)(clock() - before) * 1000 / CLOCKS_PER_SEC;
    CHECK_LE_I64(busy_ms, 700); /* spinning would take all 1500 */
    CHECK_OK(mccl_comm_destroy(comm));
}

int main(void)
{
    for (int n = 2; n <= 5; n++)
        for (int asked = 0; asked < 2; asked++)
            team_run(n, 30, shares, asked ? "transport=shm" : NULL);
    team_run(5, 30, some_do_not, NULL);
    team_run(3, 30, waits_asleep, NULL);
    return 0;
}

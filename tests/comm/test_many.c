/* SPDX-License-Identifier: MIT
 *
 * Many ranks, many groups, many lives: 32 processes in one group; 200 groups made and destroyed
 * in one process, and 50 times everything, without growth; groups split by color; overlapping
 * groups used by several threads at once; a limit on descriptors that is too low for the ranks.
 */
/* limit: 180 s */
#include "support/check.h"
#include "support/harness.h"
#include "support/proc.h"

#include <pthread.h>
#include <sys/resource.h>

#define N_MANY 32
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define FORM_LIMIT_MS 20000
#else
#define FORM_LIMIT_MS 5000 /* what is promised; 0.5 to 1.5 s on two cores */
#endif

static void check_sum_of_ranks(mccl_comm *comm)
{
    int rank = -1, n = 0;
    CHECK_OK(mccl_comm_rank(comm, &rank));
    CHECK_OK(mccl_comm_count(comm, &n));
    int64_t value = rank + 1;
    CHECK_OK(mccl_all_reduce(&value, &value, 1, MCCL_INT64, MCCL_SUM, comm, NULL, NULL));
    CHECK_EQ_I64(value, (int64_t)n * (n + 1) / 2);
}

static void member_of_many(struct rank *self)
{
    rank_mark(self, 1);
    rank_wait_go(self, 1);
    const int64_t start_ms = now_ms();
    mccl_comm *comm = rank_connect_with(self, NULL, 30000);
    const int64_t formed_ms = now_ms();
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    check_sum_of_ranks(comm);
    atomic_store(&self->board->value[self->rank], now_ms() - start_ms);
    if (self->rank == 0)
        printf("rank 0 of %d: group in %lld ms, barrier and all-reduce in %lld ms more\n", self->n,
               (long long)(formed_ms - start_ms), (long long)(now_ms() - formed_ms));
    fflush(stdout);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void many_ranks(void)
{
    struct team *team = team_start(N_MANY, 60, member_of_many, NULL);
    team_wait_marks(team, 1);
    team_go(team, 1);
    int64_t worst_ms = 0;
    for (int rank = 0; rank < N_MANY; rank++) {
        team_expect_ok(team, rank);
        const int64_t ms = atomic_load(&team_board(team)->value[rank]);
        worst_ms = ms > worst_ms ? ms : worst_ms;
    }
    team_end(team);
    printf("%d processes: group, barrier and all-reduce within %lld ms\n", N_MANY,
           (long long)worst_ms);
    CHECK_LE_I64(worst_ms, FORM_LIMIT_MS);
}

/* ---- no growth ---- */

struct footprint {
    int fds, threads;
    int64_t rss_kib;
};

static struct footprint footprint(void)
{
    return (struct footprint){proc_fd_count(), proc_thread_count(), proc_rss_kib()};
}

/* The last connections and threads of a life may take a moment to go. */
static void check_no_growth(const char *what, const struct rank *self, struct footprint before)
{
    struct footprint after = footprint();
    for (int tries = 0; tries < 100 && (after.fds > before.fds || after.threads > before.threads);
         tries++) {
        sleep_ms(20);
        after = footprint();
    }
    if (self->rank == 0)
        printf("%s: descriptors %d -> %d, threads %d -> %d, RSS %lld -> %lld KiB\n", what,
               before.fds, after.fds, before.threads, after.threads, (long long)before.rss_kib,
               (long long)after.rss_kib);
    fflush(stdout);
    CHECK_LE_I64(after.fds, before.fds);
    CHECK_LE_I64(after.threads, before.threads);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    CHECK_LE_I64(after.rss_kib, before.rss_kib + 2048);
#endif
}

static void one_life(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    check_sum_of_ranks(comm);
    CHECK_OK(mccl_comm_destroy(comm));
}

/* Groups beside one that stays, so that the endpoint lives on. */
static void groups_come_and_go(struct rank *self)
{
    mccl_comm *stays = rank_connect_with(self, NULL, 20000);
    for (int i = 0; i < 20; i++)
        one_life(self); /* pools fill up */
    CHECK_OK(mccl_barrier(stays, NULL, NULL));
    const struct footprint before = footprint();
    const int64_t start_ms = now_ms();
    for (int i = 0; i < 200; i++)
        one_life(self);
    if (self->rank == 0)
        printf("200 groups of %d in %lld ms\n", self->n, (long long)(now_ms() - start_ms));
    check_no_growth("200 groups", self, before);
    check_sum_of_ranks(stays);
    CHECK_OK(mccl_comm_destroy(stays));
}

/* All of the library goes and comes back. */
static void lives(struct rank *self)
{
    for (int i = 0; i < 5; i++)
        one_life(self);
    const struct footprint before = footprint();
    for (int i = 0; i < 50; i++)
        one_life(self);
    check_no_growth("50 lives", self, before);
}

/* Nothing of the library remains when its last communicator is gone. */
static void nothing_remains(struct rank *self)
{
#if defined(__SANITIZE_THREAD__)
    one_life(self); /* starts the sanitizer's own thread */
#endif
    const struct footprint before = footprint();
    one_life(self);
    struct footprint after = footprint();
    for (int tries = 0; tries < 100 && (after.fds > before.fds || after.threads > before.threads);
         tries++) {
        sleep_ms(20);
        after = footprint();
    }
    CHECK_EQ_I64(after.fds, before.fds);
    CHECK_EQ_I64(after.threads, before.threads);
}

/* ---- split ---- */

static void split(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000), *part = NULL;
    int rank = -1, n = -1;
    /* Even and odd ranks; the order within is reversed by the key. */
    CHECK_OK(mccl_comm_split(comm, self->rank % 2, -self->rank, &part, NULL));
    CHECK_OK(mccl_comm_rank(part, &rank));
    CHECK_OK(mccl_comm_count(part, &n));
    CHECK_EQ_I64(n, (self->n + 1 - self->rank % 2) / 2);
    CHECK_EQ_I64(rank, n - 1 - self->rank / 2);
    int64_t sum = self->rank;
    CHECK_OK(mccl_all_reduce(&sum, &sum, 1, MCCL_INT64, MCCL_SUM, part, NULL, NULL));
    int64_t expected = 0;
    for (int r = self->rank % 2; r < self->n; r += 2)
        expected += r;
    CHECK_EQ_I64(sum, expected);
    /* Equal keys: the order of the old ranks. A part can be split again. */
    mccl_comm *all = NULL, *alone = NULL;
    CHECK_OK(mccl_comm_split(comm, 0, 0, &all, NULL));
    CHECK_OK(mccl_comm_rank(all, &rank));
    CHECK_EQ_I64(rank, self->rank);
    CHECK_OK(mccl_comm_split(part, self->rank, 0, &alone, NULL));
    CHECK_OK(mccl_comm_count(alone, &n));
    CHECK_EQ_I64(n, 1);
    check_sum_of_ranks(alone);
    /* Rank 0 stays out; NULL for it, and a group for the others. */
    mccl_comm *rest = all;
    CHECK_OK(mccl_comm_split(comm, self->rank == 0 ? MCCL_SPLIT_NOCOLOR : 5, 0, &rest, NULL));
    CHECK((rest == NULL) == (self->rank == 0));
    if (rest)
        check_sum_of_ranks(rest);
    CHECK_RESULT(mccl_comm_split(comm, -2, 0, &rest, NULL), MCCL_ERR_INVALID_ARGUMENT);
    check_sum_of_ranks(all);
    check_sum_of_ranks(comm);
    if (self->rank != 0)
        CHECK_OK(mccl_comm_destroy(rest));
    /* Children live on without their parent. */
    CHECK_OK(mccl_comm_destroy(comm));
    check_sum_of_ranks(all);
    check_sum_of_ranks(part);
    CHECK_OK(mccl_comm_destroy(all));
    CHECK_OK(mccl_comm_destroy(alone));
    CHECK_OK(mccl_comm_destroy(part));
}

/* ---- overlapping groups, each with a thread of its own in each member ---- */

#define N_PAIRS 3

struct pair_worker {
    pthread_t thread;
    mccl_comm *comm;
    bool used;
};

static void *pair_main(void *arg)
{
    const struct pair_worker *worker = arg;
    for (int i = 0; i < 300; i++) {
        int64_t value = i;
        CHECK_OK(
            mccl_all_reduce(&value, &value, 1, MCCL_INT64, MCCL_SUM, worker->comm, NULL, NULL));
        CHECK_EQ_I64(value, 2 * i);
    }
    return NULL;
}

/* Groups {0,1}, {1,2}, {2,0}: in a cycle, so that an order between them would deadlock. */
static void overlapping(struct rank *self)
{
    struct pair_worker workers[N_PAIRS] = {{.used = false}};
    mccl_comm *world = rank_connect_with(self, NULL, 20000);
    for (int pair = 0; pair < N_PAIRS; pair++) {
        const bool member = self->rank == pair || self->rank == (pair + 1) % N_PAIRS;
        CHECK_OK(
            mccl_comm_split(world, member ? 1 : MCCL_SPLIT_NOCOLOR, 0, &workers[pair].comm, NULL));
        workers[pair].used = member;
    }
    for (int pair = 0; pair < N_PAIRS; pair++) {
        if (workers[pair].used)
            CHECK(pthread_create(&workers[pair].thread, NULL, pair_main, &workers[pair]) == 0);
    }
    for (int i = 0; i < 100; i++)
        check_sum_of_ranks(world);
    for (int pair = 0; pair < N_PAIRS; pair++) {
        if (!workers[pair].used)
            continue;
        pthread_join(workers[pair].thread, NULL);
        CHECK_OK(mccl_comm_destroy(workers[pair].comm));
    }
    CHECK_OK(mccl_comm_destroy(world));
}

/* ---- without blocking ---- */

static void nonblocking_init(struct rank *self)
{
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.flags = MCCL_CONFIG_NONBLOCKING;
    rank_next_id(self, &id);
    if (self->rank == 1)
        sleep_ms(300);
    const int64_t start_ms = now_ms();
    CHECK_OK(mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config));
    CHECK_LE_I64(now_ms() - start_ms, 200);
    if (self->rank == 0)
        CHECK_RESULT(mccl_comm_wait_ready(comm, 20), MCCL_IN_PROGRESS);
    CHECK_OK(mccl_comm_wait_ready(comm, -1));
    CHECK_OK(mccl_comm_wait_ready(comm, 0));
    check_sum_of_ranks(comm);
    CHECK_OK(mccl_comm_destroy(comm));
}

/* Refused at once, with the limit to raise: who waits for a descriptor waits for ever. */
static void few_descriptors(struct rank *self)
{
    struct rlimit limit, full;
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    CHECK_OK(mccl_get_unique_id(&id));
    CHECK_EQ_I64(getrlimit(RLIMIT_NOFILE, &full), 0);
    limit = full;
    limit.rlim_cur = (rlim_t)proc_fd_count() + 40;
    CHECK_EQ_I64(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_RESULT(mccl_comm_init_rank(&comm, 64, &id, 5, NULL), MCCL_ERR_SYSTEM);
    CHECK_HAS(mccl_last_error(), "rank 5 of 64");
    CHECK_HAS(mccl_last_error(), "ulimit -n");
    CHECK_HAS(mccl_last_error(), "may open only");
    CHECK_EQ_I64(setrlimit(RLIMIT_NOFILE, &full), 0);
    one_life(self);
}

int main(void)
{
    many_ranks();
    team_run(2, 60, groups_come_and_go, NULL);
    team_run(3, 60, lives, NULL);
    team_run(2, 20, nothing_remains, NULL);
    for (int n = 1; n <= 5; n++)
        team_run(n, 20, split, NULL);
    team_run(3, 30, overlapping, NULL);
    team_run(2, 20, nonblocking_init, NULL);
    team_run(2, 20, few_descriptors, NULL);
    return 0;
}

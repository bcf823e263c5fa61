/* SPDX-License-Identifier: MIT
 *
 * A rank is killed with -9 while the others wait for it: each of them gets MCCL_ERR_PEER_LOST
 * within two seconds, in words that name operation, sequence number, own rank and lost rank. Ranks
 * that leave cleanly, one after the other, cause no such line.
 */
/* limit: 120 s */
#include "support/check.h"
#include "support/harness.h"

#include <signal.h>

#define NOTICE_MS 2000
#define BIG_COUNT (16 * 1024 * 1024) /* float32: 64 MiB */

enum way { IDLE_SMALL, IDLE_BIG, AMID_BIG, IN_RECV };
static const char *const way_names[] = {"never calls (small)", "never calls (64 MiB)",
                                        "amid 64 MiB operations", "awaited by recv"};

struct plan {
    enum way way;
    int victim;
};

#define BOARD_KILLED (TEAM_MAX - 1) /* board value, set by the parent: time of the kill */

static mccl_result wait_for_victim(const struct plan *plan, float *data, size_t count,
                                   mccl_comm *comm)
{
    mccl_result result = MCCL_OK;
    if (plan->way == IN_RECV)
        return mccl_recv(data, count, MCCL_FLOAT32, plan->victim, comm, NULL, NULL);
    for (int i = 0; i < 1000 && result == MCCL_OK; i++)
        result = mccl_all_reduce(data, data, count, MCCL_FLOAT32, MCCL_SUM, comm, NULL, NULL);
    return result;
}

static void check_words(const struct rank *self, const struct plan *plan, const char *text)
{
    char word[32];
    CHECK_HAS(text, plan->way == IN_RECV ? "recv" : "all_reduce");
    CHECK_HAS(text, "seq ");
    snprintf(word, sizeof word, "rank %d", self->rank);
    CHECK_HAS(text, word);
    snprintf(word, sizeof word, "rank %d", plan->victim);
    CHECK_HAS(text, word);
}

static void rank_main(struct rank *self)
{
    const struct plan *plan = self->arg;
    const bool big = plan->way == IDLE_BIG || plan->way == AMID_BIG;
    const size_t count = big ? BIG_COUNT : 100;
    float *data = calloc(count, sizeof *data);
    CHECK(data != NULL);
    mccl_comm *comm = rank_connect_with(self, NULL, 60000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    rank_mark(self, 1);
    if (self->rank == plan->victim) {
        if (plan->way == AMID_BIG)
            (void)wait_for_victim(plan, data, count, comm);
        sleep_ms(30000); /* killed in here */
        CHECK_FAIL("the victim was not killed");
    }
    CHECK_RESULT(wait_for_victim(plan, data, count, comm), MCCL_ERR_PEER_LOST);
    char text[1024], word[32];
    snprintf(text, sizeof text, "%s", mccl_last_error());
    snprintf(word, sizeof word, "rank %d", plan->victim);
    const int64_t killed_ms = atomic_load(&self->board->value[BOARD_KILLED]);
    const int64_t noticed_ms = now_ms() - killed_ms;
    CHECK(killed_ms != 0);
    CHECK_LE_I64(noticed_ms, NOTICE_MS);
    check_words(self, plan, text);
    atomic_store(&self->board->value[self->rank], noticed_ms);
    /* The next call says the same at once. */
    const int64_t again_ms = now_ms();
    CHECK_RESULT(mccl_barrier(comm, NULL, NULL), MCCL_ERR_PEER_LOST);
    CHECK_HAS(mccl_last_error(), "has failed before seq ");
    CHECK_HAS(mccl_last_error(), word);
    CHECK_OK(mccl_comm_destroy(comm));
    CHECK_LE_I64(now_ms() - again_ms, NOTICE_MS);
    free(data);
}

static void kill_one(int n, enum way way, int victim)
{
    const struct plan plan = {way, victim};
    int64_t worst_ms = 0;
    struct team *team = team_start(n, 60, rank_main, &plan);
    team_wait_marks(team, 1);
    sleep_ms(way == AMID_BIG ? 170 : 100);
    atomic_store(&team_board(team)->value[BOARD_KILLED], now_ms());
    team_signal(team, victim, SIGKILL);
    for (int rank = 0; rank < n; rank++) {
        if (rank == victim)
            continue;
        team_expect_ok(team, rank);
        const int64_t ms = atomic_load(&team_board(team)->value[rank]);
        worst_ms = ms > worst_ms ? ms : worst_ms;
    }
    CHECK_EQ_I64(team_join(team, victim), 128 + SIGKILL);
    team_end(team);
    printf("n=%d, rank %d %s: noticed within %lld ms\n", n, victim, way_names[way],
           (long long)worst_ms);
    fflush(stdout);
}

/* Leaving is no failure, however far apart: rank r goes r * 150 ms after the first. */
static void leave_with_skew(struct rank *self)
{
    int32_t value = self->rank;
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    CHECK_OK(mccl_all_reduce(&value, &value, 1, MCCL_INT32, MCCL_SUM, comm, NULL, NULL));
    CHECK_EQ_I64(value, self->n * (self->n - 1) / 2);
    sleep_ms(150 * self->rank);
    mccl_result error = MCCL_ERR_INTERNAL;
    CHECK_OK(mccl_comm_get_async_error(comm, &error));
    CHECK_EQ_I64(error, MCCL_OK);
    CHECK_OK(mccl_comm_destroy(comm));
}

/* Ends without destroying its communicator: what a script without clean-up does. */
static void leave_without_destroy(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    sleep_ms(100 * self->rank);
    (void)comm;
}

static void expect_silence(int n)
{
    struct team *team = team_start(n, 30, leave_with_skew, NULL);
    for (int rank = 0; rank < n; rank++) {
        team_expect_ok(team, rank);
        CHECK_EQ_STR(team_stderr(team, rank), "");
    }
    team_end(team);
}

/* The library's threads keep nobody from ending. */
static void expect_prompt_exit(int n)
{
    const int64_t start_ms = now_ms();
    team_run(n, 30, leave_without_destroy, NULL);
    CHECK_LE_I64(now_ms() - start_ms, 2000 + 100 * n);
}

int main(void)
{
    for (int n = 2; n <= 4; n++) {
        for (int victim = 0; victim < n; victim += n - 1) {
            kill_one(n, IDLE_SMALL, victim);
            kill_one(n, IN_RECV, victim);
            kill_one(n, IDLE_BIG, victim);
            kill_one(n, AMID_BIG, victim);
        }
        expect_silence(n);
        expect_prompt_exit(n);
    }
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * Every wait has a deadline. A peer is stopped (SIGSTOP: alive, silent, its sockets open) in each
 * phase of a group's life; whoever waits for it returns within the deadline and a second, and says
 * for whom it waited. Heartbeats notice the same much earlier.
 */
/* limit: 180 s */
#include "support/check.h"
#include "support/harness.h"

#include <signal.h>
#include <time.h>

#define GRACE_MS 1000
#define BIG_COUNT (16 * 1024 * 1024) /* float32: 64 MiB */

/* The failed call started at `start_ms` under a deadline of `timeout_ms`. */
static void check_deadline(int64_t start_ms, int64_t timeout_ms)
{
    const int64_t took_ms = now_ms() - start_ms;
    /* An operation submitted a little before `start_ms` may be the one whose time is up. */
    CHECK_GE_I64(took_ms, timeout_ms - 20);
    CHECK_LE_I64(took_ms, timeout_ms + GRACE_MS);
}

static void check_names_rank(int rank)
{
    char word[32];
    snprintf(word, sizeof word, "%d", rank);
    CHECK_HAS(mccl_last_error(), "rank");
    CHECK_HAS(mccl_last_error(), word);
}

/* ---- before check-in: the last rank never comes ---- */

static void missing_at_check_in(struct rank *self)
{
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 700;
    config.name = "absentees";
    rank_next_id(self, &id);
    rank_mark(self, 1);
    if (self->rank == self->n - 1)
        sleep_ms(60000); /* stopped in here */
    const int64_t start_ms = now_ms();
    CHECK_RESULT(mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config), MCCL_ERR_TIMEOUT);
    check_deadline(start_ms, config.timeout_ms);
    CHECK(comm == NULL);
    check_names_rank(self->n - 1);
    CHECK_HAS(mccl_last_error(), "absentees");
}

/* The maker of the id is stopped: its socket accepts, but nobody answers. */
static void maker_stopped(struct rank *self)
{
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 700;
    rank_next_id(self, &id);
    rank_mark(self, 1);
    if (self->rank == 0)
        sleep_ms(60000); /* stopped in here */
    rank_wait_go(self, 1);
    const int64_t start_ms = now_ms();
    CHECK_RESULT(mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config), MCCL_ERR_TIMEOUT);
    check_deadline(start_ms, config.timeout_ms);
}

static void stop_before_check_in(rank_body *body, int n, int victim)
{
    struct team *team = team_start(n, 20, body, NULL);
    team_wait_marks(team, 1);
    team_signal(team, victim, SIGSTOP);
    team_go(team, 1);
    for (int rank = 0; rank < n; rank++) {
        if (rank != victim)
            team_expect_ok(team, rank);
    }
    team_end(team);
}

/* ---- during check-in and mesh: at whatever moment ---- */

static void stopped_while_connecting(struct rank *self)
{
    const int *victim = self->arg;
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 1000;
    config.settings = "connect_timeout_ms=1000";
    rank_next_id(self, &id);
    rank_mark(self, 1);
    rank_wait_go(self, 1);
    int64_t start_ms = now_ms();
    mccl_result result = mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config);
    if (self->rank == *victim)
        sleep_ms(60000); /* stopped in here at the latest */
    /* Check-in and connecting have a deadline each. */
    CHECK_LE_I64(now_ms() - start_ms, 2000 + GRACE_MS);
    if (result == MCCL_OK) {
        start_ms = now_ms();
        result = mccl_barrier(comm, NULL, NULL);
        CHECK_LE_I64(now_ms() - start_ms, 1000 + GRACE_MS);
        CHECK_OK(mccl_comm_destroy(comm));
    }
    /* With three ranks another one's deadline may have been the first, and its leaving the cause.
     */
    if (self->n == 2 || (result != MCCL_ERR_ABORTED && result != MCCL_ERR_PEER_LOST))
        CHECK_EQ_I64(result, MCCL_ERR_TIMEOUT);
    CHECK(mccl_last_error()[0] != '\0');
}

static void stop_while_connecting(int n, int victim, int delay_us)
{
    struct team *team = team_start(n, 20, stopped_while_connecting, &victim);
    team_wait_marks(team, 1);
    team_go(team, 1);
    const struct timespec delay = {0, delay_us * 1000L};
    nanosleep(&delay, NULL);
    team_signal(team, victim, SIGSTOP);
    for (int rank = 0; rank < n; rank++) {
        if (rank != victim)
            team_expect_ok(team, rank);
    }
    team_end(team);
}

/* ---- in operations ---- */

enum phase { SMALL_OP, BIG_OP, AMID_BIG_OPS, RECV, SEND_BIG, QUEUE_FULL, DESTROY };

struct plan {
    enum phase phase;
    int victim;
};

/* Calls until one fails: the queue holds 4, so submitting soon has to wait. */
static mccl_result fill_queue(float *data, mccl_comm *comm)
{
    for (int i = 0; i < 100; i++) {
        mccl_request *request = NULL;
        const mccl_result result =
            mccl_all_reduce(data, data, 100, MCCL_FLOAT32, MCCL_SUM, comm, NULL, &request);
        if (result != MCCL_OK)
            return result;
        CHECK_OK(mccl_request_free(request));
    }
    CHECK_FAIL("100 operations went into a queue of 4");
}

static mccl_result wait_in_phase(const struct plan *plan, float *data, mccl_comm *comm)
{
    const size_t count = plan->phase == SMALL_OP ? 100 : BIG_COUNT;
    mccl_result result = MCCL_OK;
    switch (plan->phase) {
    case RECV:
        return mccl_recv(data, 100, MCCL_FLOAT32, plan->victim, comm, NULL, NULL);
    case SEND_BIG:
        return mccl_send(data, BIG_COUNT, MCCL_FLOAT32, plan->victim, comm, NULL, NULL);
    case QUEUE_FULL:
        return fill_queue(data, comm);
    default:
        for (int i = 0; i < 1000 && result == MCCL_OK; i++)
            result = mccl_all_reduce(data, data, count, MCCL_FLOAT32, MCCL_SUM, comm, NULL, NULL);
        return result;
    }
}

static void victim_until_stopped(const struct plan *plan, float *data, mccl_comm *comm)
{
    if (plan->phase == AMID_BIG_OPS)
        (void)wait_in_phase(plan, data, comm);
    sleep_ms(60000);
}

static void stopped_in_operation(struct rank *self)
{
    const struct plan *plan = self->arg;
    const int64_t timeout_ms = 1500;
    float *data = calloc(BIG_COUNT, sizeof *data);
    CHECK(data != NULL);
    mccl_comm *comm = rank_connect_with(self, "max_queue_depth=4", timeout_ms);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    rank_mark(self, 1);
    if (self->rank == plan->victim) {
        victim_until_stopped(plan, data, comm);
        return;
    }
    if (plan->phase != AMID_BIG_OPS)
        rank_wait_go(self, 1);
    const int64_t start_ms = now_ms();
    CHECK_RESULT(wait_in_phase(plan, data, comm), MCCL_ERR_TIMEOUT);
    /* Those that were amid operations began theirs at most a second or so before the stop. */
    if (plan->phase != AMID_BIG_OPS)
        check_deadline(start_ms, timeout_ms);
    check_names_rank(plan->victim);
    const int64_t destroy_ms = now_ms();
    CHECK_RESULT(mccl_barrier(comm, NULL, NULL), MCCL_ERR_TIMEOUT);
    CHECK_OK(mccl_comm_destroy(comm));
    CHECK_LE_I64(now_ms() - destroy_ms, 2000 + GRACE_MS);
    free(data);
}

/* Operations in flight towards a stopped peer do not hold up destroy. */
static void stopped_at_destroy(struct rank *self)
{
    const struct plan *plan = self->arg;
    float *data = calloc(BIG_COUNT, sizeof *data);
    mccl_request *request = NULL;
    CHECK(data != NULL);
    mccl_comm *comm = rank_connect_with(self, NULL, 60000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    rank_mark(self, 1);
    if (self->rank == plan->victim)
        sleep_ms(60000);
    rank_wait_go(self, 1);
    CHECK_OK(mccl_all_reduce(data, data, BIG_COUNT, MCCL_FLOAT32, MCCL_SUM, comm, NULL, &request));
    const int64_t start_ms = now_ms();
    CHECK_OK(mccl_comm_destroy(comm));
    CHECK_LE_I64(now_ms() - start_ms, 2000 + GRACE_MS);
    const mccl_result result = mccl_request_wait(request, 100);
    CHECK(result != MCCL_OK && result != MCCL_IN_PROGRESS);
    CHECK_OK(mccl_request_free(request));
    free(data); /* a write into it from now on is a sanitizer's find */
    sleep_ms(50);
}

static void stop_in(int n, int victim, enum phase phase)
{
    const struct plan plan = {phase, victim};
    struct team *team =
        team_start(n, 30, phase == DESTROY ? stopped_at_destroy : stopped_in_operation, &plan);
    team_wait_marks(team, 1);
    sleep_ms(phase == AMID_BIG_OPS ? 150 : 20);
    team_signal(team, victim, SIGSTOP);
    team_go(team, 1);
    for (int rank = 0; rank < n; rank++) {
        if (rank != victim)
            team_expect_ok(team, rank);
    }
    team_end(team);
}

/* ---- heartbeats ---- */

static void stopped_under_heartbeat(struct rank *self)
{
    const struct plan *plan = self->arg;
    mccl_comm *comm = rank_connect_with(self, "heartbeat_interval_ms=50", 20000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    sleep_ms(300);
    mccl_stats stats = {.size = sizeof stats};
    CHECK_OK(mccl_comm_get_stats(comm, &stats));
    /* 300 ms on an idle communicator: 6 to each peer, fewer on a busy machine. */
    CHECK_GE_I64(stats.heartbeats_sent, 2 * (self->n - 1));
    CHECK_GE_I64(stats.heartbeats_received, 2 * (self->n - 1));
    CHECK_LE_I64(stats.heartbeats_sent, 20 * (self->n - 1));
    rank_mark(self, 1);
    if (self->rank == plan->victim)
        sleep_ms(60000);
    rank_wait_go(self, 1);
    const int64_t start_ms = now_ms();
    CHECK_RESULT(mccl_barrier(comm, NULL, NULL), MCCL_ERR_PEER_LOST);
    CHECK_LE_I64(now_ms() - start_ms, 6 * 50 + GRACE_MS / 2);
    check_names_rank(plan->victim);
    CHECK_OK(mccl_comm_destroy(comm));
}

static void stop_under_heartbeat(int n, int victim)
{
    const struct plan plan = {SMALL_OP, victim};
    struct team *team = team_start(n, 30, stopped_under_heartbeat, &plan);
    team_wait_marks(team, 1);
    team_signal(team, victim, SIGSTOP);
    team_go(team, 1);
    for (int rank = 0; rank < n; rank++) {
        if (rank != victim)
            team_expect_ok(team, rank);
    }
    team_end(team);
}

/* Off: nothing is sent, and a pause of one rank is no reason to lose it. */
static void no_heartbeat(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, "heartbeat_interval_ms=0", 20000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    rank_mark(self, 1);
    rank_wait_go(self, 1);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    mccl_stats stats = {.size = sizeof stats};
    CHECK_OK(mccl_comm_get_stats(comm, &stats));
    CHECK_EQ_U64(stats.heartbeats_sent, 0);
    CHECK_EQ_U64(stats.heartbeats_received, 0);
    CHECK_OK(mccl_comm_destroy(comm));
}

static void pause_without_heartbeat(void)
{
    struct team *team = team_start(2, 30, no_heartbeat, NULL);
    team_wait_marks(team, 1);
    team_signal(team, 1, SIGSTOP);
    team_go(team, 1);
    sleep_ms(700);
    team_signal(team, 1, SIGCONT);
    team_expect_ok(team, 0);
    team_expect_ok(team, 1);
    team_end(team);
}

static void report(const char *what)
{
    printf("%s: ok\n", what);
    fflush(stdout);
}

int main(void)
{
    for (int n = 2; n <= 4; n++)
        stop_before_check_in(missing_at_check_in, n, n - 1);
    stop_before_check_in(maker_stopped, 2, 0);
    stop_before_check_in(maker_stopped, 3, 0);
    report("stopped before check-in");
    for (int delay_us = 0; delay_us <= 6400; delay_us += 800) {
        stop_while_connecting(2, 0, delay_us);
        stop_while_connecting(2, 1, delay_us);
        stop_while_connecting(3, 2, delay_us);
    }
    report("stopped while connecting");
    static const enum phase phases[] = {SMALL_OP, BIG_OP,     AMID_BIG_OPS, RECV,
                                        SEND_BIG, QUEUE_FULL, DESTROY};
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        stop_in(2, 1, phases[i]);
        stop_in(3, 0, phases[i]);
    }
    report("stopped in operations");
    stop_under_heartbeat(2, 0);
    stop_under_heartbeat(3, 2);
    pause_without_heartbeat();
    report("heartbeats");
    return 0;
}

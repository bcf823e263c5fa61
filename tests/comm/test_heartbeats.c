/* SPDX-License-Identifier: MIT
 *
 * Ranks with different heartbeat intervals: each is measured by its own, so a slow or silent one is
 * not taken for dead, and a quick one that stops is noticed at its own pace by a rank that sends
 * none.
 */
#include "support/check.h"
#include "support/harness.h"

#include <signal.h>

#define QUICK_MS 10
#define QUIET_MS 250 /* many times what a quick rank may be silent */
#define NOTICE_MS 2000

static const char *settings_of(const struct rank *self)
{
    return self->rank == 0 ? "heartbeat_interval_ms=10" : "heartbeat_interval_ms=0";
}

static void expect_healthy(struct rank *self, mccl_comm *comm)
{
    int64_t value = self->rank;
    sleep_ms(QUIET_MS);
    CHECK_OK(mccl_all_reduce(&value, &value, 1, MCCL_INT64, MCCL_SUM, comm, NULL, NULL));
    CHECK_EQ_I64(value, 1);
    mccl_stats stats = {.size = sizeof stats};
    CHECK_OK(mccl_comm_get_stats(comm, &stats));
    if (self->rank == 0)
        CHECK_GE_I64(stats.heartbeats_sent, QUIET_MS / QUICK_MS / 5);
    else
        CHECK_EQ_I64(stats.heartbeats_sent, 0);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
}

static void different(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, settings_of(self), 20000);
    expect_healthy(self, comm);
    CHECK_OK(mccl_comm_destroy(comm));
}

static void different_in_split(struct rank *self)
{
    mccl_comm *all = rank_connect_with(self, NULL, 20000), *part = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.settings = settings_of(self);
    CHECK_OK(mccl_comm_split(all, 0, self->rank, &part, &config));
    expect_healthy(self, part);
    CHECK_OK(mccl_comm_destroy(part));
    CHECK_OK(mccl_comm_destroy(all));
}

static void quick_one_stops(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, settings_of(self), 20000);
    int64_t value = 1;
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    rank_mark(self, 1);
    rank_wait_go(self, 1); /* rank 0 is stopped in here */
    const int64_t from_ms = now_ms();
    CHECK_RESULT(mccl_all_reduce(&value, &value, 1, MCCL_INT64, MCCL_SUM, comm, NULL, NULL),
                 MCCL_ERR_PEER_LOST);
    CHECK_LE_I64(now_ms() - from_ms, NOTICE_MS);
    CHECK_HAS(mccl_last_error(), "rank 0");
    CHECK_HAS(mccl_last_error(), "MCCL_HEARTBEAT_INTERVAL_MS=10");
    CHECK_OK(mccl_comm_destroy(comm));
}

int main(void)
{
    team_run(2, 20, different, NULL);
    team_run(2, 20, different_in_split, NULL);
    struct team *team = team_start(2, 20, quick_one_stops, NULL);
    team_wait_marks(team, 1);
    team_signal(team, 0, SIGSTOP);
    team_go(team, 1);
    team_expect_ok(team, 1);
    team_end(team);
    return 0;
}

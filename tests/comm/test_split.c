/* SPDX-License-Identifier: MIT
 *
 * mccl_comm_split and the settings of its parts; test_many.c has its ranks and keys.
 */
/* limit: 30 s */
#include "support/check.h"
#include "support/harness.h"

static mccl_result split_with(struct rank *self, mccl_comm *comm, int color, const char *settings,
                              mccl_comm **part)
{
    mccl_config config = MCCL_CONFIG_INIT;
    config.settings = settings;
    return mccl_comm_split(comm, color, self->rank, part, &config);
}

/* Ranks of one color with other settings than the first: they would run different schedules. */
static void disagree(struct rank *self)
{
    mccl_comm *comm = rank_connect(self, NULL), *part = NULL;
    for (int odd = 0; odd < self->n; odd++) {
        const char *settings = self->rank == odd ? "allreduce_algo=ring" : "chunk_bytes=4M";
        CHECK_RESULT(split_with(self, comm, 0, settings, &part), MCCL_ERR_MISMATCH);
        CHECK_HAS(mccl_last_error(), "MCCL_ALLREDUCE_ALGO");
        CHECK_HAS(mccl_last_error(), "ring");
    }
    CHECK_OK(mccl_barrier(comm, NULL, NULL)); /* the old group is none the worse */
    CHECK_OK(mccl_comm_destroy(comm));
}

/* Each color may have settings of its own. */
static void differ_by_color(struct rank *self)
{
    mccl_comm *comm = rank_connect(self, NULL), *part = NULL;
    const int color = self->rank % 2;
    CHECK_OK(
        split_with(self, comm, color, color ? "chunk_bytes=65536" : "allreduce_algo=ring", &part));
    int64_t sum = self->rank + 1, expected = 0;
    for (int rank = color; rank < self->n; rank += 2)
        expected += rank + 1;
    CHECK_OK(mccl_all_reduce(&sum, &sum, 1, MCCL_INT64, MCCL_SUM, part, NULL, NULL));
    CHECK_EQ_I64(sum, expected);
    CHECK_OK(mccl_comm_destroy(part));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void inside_a_group(struct rank *self)
{
    mccl_comm *comm = rank_connect(self, NULL), *part = NULL;
    int32_t sum = 1;
    CHECK_OK(mccl_group_start());
    CHECK_OK(mccl_all_reduce(&sum, &sum, 1, MCCL_INT32, MCCL_SUM, comm, NULL, NULL));
    CHECK_RESULT(mccl_comm_split(comm, 0, 0, &part, NULL), MCCL_ERR_INVALID_USAGE);
    CHECK_HAS(mccl_last_error(), "group");
    CHECK_OK(mccl_group_end());
    CHECK_EQ_I64(sum, self->n);
    CHECK_OK(mccl_comm_destroy(comm));
}

int main(void)
{
    team_run(3, 10, disagree, NULL);
    team_run(4, 10, differ_by_color, NULL);
    team_run(2, 10, inside_a_group, NULL);
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * The short way of a small all-reduce: that it is taken, that it turns into an ordinary operation
 * when a rank comes late, whatever has arrived by then, and that ranks on the short and on the long
 * way understand each other. Ranks are threads of this process; their communicators are made to
 * spin, as they would on a machine with a core for each.
 */
/* limit: 120 s */
#include "comm/comm.h"
#include "support/check.h"

#include <pthread.h>
#include <time.h>

#define MAX_RANKS SMALL_RANKS
#define ROUNDS 300

static const char *const transports[] = {"transport=tcp", "transport=shm"};

struct team {
    int n;
    mccl_comm *comms[MAX_RANKS];
    mccl_unique_id id;
    const char *settings;
};

struct member {
    struct team *team;
    int rank;
    pthread_t thread;
    void (*body)(struct team *team, int rank);
};

static void *run_member(void *arg)
{
    const struct member *member = arg;
    member->body(member->team, member->rank);
    return NULL;
}

static void each(struct team *team, void (*body)(struct team *team, int rank))
{
    struct member members[MAX_RANKS];
    for (int rank = 0; rank < team->n; rank++) {
        members[rank] = (struct member){.team = team, .rank = rank, .body = body};
        CHECK(pthread_create(&members[rank].thread, NULL, run_member, &members[rank]) == 0);
    }
    for (int rank = 0; rank < team->n; rank++)
        pthread_join(members[rank].thread, NULL);
}

static void join(struct team *team, int rank)
{
    mccl_config config = MCCL_CONFIG_INIT;
    config.settings = team->settings;
    config.timeout_ms = 60000;
    CHECK_OK(mccl_comm_init_rank(&team->comms[rank], team->n, &team->id, rank, &config));
    CHECK_OK(mccl_barrier(team->comms[rank], NULL, NULL)); /* links have settled */
    team->comms[rank]->may_spin = true;
}

static void leave(struct team *team, int rank)
{
    CHECK_OK(mccl_comm_destroy(team->comms[rank]));
}

static struct team make_team(int n, const char *settings)
{
    struct team team = {.n = n, .settings = settings};
    CHECK_OK(mccl_get_unique_id(&team.id));
    each(&team, join);
    return team;
}

static int32_t value(int rank, size_t i, uint32_t round)
{
    return (int32_t)((i * 7 + (size_t)rank * 31 + round * 13) % 1000) - 500;
}

static void fill(int32_t *data, size_t count, int rank, uint32_t round)
{
    for (size_t i = 0; i < count; i++)
        data[i] = value(rank, i, round);
}

static void check(const int32_t *data, size_t count, int n, uint32_t round)
{
    for (size_t i = 0; i < count; i++) {
        int32_t sum = 0;
        for (int rank = 0; rank < n; rank++)
            sum += value(rank, i, round);
        CHECK_EQ_I64(data[i], sum);
    }
}

/* Of the last operation that went the long way. */
static uint32_t long_way_seq(const mccl_comm *comm)
{
    const struct operation *operation = atomic_load(&comm->engine.spare_operation);
    CHECK(operation != NULL);
    return operation->seq;
}

/* Rank 1's vector is there before rank 0 calls, so there is nothing to wait for. */
static void takes_the_short_way(const char *settings)
{
    struct team team = make_team(2, settings);
    for (uint32_t round = 1; round <= 3; round++) {
        int32_t data[2][5];
        mccl_request *request;
        fill(data[0], 5, 0, round);
        fill(data[1], 5, 1, round);
        CHECK_OK(mccl_all_reduce(data[1], data[1], 5, MCCL_INT32, MCCL_SUM, team.comms[1], NULL,
                                 &request));
        const uint32_t before = long_way_seq(team.comms[0]);
        mccl_stats stats = {.size = sizeof stats}, after = {.size = sizeof after};
        CHECK_OK(mccl_comm_get_stats(team.comms[0], &stats));
        CHECK_OK(
            mccl_all_reduce(data[0], data[0], 5, MCCL_INT32, MCCL_SUM, team.comms[0], NULL, NULL));
        CHECK_EQ_U64(long_way_seq(team.comms[0]), before);
        CHECK_OK(mccl_comm_get_stats(team.comms[0], &after));
        CHECK_EQ_U64(after.bytes_sent - stats.bytes_sent, 20);
        CHECK_EQ_U64(after.bytes_received - stats.bytes_received, 20);
        CHECK_EQ_U64(after.operations - stats.operations, 1);
        check(data[0], 5, 2, round);
        CHECK_OK(mccl_request_wait(request, -1));
        CHECK_OK(mccl_request_free(request));
        check(data[1], 5, 2, round);
    }
    each(&team, leave);
}

/* The other ranks' vectors are there, and behind each of them a message of the next operation,
 * which the link reads ahead: no event of the poller tells of it any more. */
static void reads_ahead(const char *settings)
{
    struct team team = make_team(6, settings);
    int32_t data[6][5], parts[6][6];
    mccl_request *requests[6][2];
    for (int rank = 1; rank < 6; rank++) {
        fill(data[rank], 5, rank, 1);
        parts[rank][rank] = 100 + rank;
        CHECK_OK(mccl_all_reduce(data[rank], data[rank], 5, MCCL_INT32, MCCL_SUM, team.comms[rank],
                                 NULL, &requests[rank][0]));
        CHECK_OK(mccl_all_gather(&parts[rank][rank], parts[rank], 1, MCCL_INT32, team.comms[rank],
                                 NULL, &requests[rank][1]));
    }
    const uint32_t before = long_way_seq(team.comms[0]);
    fill(data[0], 5, 0, 1);
    CHECK_OK(mccl_all_reduce(data[0], data[0], 5, MCCL_INT32, MCCL_SUM, team.comms[0], NULL, NULL));
    CHECK_EQ_U64(long_way_seq(team.comms[0]), before);
    parts[0][0] = 100;
    CHECK_OK(mccl_all_gather(&parts[0][0], parts[0], 1, MCCL_INT32, team.comms[0], NULL, NULL));
    for (int rank = 0; rank < 6; rank++) {
        for (int i = 0; i < 2 && rank > 0; i++) {
            CHECK_OK(mccl_request_wait(requests[rank][i], -1));
            CHECK_OK(mccl_request_free(requests[rank][i]));
        }
        check(data[rank], 5, 6, 1);
        for (int other = 0; other < 6; other++)
            CHECK_EQ_I64(parts[rank][other], 100 + other);
    }
    each(&team, leave);
}

/* All but the last rank call; the last one when the others have given up the short way. */
static void late_round(struct team *team, int rank, uint32_t round, bool in_place)
{
    int32_t send[9], recv[9];
    int32_t *to = in_place ? send : recv;
    fill(send, 9, rank, round);
    if (rank == team->n - 1)
        for (int other = 0; other < rank; other++)
            while (atomic_load(&team->comms[other]->engine.n_outstanding) == 0)
                os_thread_yield();
    CHECK_OK(mccl_all_reduce(send, to, 9, MCCL_INT32, MCCL_SUM, team->comms[rank], NULL, NULL));
    check(to, 9, team->n, round);
    CHECK_OK(mccl_barrier(team->comms[rank], NULL, NULL));
}

static void last_is_late(struct team *team, int rank)
{
    for (uint32_t round = 0; round < 6; round++)
        late_round(team, rank, round, round % 2 == 1);
}

/* Every size, place and order of arrival, mixed with what goes the long way. */
static void mixture(struct team *team, int rank)
{
    mccl_comm *comm = team->comms[rank];
    int32_t send[300], recv[300], other[64];
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const size_t count = 1 + round * 37 % 300; /* up to 1200 bytes: beyond SMALL_BYTES too */
        int32_t *to = round % 3 == 0 ? send : recv;
        mccl_request *request = NULL;
        fill(send, count, rank, round);
        fill(other, 64, rank, round + 1);
        if ((round + (uint32_t)rank * 5) % 11 == 0) /* more than what a rank spins */
            nanosleep(&(struct timespec){0, 200000}, NULL);
        if (round % 7 == 0)
            CHECK_OK(mccl_all_reduce(other, other, 64, MCCL_INT32, MCCL_SUM, comm, NULL, &request));
        CHECK_OK(mccl_all_reduce(send, to, count, MCCL_INT32, MCCL_SUM, comm, NULL, NULL));
        check(to, count, team->n, round);
        if (request) {
            CHECK_OK(mccl_request_wait(request, -1));
            CHECK_OK(mccl_request_free(request));
            check(other, 64, team->n, round + 1);
        }
    }
}

/* Rank 1 asks for something else: both hear of it, with both values. */
static void disagree(struct team *team, int rank)
{
    float data[4] = {0};
    const mccl_result result = mccl_all_reduce(data, data, rank == 0 ? 3 : 4, MCCL_FLOAT32,
                                               MCCL_SUM, team->comms[rank], NULL, NULL);
    CHECK_EQ_I64(result, MCCL_ERR_MISMATCH);
    CHECK_HAS(mccl_last_error(), "count=3");
    CHECK_HAS(mccl_last_error(), "count=4");
}

static void times_out(const char *settings)
{
    struct team team = make_team(2, settings);
    float data = 1;
    mccl_options options = MCCL_OPTIONS_INIT;
    options.timeout_ms = 300;
    CHECK_OK(mccl_set_options(&options));
    CHECK_RESULT(
        mccl_all_reduce(&data, &data, 1, MCCL_FLOAT32, MCCL_SUM, team.comms[0], NULL, NULL),
        MCCL_ERR_TIMEOUT);
    CHECK_HAS(mccl_last_error(), "waiting 300ms for rank 1");
    CHECK_EQ_F64(data, 1);
    each(&team, leave);
}

/* Not before rank 0 has given up the short way and waits. */
static void abort_late(struct team *team, int rank)
{
    float data = 1;
    if (rank == 0) {
        const mccl_result result =
            mccl_all_reduce(&data, &data, 1, MCCL_FLOAT32, MCCL_SUM, team->comms[0], NULL, NULL);
        CHECK_EQ_I64(result, MCCL_ERR_ABORTED);
        CHECK_EQ_F64(data, 1);
        return;
    }
    while (atomic_load(&team->comms[0]->engine.n_outstanding) == 0)
        os_thread_yield();
    CHECK_OK(mccl_comm_abort(team->comms[1]));
}

static void run_new(int n, const char *settings, void (*body)(struct team *team, int rank))
{
    struct team team = make_team(n, settings);
    each(&team, body);
    each(&team, leave);
}

int main(void)
{
    for (size_t i = 0; i < sizeof transports / sizeof transports[0]; i++) {
        takes_the_short_way(transports[i]);
        reads_ahead(transports[i]);
        for (int n = 2; n <= 4; n++)
            run_new(n, transports[i], last_is_late);
        for (int n = 2; n <= MAX_RANKS; n += n < 4 ? 1 : 4)
            run_new(n, transports[i], mixture);
        run_new(2, transports[i], disagree);
        run_new(2, transports[i], abort_late);
        times_out(transports[i]);
    }
    return 0;
}

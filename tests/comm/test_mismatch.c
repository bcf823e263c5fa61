/* SPDX-License-Identifier: MIT
 *
 * Ranks that disagree about an operation learn it, both sides' values included, instead of hanging
 * or getting wrong data; the communicator then refuses with the first cause. A wrong argument of
 * one rank alone is that rank's own error and leaves the communicator as it was.
 */
/* limit: 90 s */
#include "support/check.h"
#include "support/harness.h"

#define MAX_BYTES (4 * 1024 * 1024)

struct call {
    enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, GATHER, BARRIER } kind;
    size_t count;
    mccl_dtype dtype;
    mccl_op op;
    int root;
};

struct disagreement {
    struct call most, last;            /* the last rank calls `last`, all others `most` */
    const char *word_most, *word_last; /* which the error text has to contain */
};

static const struct disagreement cases[] = {
    {{ALL_REDUCE, 3, MCCL_FLOAT32, MCCL_SUM, 0},
     {ALL_REDUCE, 4, MCCL_FLOAT32, MCCL_SUM, 0},
     "count=3",
     "count=4"},
    {{ALL_REDUCE, 0, MCCL_FLOAT32, MCCL_SUM, 0},
     {ALL_REDUCE, 4, MCCL_FLOAT32, MCCL_SUM, 0},
     "count=0",
     "count=4"},
    {{ALL_REDUCE, 200001, MCCL_FLOAT32, MCCL_SUM, 0},
     {ALL_REDUCE, 200002, MCCL_FLOAT32, MCCL_SUM, 0},
     "count=200001",
     "count=200002"},
    {{ALL_REDUCE, 200000, MCCL_FLOAT32, MCCL_SUM, 0},
     {ALL_REDUCE, 10, MCCL_FLOAT32, MCCL_SUM, 0},
     "count=200000",
     "count=10"},
    {{ALL_REDUCE, 100, MCCL_FLOAT32, MCCL_SUM, 0},
     {ALL_REDUCE, 100, MCCL_INT32, MCCL_SUM, 0},
     "float32",
     "int32"},
    {{ALL_REDUCE, 100, MCCL_FLOAT32, MCCL_SUM, 0},
     {ALL_REDUCE, 100, MCCL_FLOAT32, MCCL_MAX, 0},
     "sum",
     "max"},
    {{ALL_REDUCE, 5, MCCL_UINT8, MCCL_SUM, 0},
     {ALL_GATHER, 5, MCCL_UINT8, MCCL_SUM, 0},
     "all_reduce",
     "all_gather"},
    {{ALL_REDUCE, 5, MCCL_UINT8, MCCL_SUM, 0},
     {BARRIER, 0, MCCL_UINT8, MCCL_SUM, 0},
     "all_reduce",
     "barrier"},
    {{BROADCAST, 1000, MCCL_FLOAT64, MCCL_SUM, 0},
     {BROADCAST, 1000, MCCL_FLOAT64, MCCL_SUM, 1},
     "root=0",
     "root=1"},
    {{BROADCAST, 200000, MCCL_FLOAT64, MCCL_SUM, 1},
     {BROADCAST, 200001, MCCL_FLOAT64, MCCL_SUM, 1},
     "count=200000",
     "count=200001"},
    {{REDUCE, 17, MCCL_INT64, MCCL_PROD, 0},
     {REDUCE, 17, MCCL_INT64, MCCL_PROD, 1},
     "root=0",
     "root=1"},
    {{REDUCE_SCATTER, 255, MCCL_BFLOAT16, MCCL_AVG, 0},
     {REDUCE_SCATTER, 255, MCCL_FLOAT16, MCCL_AVG, 0},
     "bfloat16",
     "float16"},
    {{GATHER, 40, MCCL_FLOAT32, MCCL_SUM, 0},
     {GATHER, 41, MCCL_FLOAT32, MCCL_SUM, 0},
     "count=40",
     "count=41"},
};
#define N_CASES (sizeof cases / sizeof cases[0])

static mccl_result run_call(const struct call *c, const void *send, void *recv, mccl_comm *comm)
{
    switch (c->kind) {
    case ALL_REDUCE:
        return mccl_all_reduce(send, recv, c->count, c->dtype, c->op, comm, NULL, NULL);
    case REDUCE:
        return mccl_reduce(send, recv, c->count, c->dtype, c->op, c->root, comm, NULL, NULL);
    case BROADCAST:
        return mccl_broadcast(send, recv, c->count, c->dtype, c->root, comm, NULL, NULL);
    case ALL_GATHER:
        return mccl_all_gather(send, recv, c->count, c->dtype, comm, NULL, NULL);
    case REDUCE_SCATTER:
        return mccl_reduce_scatter(send, recv, c->count, c->dtype, c->op, comm, NULL, NULL);
    case GATHER:
        return mccl_gather(send, recv, c->count, c->dtype, c->root, comm, NULL, NULL);
    default:
        return mccl_barrier(comm, NULL, NULL);
    }
}

/* One case on a new communicator. `late`: the last rank calls only when all others wait. */
static void disagree(struct rank *self, const struct disagreement *d, bool late, char *send,
                     char *recv)
{
    const bool last = self->rank == self->n - 1;
    mccl_comm *comm = rank_connect_with(self, "heartbeat_interval_ms=1000", 10000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    /* An abort may overtake the end of the barrier on another rank. */
    sleep_ms(late && last ? 200 : 50);
    const int64_t start = now_ms();
    mccl_result result = run_call(last ? &d->last : &d->most, send, recv, comm);
    /* A rank that only sends, or has nothing to do, may learn it at its next call. */
    for (int more = 0; result == MCCL_OK && more < 2; more++)
        result = mccl_barrier(comm, NULL, NULL);
    CHECK_RESULT(result, MCCL_ERR_MISMATCH);
    CHECK_LE_I64(now_ms() - start, 3000);
    CHECK_HAS(mccl_last_error(), d->word_most);
    CHECK_HAS(mccl_last_error(), d->word_last);
    /* The first cause stays. */
    CHECK_RESULT(mccl_all_reduce(send, recv, 1, MCCL_INT32, MCCL_SUM, comm, NULL, NULL),
                 MCCL_ERR_MISMATCH);
    CHECK_HAS(mccl_last_error(), d->word_most);
    CHECK_OK(mccl_comm_destroy(comm));
}

static void all_cases(struct rank *self)
{
    char *send = calloc(1, MAX_BYTES), *recv = calloc(1, MAX_BYTES);
    CHECK(send != NULL && recv != NULL);
    for (size_t i = 0; i < N_CASES; i++) {
        fprintf(stderr, "case %zu\n", i); /* shown if it fails */
        disagree(self, &cases[i], false, send, recv);
        disagree(self, &cases[i], true, send, recv);
    }
    free(recv);
    free(send);
}

/* One side says "nothing" where the other means something: both learn it in the call itself, or in
 * the next. */
static void nothing_against_something(struct rank *self, size_t sent, size_t expected)
{
    int32_t send[8] = {0}, recv[8] = {0};
    const void *sends[2] = {send, send + 4};
    void *recvs[2] = {recv, recv + 4};
    const size_t send_counts[2] = {2, self->rank == 0 ? sent : 2};
    const size_t recv_counts[2] = {self->rank == 1 ? expected : 2, 2};
    mccl_comm *comm = rank_connect_with(self, NULL, 10000);
    mccl_result result =
        mccl_all_to_all_v(sends, send_counts, recvs, recv_counts, MCCL_INT32, comm, NULL, NULL);
    if (result == MCCL_OK && self->rank == 0) /* which only sent too little or too much */
        result = mccl_barrier(comm, NULL, NULL);
    CHECK_RESULT(result, MCCL_ERR_MISMATCH);
    CHECK_HAS(mccl_last_error(), "bytes");
    CHECK_OK(mccl_comm_destroy(comm));
}

/* Counts that every rank chooses for itself. */
static void v_counts_disagree(struct rank *self)
{
    nothing_against_something(self, 3, 0);
    nothing_against_something(self, 0, 3);
    int32_t send[8] = {0}, recv[8] = {0};
    const void *sends[2] = {send, send + 4};
    void *recvs[2] = {recv, recv + 4};
    /* Rank 1 expects one element more of rank 0 than that sends. */
    const size_t send_counts[2] = {2, 2};
    const size_t recv_counts[2] = {self->rank == 1 ? 3 : 2, 2};
    mccl_comm *comm = rank_connect_with(self, NULL, 10000);
    mccl_result result =
        mccl_all_to_all_v(sends, send_counts, recvs, recv_counts, MCCL_INT32, comm, NULL, NULL);
    if (result == MCCL_OK && self->rank == 0)
        result = mccl_barrier(comm, NULL, NULL);
    CHECK_RESULT(result, MCCL_ERR_MISMATCH);
    CHECK_OK(mccl_comm_destroy(comm));

    comm = rank_connect_with(self, NULL, 10000);
    result = mccl_all_gather_v(send, recvs, recv_counts, MCCL_INT32, comm, NULL, NULL);
    for (int more = 0; result == MCCL_OK && more < 2; more++)
        result = mccl_barrier(comm, NULL, NULL);
    CHECK_RESULT(result, MCCL_ERR_MISMATCH);
    CHECK_HAS(mccl_last_error(), "counts=2 each");
    CHECK_HAS(mccl_last_error(), "counts=5 in all");
    CHECK_OK(mccl_comm_destroy(comm));
}

#define REFUSED(call, code, word)            \
    do {                                     \
        CHECK_RESULT(call, MCCL_ERR_##code); \
        CHECK_HAS(mccl_last_error(), word);  \
    } while (0)

static void bad_arguments(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 10000);
    int32_t a[4] = {1, 2, 3, 4}, b[4];
    void *const recvs[TEAM_MAX] = {NULL};
    const mccl_dtype no_dtype = (mccl_dtype)99;
    const mccl_op no_op = (mccl_op)99;
    REFUSED(mccl_all_reduce(NULL, b, 4, MCCL_INT32, MCCL_SUM, comm, NULL, NULL), INVALID_ARGUMENT,
            "send");
    REFUSED(mccl_all_reduce(a, NULL, 4, MCCL_INT32, MCCL_SUM, comm, NULL, NULL), INVALID_ARGUMENT,
            "recv");
    REFUSED(mccl_all_reduce(a, b, 4, MCCL_INT32, MCCL_SUM, NULL, NULL, NULL), INVALID_ARGUMENT,
            "comm");
    REFUSED(mccl_all_reduce(a, b, 4, no_dtype, MCCL_SUM, comm, NULL, NULL), INVALID_ARGUMENT, "99");
    REFUSED(mccl_all_reduce(a, b, 4, MCCL_INT32, no_op, comm, NULL, NULL), INVALID_ARGUMENT, "99");
    REFUSED(mccl_all_reduce(a, b, 4, MCCL_INT32, MCCL_AVG, comm, NULL, NULL), UNSUPPORTED, "avg");
    REFUSED(mccl_all_reduce(a, b, 4, MCCL_FLOAT8_E5M2, MCCL_SUM, comm, NULL, NULL), UNSUPPORTED,
            "float8_e5m2");
    REFUSED(mccl_reduce(a, b, 4, MCCL_COMPLEX64, MCCL_MAX, 0, comm, NULL, NULL), UNSUPPORTED,
            "complex64");
    REFUSED(mccl_all_reduce(a, b, SIZE_MAX / 2, MCCL_INT32, MCCL_SUM, comm, NULL, NULL),
            INVALID_ARGUMENT, "count");
    REFUSED(mccl_broadcast(a, b, 4, MCCL_INT32, self->n, comm, NULL, NULL), INVALID_ARGUMENT,
            "root");
    REFUSED(mccl_broadcast(a, b, 4, MCCL_INT32, -1, comm, NULL, NULL), INVALID_ARGUMENT, "root");
    REFUSED(mccl_all_gather_v(a, NULL, NULL, MCCL_INT32, comm, NULL, NULL), INVALID_ARGUMENT,
            "recv");
    const size_t ones[TEAM_MAX] = {1, 1, 1, 1};
    REFUSED(mccl_all_gather_v(a, recvs, ones, MCCL_INT32, comm, NULL, NULL), INVALID_ARGUMENT,
            "recvs[0]");
    REFUSED(mccl_send(a, 4, MCCL_INT32, self->n, comm, NULL, NULL), INVALID_ARGUMENT, "peer");
    REFUSED(mccl_send(a, 4, MCCL_INT32, MCCL_ANY_SOURCE, comm, NULL, NULL), INVALID_ARGUMENT,
            "peer");
    REFUSED(mccl_recv(b, 4, MCCL_INT32, -2, comm, NULL, NULL), INVALID_ARGUMENT, "peer");
    mccl_options options = MCCL_OPTIONS_INIT;
    options.size = 3;
    REFUSED(mccl_set_options(&options), INVALID_ARGUMENT, "size");
    /* Nothing of this has reached anybody. */
    mccl_result error = MCCL_ERR_INTERNAL;
    CHECK_OK(mccl_comm_get_async_error(comm, &error));
    CHECK_EQ_I64(error, MCCL_OK);
    CHECK_OK(mccl_all_reduce(a, b, 4, MCCL_INT32, MCCL_SUM, comm, NULL, NULL));
    for (int i = 0; i < 4; i++)
        CHECK_EQ_I64(b[i], a[i] * self->n);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* Of the calls that make communicators. */
static void bad_init_arguments(struct rank *self)
{
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    (void)self;
    CHECK_OK(mccl_get_unique_id(&id));
    REFUSED(mccl_comm_init_rank(NULL, 1, &id, 0, NULL), INVALID_ARGUMENT, "comm");
    REFUSED(mccl_comm_init_rank(&comm, 0, &id, 0, NULL), INVALID_ARGUMENT, "n_ranks");
    REFUSED(mccl_comm_init_rank(&comm, 2, &id, 2, NULL), INVALID_ARGUMENT, "rank");
    REFUSED(mccl_comm_init_rank(&comm, 2, &id, -1, NULL), INVALID_ARGUMENT, "rank");
    REFUSED(mccl_comm_init_rank(&comm, 2, NULL, 0, NULL), INVALID_ARGUMENT, "id");
    mccl_config config = MCCL_CONFIG_INIT;
    config.size = 5;
    REFUSED(mccl_comm_init_rank(&comm, 1, &id, 0, &config), INVALID_ARGUMENT, "size");
    mccl_unique_id garbage;
    memset(&garbage, 0x5a, sizeof garbage);
    CHECK(mccl_comm_init_rank(&comm, 1, &garbage, 0, NULL) != MCCL_OK);
    CHECK(mccl_unique_id_from_text("no id", &garbage) != MCCL_OK);
    CHECK(comm == NULL);
    CHECK_OK(mccl_comm_init_rank(&comm, 1, &id, 0, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
    CHECK_OK(mccl_comm_destroy(NULL));
}

int main(void)
{
    team_run(1, 20, bad_init_arguments, NULL);
    for (int n = 1; n <= 3; n++)
        team_run(n, 20, bad_arguments, NULL);
    team_run(2, 20, v_counts_disagree, NULL);
    for (int n = 2; n <= 4; n++)
        team_run(n, 60, all_cases, NULL);
    return 0;
}

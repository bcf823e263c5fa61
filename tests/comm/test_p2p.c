/* SPDX-License-Identifier: MIT
 *
 * Point to point: matching by peer and tag in any order, early arrivals, both size classes (eager
 * up to 64 KiB, rendezvous above), sending to oneself, beside collectives, and disagreement.
 */
/* limit: 60 s */
#include "support/check.h"
#include "support/harness.h"
#include "support/pattern.h"

#define EAGER_BYTES 65536

static const size_t sizes[] = {0, 1, 17, EAGER_BYTES, EAGER_BYTES + 1, 5 * 1024 * 1024 + 3};
#define N_SIZES (sizeof sizes / sizeof sizes[0])

static unsigned char *filled(size_t size, uint64_t seed, int rank)
{
    unsigned char *data = malloc(size + 1);
    CHECK(data != NULL);
    pattern_fill(data, size, MCCL_UINT8, PATTERN_MOVE, seed, rank, 1, 0);
    return data;
}

static void check_filled(const unsigned char *data, size_t size, uint64_t seed, int rank)
{
    unsigned char *expected = filled(size, seed, rank);
    CHECK_EQ_MEM(data, expected, size);
    free(expected);
}

static void set_tag(int32_t tag)
{
    mccl_options options = MCCL_OPTIONS_INIT;
    options.tag = tag;
    CHECK_OK(mccl_set_options(&options));
}

static mccl_request *isend(const void *data, size_t size, int peer, int32_t tag, mccl_comm *comm)
{
    mccl_request *request = NULL;
    set_tag(tag);
    CHECK_OK(mccl_send(data, size, MCCL_UINT8, peer, comm, NULL, &request));
    CHECK(request != NULL);
    return request;
}

static mccl_request *irecv(void *data, size_t size, int peer, int32_t tag, mccl_comm *comm)
{
    mccl_request *request = NULL;
    set_tag(tag);
    CHECK_OK(mccl_recv(data, size, MCCL_UINT8, peer, comm, NULL, &request));
    CHECK(request != NULL);
    return request;
}

static void finish(mccl_request *request)
{
    CHECK_OK(mccl_request_wait(request, -1));
    CHECK_OK(mccl_request_free(request));
}

/* Every pair at once, blocking receive, sends first on both sides. */
static void everybody_sends_first(struct rank *self, mccl_comm *comm)
{
    for (size_t i = 0; i < N_SIZES; i++) {
        mccl_request *sends[TEAM_MAX];
        unsigned char *data = filled(sizes[i], i, self->rank);
        unsigned char *got = malloc(sizes[i] + 1);
        CHECK(got != NULL);
        for (int peer = 0; peer < self->n; peer++)
            sends[peer] = isend(data, sizes[i], peer, 0, comm);
        for (int peer = 0; peer < self->n; peer++) {
            CHECK_OK(mccl_recv(got, sizes[i], MCCL_UINT8, peer, comm, NULL, NULL));
            check_filled(got, sizes[i], i, peer);
        }
        for (int peer = 0; peer < self->n; peer++)
            finish(sends[peer]);
        free(got);
        free(data);
    }
}

/* Messages of one peer taken in another order than they were sent in. */
static void tags_out_of_order(struct rank *self, mccl_comm *comm)
{
    static const int order[] = {3, 0, 5, 1, 4, 2};
    const int next = (self->rank + 1) % self->n;
    const int before = (self->rank + self->n - 1) % self->n;
    mccl_request *sends[N_SIZES];
    unsigned char *data[N_SIZES];
    for (size_t i = 0; i < N_SIZES; i++) {
        data[i] = filled(sizes[i], 100 + i, self->rank);
        sends[i] = isend(data[i], sizes[i], next, (int32_t)(1000 + i), comm);
    }
    for (size_t k = 0; k < N_SIZES; k++) {
        const size_t i = (size_t)order[k];
        unsigned char *got = malloc(sizes[i] + 1);
        CHECK(got != NULL);
        mccl_request *request = irecv(got, sizes[i], before, (int32_t)(1000 + i), comm);
        mccl_status status = {.size = sizeof status};
        CHECK_OK(mccl_request_wait(request, -1));
        CHECK_OK(mccl_request_get_status(request, &status));
        CHECK_EQ_I64(status.source, before);
        CHECK_EQ_I64(status.tag, (int)(1000 + i));
        CHECK_EQ_U64(status.bytes, sizes[i]);
        CHECK_OK(mccl_request_free(request));
        check_filled(got, sizes[i], 100 + i, before);
        free(got);
    }
    for (size_t i = 0; i < N_SIZES; i++) {
        finish(sends[i]);
        free(data[i]);
    }
}

/* Rank 0 takes one message of every other rank, from whoever comes; the tag says what is in it. */
static void any_source(struct rank *self, mccl_comm *comm)
{
    for (size_t i = 0; i < N_SIZES; i++) {
        if (self->rank != 0) {
            unsigned char *data = filled(sizes[i], 200 + i, self->rank);
            finish(isend(data, sizes[i], 0, 7 + self->rank, comm));
            free(data);
            /* Nobody's next size may overtake: any-source takes what comes. */
            CHECK_OK(mccl_barrier(comm, NULL, NULL));
            continue;
        }
        bool seen[TEAM_MAX] = {false};
        unsigned char *got = malloc(sizes[i] + 1);
        CHECK(got != NULL);
        for (int k = 1; k < self->n; k++) {
            mccl_request *request = irecv(got, sizes[i], MCCL_ANY_SOURCE, MCCL_ANY_TAG, comm);
            mccl_status status = {.size = sizeof status};
            CHECK_OK(mccl_request_wait(request, -1));
            CHECK_OK(mccl_request_get_status(request, &status));
            CHECK(status.source > 0 && status.source < self->n && !seen[status.source]);
            CHECK_EQ_I64(status.tag, 7 + status.source);
            seen[status.source] = true;
            check_filled(got, sizes[i], 200 + i, status.source);
            CHECK_OK(mccl_request_free(request));
        }
        free(got);
        CHECK_OK(mccl_barrier(comm, NULL, NULL));
    }
}

/* More messages than any queue of early arrivals should hold in memory, before the first recv. */
static void many_before_the_first_recv(struct rank *self, mccl_comm *comm)
{
    enum { N = 200, SIZE = 20001 };
    const int peer = self->rank ^ 1;
    if (peer < self->n) {
        mccl_request *sends[N];
        unsigned char *data[N], *got = malloc(SIZE);
        CHECK(got != NULL);
        for (int i = 0; i < N; i++) {
            data[i] = filled(SIZE, 300u + (unsigned)i, self->rank);
            sends[i] = isend(data[i], SIZE, peer, 1, comm);
        }
        sleep_ms(50);
        for (int i = 0; i < N; i++) {
            finish(irecv(got, SIZE, peer, 1, comm));
            check_filled(got, SIZE, 300u + (unsigned)i, peer);
        }
        for (int i = 0; i < N; i++) {
            finish(sends[i]);
            free(data[i]);
        }
        free(got);
    }
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
}

/* A token goes round, growing at every rank. */
static void ring(struct rank *self, mccl_comm *comm)
{
    const int next = (self->rank + 1) % self->n;
    const int before = (self->rank + self->n - 1) % self->n;
    int64_t token = 1;
    if (self->rank != 0) {
        CHECK_OK(mccl_recv(&token, 1, MCCL_INT64, before, comm, NULL, NULL));
        CHECK_EQ_I64(token, self->rank);
        token++;
    }
    if (self->rank == 0) {
        CHECK_OK(mccl_send(&token, 1, MCCL_INT64, next, comm, NULL, NULL));
        CHECK_OK(mccl_recv(&token, 1, MCCL_INT64, before, comm, NULL, NULL));
        CHECK_EQ_I64(token, self->n);
    } else {
        CHECK_OK(mccl_send(&token, 1, MCCL_INT64, next, comm, NULL, NULL));
    }
}

/* A receive that stays open over collectives, and messages sent between them. */
static void beside_collectives(struct rank *self, mccl_comm *comm)
{
    enum { COUNT = 300007, ROUNDS = 5 };
    const int next = (self->rank + 1) % self->n;
    const int before = (self->rank + self->n - 1) % self->n;
    int32_t *numbers = malloc(COUNT * sizeof *numbers);
    unsigned char *got = malloc(COUNT);
    CHECK(numbers != NULL && got != NULL);
    for (int round = 0; round < ROUNDS; round++) {
        mccl_request *recv = irecv(got, COUNT, before, round, comm);
        for (int i = 0; i < COUNT; i++)
            numbers[i] = self->rank + i + round;
        mccl_request *reduce = NULL;
        CHECK_OK(
            mccl_all_reduce(numbers, numbers, COUNT, MCCL_INT32, MCCL_SUM, comm, NULL, &reduce));
        unsigned char *data = filled(COUNT, 500u + (unsigned)round, self->rank);
        mccl_request *send = isend(data, COUNT, next, round, comm);
        finish(recv);
        check_filled(got, COUNT, 500u + (unsigned)round, before);
        finish(reduce);
        for (int i = 0; i < COUNT; i++)
            CHECK_EQ_I64(numbers[i], self->n * (i + round) + self->n * (self->n - 1) / 2);
        finish(send);
        free(data);
    }
    free(got);
    free(numbers);
}

static void all_parts(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    everybody_sends_first(self, comm);
    tags_out_of_order(self, comm);
    any_source(self, comm);
    many_before_the_first_recv(self, comm);
    ring(self, comm);
    beside_collectives(self, comm);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* What the two sides of a message say about it. */
struct disagreement {
    size_t send_count, recv_count;
    mccl_dtype send_dtype, recv_dtype;
    const char *send_word, *recv_word; /* in the error text */
};

static void disagree(struct rank *self)
{
    const struct disagreement *d = self->arg;
    mccl_comm *comm = rank_connect_with(self, NULL, 5000);
    char *data = calloc(1, 1024 * 1024);
    CHECK(data != NULL);
    mccl_result result;
    if (self->rank == 0)
        result = mccl_send(data, d->send_count, d->send_dtype, 1, comm, NULL, NULL);
    else
        result = mccl_recv(data, d->recv_count, d->recv_dtype, 0, comm, NULL, NULL);
    if (self->rank == 0 && result == MCCL_OK) /* had gone before anybody looked at it */
        result = mccl_barrier(comm, NULL, NULL);
    CHECK_RESULT(result, MCCL_ERR_MISMATCH);
    CHECK_HAS(mccl_last_error(), d->send_word);
    CHECK_HAS(mccl_last_error(), d->recv_word);
    CHECK_RESULT(mccl_barrier(comm, NULL, NULL), MCCL_ERR_MISMATCH);
    CHECK_OK(mccl_comm_destroy(comm));
    free(data);
}

int main(void)
{
    for (int n = 1; n <= 4; n++)
        team_run(n, 50, all_parts, NULL);
    static const struct disagreement cases[] = {
        {3, 4, MCCL_FLOAT32, MCCL_FLOAT32, "count=3", "count=4"},
        {5, 5, MCCL_FLOAT32, MCCL_INT32, "float32", "int32"},
        {100000, 100001, MCCL_FLOAT32, MCCL_FLOAT32, "count=100000", "count=100001"},
        {100000, 100000, MCCL_FLOAT64, MCCL_INT64, "float64", "int64"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        team_run(2, 20, disagree, &cases[i]);
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * Requests and what belongs to them: waiting in any order, testing, waiting inside the call,
 * freeing early, outliving the communicator, completion queues, groups of calls, an operation's own
 * time-out.
 */
/* limit: 90 s */
#include "support/check.h"
#include "support/harness.h"

#include <pthread.h>

#define N_OPS 12
#define COUNT 30011

/* input[i] = rank + i + salt; the sum over n ranks is sum_at(). */
static int32_t *numbers(const struct rank *self, int salt)
{
    int32_t *data = malloc(COUNT * sizeof *data);
    CHECK(data != NULL);
    for (int i = 0; i < COUNT; i++)
        data[i] = self->rank + i + salt;
    return data;
}

static void check_sum(const struct rank *self, const int32_t *data, int salt)
{
    for (int i = 0; i < COUNT; i++)
        CHECK_EQ_I64(data[i], self->n * (i + salt) + self->n * (self->n - 1) / 2);
}

static mccl_request *start_sum(int32_t *data, mccl_comm *comm)
{
    mccl_request *request = NULL;
    CHECK_OK(mccl_all_reduce(data, data, COUNT, MCCL_INT32, MCCL_SUM, comm, NULL, &request));
    CHECK(request != NULL);
    return request;
}

static void waits_out_of_order(struct rank *self, mccl_comm *comm)
{
    int32_t *data[N_OPS];
    mccl_request *requests[N_OPS];
    for (int i = 0; i < N_OPS; i++) {
        data[i] = numbers(self, 1000 * i);
        requests[i] = start_sum(data[i], comm);
    }
    for (int k = 0; k < N_OPS; k++) {
        /* Every rank in an order of its own: 5 and 12 have no common factor. */
        const int i = (k * 5 + self->rank * 7) % N_OPS;
        CHECK_OK(mccl_request_wait(requests[i], -1));
        check_sum(self, data[i], 1000 * i);
        CHECK_OK(mccl_request_wait(requests[i], 0)); /* again, it stays done */
        mccl_status status = {.size = sizeof status};
        CHECK_OK(mccl_request_get_status(requests[i], &status));
        CHECK_EQ_U64(status.bytes, COUNT * sizeof(int32_t));
        CHECK_EQ_I64(status.source, -1);
        CHECK_OK(mccl_request_free(requests[i]));
        free(data[i]);
    }
}

/* Alternating between test and sleep gets an operation done, also when nobody else drives. */
static void tests_until_done(struct rank *self, mccl_comm *comm)
{
    int32_t *data = numbers(self, 5);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    if (self->rank == self->n - 1)
        sleep_ms(100);
    mccl_request *request = start_sum(data, comm);
    mccl_status status = {.size = sizeof status};
    if (self->rank == 0 && self->n > 1) {
        CHECK_RESULT(mccl_request_test(request), MCCL_IN_PROGRESS); /* the last rank still sleeps */
        CHECK_RESULT(mccl_request_get_status(request, &status), MCCL_IN_PROGRESS);
        CHECK_RESULT(mccl_request_wait(request, 20), MCCL_IN_PROGRESS);
    }
    mccl_result result;
    while ((result = mccl_request_test(request)) == MCCL_IN_PROGRESS)
        sleep_ms(1);
    CHECK_OK(result);
    check_sum(self, data, 5);
    CHECK_OK(mccl_request_free(request));
    CHECK_OK(mccl_request_free(NULL));
    free(data);
}

/* Freed before completion, an operation goes on without a waiter: the next barrier proves it. */
static void free_before_completion(struct rank *self, mccl_comm *comm)
{
    int32_t *data[N_OPS];
    for (int i = 0; i < N_OPS; i++) {
        data[i] = numbers(self, i);
        CHECK_OK(mccl_request_free(start_sum(data[i], comm)));
    }
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    for (int i = 0; i < N_OPS; i++) {
        check_sum(self, data[i], i);
        free(data[i]);
    }
}

/* One thread closes the queue under another that waits. */
static void *wait_closed(void *arg)
{
    uint64_t user;
    mccl_result result;
    CHECK_RESULT(mccl_queue_wait(arg, -1, &user, &result), MCCL_ERR_ABORTED);
    return NULL;
}

static void completion_queue(struct rank *self, mccl_comm *comm)
{
    mccl_queue *queue = NULL;
    int32_t *data[N_OPS];
    uint64_t user = 0;
    mccl_result result = MCCL_OK;
    CHECK_OK(mccl_queue_create(&queue));
    CHECK_RESULT(mccl_queue_wait(queue, 10, &user, &result), MCCL_IN_PROGRESS);
    for (int i = 0; i < N_OPS; i++) {
        data[i] = numbers(self, 10 * i);
        mccl_request *request = start_sum(data[i], comm);
        CHECK_OK(mccl_queue_add(queue, request, 100u + (unsigned)i));
        CHECK_OK(mccl_request_free(request));
    }
    bool seen[N_OPS] = {false};
    for (int k = 0; k < N_OPS; k++) {
        CHECK_OK(mccl_queue_wait(queue, -1, &user, &result));
        CHECK_OK(result);
        CHECK(user >= 100 && user < 100 + N_OPS && !seen[user - 100]);
        seen[user - 100] = true;
        check_sum(self, data[user - 100], 10 * (int)(user - 100));
    }
    /* A request that is done already comes at once. */
    mccl_request *done = start_sum(data[0], comm);
    CHECK_OK(mccl_request_wait(done, -1));
    CHECK_OK(mccl_queue_add(queue, done, 7));
    CHECK_RESULT(mccl_queue_add(queue, done, 8), MCCL_ERR_INVALID_USAGE);
    CHECK_OK(mccl_queue_wait(queue, 0, &user, &result));
    CHECK_EQ_U64(user, 7);
    CHECK_RESULT(mccl_queue_wait(queue, 0, &user, &result), MCCL_IN_PROGRESS);
    CHECK_OK(mccl_queue_add(queue, done, 9)); /* taken out, it may go in again */
    CHECK_OK(mccl_queue_wait(queue, 0, &user, &result));
    CHECK_EQ_U64(user, 9);
    CHECK_OK(mccl_request_free(done));

    pthread_t waiter;
    CHECK_RESULT(mccl_queue_destroy(queue), MCCL_ERR_INVALID_USAGE);
    CHECK(pthread_create(&waiter, NULL, wait_closed, queue) == 0);
    sleep_ms(20);
    CHECK_OK(mccl_queue_close(queue));
    pthread_join(waiter, NULL);
    CHECK_OK(mccl_queue_destroy(queue));
    for (int i = 0; i < N_OPS; i++)
        free(data[i]);
}

/* Mixed operations on two communicators; all pairs exchange without any order of their own. */
static void groups(struct rank *self, mccl_comm *comm, mccl_comm *other)
{
    int32_t *sum = numbers(self, 1), *more = numbers(self, 2);
    int32_t out[TEAM_MAX], in[TEAM_MAX];
    mccl_request *request = NULL;
    CHECK_OK(mccl_group_start());
    CHECK_OK(mccl_all_reduce(sum, sum, COUNT, MCCL_INT32, MCCL_SUM, comm, NULL, NULL));
    CHECK_OK(mccl_group_start());
    for (int peer = 0; peer < self->n; peer++) {
        out[peer] = 100 * self->rank + peer;
        /* Receives first: blocking calls in this order would wait for each other for ever. */
        CHECK_OK(mccl_recv(&in[peer], 1, MCCL_INT32, peer, comm, NULL, NULL));
        CHECK_OK(mccl_send(&out[peer], 1, MCCL_INT32, peer, comm, NULL, NULL));
    }
    CHECK_OK(mccl_group_end());
    CHECK_OK(mccl_all_reduce(more, more, COUNT, MCCL_INT32, MCCL_SUM, other, NULL, &request));
    CHECK_OK(mccl_group_end());
    check_sum(self, sum, 1);
    for (int peer = 0; peer < self->n; peer++)
        CHECK_EQ_I64(in[peer], 100 * peer + self->rank);
    CHECK(request != NULL);
    CHECK_OK(mccl_request_wait(request, -1));
    check_sum(self, more, 2);
    CHECK_OK(mccl_request_free(request));
    free(more);
    free(sum);
}

/* The first error fails all of the group and nothing of it is sent; the communicator goes on. */
static void group_error(struct rank *self, mccl_comm *comm)
{
    int32_t *data = numbers(self, 9), *untouched = numbers(self, 9);
    mccl_request *request = NULL;
    CHECK_OK(mccl_group_start());
    (void)mccl_all_reduce(data, data, COUNT, MCCL_INT32, MCCL_SUM, comm, NULL, &request);
    (void)mccl_broadcast(data, data, COUNT, MCCL_INT32, self->n, comm, NULL,
                         NULL); /* no such root */
    (void)mccl_all_reduce(data, data, COUNT, MCCL_INT32, MCCL_SUM, comm, NULL, NULL);
    CHECK_RESULT(mccl_group_end(), MCCL_ERR_INVALID_ARGUMENT);
    CHECK_HAS(mccl_last_error(), "root");
    CHECK(request == NULL);
    CHECK_EQ_MEM(data, untouched, COUNT * sizeof *data);
    CHECK_RESULT(mccl_group_end(), MCCL_ERR_INVALID_USAGE);
    CHECK_OK(mccl_all_reduce(data, data, COUNT, MCCL_INT32, MCCL_SUM, comm, NULL, NULL));
    check_sum(self, data, 9);
    free(untouched);
    free(data);
}

static mccl_result sum_on(mccl_stream *stream, int32_t *data, mccl_comm *comm,
                          mccl_request **request)
{
    return mccl_all_reduce(data, data, COUNT, MCCL_INT32, MCCL_SUM, comm, stream, request);
}

static void waits_in_the_call(struct rank *self, mccl_comm *comm)
{
    int32_t *data = numbers(self, 21);
    mccl_request *request = NULL;
    mccl_stream *stream;
    CHECK_OK(mccl_stream_create(MCCL_DEVICE_HOST, NULL, &stream));
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    if (self->rank == 0 && self->n > 1) {
        CHECK_OK(mccl_stream_set_wait(stream, 20));
        CHECK_RESULT(sum_on(stream, data, comm, &request), MCCL_IN_PROGRESS); /* others sleep */
        CHECK(request != NULL);
        CHECK_OK(mccl_request_wait(request, -1));
        CHECK_OK(mccl_request_free(request));
    } else {
        sleep_ms(300);
        CHECK_OK(mccl_stream_set_wait(stream, 20000));
        request = (mccl_request *)self; /* overwritten */
        CHECK_OK(sum_on(stream, data, comm, &request));
        CHECK(request == NULL);
    }
    check_sum(self, data, 21);
    CHECK_OK(mccl_group_start());
    CHECK_RESULT(mccl_barrier(comm, stream, &request), MCCL_ERR_INVALID_USAGE);
    CHECK_RESULT(mccl_group_end(), MCCL_ERR_INVALID_USAGE);
    CHECK_HAS(mccl_last_error(), "stream says to wait");
    CHECK_RESULT(mccl_stream_set_wait(NULL, 1), MCCL_ERR_INVALID_ARGUMENT);
    CHECK_OK(mccl_stream_destroy(stream));
    free(data);
}

static void arguments_in_a_struct(struct rank *self, mccl_comm *comm)
{
    int32_t *first = numbers(self, 31), *second = numbers(self, 32);
    mccl_stream *stream;
    CHECK_OK(mccl_stream_create(MCCL_DEVICE_HOST, NULL, &stream));
    mccl_all_reduce_args args = {sizeof args, first, first,  COUNT, MCCL_INT32,
                                 MCCL_SUM,    comm,  stream, NULL};
    CHECK_OK(mccl_all_reduce_by(&args));
    CHECK(args.request != NULL);
    CHECK_OK(mccl_request_wait(args.request, -1));
    CHECK_OK(mccl_request_free(args.request));
    check_sum(self, first, 31);
    CHECK_OK(mccl_stream_set_wait(stream, 20000));
    args.send = args.recv = second;
    CHECK_OK(mccl_all_reduce_by(&args));
    CHECK(args.request == NULL);
    check_sum(self, second, 32);
    args.request = (mccl_request *)self; /* overwritten, also by what is refused */
    args.dtype = (mccl_dtype)1000;
    CHECK_RESULT(mccl_all_reduce_by(&args), MCCL_ERR_INVALID_ARGUMENT);
    CHECK(args.request == NULL);
    args.size--;
    CHECK_RESULT(mccl_all_reduce_by(&args), MCCL_ERR_INVALID_ARGUMENT);
    CHECK_HAS(mccl_last_error(), "mccl_all_reduce_by: size is");
    CHECK_RESULT(mccl_all_reduce_by(NULL), MCCL_ERR_INVALID_ARGUMENT);
    CHECK_OK(mccl_stream_destroy(stream));
    free(first);
    free(second);
}

static void outlives_communicator(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    int32_t *data = numbers(self, 3);
    mccl_request *done = start_sum(data, comm);
    CHECK_OK(mccl_request_wait(done, -1));
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    /* Nobody sends this: unfinished when the communicator goes. */
    int32_t never = 0;
    mccl_request *unfinished = NULL;
    CHECK_OK(mccl_recv(&never, 1, MCCL_INT32, self->rank, comm, NULL, &unfinished));
    const int64_t start = now_ms();
    CHECK_OK(mccl_comm_destroy(comm));
    CHECK_LE_I64(now_ms() - start, 3000);
    CHECK_OK(mccl_request_wait(done, 0));
    CHECK_OK(mccl_request_test(done));
    check_sum(self, data, 3);
    const mccl_result result = mccl_request_wait(unfinished, 1000);
    CHECK(result != MCCL_OK && result != MCCL_IN_PROGRESS);
    CHECK(mccl_last_error()[0] != '\0');
    CHECK_OK(mccl_request_free(done));
    CHECK_OK(mccl_request_free(unfinished));
    free(data);
}

/* The last rank comes too late for the first one's own time-out, but not for the group's. */
static void own_time_out(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    int32_t *data = numbers(self, 3);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    if (self->rank == self->n - 1) {
        sleep_ms(1500);
        const mccl_result late =
            mccl_all_reduce(data, data, COUNT, MCCL_INT32, MCCL_SUM, comm, NULL, NULL);
        CHECK(late == MCCL_ERR_TIMEOUT || late == MCCL_ERR_ABORTED || late == MCCL_ERR_PEER_LOST);
    } else if (self->rank == 0) {
        mccl_options options = MCCL_OPTIONS_INIT;
        options.timeout_ms = 300;
        CHECK_OK(mccl_set_options(&options));
        const int64_t start = now_ms();
        mccl_request *request = start_sum(data, comm);
        CHECK_RESULT(mccl_request_wait(request, -1), MCCL_ERR_TIMEOUT);
        CHECK_GE_I64(now_ms() - start, 299);
        CHECK_LE_I64(now_ms() - start, 1300);
        CHECK_HAS(mccl_last_error(), "all_reduce");
        CHECK_OK(mccl_request_free(request));
        mccl_result error = MCCL_OK;
        CHECK_OK(mccl_comm_get_async_error(comm, &error));
        CHECK_EQ_I64(error, MCCL_ERR_TIMEOUT);
    } else {
        const mccl_result told =
            mccl_all_reduce(data, data, COUNT, MCCL_INT32, MCCL_SUM, comm, NULL, NULL);
        CHECK(told == MCCL_ERR_TIMEOUT || told == MCCL_ERR_ABORTED);
    }
    /* The failure is for good. */
    CHECK(mccl_barrier(comm, NULL, NULL) != MCCL_OK);
    CHECK_OK(mccl_comm_destroy(comm));
    free(data);
}

/* Abort from another thread ends a wait at once, here and elsewhere, and memory stays as it is. */
static void *abort_soon(void *arg)
{
    sleep_ms(200);
    CHECK_OK(mccl_comm_abort(arg));
    return NULL;
}

static void abort_ends_waits(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    int32_t *data = numbers(self, 3);
    pthread_t thread;
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    const int64_t start = now_ms();
    if (self->rank == 0) {
        CHECK(pthread_create(&thread, NULL, abort_soon, comm) == 0);
        int32_t value = 0;
        CHECK_RESULT(mccl_recv(&value, 1, MCCL_INT32, self->n - 1, comm, NULL, NULL),
                     MCCL_ERR_ABORTED);
        pthread_join(thread, NULL);
    } else {
        const mccl_result told = mccl_barrier(comm, NULL, NULL);
        CHECK_EQ_I64(told, MCCL_ERR_ABORTED);
        CHECK_HAS(mccl_last_error(), "rank 0");
    }
    CHECK_LE_I64(now_ms() - start, 1500);
    CHECK_OK(mccl_comm_destroy(comm));
    free(data);
}

static void rank_main(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    mccl_comm *other = rank_connect_with(self, NULL, 20000);
    waits_out_of_order(self, comm);
    tests_until_done(self, comm);
    free_before_completion(self, comm);
    completion_queue(self, comm);
    groups(self, comm, other);
    group_error(self, comm);
    waits_in_the_call(self, comm);
    arguments_in_a_struct(self, comm);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(other));
    CHECK_OK(mccl_comm_destroy(comm));
    outlives_communicator(self);
    if (self->n > 1) {
        own_time_out(self);
        abort_ends_waits(self);
    }
}

int main(void)
{
    for (int n = 1; n <= 4; n++)
        team_run(n, 60, rank_main, NULL);
    return 0;
}

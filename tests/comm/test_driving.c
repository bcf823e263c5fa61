/* SPDX-License-Identifier: MIT
 *
 * Who drives: every operation goes on and meets its deadline whatever other threads wait for or
 * leave, an end of stream is not forgotten, and a group of calls cannot wait for itself.
 */
/* limit: 60 s */
#include "support/check.h"
#include "support/harness.h"

#include <pthread.h>
#include <time.h>

#define QUICK_MS \
    1500             /* a hang that only the deadline ends takes much longer, a slow machine less */
#define LATE_MS 6000 /* time-out of operations that must not need it */
#define MANY 5       /* ranks; from 5 on links are read when the poller says so */

static mccl_comm *comms[MANY], *second[MANY];

static void set_tag(int tag)
{
    mccl_options options = MCCL_OPTIONS_INIT;
    options.tag = tag;
    CHECK_OK(mccl_set_options(&options));
}

static pthread_t start(void *(*function)(void *), void *arg)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, function, arg) == 0);
    return thread;
}

static void connect_one(struct rank *self)
{
    comms[self->rank] = rank_connect_with(self, self->arg, LATE_MS);
}

static void split_one(struct rank *self)
{
    CHECK_OK(mccl_comm_split(comms[self->rank], 0, 0, &second[self->rank], NULL));
}

static void destroy_one(struct rank *self)
{
    CHECK_OK(mccl_comm_destroy(comms[self->rank]));
}

/* ---- a waiter that has what it wants does not leave the others without a driver ---- */

static void *receive(void *arg)
{
    const int *tag = arg;
    uint8_t byte = 0;
    set_tag(*tag);
    CHECK_OK(mccl_recv(&byte, 1, MCCL_UINT8, 1, comms[0], NULL, NULL));
    CHECK_EQ_I64(byte, *tag);
    return NULL;
}

static void send(uint8_t tag)
{
    set_tag(tag);
    CHECK_OK(mccl_send(&tag, 1, MCCL_UINT8, 0, comms[1], NULL, NULL));
}

/* Two threads wait, one of them drives; their messages come at once, so both leave together, and
 * the background thread has to look after the third. */
static void background_takes_over(void)
{
    static const int tags[] = {1, 2};
    static const uint8_t bytes[] = {1, 2};
    threads_run(2, connect_one, NULL);
    mccl_queue *queue;
    CHECK_OK(mccl_queue_create(&queue));
    for (uint64_t i = 0; i < 20; i++) {
        int tag[2] = {tags[0], tags[1]};
        uint8_t byte = 0;
        mccl_request *request;
        const pthread_t first = start(receive, &tag[0]);
        sleep_ms(5);
        set_tag(99);
        CHECK_OK(mccl_recv(&byte, 1, MCCL_UINT8, 1, comms[0], NULL, &request));
        CHECK_OK(mccl_queue_add(queue, request, i));
        sleep_ms(5);
        const pthread_t other = start(receive, &tag[1]);
        sleep_ms(5);
        CHECK_OK(mccl_group_start());
        for (int k = 0; k < 2; k++) {
            set_tag(tags[k]);
            CHECK_OK(mccl_send(&bytes[k], 1, MCCL_UINT8, 0, comms[1], NULL, NULL));
        }
        CHECK_OK(mccl_group_end());
        pthread_join(first, NULL);
        pthread_join(other, NULL);
        sleep_ms(5);
        send(99);
        uint64_t user;
        mccl_result result;
        const int64_t started = now_ms();
        CHECK_OK(mccl_queue_wait(queue, LATE_MS, &user, &result));
        CHECK_OK(result);
        CHECK_EQ_U64(user, i);
        CHECK_EQ_I64(byte, 99);
        CHECK_LE_I64(now_ms() - started, QUICK_MS);
        CHECK_OK(mccl_request_free(request));
    }
    CHECK_OK(mccl_queue_close(queue));
    CHECK_OK(mccl_queue_destroy(queue));
    threads_run(2, destroy_one, NULL);
}

/* ---- a short wait is short, also while data streams by ---- */

static void *reduce_much(void *arg)
{
    static float data[2][2 << 20];
    const int rank = *(const int *)arg;
    for (int i = 0; i < 4; i++)
        CHECK_OK(mccl_all_reduce(data[rank], data[rank], 2 << 20, MCCL_FLOAT32, MCCL_SUM,
                                 comms[rank], NULL, NULL));
    return NULL;
}

static void waits_are_short(void)
{
    threads_run(2, connect_one, NULL);
    static float data[2][2 << 20];
    int one = 1;
    mccl_request *requests[4];
    const pthread_t other = start(reduce_much, &one);
    for (int i = 0; i < 4; i++)
        CHECK_OK(mccl_all_reduce(data[0], data[0], 2 << 20, MCCL_FLOAT32, MCCL_SUM, comms[0], NULL,
                                 &requests[i]));
    mccl_result result = MCCL_IN_PROGRESS;
    while (result == MCCL_IN_PROGRESS) {
        const int64_t started = now_ms();
        result = mccl_request_wait(requests[3], 10);
        CHECK_LE_I64(now_ms() - started, 500);
    }
    CHECK_OK(result);
    for (int i = 0; i < 4; i++)
        CHECK_OK(mccl_request_free(requests[i]));
    pthread_join(other, NULL);
    threads_run(2, destroy_one, NULL);
}

/* ---- more operations than run at once ---- */

#define N_QUEUED 30

static int64_t cpu_ms(void)
{
    struct timespec time;
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) == 0);
    return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static void queue_many(struct rank *self)
{
    int32_t sums[N_QUEUED];
    mccl_request *requests[N_QUEUED];
    mccl_comm *comm = rank_connect(self, NULL);
    if (self->rank == 1)
        sleep_ms(500);
    const int64_t started = now_ms();
    for (int i = 0; i < N_QUEUED; i++) {
        sums[i] = self->rank + i;
        CHECK_OK(
            mccl_all_reduce(&sums[i], &sums[i], 1, MCCL_INT32, MCCL_SUM, comm, NULL, &requests[i]));
    }
    if (self->rank == 0) { /* the other one still sleeps: nothing holds this one up or burns */
        CHECK_LE_I64(now_ms() - started, 200);
        const int64_t before = cpu_ms();
        CHECK_RESULT(mccl_request_wait(requests[0], 200), MCCL_IN_PROGRESS);
        CHECK_LE_I64(cpu_ms() - before, 100);
    }
    for (int i = N_QUEUED - 1; i >= 0; i--) {
        CHECK_OK(mccl_request_wait(requests[i], -1));
        CHECK_EQ_I64(sums[i], 2 * i + 1);
        CHECK_OK(mccl_request_free(requests[i]));
    }
    CHECK_OK(mccl_comm_destroy(comm));
}

/* ---- a rank that left ---- */

static void reduce_to_two(struct rank *self)
{
    const int32_t number = self->rank;
    int32_t sum = 0;
    CHECK_OK(mccl_reduce(&number, &sum, 1, MCCL_INT32, MCCL_SUM, 2, comms[self->rank], NULL, NULL));
    if (self->rank == 2)
        CHECK_EQ_I64(sum, MANY * (MANY - 1) / 2);
    if (self->rank == 0) {
        sleep_ms(30);
        CHECK_OK(mccl_comm_destroy(comms[0]));
    }
}

/* The end of rank 0's stream arrives while rank 1 expects nothing from it; an operation that needs
 * rank 0 comes later. */
static void end_of_stream_is_kept(void)
{
    threads_run(MANY, connect_one, NULL);
    threads_run(MANY, reduce_to_two, NULL);
    sleep_ms(50);
    uint8_t byte = 7, got = 0;
    mccl_request *request;
    CHECK_OK(mccl_recv(&got, 1, MCCL_UINT8, 2, comms[1], NULL, &request));
    CHECK_OK(mccl_send(&byte, 1, MCCL_UINT8, 1, comms[2], NULL, NULL));
    CHECK_OK(mccl_request_wait(request, -1)); /* rank 1's engine has run meanwhile */
    CHECK_EQ_I64(got, 7);
    CHECK_OK(mccl_request_free(request));
    const int64_t started = now_ms();
    CHECK_RESULT(mccl_broadcast(&byte, &byte, 1, MCCL_UINT8, 0, comms[1], NULL, NULL),
                 MCCL_ERR_PEER_LOST);
    CHECK_HAS(mccl_last_error(), "rank 0 has left");
    CHECK_LE_I64(now_ms() - started, QUICK_MS);
    for (int rank = 1; rank < MANY; rank++)
        CHECK_OK(mccl_comm_destroy(comms[rank]));
}

/* ---- groups of calls ---- */

static void *second_first(void *arg)
{
    static int32_t data[2 << 20];
    (void)arg;
    CHECK_OK(mccl_all_reduce(data, data, 2 << 20, MCCL_INT32, MCCL_SUM, second[1], NULL, NULL));
    CHECK_OK(mccl_all_reduce(data, data, 2 << 20, MCCL_INT32, MCCL_SUM, comms[1], NULL, NULL));
    return NULL;
}

/* The other rank ends the second one before it begins the first: both have to move. */
static void group_over_two_communicators(void)
{
    static int32_t data[2][2 << 20];
    threads_run(2, connect_one, NULL);
    threads_run(2, split_one, NULL);
    const pthread_t other = start(second_first, NULL);
    const int64_t started = now_ms();
    CHECK_OK(mccl_group_start());
    CHECK_OK(
        mccl_all_reduce(data[0], data[0], 2 << 20, MCCL_INT32, MCCL_SUM, comms[0], NULL, NULL));
    CHECK_OK(
        mccl_all_reduce(data[1], data[1], 2 << 20, MCCL_INT32, MCCL_SUM, second[0], NULL, NULL));
    CHECK_OK(mccl_group_end());
    CHECK_LE_I64(now_ms() - started, LATE_MS / 2);
    pthread_join(other, NULL);
    for (int rank = 0; rank < 2; rank++)
        CHECK_OK(mccl_comm_destroy(second[rank]));
    threads_run(2, destroy_one, NULL);
}

static void exchange_in_a_group(struct rank *self)
{
    static uint8_t sent[2][1 << 20], received[2][1 << 20];
    const int own = self->rank, peer = 1 - own;
    memset(sent[own], own + 1, sizeof sent[own]);
    CHECK_OK(mccl_group_start());
    for (int i = 0; i < 4; i++) {
        CHECK_OK(mccl_send(sent[own], 1 << 18, MCCL_UINT8, peer, comms[own], NULL, NULL));
        CHECK_OK(mccl_recv(received[own] + (i << 18), 1 << 18, MCCL_UINT8, peer, comms[own], NULL,
                           NULL));
    }
    CHECK_OK(mccl_group_end());
    for (size_t i = 0; i < sizeof received[own]; i++)
        CHECK_EQ_I64(received[own][i], peer + 1);
}

/* Its sends need its receives: a place in the queue for each in turn would never come. */
static void group_larger_than_the_queue(void)
{
    static char settings[] = "max_queue_depth=1";
    threads_run(2, connect_one, settings);
    const int64_t started = now_ms();
    threads_run(2, exchange_in_a_group, NULL);
    CHECK_LE_I64(now_ms() - started, QUICK_MS);
    threads_run(2, destroy_one, NULL);
}

/* ---- before a group is ready ---- */

static void *join_as_one(void *arg)
{
    mccl_comm *comm;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 3000;
    CHECK(mccl_comm_init_rank(&comm, 2, arg, 1, &config) != MCCL_OK);
    return NULL;
}

static void abort_comes_before_the_table(void)
{
    mccl_unique_id id;
    mccl_comm *comm;
    mccl_config config = MCCL_CONFIG_INIT;
    config.flags = MCCL_CONFIG_NONBLOCKING;
    CHECK_OK(mccl_get_unique_id(&id));
    CHECK_OK(mccl_comm_init_rank(&comm, 2, &id, 0, &config));
    sleep_ms(100); /* it has checked in */
    CHECK_OK(mccl_comm_abort(comm));
    const pthread_t other = start(join_as_one, &id);
    sleep_ms(200);
    const int64_t started = now_ms();
    CHECK_RESULT(mccl_comm_wait_ready(comm, LATE_MS), MCCL_ERR_ABORTED);
    CHECK_LE_I64(now_ms() - started, QUICK_MS);
    pthread_join(other, NULL);
    CHECK_OK(mccl_comm_destroy(comm));
}

static void connect_patiently(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, INT64_MAX);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

int main(void)
{
    team_run(2, 20, queue_many, NULL);
    background_takes_over();
    waits_are_short();
    end_of_stream_is_kept();
    group_over_two_communicators();
    group_larger_than_the_queue();
    abort_comes_before_the_table();
    threads_run(2, connect_patiently, NULL);
    return 0;
}

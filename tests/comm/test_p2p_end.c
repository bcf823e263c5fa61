/* SPDX-License-Identifier: MIT
 *
 * Leaving: what a rank was sent arrives although the sender has gone, the ranks that stay can go
 * on, leaving takes no longer than it must, and who waits for ranks that are gone hears so at once.
 */
/* limit: 60 s */
#include "support/check.h"
#include "support/harness.h"
#include "support/pattern.h"

#include <stdlib.h>
#include <string.h>

enum {
    SIZE = 65536, /* the largest message that is sent before anybody asks for it */
    N = 60,       /* of them wait at their receiver: several lots of credit */
    DRIVER_TAG = 55,
    AT_ONCE_MS = 700 /* with a sanitizer, on a busy machine */
};

/* Of the next call. */
static void set_tag(int32_t tag)
{
    mccl_options options = MCCL_OPTIONS_INIT;
    options.tag = tag;
    CHECK_OK(mccl_set_options(&options));
}

static void finish(mccl_request *request)
{
    CHECK_OK(mccl_request_wait(request, -1));
    CHECK_OK(mccl_request_free(request));
}

static void fill(unsigned char *data, int number)
{
    pattern_fill(data, SIZE, MCCL_UINT8, PATTERN_MOVE, (uint64_t)number, 0, 1, 0);
}

static void send_all(mccl_comm *comm, int peer)
{
    static unsigned char data[N][SIZE];
    mccl_request *sends[N];
    for (int i = 0; i < N; i++) {
        fill(data[i], i);
        CHECK_OK(mccl_send(data[i], SIZE, MCCL_UINT8, peer, comm, NULL, &sends[i]));
    }
    for (int i = 0; i < N; i++)
        finish(sends[i]);
}

static void receive_all(mccl_comm *comm, int peer)
{
    static unsigned char got[SIZE], expected[SIZE];
    for (int i = 0; i < N; i++) {
        CHECK_OK(mccl_recv(got, SIZE, MCCL_UINT8, peer, comm, NULL, NULL));
        fill(expected, i);
        CHECK_EQ_MEM(got, expected, SIZE);
    }
}

/* Ranks 1 and 2, after rank 0 has left. */
static void still_works(struct rank *self, mccl_comm *comm)
{
    int32_t value = self->rank;
    const int other = 3 - self->rank;
    mccl_request *send = NULL;
    CHECK_OK(mccl_send(&value, 1, MCCL_INT32, other, comm, NULL, &send));
    int32_t got = 0;
    CHECK_OK(mccl_recv(&got, 1, MCCL_INT32, other, comm, NULL, NULL));
    CHECK_EQ_I64(got, other);
    finish(send);
}

struct leaving {
    bool idle;  /* nobody drives rank 1 while rank 0 leaves */
    bool abort; /* instead of leaving */
};

/* A request without a waiter keeps rank 1's background thread at work until rank 2 answers it. */
static void receiver(struct rank *self, mccl_comm *comm, const struct leaving *leaving)
{
    char byte = 0;
    mccl_request *driver = NULL;
    set_tag(DRIVER_TAG);
    CHECK_OK(mccl_recv(&byte, 1, MCCL_UINT8, 2, comm, NULL, &driver));
    rank_mark(self, 1);
    if (leaving->idle)
        finish(driver);
    rank_mark(self, 2);
    rank_wait_go(self, 4);
    if (leaving->abort) {
        CHECK_RESULT(mccl_request_wait(driver, -1), MCCL_ERR_ABORTED);
        CHECK_OK(mccl_request_free(driver));
        return;
    }
    receive_all(comm, 0);
    rank_mark(self, 3);
    if (!leaving->idle)
        finish(driver);
    still_works(self, comm);
}

static void sender(struct rank *self, mccl_comm *comm, const struct leaving *leaving)
{
    rank_wait_go(self, 1);
    send_all(comm, 1);
    rank_mark(self, 1);
    rank_wait_go(self, 3);
    if (leaving->abort)
        CHECK_OK(mccl_comm_abort(comm));
}

static void answerer(struct rank *self, mccl_comm *comm, const struct leaving *leaving)
{
    const char byte = 1;
    rank_wait_go(self, leaving->idle ? 2 : leaving->abort ? 4 : 5);
    if (leaving->abort)
        return;
    set_tag(DRIVER_TAG);
    CHECK_OK(mccl_send(&byte, 1, MCCL_UINT8, 1, comm, NULL, NULL));
    rank_wait_go(self, 4);
    still_works(self, comm);
}

static void leave_body(struct rank *self)
{
    const struct leaving *leaving = self->arg;
    mccl_comm *comm = rank_connect_with(self, NULL, 10000);
    if (self->rank == 0)
        sender(self, comm, leaving);
    else if (self->rank == 1)
        receiver(self, comm, leaving);
    else
        answerer(self, comm, leaving);
    const int64_t before_ms = now_ms();
    CHECK_OK(mccl_comm_destroy(comm));
    if (self->rank == 0)
        atomic_store(&self->board->value[0], now_ms() - before_ms);
}

static void leave(struct leaving leaving)
{
    struct team *team = team_start(3, 20, leave_body, &leaving);
    team_wait_mark(team, 1, 1);
    team_go(team, 1);
    team_wait_mark(team, 0, 1);
    sleep_ms(20); /* what rank 1 is to store has arrived there */
    team_go(team, 2);
    team_wait_mark(team, 1, 2);
    team_go(team, 3);
    team_expect_ok(team, 0);
    const int64_t took_ms = atomic_load(&team_board(team)->value[0]);
    /* An idle receiver may still be about to give credit: leaving waits for it, but not long. */
    CHECK_LE_I64(took_ms, leaving.idle ? 1000 + AT_ONCE_MS : AT_ONCE_MS);
    team_go(team, 4);
    if (!leaving.idle && !leaving.abort) {
        team_wait_mark(team, 1, 3);
        team_go(team, 5);
    }
    team_expect_ok(team, 1);
    team_expect_ok(team, 2);
    team_end(team);
    printf("idle %d, abort %d: destroy took %lld ms\n", leaving.idle, leaving.abort,
           (long long)took_ms);
}

/* A receiver that is slow, but at it; the sender leaves as soon as it can, several times. */
static void slow_receiver(struct rank *self)
{
    for (int round = 0; round < 3; round++) {
        mccl_comm *comm = rank_connect_with(self, NULL, 10000);
        static unsigned char data[SIZE];
        for (int i = 0; i < 40; i++) {
            if (self->rank == 0) {
                CHECK_OK(mccl_send(data, SIZE, MCCL_UINT8, 1, comm, NULL, NULL));
                continue;
            }
            sleep_ms(2);
            CHECK_OK(mccl_recv(data, SIZE, MCCL_UINT8, 0, comm, NULL, NULL));
        }
        const int64_t before_ms = now_ms();
        CHECK_OK(mccl_comm_destroy(comm));
        CHECK_LE_I64(now_ms() - before_ms, AT_ONCE_MS);
    }
}

/* Messages are on their way to a rank that leaves: some are stored there, one only in part, since
 * buffers are small. */
static void flooded(struct rank *self)
{
    for (int round = 0; round < 8; round++) {
        mccl_comm *comm = rank_connect_with(self, "sock_bufsize=32768", 10000);
        static unsigned char data[SIZE];
        mccl_result result = MCCL_OK;
        for (int i = 0; result == MCCL_OK && i < 1000 && self->rank == 0; i++) {
            set_tag(i == 8 + round ? DRIVER_TAG : 0);
            result = mccl_send(data, SIZE, MCCL_UINT8, 1, comm, NULL, NULL);
        }
        if (self->rank == 0) {
            CHECK_RESULT(result, MCCL_ERR_PEER_LOST);
            CHECK_HAS(mccl_last_error(), "rank 1 has left the group");
        } else {
            set_tag(DRIVER_TAG);
            CHECK_OK(mccl_recv(data, SIZE, MCCL_UINT8, 0, comm, NULL, NULL));
        }
        CHECK_OK(mccl_comm_destroy(comm));
    }
}

/* The last one hears that nobody is left, after it got what they had sent; not before. */
static void any_source(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    int32_t value = self->rank;
    if (self->rank != 0) {
        sleep_ms(80 * (self->rank - 1));
        CHECK_OK(mccl_send(&value, 1, MCCL_INT32, 0, comm, NULL, NULL));
        CHECK_OK(mccl_comm_destroy(comm));
        rank_mark(self, 1);
        return;
    }
    for (int i = 1; i < self->n; i++)
        CHECK_OK(mccl_recv(&value, 1, MCCL_INT32, MCCL_ANY_SOURCE, comm, NULL, NULL));
    const int64_t before_ms = now_ms();
    CHECK_RESULT(mccl_recv(&value, 1, MCCL_INT32, MCCL_ANY_SOURCE, comm, NULL, NULL),
                 MCCL_ERR_PEER_LOST);
    CHECK_HAS(mccl_last_error(), "all other ranks have left");
    CHECK_LE_I64(now_ms() - before_ms, AT_ONCE_MS);
    CHECK_OK(mccl_comm_destroy(comm));
}

/* The last collective of a rank that leaves: slower ranks have still to read all of it. */
static void late_collective(struct rank *self)
{
    enum { COUNT = 100 * 1000 };
    static unsigned char data[COUNT], expected[COUNT];
    mccl_comm *comm = rank_connect_with(self, NULL, 10000);
    memset(expected, 7, sizeof expected);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    if (self->rank == 0)
        memset(data, 7, sizeof data);
    else
        sleep_ms(60 * self->rank);
    CHECK_OK(mccl_broadcast(data, data, COUNT, MCCL_UINT8, 0, comm, NULL, NULL));
    CHECK_EQ_MEM(data, expected, COUNT);
    CHECK_OK(mccl_comm_destroy(comm));
}

int main(void)
{
    leave((struct leaving){.idle = false, .abort = false});
    leave((struct leaving){.idle = true, .abort = false});
    leave((struct leaving){.idle = false, .abort = true});
    team_run(2, 20, slow_receiver, NULL);
    team_run(2, 20, flooded, NULL);
    team_run(3, 20, any_source, NULL);
    team_run(3, 20, late_collective, NULL);
    team_run(6, 20, late_collective, NULL);
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * Forked children beside a live group, as data loaders make them: the child's use of the parent's
 * communicator is a clear error, the parent's group goes on, and a parent that is killed is noticed
 * at once although the child lives: the child holds none of its sockets.
 */
/* limit: 60 s */
/* sanitize: not thread */
/* it does not support threads in the child of a process that has threads */
#include "support/check.h"
#include "support/harness.h"
#include "support/proc.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define NOTICE_MS 1000

static void work(struct rank *self, mccl_comm *comm, int rounds)
{
    for (int round = 0; round < rounds; round++) {
        int64_t value = self->rank + round;
        CHECK_OK(mccl_all_reduce(&value, &value, 1, MCCL_INT64, MCCL_SUM, comm, NULL, NULL));
        CHECK_EQ_I64(value, self->n * round + self->n * (self->n - 1) / 2);
    }
}

static int count_inet_sockets(void)
{
    int n = 0;
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_storage address;
        socklen_t size = sizeof address;
        n += getsockname(fd, (struct sockaddr *)&address, &size) == 0 &&
             (address.ss_family == AF_INET || address.ss_family == AF_INET6);
    }
    return n;
}

/* Everything that a child may try with what it inherited. Ends the child. */
static _Noreturn void child_main(mccl_comm *comm, mccl_request *request)
{
    int64_t value = 1;
    CHECK_EQ_I64(count_inet_sockets(), 0);
    CHECK_RESULT(mccl_all_reduce(&value, &value, 1, MCCL_INT64, MCCL_SUM, comm, NULL, NULL),
                 MCCL_ERR_INVALID_USAGE);
    CHECK_HAS(mccl_last_error(), "fork");
    CHECK_RESULT(mccl_send(&value, 1, MCCL_INT64, 0, comm, NULL, NULL), MCCL_ERR_INVALID_USAGE);
    CHECK_RESULT(mccl_request_wait(request, 100), MCCL_ERR_INVALID_USAGE);
    CHECK_OK(mccl_request_free(request));
    CHECK_OK(mccl_comm_destroy(comm)); /* harmless for the parent */
    /* And it may form groups of its own. */
    mccl_unique_id id;
    mccl_comm *own = NULL;
    CHECK_OK(mccl_get_unique_id(&id));
    CHECK_OK(mccl_comm_init_rank(&own, 1, &id, 0, NULL));
    CHECK_OK(mccl_all_reduce(&value, &value, 1, MCCL_INT64, MCCL_SUM, own, NULL, NULL));
    CHECK_EQ_I64(value, 1);
    CHECK_OK(mccl_comm_destroy(own));
    _exit(0);
}

static void children_beside_group(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, "heartbeat_interval_ms=100", 20000);
    work(self, comm, 10);
    for (int i = 0; i < 5; i++) {
        int64_t open = 0;
        mccl_request *request = NULL;
        CHECK_OK(mccl_recv(&open, 1, MCCL_INT64, self->rank, comm, NULL, &request));
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            child_main(comm, request);
        work(self, comm, 200);
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK_EQ_I64(status, 0);
        int64_t sent = 40 + i;
        CHECK_OK(mccl_send(&sent, 1, MCCL_INT64, self->rank, comm, NULL, NULL));
        CHECK_OK(mccl_request_wait(request, -1));
        CHECK_EQ_I64(open, 40 + i);
        CHECK_OK(mccl_request_free(request));
    }
    work(self, comm, 10);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void killed_beside_child(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    work(self, comm, 10);
    if (self->rank == 1) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            sleep_ms(5000); /* outlives its parent */
            _exit(0);
        }
        atomic_store(&self->board->value[1], child);
        rank_mark(self, 1);
        sleep_ms(30000); /* killed in here */
    }
    rank_mark(self, 1);
    int64_t value = 0;
    CHECK_RESULT(mccl_all_reduce(&value, &value, 1, MCCL_INT64, MCCL_SUM, comm, NULL, NULL),
                 MCCL_ERR_PEER_LOST);
    CHECK_LE_I64(now_ms() - atomic_load(&self->board->value[0]), NOTICE_MS);
    CHECK_HAS(mccl_last_error(), "rank 1");
    CHECK_OK(mccl_comm_destroy(comm));
}

static void kill_parent(void)
{
    struct team *team = team_start(2, 30, killed_beside_child, NULL);
    team_wait_marks(team, 1);
    sleep_ms(50);
    const pid_t child = (pid_t)atomic_load(&team_board(team)->value[1]);
    atomic_store(&team_board(team)->value[0], now_ms());
    team_signal(team, 1, SIGKILL);
    team_expect_ok(team, 0);
    CHECK(kill(child, 0) == 0); /* it did live all the time */
    kill(child, SIGKILL);
    team_end(team);
}

/* A child forked at any moment of another thread's work with communicators and defaults finds no
 * lock of the library held. */
static _Atomic bool forked_enough;

static void make_own_group(void)
{
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    CHECK_OK(mccl_set_defaults("port_base=0"));
    CHECK_OK(mccl_get_unique_id(&id));
    CHECK_OK(mccl_comm_init_rank(&comm, 1, &id, 0, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void *keep_making_groups(void *arg)
{
    while (!atomic_load(&forked_enough))
        make_own_group();
    return arg;
}

static void forks_amid_making(struct rank *self)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, keep_making_groups, NULL) == 0);
    for (int i = 0; i < 50; i++) {
        int status = -1;
        usleep((useconds_t)(i * 37 % 1000));
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(10); /* instead of hanging for ever */
            make_own_group();
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child);
        CHECK_EQ_I64(status, 0);
    }
    atomic_store(&forked_enough, true);
    pthread_join(thread, NULL);
    (void)self;
}

/* AddressSanitizer's allocator does not survive a fork while another thread is in it: a child that
 * goes on with MCCL would hang in there. */
static bool child_may_allocate(void)
{
#if defined(__SANITIZE_ADDRESS__)
    return false;
#else
    return true;
#endif
}

int main(void)
{
    kill_parent();
    if (!child_may_allocate())
        CHECK_SKIP("all but a parent's death: the sanitizer has no support for such children");
    for (int n = 1; n <= 3; n++)
        team_run(n, 30, children_beside_group, NULL);
    team_run(1, 30, forks_amid_making, NULL);
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * Strangers at the port, while a group forms and while it works: noise, HTTP, huge lengths, half a
 * hello, a hello and then silence, connections closed and reset at once. The group forms, computes
 * right values and does not grow.
 */
/* limit: 90 s */
#include "support/check.h"
#include "support/harness.h"
#include "support/pattern.h"
#include "support/proc.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define N_STRANGERS 300
#define PORT 21500 /* no system gives it to outgoing connections */
#define PORT_RANGE "21500-21500"
#define FEW_FDS 256

enum visit { NOISE, HTTP, HUGE_LENGTH, HALF_HELLO, NO_PROOF, CLOSE, RESET, SILENCE, N_VISITS };

static int dial(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    /* Full backlogs and busy ports are the visitor's own bad luck. */
    const struct timeval patience = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

static void say(int fd, const void *data, size_t size)
{
    (void)!send(fd, data, size, MSG_NOSIGNAL);
}

/* The first bytes of a hello as in docs/protocol.md: right magic, version and purpose, and then an
 * id that nobody knows. */
static void say_hello(int fd, size_t size, uint64_t seed)
{
    unsigned char hello[256];
    pattern_fill(hello, sizeof hello, MCCL_UINT8, PATTERN_MOVE, seed, 0, 1, 0);
    memcpy(hello, "MCCL", 4);
    memcpy(hello + 4, "\1\0\1\0", 4);
    hello[8] = (unsigned char)(1 + seed % 4);
    say(fd, hello, size);
}

/* Returns the socket if it stays open, else -1. */
static int visit(enum visit kind, uint64_t seed)
{
    unsigned char data[5000];
    const int fd = dial();
    if (fd < 0)
        return -1;
    switch (kind) {
    case NOISE:
        pattern_fill(data, sizeof data, MCCL_UINT8, PATTERN_MOVE, seed, 0, 1, 0);
        say(fd, data, 1 + seed % sizeof data);
        break;
    case HTTP:
        say(fd, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 36);
        break;
    case HUGE_LENGTH:
        memset(data, 0xff, 8);
        say(fd, data, 8);
        break;
    case HALF_HELLO:
        say_hello(fd, 20, seed);
        break;
    case NO_PROOF:
        say_hello(fd, 80 + seed % 177, seed);
        break;
    case RESET: {
        const struct linger now = {1, 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
        break;
    }
    case SILENCE:
        break;
    default:
        break;
    }
    if (kind == CLOSE || kind == RESET || seed % 3 == 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* All visits, a few dozen connections open at a time. */
static void *strangers(void *arg)
{
    int open[40], n_open = 0;
    const uint64_t *seed = arg;
    for (unsigned i = 0; i < N_STRANGERS; i++) {
        const int fd = visit((enum visit)(i % N_VISITS), *seed + i);
        if (fd < 0)
            continue;
        if (n_open == 40)
            close(open[--n_open]);
        open[n_open++] = fd;
    }
    while (n_open > 0)
        close(open[--n_open]);
    return NULL;
}

static void work(struct rank *self, mccl_comm *comm)
{
    enum { COUNT = 20011 };
    static int32_t data[COUNT];
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < COUNT; i++)
            data[i] = self->rank + i + round;
        CHECK_OK(mccl_all_reduce(data, data, COUNT, MCCL_INT32, MCCL_SUM, comm, NULL, NULL));
        for (int i = 0; i < COUNT; i++)
            CHECK_EQ_I64(data[i], self->n * (i + round) + self->n * (self->n - 1) / 2);
    }
}

static void rank_main(struct rank *self)
{
    if (self->rank == 0)
        setenv("MCCL_PORT_BASE", PORT_RANGE, 1);
    setenv("MCCL_LOG_LEVEL", "ERROR", 1); /* strangers are worth a warning, but nothing more */
    mccl_comm *comm = rank_connect_with(self, NULL, 30000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    rank_mark(self, 1);
    work(self, comm);
    rank_wait_go(self, 1);
    const int64_t rss_kib = proc_rss_kib();
    const int fds = proc_fd_count();
    rank_mark(self, 2);
    rank_wait_go(self, 2); /* strangers come now */
    work(self, comm);
    rank_wait_go(self, 3); /* and have gone */
#if defined(__SANITIZE_ADDRESS__)
    const int64_t slack_kib = 65536; /* the sanitizer keeps freed memory for a while */
#else
    const int64_t slack_kib = 2048;
#endif
    CHECK_LE_I64(proc_rss_kib(), rss_kib + slack_kib);
    for (int tries = 0; tries < 500 && proc_fd_count() > fds; tries++)
        sleep_ms(20);
    CHECK_LE_I64(proc_fd_count(), fds);
    work(self, comm);
    mccl_result error = MCCL_ERR_INTERNAL;
    CHECK_OK(mccl_comm_get_async_error(comm, &error));
    CHECK_EQ_I64(error, MCCL_OK);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* Connections that say nothing do not keep a group from forming: they have a time limit each, and
 * there is room for others. */
static void late_joiner(struct rank *self)
{
    if (self->rank == 0)
        setenv("MCCL_PORT_BASE", PORT_RANGE, 1);
    setenv("MCCL_LOG_LEVEL", "ERROR", 1);
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    rank_next_id(self, &id);
    rank_mark(self, 1);
    if (self->rank != 0)
        rank_wait_go(self, 1); /* the strangers are there */
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 30000;
    CHECK_OK(mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config));
    work(self, comm);
    CHECK_OK(mccl_comm_destroy(comm));
}

static void allow_few_fds(void)
{
    const struct rlimit few = {FEW_FDS, FEW_FDS};
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
}

/* However many strangers there are, most descriptors stay the program's. */
static void crowded(struct rank *self)
{
    mccl_unique_id id;
    setenv("MCCL_PORT_BASE", PORT_RANGE, 1);
    setenv("MCCL_LOG_LEVEL", "ERROR", 1);
    allow_few_fds();
    CHECK_OK(mccl_get_unique_id(&id));
    const int fds = proc_fd_count();
    rank_mark(self, 1);
    rank_wait_go(self, 1); /* the strangers are there */
    for (int tries = 0; tries < 500 && proc_fd_count() < fds + FEW_FDS / 4; tries++)
        sleep_ms(2);
    sleep_ms(50);
    CHECK_EQ_I64(proc_fd_count(), fds + FEW_FDS / 4);
}

static int64_t cpu_ms(void)
{
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000;
}

/* A program that has used up its descriptors itself, with a rank at its port: that one waits, which
 * costs nothing, and gets in when there are descriptors again. */
static void without_descriptors(struct rank *self)
{
    enum { WAIT_MS = 300 };
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 30000;
    allow_few_fds();
    rank_next_id(self, &id);
    if (self->rank == 0) {
        int taken[FEW_FDS], n = 0;
        while ((taken[n] = dup(STDERR_FILENO)) >= 0)
            n++;
        rank_mark(self, 1);
        const int64_t before_ms = cpu_ms();
        rank_wait_go(self, 1); /* the other one dials by now */
        sleep_ms(WAIT_MS);
        CHECK_LE_I64(cpu_ms() - before_ms, WAIT_MS / 2);
        while (n > 0)
            close(taken[--n]);
    } else {
        while (atomic_load(&self->board->mark[0]) < 1)
            sleep_ms(1);
        config.flags = MCCL_CONFIG_NONBLOCKING;
    }
    CHECK_OK(mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config));
    rank_mark(self, 1);
    CHECK_OK(mccl_comm_wait_ready(comm, -1));
    work(self, comm);
    CHECK_OK(mccl_comm_destroy(comm));
}

static void few_descriptors(void)
{
    int fds[FEW_FDS];
    struct team *team = team_start(1, 30, crowded, NULL);
    team_wait_marks(team, 1);
    for (int i = 0; i < FEW_FDS; i++)
        fds[i] = dial();
    team_go(team, 1);
    team_expect_ok(team, 0);
    for (int i = 0; i < FEW_FDS; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    team_end(team);

    team = team_start(2, 60, without_descriptors, NULL);
    team_wait_marks(team, 1);
    team_go(team, 1);
    team_expect_ok(team, 0);
    team_expect_ok(team, 1);
    CHECK_HAS(team_stderr(team, 0), "all 256 descriptors");
    CHECK_HAS(team_stderr(team, 0), "ulimit -n");
    CHECK(!strchr(strchr(team_stderr(team, 0), '\n') + 1, '\n')); /* said once */
    team_end(team);
}

/* A rank with another secret is told so after two seconds, not at the end of the time-out. */
static void other_secret(struct rank *self)
{
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = self->rank == 0 ? 4000 : 30000;
    setenv("MCCL_AUTH_KEY", self->rank == 0 ? "one" : "another", 1);
    rank_next_id(self, &id);
    const int64_t start_ms = now_ms();
    const mccl_result result = mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config);
    CHECK_EQ_I64(result, self->rank == 0 ? MCCL_ERR_TIMEOUT : MCCL_ERR_AUTH);
    if (self->rank != 0)
        CHECK_LE_I64(now_ms() - start_ms, 15000);
    CHECK_HAS(mccl_last_error(), self->rank == 0 ? "waited 4.0 s for rank 1 to check in"
                                                 : "MCCL_AUTH_KEY must be the same on all ranks");
    mccl_comm_abort(comm);
}

static void secrets_differ(void)
{
    struct team *team = team_start(2, 60, other_secret, NULL);
    team_expect_ok(team, 1);
    team_expect_ok(team, 0);
    CHECK_HAS(team_stderr(team, 0), "or did not know the job's secret");
    team_end(team);
}

static void host_of_nobody(struct rank *self)
{
    mccl_unique_id id;
    setenv("MCCL_PORT_BASE", PORT_RANGE, 1);
    CHECK_OK(mccl_get_unique_id(&id));
    rank_mark(self, 1);
    rank_wait_go(self, 1);
    sleep_ms(200); /* they are looked at */
}

/* Who leaves without a word may be a rank that was faster by another address: only others are worth
 * a warning. */
static void told_of_visits(const enum visit *kinds, size_t n, const char *told)
{
    struct team *team = team_start(1, 30, host_of_nobody, NULL);
    team_wait_marks(team, 1);
    for (size_t i = 0; i < n; i++) {
        const int fd = visit(kinds[i], 3 * i);
        CHECK(fd < 0); /* closed already */
    }
    team_go(team, 1);
    team_expect_ok(team, 0);
    if (told)
        CHECK_HAS(team_stderr(team, 0), told);
    else
        CHECK_EQ_STR(team_stderr(team, 0), "");
    team_end(team);
}

static void who_is_told_of(void)
{
    static const enum visit quiet[] = {CLOSE, RESET, CLOSE}, loud[] = {CLOSE, HTTP, RESET};
    told_of_visits(quiet, 3, NULL);
    told_of_visits(loud, 3, "closed 1 connection(s) that were not MCCL");
}

static void while_forming_and_working(int n)
{
    uint64_t seed = 1;
    pthread_t thread;
    struct team *team = team_start(n, 60, rank_main, NULL);
    CHECK(pthread_create(&thread, NULL, strangers, &seed) == 0);
    team_wait_marks(team, 1);
    pthread_join(thread, NULL);
    team_go(team, 1);
    team_wait_marks(team, 2);
    team_go(team, 2);
    seed = 1000;
    CHECK(pthread_create(&thread, NULL, strangers, &seed) == 0);
    pthread_join(thread, NULL);
    team_go(team, 3);
    for (int rank = 0; rank < n; rank++) {
        team_expect_ok(team, rank);
        CHECK_EQ_STR(team_stderr(team, rank), "");
    }
    team_end(team);
}

static void silent_crowd_first(int n)
{
    enum { CROWD = 200 };
    int fds[CROWD];
    struct team *team = team_start(n, 60, late_joiner, NULL);
    team_wait_marks(team, 1);
    for (int i = 0; i < CROWD; i++)
        fds[i] = dial();
    const int64_t start_ms = now_ms();
    team_go(team, 1);
    for (int rank = 0; rank < n; rank++)
        team_expect_ok(team, rank);
    printf("n=%d: joined behind %d silent connections in %lld ms\n", n, CROWD,
           (long long)(now_ms() - start_ms));
    for (int i = 0; i < CROWD; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
    }
    team_end(team);
}

int main(void)
{
    who_is_told_of();
    secrets_differ();
    while_forming_and_working(2);
    while_forming_and_working(4);
    silent_crowd_first(2);
    few_descriptors();
    return 0;
}

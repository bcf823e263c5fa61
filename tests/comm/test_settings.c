/* SPDX-License-Identifier: MIT
 *
 * Every live setting changes behaviour that can be seen from outside, one part each: bytes and
 * messages sent, socket options, times, log lines. (Where a process listens and what is refused
 * have files of their own.)
 */
/* limit: 120 s */
#include "support/check.h"
#include "support/harness.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

static void set_variable(const char *name, const char *value)
{
    CHECK(setenv(name, value, 1) == 0);
}

static uint64_t bytes_sent(mccl_comm *comm)
{
    mccl_stats stats = {.size = sizeof stats};
    CHECK_OK(mccl_comm_get_stats(comm, &stats));
    return stats.bytes_sent;
}

static void check_setting(const mccl_comm *comm, const char *name, const char *value,
                          const char *source)
{
    char got[256], from[32];
    CHECK_OK(mccl_setting_get(comm, name, got, sizeof got, from, sizeof from));
    CHECK_EQ_STR(got, value);
    CHECK_EQ_STR(from, source);
}

/* ---- algorithms: told apart by how many bytes a rank sends ---- */

/* Bytes that one all_reduce of `count` float32 makes this rank send. */
static uint64_t sent_by_all_reduce(struct rank *self, const char *settings, size_t count)
{
    float *data = calloc(count, sizeof *data);
    CHECK(data != NULL);
    mccl_comm *comm = rank_connect_with(self, settings, 20000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    const uint64_t before = bytes_sent(comm);
    CHECK_OK(mccl_all_reduce(data, data, count, MCCL_FLOAT32, MCCL_SUM, comm, NULL, NULL));
    const uint64_t sent = bytes_sent(comm) - before;
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
    free(data);
    return sent;
}

/* Four ranks: direct sends the vector three times, the others one and a half times. */
static void algorithms(struct rank *self)
{
    const size_t count = 40000, bytes = count * 4;
    CHECK_EQ_I64(self->n, 4);
    CHECK_EQ_U64(sent_by_all_reduce(self, "allreduce_algo=direct", count), 3 * bytes);
    CHECK_EQ_U64(sent_by_all_reduce(self, "allreduce_algo=two_shot", count), bytes * 3 / 2);
    CHECK_EQ_U64(sent_by_all_reduce(self, "allreduce_algo=ring", count), bytes * 3 / 2);
    /* Two rings' segments are of two sizes. */
    const uint64_t fast = sent_by_all_reduce(self, "allreduce_algo=ring; ring_algo=fast", count);
    CHECK_GE_I64(fast, bytes * 3 / 2 - bytes / 100);
    CHECK_LE_I64(fast, bytes * 3 / 2 + bytes / 100);
    /* ring_chunked: a ring above the threshold, direct below. */
    CHECK_EQ_U64(sent_by_all_reduce(self, "allreduce_algo=ring_chunked", count), 3 * bytes);
    CHECK_EQ_U64(
        sent_by_all_reduce(self, "allreduce_algo=ring_chunked; small_msg_threshold=1000", count),
        bytes * 3 / 2);
    /* auto: direct while what a rank sends, here three vectors, is within the threshold. */
    CHECK_EQ_U64(sent_by_all_reduce(self, "transport=tcp; small_msg_threshold=480000", count),
                 3 * bytes);
    CHECK_EQ_U64(sent_by_all_reduce(self, "transport=tcp; small_msg_threshold=479999", count),
                 bytes * 3 / 2);
}

/* ---- how vectors are cut: bytes on the wire beyond the payload are message headers ---- */

#define MAX_SOCKETS 256

/* Bytes that each connected socket of this process has sent, by descriptor. */
struct wire {
    uint64_t sent[MAX_SOCKETS];
};

static bool is_connected_tcp(int fd)
{
    struct sockaddr_storage peer;
    socklen_t size = sizeof peer;
    return getpeername(fd, (struct sockaddr *)&peer, &size) == 0 && peer.ss_family != AF_UNIX;
}

static void wire_read(struct wire *wire)
{
    memset(wire, 0, sizeof *wire);
    for (int fd = 3; fd < MAX_SOCKETS; fd++) {
        struct tcp_info info;
        socklen_t size = sizeof info;
        if (is_connected_tcp(fd) && getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0)
            wire->sent[fd] = info.tcpi_bytes_sent - info.tcpi_bytes_retrans;
    }
}

struct traffic {
    uint64_t headers; /* bytes sent beyond the payload */
    int busy_sockets; /* over which a tenth of the vector or more went */
};

/* Of this rank in one all_reduce of `count` float32. */
static struct traffic traffic_of_all_reduce(struct rank *self, const char *settings, size_t count)
{
    struct wire before, after;
    struct traffic traffic = {0, 0};
    float *data = calloc(count, sizeof *data);
    CHECK(data != NULL);
    char with_sockets[256];
    snprintf(with_sockets, sizeof with_sockets, "transport=tcp; %s", settings);
    mccl_comm *comm = rank_connect_with(self, with_sockets, 20000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    const uint64_t payload_before = bytes_sent(comm);
    wire_read(&before);
    CHECK_OK(mccl_all_reduce(data, data, count, MCCL_FLOAT32, MCCL_SUM, comm, NULL, NULL));
    CHECK_OK(mccl_barrier(comm, NULL, NULL)); /* until then bytes may wait in the kernel */
    wire_read(&after);
    for (int fd = 0; fd < MAX_SOCKETS; fd++) {
        const uint64_t sent = after.sent[fd] - before.sent[fd];
        traffic.headers += sent;
        traffic.busy_sockets += sent > count * sizeof *data / 10;
    }
    traffic.headers -= bytes_sent(comm) - payload_before;
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
    free(data);
    return traffic;
}

static void pieces(struct rank *self)
{
    const size_t count = 1000000; /* 4 MB, in four segments */
    CHECK_EQ_I64(self->n, 4);
    const struct traffic large = traffic_of_all_reduce(self, "chunk_bytes=64M", count);
    const struct traffic small = traffic_of_all_reduce(self, "chunk_bytes=4096", count);
    /* 6 MB leave in at least 1464 messages of 4096 bytes. */
    CHECK_GE_I64(small.headers, 1464 * 32);
    CHECK_LE_I64(large.headers, small.headers / 4);

    const struct traffic basic =
        traffic_of_all_reduce(self, "allreduce_algo=ring; ring_algo=basic; chunk_bytes=64M", count);
    const struct traffic chunked = traffic_of_all_reduce(
        self, "allreduce_algo=ring; ring_algo=chunked; chunk_bytes=65536", count);
    const struct traffic fast =
        traffic_of_all_reduce(self, "allreduce_algo=ring; ring_algo=fast", count);
    /* One message a step, against 15 or more; the barrier and the control link send a few. */
    CHECK_GE_I64(basic.headers, 6 * 32);
    CHECK_LE_I64(basic.headers, (6 + 16) * 32);
    CHECK_GE_I64(chunked.headers, 6 * 15 * 32);
    CHECK_EQ_I64(basic.busy_sockets, 1);
    CHECK_EQ_I64(chunked.busy_sockets, 1);
    CHECK_EQ_I64(fast.busy_sockets, 2); /* both ways round */
    CHECK_EQ_I64(large.busy_sockets, 3);
    const struct traffic channels = traffic_of_all_reduce(self, "channels=2", count);
    CHECK_EQ_I64(channels.busy_sockets, 6);
}

/* Below 32 KiB for each channel a message goes by one socket. */
static void channels(struct rank *self)
{
    CHECK_EQ_I64(self->n, 2);
    const struct traffic short_ones = traffic_of_all_reduce(self, "channels=4", 32767);
    CHECK_EQ_I64(short_ones.busy_sockets, 1);
    const struct traffic long_ones = traffic_of_all_reduce(self, "channels=4", 32768);
    CHECK_EQ_I64(long_ones.busy_sockets, 4);
}

/* ---- profiles ---- */

static void link_profile(struct rank *self)
{
    mccl_comm *plain = rank_connect_with(self, "chunk_bytes=8M", 0);
    mccl_comm *comm = rank_connect_with(self, "link_profile=thunderbolt", 0);
    check_setting(plain, "chunk_bytes", "8388608", "config");
    check_setting(plain, "sock_bufsize", "0", "default");
    check_setting(comm, "chunk_bytes", "16777216", "profile");
    check_setting(comm, "sock_bufsize", "33554432", "profile");
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
    comm = rank_connect_with(self, "link_profile=thunderbolt; chunk_bytes=1M", 0);
    check_setting(comm, "chunk_bytes", "1048576", "config");
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
    CHECK_OK(mccl_comm_destroy(plain));
}

/* ---- sockets: options read back from the process's own descriptors ---- */

/* The smallest value of a socket option over all connected TCP sockets of this process. */
static int smallest_option(int level, int name)
{
    int smallest = -1;
    for (int fd = 3; fd < MAX_SOCKETS; fd++) {
        int value = 0;
        socklen_t size = sizeof value;
        if (is_connected_tcp(fd) && getsockopt(fd, level, name, &value, &size) == 0 &&
            (smallest < 0 || value < smallest))
            smallest = value;
    }
    return smallest;
}

static void socket_options(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, "sock_bufsize=70000; tcp_lowat=50000", 0);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    /* Linux doubles the value for its own book-keeping. */
    CHECK_EQ_I64(smallest_option(SOL_SOCKET, SO_SNDBUF), 140000);
    CHECK_EQ_I64(smallest_option(SOL_SOCKET, SO_RCVBUF), 140000);
    CHECK_EQ_I64(smallest_option(IPPROTO_TCP, TCP_NOTSENT_LOWAT), 50000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* A whole life under the settings that are the team's argument. */
static void connect_with(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, self->arg, 0);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* More than the system grants is reported, since it was asked for. */
static void clamping_is_reported(void)
{
    struct team *team = team_start(2, 20, connect_with, "sock_bufsize=1G; log_level=INFO");
    for (int rank = 0; rank < 2; rank++) {
        team_expect_ok(team, rank);
        CHECK_HAS(team_stderr(team, rank), "WARN");
        CHECK_HAS(team_stderr(team, rank), "MCCL_SOCK_BUFSIZE=1073741824: the system granted");
    }
    team_end(team);
}

/* A profile asks for as much as it can get, so getting less is no news for a user who chose none of
 * it. */
static void profile_reaches_sockets(void)
{
    struct team *team = team_start(2, 20, connect_with, "link_profile=thunderbolt; log_level=INFO");
    for (int rank = 0; rank < 2; rank++) {
        team_expect_ok(team, rank);
        CHECK_HAS(team_stderr(team, rank), "socket buffers: asked for 33554432, granted");
        CHECK(strstr(team_stderr(team, rank), "WARN") == NULL);
    }
    team_end(team);
}

static void transport_tcp(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, "transport=tcp", 0);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_GE_I64(smallest_option(SOL_SOCKET, SO_TYPE), SOCK_STREAM); /* it is TCP indeed */
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* ---- time ---- */

/* Makes all listening sockets of this process deaf: connections to them are refused. */
static void shut_listeners(void)
{
    int n = 0;
    for (int fd = 3; fd < MAX_SOCKETS; fd++) {
        int listening = 0;
        socklen_t size = sizeof listening;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) == 0 && listening) {
            CHECK(shutdown(fd, SHUT_RDWR) == 0);
            n++;
        }
    }
    CHECK_GE_I64(n, 1);
}

/* Ranks 1 and 2 reach rank 0 and check in, but cannot reach each other. */
static void connect_timeout(struct rank *self)
{
    mccl_unique_id id, unused;
    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 20000;
    config.settings = "connect_timeout_ms=600";
    rank_next_id(self, &id);
    if (self->rank != 0) {
        CHECK_OK(mccl_get_unique_id(&unused)); /* opens the endpoint */
        shut_listeners();
    }
    const int64_t start_ms = now_ms();
    const mccl_result result = mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config);
    CHECK_HAS(mccl_last_error(), "MCCL_CONNECT_TIMEOUT_MS=600");
    CHECK(result == MCCL_ERR_TIMEOUT || result == MCCL_ERR_CONNECT);
    CHECK(comm == NULL);
    CHECK_GE_I64(now_ms() - start_ms, 550);
    CHECK_LE_I64(now_ms() - start_ms, 1600);
    CHECK_HAS(mccl_last_error(), "rank 1");
}

/* The last rank comes `late_ms` after the others. Returns the others' result. */
static mccl_result reduce_with_late_rank(struct rank *self, mccl_comm *comm, int late_ms)
{
    int32_t value = 1;
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    if (self->rank == self->n - 1)
        sleep_ms(late_ms);
    return mccl_all_reduce(&value, &value, 1, MCCL_INT32, MCCL_SUM, comm, NULL, NULL);
}

/* A watchdog value that the user set aborts, if no time-out was given. */
static void watchdog_aborts(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, "watchdog_timeout_ms=300", 0);
    const int64_t start_ms = now_ms();
    const mccl_result result = reduce_with_late_rank(self, comm, 1500);
    CHECK(result != MCCL_OK);
    if (self->rank == 0) {
        CHECK_EQ_I64(result, MCCL_ERR_TIMEOUT);
        CHECK_GE_I64(now_ms() - start_ms, 299);
        CHECK_LE_I64(now_ms() - start_ms, 1300);
        CHECK_HAS(mccl_last_error(), "rank 1");
    }
    CHECK_OK(mccl_comm_destroy(comm));
}

/* With a time-out of the group the watchdog only says who is missing. */
static void watchdog_warns(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, "watchdog_timeout_ms=200", 10000);
    CHECK_OK(reduce_with_late_rank(self, comm, 800));
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void watchdog_line(void)
{
    struct team *team = team_start(2, 20, watchdog_warns, NULL);
    team_expect_ok(team, 0);
    team_expect_ok(team, 1);
    CHECK_HAS(team_stderr(team, 0), "WARN");
    CHECK_HAS(team_stderr(team, 0), "all_reduce");
    CHECK_HAS(team_stderr(team, 0), "rank 1");
    CHECK_EQ_STR(team_stderr(team, 1), ""); /* which waited for nobody */
    team_end(team);
}

/* Milliseconds that rank 0 needs to submit three operations which the others are late for. */
static int64_t submit_three(struct rank *self, const char *settings)
{
    int32_t values[3] = {1, 2, 3};
    mccl_request *requests[3];
    mccl_comm *comm = rank_connect_with(self, settings, 10000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    if (self->rank != 0)
        sleep_ms(500);
    const int64_t start_ms = now_ms();
    for (int i = 0; i < 3; i++)
        CHECK_OK(mccl_all_reduce(&values[i], &values[i], 1, MCCL_INT32, MCCL_SUM, comm, NULL,
                                 &requests[i]));
    const int64_t took_ms = now_ms() - start_ms;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(mccl_request_wait(requests[i], -1));
        CHECK_EQ_I64(values[i], (i + 1) * self->n);
        CHECK_OK(mccl_request_free(requests[i]));
    }
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
    return took_ms;
}

static void queue_depth(struct rank *self)
{
    const int64_t short_ms = submit_three(self, "max_queue_depth=2");
    const int64_t long_ms = submit_three(self, "max_queue_depth=3");
    if (self->rank == 0) {
        CHECK_GE_I64(short_ms, 350);
        CHECK_LE_I64(long_ms, 250);
    }
}

/* 300 ms of idleness at 20 ms an interval; 0 is tested with the other deadlines. */
static void heartbeats(struct rank *self)
{
    mccl_stats stats = {.size = sizeof stats};
    mccl_comm *comm = rank_connect_with(self, "heartbeat_interval_ms=20", 0);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    sleep_ms(300);
    CHECK_OK(mccl_comm_get_stats(comm, &stats));
    CHECK_GE_I64(stats.heartbeats_sent, 5);
    CHECK_LE_I64(stats.heartbeats_sent, 16);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* ---- log ---- */

static void noisy_life(struct rank *self)
{
    const char *const *level = self->arg;
    set_variable("MCCL_CHUNK_BITES", "1"); /* no such variable: worth a warning */
    set_variable("MCCL_LOG_LEVEL", *level);
    mccl_comm *comm = rank_connect(self, NULL);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void log_level(const char *level, const char *has, const char *lacks)
{
    struct team *team = team_start(2, 20, noisy_life, &level);
    for (int rank = 0; rank < 2; rank++) {
        team_expect_ok(team, rank);
        const char *text = team_stderr(team, rank);
        CHECK_HAS(text, has);
        if (lacks && strstr(text, lacks))
            CHECK_FAIL("log_level=%s wrote \"%s\"", level, text);
    }
    team_end(team);
}

static void log_levels(void)
{
    log_level("OFF", "", "mccl");
    log_level("WARN", "did you mean MCCL_CHUNK_BYTES", "INFO");
    log_level("INFO", "INFO", "DEBUG");
    log_level("DEBUG", "DEBUG", "TRACE");
}

static void run(const char *what, int n, rank_body *body)
{
    const int64_t start_ms = now_ms();
    team_run(n, 20, body, NULL);
    printf("%s: ok (%lld ms)\n", what, (long long)(now_ms() - start_ms));
    fflush(stdout);
}

int main(void)
{
    run("ALLREDUCE_ALGO, SMALL_MSG_THRESHOLD", 4, algorithms);
    run("CHUNK_BYTES, RING_ALGO", 4, pieces);
    run("CHANNELS", 2, channels);
    run("LINK_PROFILE", 2, link_profile);
    run("SOCK_BUFSIZE, TCP_LOWAT", 2, socket_options);
    clamping_is_reported();
    profile_reaches_sockets();
    run("TRANSPORT", 2, transport_tcp);
    run("CONNECT_TIMEOUT_MS", 3, connect_timeout);
    run("WATCHDOG_TIMEOUT_MS", 2, watchdog_aborts);
    watchdog_line();
    run("MAX_QUEUE_DEPTH", 2, queue_depth);
    run("HEARTBEAT_INTERVAL_MS", 2, heartbeats);
    log_levels();
    return 0;
}

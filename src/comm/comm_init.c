/* SPDX-License-Identifier: MIT
 *
 * From "checked in" to "ready": dialling the full mesh, taking over connections, and what has to
 * happen from time to time (deadlines, heartbeats, silence). Service thread, endpoint's lock held.
 */
#include "base/log.h"
#include "comm/bootstrap.h"
#include "comm/comm.h"
#include "comm/conn.h"
#include "comm/dial.h"
#include "shm/shm_link.h"

#include <stdio.h>
#include <string.h>

#define SILENT_INTERVALS \
    6 /* heartbeats missed before a rank counts as lost: one or two may be late on a busy host */

/* A rank that dials knows why it has no connection, one that is dialled does not: the first has the
 * first word, which all ranks then repeat. */
#define FIRST_WORD_NS (200 * OS_MS)

/* All sockets of the data link to `peer` are there: the engine gets the link. Only now, since until
 * all ranks are ready each of them may be dialled again. */
static mccl_result hand_over(struct mccl_comm *comm, int peer)
{
    int fds[WIRE_CHANNELS_MAX];
    struct link *link;
    memcpy(fds, comm->peers[peer].channels, sizeof fds);
    for (int i = 0; i < WIRE_CHANNELS_MAX; i++)
        comm->peers[peer].channels[i] = -1;
    if (comm->peers[peer].shares)
        TRY(link_shm_create(fds[0], peer < comm->rank, comm_wants_memory(&comm->settings), &link));
    else if (comm->settings.channels == 1)
        TRY(link_tcp_create(fds[0], NULL, 0, &link));
    else
        TRY(link_tcp_create_channels(fds, (unsigned)comm->settings.channels, &link));
    return engine_add_link(comm, peer, link, false);
}

static void become_ready(struct mccl_comm *comm)
{
    for (int peer = 0; peer < comm->n_ranks; peer++)
        if (peer != comm->rank && hand_over(comm, peer) != MCCL_OK) {
            comm_fail_locked(comm, true, MCCL_ERR_NO_MEMORY, comm->rank, "%s", error_text());
            return;
        }
    const int64_t now_ns = os_now_ns();
    for (int peer = 0; peer < comm->n_ranks; peer++)
        comm->peers[peer].heard_ns = now_ns;
    comm->heartbeat_due_ns = now_ns + comm->settings.heartbeat_interval_ms * OS_MS;
    comm->silence_due_ns = now_ns;
    atomic_store(&comm->was_ready, true);
    atomic_store(&comm->phase, COMM_READY);
    os_wake_all(&comm->phase);
    log_info("rank %d of %d, group '%s': ready after %.3f s, on %d host%s", comm->rank,
             comm->n_ranks, comm->name, (double)(now_ns - comm->started_ns) / 1e9, comm->n_hosts,
             comm->n_hosts == 1 ? "" : "s");
}

/* Ready means that all ranks are connected with all, so that no rank starts while another is about
 * to fail. */
static void check_connected(struct mccl_comm *comm)
{
    if (comm->links_missing > 0)
        return;
    if (comm->links_missing == 0) {
        comm->links_missing = -1; /* said once */
        control_send_ready(comm);
    }
    if (comm->ranks_missing == 0)
        become_ready(comm);
}

void comm_on_peer_ready(struct mccl_comm *comm, int peer)
{
    if (comm->peers[peer].ready)
        return;
    comm->peers[peer].ready = true;
    if (atomic_load(&comm->phase) != COMM_MESHING)
        return;
    comm->ranks_missing--;
    check_connected(comm);
}

void comm_on_all_ready(struct mccl_comm *comm)
{
    if (atomic_load(&comm->phase) == COMM_MESHING && comm->links_missing < 0)
        become_ready(comm);
}

/* Members are known: who is on which host. */
static void count_hosts(struct mccl_comm *comm)
{
    comm->n_hosts = 0;
    comm->shares = true;
    for (int rank = 0; rank < comm->n_ranks; rank++) {
        const struct wire_member *member = &comm->peers[rank].member;
        int first = 0; /* rank of the same host */
        while (memcmp(comm->peers[first].member.host_id, member->host_id, sizeof member->host_id))
            first++;
        comm->hosts[rank] = first == rank ? comm->n_hosts++ : comm->hosts[first];
        comm->shares = comm->shares && member->shares;
    }
}

void comm_start_mesh(struct mccl_comm *comm, const struct wire_member *table)
{
    if (atomic_load(&comm->failed)) /* aborted while the table was on its way */
        return;
    const int64_t deadline_ns = os_now_ns() + comm->settings.connect_timeout_ms * OS_MS;
    comm->ranks_on_host = 1;
    for (int peer = 0; peer < comm->n_ranks; peer++) {
        struct peer *to = &comm->peers[peer];
        memcpy(&to->member, &table[peer], sizeof to->member);
        to->member.host_name[sizeof to->member.host_name - 1] = '\0';
        if (to->member.n_addresses > WIRE_MEMBER_ADDRESSES)
            to->member.n_addresses = WIRE_MEMBER_ADDRESSES;
        to->same_host =
            memcmp(to->member.host_id, comm->endpoint->host_id, sizeof to->member.host_id) == 0;
        comm->ranks_on_host += peer != comm->rank && to->same_host;
    }
    comm->may_spin = comm->ranks_on_host <= os_cpu_count();
    count_hosts(comm);
    comm->deadline_ns = deadline_ns;
    /* Links that came while we were checking in are there already. */
    comm->links_missing = 0;
    for (int peer = 0; peer < comm->n_ranks; peer++)
        if (peer != comm->rank)
            comm->links_missing += !comm->peers[peer].control + !comm->peers[peer].have_data;
    atomic_store(&comm->phase, COMM_MESHING);
    comm->ranks_missing = 0;
    for (int peer = 0; peer < comm->n_ranks; peer++)
        comm->ranks_missing += peer != comm->rank && !comm->peers[peer].ready;
    check_connected(comm);
    for (int peer = 0; peer < comm->rank; peer++) {
        const struct peer *to = &comm->peers[peer];
        const int n_channels = comm_offers_memory(comm, peer) ? 1 : (int)comm->settings.channels;
        for (int i = -1; i < n_channels; i++) /* the control link, and each channel */
            if (dial_start(comm, peer, i < 0 ? PURPOSE_CONTROL : PURPOSE_DATA,
                           (uint8_t)(i < 0 ? 0 : i), to->member.addresses,
                           (int)to->member.n_addresses, to->same_host, deadline_ns) != MCCL_OK) {
                comm_fail_locked(comm, true, MCCL_ERR_CONNECT, peer,
                                 "rank %d cannot dial rank %d: %s", comm->rank, peer, error_text());
                return;
            }
    }
}

bool comm_wants_memory(const struct settings *settings)
{
    return settings->transport == TRANSPORT_SHM ||
           (settings->transport == TRANSPORT_AUTO && os_shm_exists());
}

bool comm_offers_memory(const struct mccl_comm *comm, int peer)
{
    return comm->peers[peer].same_host && comm_wants_memory(&comm->settings);
}

static void link_is_there(struct mccl_comm *comm)
{
    if (atomic_load(&comm->phase) != COMM_MESHING)
        return;
    comm->links_missing--;
    check_connected(comm);
}

void comm_prepare_socket(const struct mccl_comm *comm, int fd)
{
    const struct link_tcp_options options = endpoint_socket_options(&comm->settings);
    link_tcp_prepare(fd, &options);
}

static int take_socket(const struct mccl_comm *comm, struct conn *conn, const char *what)
{
    const int peer = conn->peer;
    char where[64], congestion[16];
    os_address_format(&conn->address, where, sizeof where);
    os_socket_congestion_name(conn->fd, congestion, sizeof congestion);
    log_info("rank %d of %d, group '%s': %s to rank %d by %s%s%s", comm->rank, comm->n_ranks,
             comm->name, what, peer, where, congestion[0] ? ", " : "", congestion);
    os_socket_keepalive(conn->fd, 30);
    return conn_detach(conn);
}

static void take_p2p(struct mccl_comm *comm, struct conn *conn)
{
    const int peer = conn->peer;
    const bool shares = conn->hello.flags & HELLO_SHM;
    const int fd = take_socket(comm, conn, "point-to-point link");
    struct link *link;
    comm->peers[peer].p2p_wanted = true;
    const mccl_result result =
        shares ? link_shm_create(fd, peer < comm->rank, comm_wants_memory(&comm->settings), &link)
               : link_tcp_create(fd, NULL, 0, &link);
    if (result != MCCL_OK || engine_add_link(comm, peer, link, true) != MCCL_OK)
        comm_fail_locked(comm, true, MCCL_ERR_NO_MEMORY, comm->rank, "%s", error_text());
}

static void take_channel(struct mccl_comm *comm, struct conn *conn)
{
    struct peer *from = &comm->peers[conn->peer];
    const int channel = conn->hello.channel;
    const bool shares = conn->hello.flags & HELLO_SHM;
    const int n_channels = shares ? 1 : (int)comm->settings.channels;
    char what[64] = "data link";
    if (n_channels > 1)
        snprintf(what, sizeof what, "channel %d of the data link", channel);
    const int fd = take_socket(comm, conn, what);
    os_fd_close(from->channels[channel]); /* dialled again because our last word was lost */
    from->channels[channel] = fd;
    from->shares = shares;
    for (int i = 0; i < n_channels; i++)
        if (from->channels[i] < 0)
            return;
    const bool repeated = from->have_data;
    from->have_data = true;
    if (!repeated)
        link_is_there(comm);
}

void comm_on_connection(struct mccl_comm *comm, struct conn *conn)
{
    if (comm->closing || atomic_load(&comm->failed)) {
        conn_kill(conn, "the communicator is closed");
        return;
    }
    comm_prepare_socket(comm, conn->fd); /* accepted ones have the endpoint's options so far */
    switch (conn->hello.purpose) {
    case PURPOSE_BOOTSTRAP:
        bootstrap_check_in(comm, conn);
        break;
    case PURPOSE_CONTROL: {
        struct conn *before = comm->peers[conn->peer].control;
        if (before) /* dialled again because our last word was lost */
            conn_kill(before, "replaced");
        os_socket_keepalive(conn->fd, 30);
        comm->peers[conn->peer].control = conn;
        comm->peers[conn->peer].heard_ns = os_now_ns();
        if (!before)
            link_is_there(comm);
        else if (comm->links_missing < 0) /* the READY on it is lost, too */
            control_send_ready(comm);
        break;
    }
    case PURPOSE_DATA:
        take_channel(comm, conn);
        break;
    default:
        take_p2p(comm, conn);
        break;
    }
}

/* The next step for a rank that could not check in. */
static const char *advice(mccl_result verdict)
{
    switch (verdict) {
    case MCCL_ERR_AUTH:
        return "MCCL_AUTH_KEY must be the same on all ranks";
    case MCCL_ERR_UNSUPPORTED:
        return "all ranks need versions that speak one protocol";
    default:
        return "is it still running, and is its port open (MCCL_PORT_BASE, MCCL_IFNAME, firewall)?";
    }
}

void comm_on_dial_failed(struct mccl_comm *comm, const struct dial *dial)
{
    if (comm->closing || atomic_load(&comm->failed))
        return;
    if (dial->purpose == PURPOSE_P2P && atomic_load(&comm->peers[dial->peer].goodbye))
        return; /* it has left: that is an answer, and fails only what needed it */
    const double waited_s = (double)(os_now_ns() - comm->started_ns) / 1e9;
    char tried[300];
    dial_describe(dial, tried, sizeof tried);
    if (dial->purpose == PURPOSE_BOOTSTRAP)
        comm_fail_locked(comm, false, dial->verdict, -1,
                         "rank %d of group '%s' could not join the process that made the unique id "
                         "in %.1f s: %s; %s",
                         comm->rank, comm->name, waited_s, tried, advice(dial->verdict));
    else
        comm_fail_locked(comm, true, MCCL_ERR_CONNECT, dial->peer,
                         "rank %d of group '%s' could not connect to rank %d (%s:%u) within "
                         "MCCL_CONNECT_TIMEOUT_MS=%lld: %s; is its port "
                         "open (MCCL_PORT_BASE, MCCL_IFNAME, firewall)?",
                         comm->rank, comm->name, dial->peer,
                         comm->peers[dial->peer].member.host_name,
                         comm->peers[dial->peer].member.pid,
                         (long long)comm->settings.connect_timeout_ms, tried);
}

static void check_in_timed_out(struct mccl_comm *comm, double waited_s)
{
    if (comm->checked_in) {
        comm_fail_locked(comm, false, MCCL_ERR_TIMEOUT, -1,
                         "rank %d of group '%s' waited %.1f s for rank %s; were all started, with "
                         "the right rank and id?",
                         comm->rank, comm->name, waited_s,
                         comm->missing[0] ? comm->missing : "(unknown) to check in");
        return;
    }
    char tried[300] = "not dialled";
    const struct dial *dial = dial_find(comm);
    if (dial)
        dial_describe(dial, tried, sizeof tried);
    comm_fail_locked(comm, false, MCCL_ERR_TIMEOUT, -1,
                     "rank %d of group '%s' waited %.1f s to check in with the process that made "
                     "the unique id: %s; %s",
                     comm->rank, comm->name, waited_s, tried, advice(MCCL_ERR_CONNECT));
}

static void connecting_timed_out(struct mccl_comm *comm)
{
    char ranks[100] = "", tried[200], example[220] = "";
    size_t used = 0;
    const bool connected = comm->links_missing < 0;
    for (int peer = 0; peer < comm->n_ranks; peer++) {
        const struct peer *to = &comm->peers[peer];
        const bool missing = connected ? !to->ready : !to->control || !to->have_data;
        if (peer != comm->rank && missing && used < sizeof ranks)
            used +=
                (size_t)snprintf(ranks + used, sizeof ranks - used, "%s%d", used ? ", " : "", peer);
    }
    const struct dial *dial = dial_find(comm);
    if (dial) {
        dial_describe(dial, tried, sizeof tried);
        snprintf(example, sizeof example, " (%d: %s)", dial->peer, tried);
    }
    comm_fail_locked(comm, true, MCCL_ERR_TIMEOUT, -1,
                     "rank %d of group '%s' %s rank %s%s within MCCL_CONNECT_TIMEOUT_MS=%lld; does "
                     "it still run, and is its port open (MCCL_PORT_BASE, MCCL_IFNAME, firewall)?",
                     comm->rank, comm->name,
                     connected ? "is connected, but so was not" : "has no connection with", ranks,
                     example, (long long)comm->settings.connect_timeout_ms);
}

static int64_t send_heartbeats(struct mccl_comm *comm, int64_t now_ns)
{
    const int64_t interval_ns = comm->settings.heartbeat_interval_ms * OS_MS;
    if (interval_ns == 0)
        return INT64_MAX;
    if (now_ns >= comm->heartbeat_due_ns) {
        control_send_heartbeats(comm);
        comm->heartbeat_due_ns = now_ns + interval_ns;
    }
    return comm->heartbeat_due_ns;
}

/* Each rank is measured by the interval at which it sends itself, which need not be ours. */
static int64_t check_silence(struct mccl_comm *comm, int64_t now_ns)
{
    if (now_ns < comm->silence_due_ns)
        return comm->silence_due_ns;
    const int64_t late_ns = now_ns - comm->silence_due_ns;
    int64_t shortest_ns = INT64_MAX - now_ns;
    for (int peer = 0; peer < comm->n_ranks; peer++) {
        struct peer *from = &comm->peers[peer];
        const int64_t interval_ns = from->member.heartbeat_ms * OS_MS;
        if (interval_ns == 0 || !from->control || from->goodbye)
            continue;
        if (interval_ns < shortest_ns)
            shortest_ns = interval_ns;
        /* Who was stopped itself (suspended laptop, debugger) must first listen before it calls
         * others silent. */
        if (late_ns >= SILENT_INTERVALS * interval_ns / 2)
            from->heard_ns = now_ns;
        if (now_ns - from->heard_ns < SILENT_INTERVALS * interval_ns)
            continue;
        comm_fail_locked(comm, true, MCCL_ERR_PEER_LOST, peer,
                         "rank %d (%s:%u) is lost: silent for %.1f s, %d heartbeats "
                         "(MCCL_HEARTBEAT_INTERVAL_MS=%u); "
                         "its process is stopped, its host is down or the network is cut",
                         peer, from->member.host_name, from->member.pid,
                         (double)(now_ns - from->heard_ns) / 1e9, SILENT_INTERVALS,
                         from->member.heartbeat_ms);
        return INT64_MAX;
    }
    comm->silence_due_ns = now_ns + shortest_ns;
    return comm->silence_due_ns;
}

int64_t comm_on_time(struct mccl_comm *comm, int64_t now_ns)
{
    if (comm->closing || atomic_load(&comm->failed))
        return INT64_MAX;
    if (atomic_load(&comm->phase) == COMM_READY) {
        const int64_t heartbeat_ns = send_heartbeats(comm, now_ns);
        const int64_t silence_ns = check_silence(comm, now_ns);
        return heartbeat_ns < silence_ns ? heartbeat_ns : silence_ns;
    }
    const bool meshing = atomic_load(&comm->phase) == COMM_MESHING;
    const int64_t deadline_ns =
        comm->deadline_ns + (meshing && !dial_find(comm) ? FIRST_WORD_NS : 0);
    if (now_ns < deadline_ns)
        return deadline_ns;
    if (!meshing)
        check_in_timed_out(comm, (double)(now_ns - comm->started_ns) / 1e9);
    else
        connecting_timed_out(comm);
    return INT64_MAX;
}

/* SPDX-License-Identifier: MIT
 *
 * See bootstrap.h. The server side runs in the process that made the id, the client side in every
 * rank, the maker's own included: it dials itself like the others.
 */
#include "comm/bootstrap.h"

#include "base/error.h"
#include "base/log.h"
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STATUS_FIRST_NS (50 * OS_MS) /* most ranks come together: nothing is said before */
#define STATUS_EVERY_NS OS_SEC       /* how often waiting ranks hear who is missing */
#define LOG_WAITING_NS (5 * OS_SEC)  /* and from when on the log says so */

struct session {
    struct session *next; /* endpoint's list */
    struct endpoint *endpoint;
    uint8_t comm_id[16], key[HANDSHAKE_KEY_BYTES];
    int n_ranks; /* as the first client said; 0: nobody came yet */
    int n_present;
    struct wire_member *members; /* by rank; n_ranks == 0 marks an absent one */
    struct conn **clients;       /* by rank; NULL: not checked in, or gone again */
    bool finished;               /* table sent, or given up */
    int64_t status_due_ns, started_ns, logged_ns;
};

/* Settings that change which messages a rank sends: all ranks must have the same. */
static const char *const agreed_settings[WIRE_AGREED] = {"chunk_bytes", "small_msg_threshold",
                                                         "channels", "allreduce_algo", "ring_algo"};

void bootstrap_agree_on(const struct settings *settings, struct wire_member *member)
{
    const int64_t values[WIRE_AGREED] = {settings->chunk_bytes, settings->small_msg_threshold,
                                         settings->channels, settings->allreduce_algo,
                                         settings->ring_algo};
    memcpy(member->agreed, values, sizeof member->agreed);
}

void bootstrap_member(const struct mccl_comm *comm, struct wire_member *member)
{
    const struct endpoint *endpoint = comm->endpoint;
    const struct settings *settings = &comm->settings;
    memset(member, 0, sizeof *member);
    member->rank = (uint32_t)comm->rank;
    member->n_ranks = (uint32_t)comm->n_ranks;
    memcpy(member->host_id, endpoint->host_id, sizeof member->host_id);
    member->shares = comm_wants_memory(settings);
    member->pid = (uint32_t)os_pid();
    member->n_addresses = (uint32_t)endpoint->n_listeners;
    memcpy(member->host_name, endpoint->host_name, sizeof member->host_name);
    member->heartbeat_ms = (uint32_t)settings->heartbeat_interval_ms;
    bootstrap_agree_on(settings, member);
    memcpy(member->addresses, endpoint->addresses, sizeof member->addresses);
}

static void format_agreed(int index, int64_t value, char *text, size_t size)
{
    struct settings settings = {0};
    size_t row;
    settings.allreduce_algo = settings.ring_algo = (int)value;
    if (index < 3 || config_find(agreed_settings[index], &row) != MCCL_OK)
        snprintf(text, size, "%lld", (long long)value);
    else
        config_format(&settings, row, text, size);
}

bool bootstrap_disagree(const struct wire_member *a, const struct wire_member *b, char *text,
                        size_t size)
{
    for (int i = 0; i < WIRE_AGREED; i++) {
        if (a->agreed[i] == b->agreed[i])
            continue;
        char mine[64], theirs[64];
        size_t row;
        const mccl_setting_info *info =
            config_find(agreed_settings[i], &row) == MCCL_OK ? config_row(row) : NULL;
        format_agreed(i, a->agreed[i], mine, sizeof mine);
        format_agreed(i, b->agreed[i], theirs, sizeof theirs);
        snprintf(text, size,
                 "settings differ: %s=%s on rank %u, %s on rank %u; give all ranks the same",
                 info ? info->variable : agreed_settings[i], mine, a->rank, theirs, b->rank);
        return true;
    }
    return false;
}

/* ---- ids ---- */

mccl_result bootstrap_make_id(struct endpoint *endpoint, const char *auth_key, struct unique_id *id)
{
    static _Atomic uint64_t generation;
    struct session *session = calloc(1, sizeof *session);
    if (!session)
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a bootstrap session");
    memset(id, 0, sizeof *id);
    id->magic = WIRE_HELLO_MAGIC;
    id->version = UNIQUE_ID_VERSION;
    id->generation = atomic_fetch_add(&generation, 1) + 1;
    id->n_addresses = (uint16_t)endpoint->n_listeners;
    memcpy(id->host_id, endpoint->host_id, sizeof id->host_id);
    memcpy(id->addresses, endpoint->addresses, sizeof id->addresses);
    mccl_result result = os_random(id->comm_id, sizeof id->comm_id);
    if (result == MCCL_OK)
        result = os_random(id->secret, sizeof id->secret);
    if (result != MCCL_OK) {
        free(session);
        return result;
    }
    session->endpoint = endpoint;
    memcpy(session->comm_id, id->comm_id, sizeof session->comm_id);
    handshake_derive_key(id->secret, id->comm_id, auth_key, session->key);
    session->started_ns = os_now_ns();
    endpoint_lock(endpoint);
    session->next = endpoint->sessions;
    endpoint->sessions = session;
    endpoint_unlock(endpoint);
    return MCCL_OK;
}

mccl_result bootstrap_check_id(const struct unique_id *id)
{
    if (id->magic != WIRE_HELLO_MAGIC)
        return error_set(
            MCCL_ERR_INVALID_ARGUMENT,
            "these bytes are no unique id; pass what mccl_get_unique_id made, unchanged");
    if (id->version != UNIQUE_ID_VERSION)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "the unique id has version %u, this library knows %d; install the same "
                         "MCCL on all hosts",
                         id->version, UNIQUE_ID_VERSION);
    if (id->n_addresses > WIRE_MEMBER_ADDRESSES)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "the unique id is damaged: %u addresses",
                         id->n_addresses);
    return MCCL_OK;
}

/* ---- server ---- */

struct session *bootstrap_next(const struct session *session)
{
    return session->next;
}
const uint8_t *bootstrap_key(const struct session *session)
{
    return session->key;
}

struct session *bootstrap_find(struct endpoint *endpoint, const uint8_t comm_id[16])
{
    for (struct session *session = endpoint->sessions; session; session = session->next)
        if (!session->finished && memcmp(session->comm_id, comm_id, sizeof session->comm_id) == 0)
            return session;
    return NULL;
}

void bootstrap_adopt_key(struct endpoint *endpoint, const struct mccl_comm *comm)
{
    struct session *session = bootstrap_find(endpoint, comm->id);
    if (session)
        memcpy(session->key, comm->key, sizeof session->key);
}

void bootstrap_on_client(struct session *session, struct conn *conn)
{
    (void)session;
    conn->peer = -1; /* until it has checked in */
}

static void refuse(struct conn *conn, mccl_result result, const char *text)
{
    const struct wire_frame frame = {
        .type = FRAME_REFUSE, .kind = (uint8_t)result, .length = strlen(text)};
    conn_send_frame(conn, &frame, text);
}

static void refuse_all(struct session *session, mccl_result result, const char *text)
{
    for (int rank = 0; rank < session->n_ranks; rank++)
        if (session->clients[rank])
            refuse(session->clients[rank], result, text);
    session->finished = true;
}

/* Everybody is there. Settings are compared only now, so that every rank hears of a disagreement.
 */
static void send_table(struct session *session)
{
    char text[400];
    for (int rank = 1; rank < session->n_ranks; rank++)
        if (bootstrap_disagree(&session->members[0], &session->members[rank], text, sizeof text)) {
            refuse_all(session, MCCL_ERR_MISMATCH, text);
            return;
        }
    const struct wire_frame frame = {
        .type = FRAME_TABLE, .length = (uint64_t)session->n_ranks * sizeof *session->members};
    for (int rank = 0; rank < session->n_ranks; rank++)
        conn_send_frame(session->clients[rank], &frame, session->members);
    session->finished = true;
}

/* False when the entry makes no sense here; the client was told. */
static bool admit(struct session *session, struct conn *conn, const struct wire_member *member)
{
    char text[400];
    if (session->n_ranks == 0 && member->n_ranks > 0 && member->n_ranks <= 65535) {
        session->members = calloc(member->n_ranks, sizeof *session->members);
        session->clients = calloc(member->n_ranks, sizeof *session->clients);
        if (!session->members || !session->clients) {
            refuse(conn, MCCL_ERR_NO_MEMORY,
                   "the maker of the id has no memory for the group's table");
            return false;
        }
        session->n_ranks = (int)member->n_ranks;
    }
    if (member->n_ranks != (uint32_t)session->n_ranks) {
        snprintf(text, sizeof text,
                 "rank %u (%.31s:%u) says that the group has %u ranks, others say %d; check the "
                 "world size",
                 member->rank, member->host_name, member->pid, member->n_ranks, session->n_ranks);
        refuse(conn, MCCL_ERR_MISMATCH, text);
        refuse_all(session, MCCL_ERR_MISMATCH, text);
        return false;
    }
    if (member->rank >= member->n_ranks || member->n_addresses > WIRE_MEMBER_ADDRESSES) {
        refuse(conn, MCCL_ERR_INVALID_ARGUMENT, "the check-in names a rank outside the group");
        return false;
    }
    const struct wire_member *there = &session->members[member->rank];
    if (session->clients[member->rank]) {
        snprintf(text, sizeof text,
                 "rank %u is there twice: %.31s:%u and %.31s:%u; give every process its own rank",
                 member->rank, there->host_name, there->pid, member->host_name, member->pid);
        refuse(conn, MCCL_ERR_MISMATCH, text);
        refuse_all(session, MCCL_ERR_MISMATCH, text);
        return false;
    }
    return true;
}

void bootstrap_on_client_frame(struct session *session, struct conn *conn,
                               const struct wire_frame *frame, const void *payload)
{
    struct wire_member member;
    if (frame->type != FRAME_CHECK_IN || frame->length != sizeof member || conn->peer >= 0 ||
        session->finished) {
        conn->session = NULL;
        conn_kill(conn, "unexpected frame");
        return;
    }
    memcpy(&member, payload, sizeof member);
    member.host_name[sizeof member.host_name - 1] = '\0';
    if (!admit(session, conn, &member))
        return;
    conn->peer = (int)member.rank;
    session->members[member.rank] = member;
    session->clients[member.rank] = conn;
    session->n_present++;
    if (session->status_due_ns == 0)
        session->status_due_ns = os_now_ns() + STATUS_FIRST_NS;
    if (session->n_present == session->n_ranks)
        send_table(session);
}

void bootstrap_on_client_end(struct session *session, struct conn *conn)
{
    if (conn->peer < 0 || session->finished)
        return;
    session->clients[conn->peer] = NULL; /* it may try again */
    session->n_present--;
}

/* "1, 3, 5 and 12 more" */
static void list_missing(const struct session *session, char *text, size_t size)
{
    size_t used = 0;
    int n = 0;
    text[0] = '\0';
    for (int rank = 0; rank < session->n_ranks; rank++) {
        if (session->clients[rank])
            continue;
        if (n < 16 && used < size)
            used += (size_t)snprintf(text + used, size - used, "%s%d", n ? ", " : "", rank);
        n++;
    }
    if (n > 16 && used < size)
        snprintf(text + used, size - used, " and %d more", n - 16);
}

/* "0 (host:pid), 2 (host:pid) and 6 more" */
static void list_present(const struct session *session, char *text, size_t size)
{
    size_t used = 0;
    int n = 0;
    text[0] = '\0';
    for (int rank = 0; rank < session->n_ranks; rank++) {
        if (!session->clients[rank])
            continue;
        const struct wire_member *member = &session->members[rank];
        if (n < 4 && used < size)
            used += (size_t)snprintf(text + used, size - used, "%s%d (%.31s:%u)", n ? ", " : "",
                                     rank, member->host_name, member->pid);
        n++;
    }
    if (n > 4 && used < size)
        snprintf(text + used, size - used, " and %d more", n - 4);
}

int64_t bootstrap_on_time(struct session *session, int64_t now_ns)
{
    if (session->finished || session->n_present == 0)
        return INT64_MAX;
    if (now_ns < session->status_due_ns)
        return session->status_due_ns;
    char missing[140], present[240], text[sizeof missing + sizeof present + 40];
    list_missing(session, missing, sizeof missing);
    list_present(session, present, sizeof present);
    snprintf(text, sizeof text, "%s to check in; those there are %s", missing, present);
    const struct wire_frame frame = {.type = FRAME_STATUS, .length = strlen(text)};
    for (int rank = 0; rank < session->n_ranks; rank++)
        if (session->clients[rank])
            conn_send_frame(session->clients[rank], &frame, text);
    if (session->logged_ns == 0 && now_ns - session->started_ns >= LOG_WAITING_NS) {
        session->logged_ns = now_ns;
        log_warn("%d of %d ranks have checked in; waiting for rank %s", session->n_present,
                 session->n_ranks, missing);
    }
    session->status_due_ns = now_ns + STATUS_EVERY_NS;
    return session->status_due_ns;
}

void bootstrap_forget(struct endpoint *endpoint, const struct mccl_comm *comm)
{
    struct session *session = bootstrap_find(endpoint, comm->id);
    if (!session)
        return;
    char text[600];
    snprintf(text, sizeof text, "the process that made the unique id gave the group up: %s",
             comm->cause.text);
    refuse_all(session, comm->cause.result == MCCL_OK ? MCCL_ERR_ABORTED : comm->cause.result,
               text);
    endpoint_wake(endpoint);
}

/* Everything said has left: the clients may be let go. */
static bool is_flushed(const struct session *session)
{
    for (const struct conn *conn = session->endpoint->conns; conn; conn = conn->next)
        if (conn->session == session && conn->out_size > 0)
            return false;
    return true;
}

void bootstrap_sweep(struct endpoint *endpoint, bool all)
{
    for (struct session **at = &endpoint->sessions; *at;) {
        struct session *session = *at;
        if (!all && !(session->finished && is_flushed(session))) {
            at = &session->next;
            continue;
        }
        *at = session->next;
        for (struct conn *conn = endpoint->conns; conn; conn = conn->next)
            if (conn->session == session)
                conn_kill(conn, "bootstrap is over");
        free(session->members);
        free(session->clients);
        free(session);
        endpoint_drop_user_locked(endpoint);
    }
}

/* ---- client ---- */

void bootstrap_check_in(struct mccl_comm *comm, struct conn *conn)
{
    struct wire_member member;
    bootstrap_member(comm, &member);
    comm->bootstrap = conn;
    comm->checked_in = true;
    const struct wire_frame frame = {.type = FRAME_CHECK_IN, .length = sizeof member};
    conn_send_frame(conn, &frame, &member);
}

/* The code in a refusal, which may be any byte: to be refused is never success. */
static mccl_result refused_with(uint8_t kind)
{
    return kind > MCCL_IN_PROGRESS && kind <= MCCL_ERR_INTERNAL ? (mccl_result)kind
                                                                : MCCL_ERR_ABORTED;
}

void bootstrap_on_server_frame(struct mccl_comm *comm, struct conn *conn,
                               const struct wire_frame *frame, const void *payload)
{
    char text[WIRE_CONTROL_MAX + 1];
    const size_t length =
        frame->length < WIRE_CONTROL_MAX ? (size_t)frame->length : WIRE_CONTROL_MAX;
    memcpy(text, payload, length);
    text[length] = '\0';
    if (frame->type == FRAME_STATUS) {
        snprintf(comm->missing, sizeof comm->missing, "%.399s", text);
        return;
    }
    comm->bootstrap = NULL;
    conn_kill(conn, "bootstrap is over");
    if (frame->type == FRAME_REFUSE)
        comm_fail_locked(comm, false, refused_with(frame->kind), -1, "%.500s", text);
    else if (frame->type != FRAME_TABLE ||
             frame->length != (uint64_t)comm->n_ranks * sizeof(struct wire_member))
        comm_fail_locked(comm, false, MCCL_ERR_INTERNAL, -1,
                         "the maker of the id sent an unexpected frame");
    else
        comm_start_mesh(comm, payload);
}

void bootstrap_on_server_end(struct mccl_comm *comm, struct conn *conn, const char *why)
{
    if (comm->bootstrap != conn)
        return;
    comm->bootstrap = NULL;
    comm_fail_locked(
        comm, false, MCCL_ERR_CONNECT, -1,
        "the process that made the unique id ended the check-in (%s): it died or gave up", why);
}

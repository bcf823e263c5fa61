/* SPDX-License-Identifier: MIT
 *
 * See comm.h. Making and freeing the object, and its failure.
 */
#include "comm/comm.h"

#include "base/log.h"
#include "comm/bootstrap.h"
#include "comm/conn.h"
#include "comm/dial.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_TIMEOUT_MS (30 * 60 * 1000) /* torch's default for process groups */
/* A year; more would overflow in nanoseconds. */
#define LONGEST_TIMEOUT_MS (365LL * 86400000)

#define OWN_DESCRIPTORS 6 /* beside those of links: pollers, listening, a handshake */

static void comm_free(struct mccl_comm *comm)
{
    engine_fini(comm);
    pthread_mutex_destroy(&comm->cause_lock);
    free(comm->peers);
    free(comm->hosts);
    free(comm);
}

void comm_acquire(struct mccl_comm *comm)
{
    atomic_fetch_add(&comm->refs, 1);
}

void comm_release(struct mccl_comm *comm)
{
    if (atomic_fetch_sub(&comm->refs, 1) == 1)
        comm_free(comm);
}

/* Connections that find no descriptor wait for one, all the time that there is: better to say so at
 * once. */
static mccl_result check_descriptors(const struct mccl_comm *comm)
{
    const int per_rank = 1 + (int)comm->settings.channels;
    const int needed = per_rank * (comm->n_ranks - 1) + OWN_DESCRIPTORS;
    const int n_free = os_fd_free(needed);
    if (n_free == needed)
        return MCCL_OK;
    const int limit = os_fd_limit();
    return error_set(MCCL_ERR_SYSTEM,
                     "rank %d of %d, group '%s' needs %d descriptors, %d for each other rank, but "
                     "this process may open only %d more: raise its limit (`ulimit -n`) from %d to "
                     "at least %d",
                     comm->rank, comm->n_ranks, comm->name, needed, per_rank, n_free, limit,
                     limit + needed - n_free);
}

static mccl_result fill(struct mccl_comm *comm, const mccl_config *config)
{
    TRY(config_load(config ? config->settings : NULL, &comm->settings));
    comm->timeout_ms = config && config->timeout_ms > 0 ? config->timeout_ms : DEFAULT_TIMEOUT_MS;
    if (comm->timeout_ms > LONGEST_TIMEOUT_MS)
        comm->timeout_ms = LONGEST_TIMEOUT_MS;
    comm->operation_ms = comm->timeout_ms;
    comm->warn_ms = comm->settings.watchdog_timeout_ms;
    /* Without a time-out of the group, a watchdog value that the user chose ends operations; else
     * it only reports. */
    const bool chosen = config && config->timeout_ms > 0;
    if (!chosen && config_is_explicit(&comm->settings, "watchdog_timeout_ms"))
        comm->operation_ms = comm->warn_ms;
    snprintf(comm->name, sizeof comm->name, "%s", config && config->name ? config->name : "");
    if (comm->name[0] == '\0')
        snprintf(comm->name, sizeof comm->name, "%02x%02x%02x%02x", comm->id[0], comm->id[1],
                 comm->id[2], comm->id[3]);
    TRY(check_descriptors(comm));
    handshake_derive_key(comm->secret, comm->id, comm->settings.auth_key, comm->key);
    comm->peers = calloc((size_t)comm->n_ranks, sizeof *comm->peers);
    comm->hosts = calloc((size_t)comm->n_ranks, sizeof *comm->hosts);
    if (!comm->peers || !comm->hosts)
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a communicator of %d ranks",
                         comm->n_ranks);
    for (int peer = 0; peer < comm->n_ranks; peer++)
        for (int i = 0; i < WIRE_CHANNELS_MAX; i++)
            comm->peers[peer].channels[i] = -1;
    return engine_init(comm);
}

mccl_result comm_create(int n_ranks, int rank, const uint8_t id[16], const uint8_t secret[32],
                        uint64_t generation, const mccl_config *config, struct mccl_comm **created)
{
    os_fork_init();
    struct mccl_comm *comm = calloc(1, sizeof *comm);
    if (!comm)
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a communicator");
    atomic_init(&comm->refs, 1);
    pthread_mutex_init(&comm->cause_lock, NULL);
    comm->rank = rank;
    comm->n_ranks = n_ranks;
    comm->ranks_on_host = 1;
    comm->generation = generation;
    comm->fork_generation = os_fork_generation();
    memcpy(comm->id, id, sizeof comm->id);
    memcpy(comm->secret, secret, sizeof comm->secret);
    mccl_result result = fill(comm, config);
    if (result == MCCL_OK) {
        log_set_level(comm->settings.log_level);
        result = endpoint_acquire(&comm->settings, &comm->endpoint);
    }
    if (result != MCCL_OK) {
        comm_free(comm);
        return result;
    }
    endpoint_lock(comm->endpoint);
    comm->next = comm->endpoint->comms;
    comm->endpoint->comms = comm;
    comm->started_ns = os_now_ns();
    comm->deadline_ns = comm->started_ns + comm->timeout_ms * OS_MS;
    endpoint_unlock(comm->endpoint);
    *created = comm;
    return MCCL_OK;
}

static void close_connections(struct mccl_comm *comm)
{
    struct endpoint *endpoint = comm->endpoint;
    for (struct dial *dial = endpoint->dials; dial; dial = dial->next)
        if (dial->comm == comm && !dial->done)
            dial_cancel(dial);
    for (struct conn *conn = endpoint->conns; conn; conn = conn->next) {
        if (conn->comm != comm)
            continue;
        /* Unread bytes would turn the close into a reset, which may overtake our goodbye. */
        if (conn->state == CONN_FRAMES)
            conn_on_event(conn, OS_POLL_READ);
        conn_kill(conn, "communicator closed");
    }
    for (int peer = 0; peer < comm->n_ranks; peer++)
        for (int i = 0; i < WIRE_CHANNELS_MAX; i++) {
            os_fd_close(comm->peers[peer].channels[i]);
            comm->peers[peer].channels[i] = -1;
        }
}

void comm_destroy(struct mccl_comm *comm)
{
    struct endpoint *endpoint = comm->endpoint;
    if (comm->fork_generation != os_fork_generation())
        return; /* the parent's: its locks may be held for ever here, its sockets are closed already
                 */
    const bool was_ready = atomic_load(&comm->phase) == COMM_READY;
    if (was_ready)
        engine_finish(comm, 2 * OS_SEC);
    endpoint_lock(endpoint);
    if (atomic_load(&comm->phase) == COMM_READY)
        control_send_goodbyes(comm);
    comm->closing = true;
    comm_fail_locked(comm, !was_ready, MCCL_ERR_ABORTED, comm->rank,
                     "rank %d destroyed its communicator", comm->rank);
    endpoint_unlock(endpoint);
    engine_stop_thread(comm);
    engine_quiesce(comm);

    endpoint_lock(endpoint);
    close_connections(comm);
    for (struct mccl_comm **at = &endpoint->comms; *at; at = &(*at)->next)
        if (*at == comm) {
            *at = comm->next;
            break;
        }
    if (!was_ready)
        bootstrap_forget(endpoint, comm);
    endpoint_unlock(endpoint);
    endpoint_wake(endpoint);
    endpoint_release(endpoint);
    comm_release(comm);
}

mccl_result comm_check(struct mccl_comm *comm, const char *what)
{
    if (!comm)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "%s: comm is NULL", what);
    if (comm->fork_generation != os_fork_generation())
        return error_set(MCCL_ERR_INVALID_USAGE,
                         "%s: communicator '%s' belongs to the parent process; after a fork the "
                         "child must make one of "
                         "its own",
                         what, comm->name);
    if (atomic_load(&comm->failed)) {
        comm_cause(comm);
        return error_set(comm->cause.result,
                         "%s on rank %d of %d: group '%s' has failed before seq %u: %s; destroy it "
                         "and make a new one",
                         what, comm->rank, comm->n_ranks, comm->name, engine_peek_seq(comm),
                         comm->cause.text);
    }
    if (atomic_load(&comm->phase) != COMM_READY)
        return error_set(MCCL_ERR_INVALID_USAGE,
                         "%s: communicator '%s' is not ready; call mccl_comm_wait_ready first",
                         what, comm->name);
    return MCCL_OK;
}

/* ---- failure ---- */

/* True for the first one. */
static bool record(struct mccl_comm *comm, mccl_result result, int rank, const char *format,
                   va_list arguments)
{
    pthread_mutex_lock(&comm->cause_lock);
    const bool first = comm->cause.result == MCCL_OK;
    if (first) {
        comm->cause.rank = rank;
        vsnprintf(comm->cause.text, sizeof comm->cause.text, format, arguments);
        comm->cause.result = result;
    }
    pthread_mutex_unlock(&comm->cause_lock);
    return first;
}

/* Endpoint's lock held: the abort leaves before anybody here sees the failure and, perhaps,
 * exits. */
static void spread(struct mccl_comm *comm, bool tell)
{
    if (tell)
        control_send_aborts(comm);
    atomic_store(&comm->failed,
                 true); /* publishes the cause; pairs with the loads in check and progress */
    atomic_store(&comm->phase, COMM_FAILED);
    os_wake_all(&comm->phase);
    engine_wake(comm);
    log_info("rank %d of %d, group '%s': %s", comm->rank, comm->n_ranks, comm->name,
             comm->cause.text);
}

void comm_fail(struct mccl_comm *comm, mccl_result result, int rank, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    /* One step for everybody else: whoever is second finds `failed` set when this returns. */
    endpoint_lock(comm->endpoint);
    if (record(comm, result, rank, format, arguments))
        spread(comm, true);
    endpoint_unlock(comm->endpoint);
    va_end(arguments);
}

void comm_fail_locked(struct mccl_comm *comm, bool tell, mccl_result result, int rank,
                      const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const bool first = record(comm, result, rank, format, arguments);
    va_end(arguments);
    if (first)
        spread(comm, tell);
}

void comm_mismatch(struct mccl_comm *comm, int peer, uint32_t seq, const struct signature *own,
                   const struct signature *theirs)
{
    char here[160] = "an operation long past", there[160];
    if (own)
        signature_format(own, here, sizeof here);
    signature_format(theirs, there, sizeof there);
    comm_fail(comm, MCCL_ERR_MISMATCH, peer,
              "ranks disagree in operation seq %u: rank %d calls %s, rank %d calls %s; every rank "
              "must make the same calls "
              "in the same order",
              seq, comm->rank, here, peer, there);
}

mccl_result comm_cause(struct mccl_comm *comm)
{
    /* `failed` follows the cause under a lock that we may have to wait for. */
    pthread_mutex_lock(&comm->cause_lock);
    const mccl_result result = comm->cause.result;
    error_set(result, "%s", comm->cause.text);
    pthread_mutex_unlock(&comm->cause_lock);
    return result;
}

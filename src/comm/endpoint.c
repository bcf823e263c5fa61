/* SPDX-License-Identifier: MIT
 *
 * See endpoint.h. The process-wide pointer, the service thread's loop, and accepting.
 */
#include "comm/endpoint.h"

#include "base/error.h"
#include "base/log.h"
#include "comm/bootstrap.h"
#include "comm/comm.h"
#include "comm/conn.h"
#include "comm/dial.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Places for connections that have proved nothing yet: so many, but at most this part of the
 * process's descriptors, most of which are the program's. */
#define HANDSHAKES_MAX 1024
#define HANDSHAKES_PART 4
#define STRANGERS_LOG_NS (10 * OS_SEC) /* at most one line about strangers in so long */
#define FULL_LOG_NS (10 * OS_SEC)      /* and one about descriptors */
#define FULL_PAUSE_NS (100 * OS_MS)    /* before accepting is tried again without descriptors */

static pthread_mutex_t global_lock = PTHREAD_MUTEX_INITIALIZER;
static struct endpoint *global_endpoint; /* global_lock */
static uint32_t global_generation;       /* fork generation that made it; global_lock */

/* ---- fork: a child must find global_lock free, to make an endpoint of its own ---- */

static void before_fork(void)
{
    pthread_mutex_lock(&global_lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&global_lock);
}

/* What prepares a fork runs in reverse: registered last, this lock is taken first. */
static void register_handlers(void)
{
    config_fork_init();
    pthread_atfork(before_fork, after_fork, after_fork);
}

static void fork_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_handlers);
}

void endpoint_lock(struct endpoint *endpoint)
{
    pthread_mutex_lock(&endpoint->lock);
}
void endpoint_unlock(struct endpoint *endpoint)
{
    pthread_mutex_unlock(&endpoint->lock);
}
void endpoint_wake(struct endpoint *endpoint)
{
    os_poller_wake(endpoint->poller);
}

struct mccl_comm *endpoint_find_comm(struct endpoint *endpoint, const uint8_t id[16], uint32_t rank)
{
    for (struct mccl_comm *comm = endpoint->comms; comm; comm = comm->next)
        if ((uint32_t)comm->rank == rank && !comm->closing &&
            memcmp(comm->id, id, sizeof comm->id) == 0)
            return comm;
    return NULL;
}

/* ---- service thread ---- */

static void watch_listeners(struct endpoint *endpoint, unsigned events)
{
    for (int i = 0; i < endpoint->n_listeners; i++)
        if (os_poller_modify(endpoint->poller, endpoint->listeners[i], events,
                             &endpoint->listeners[i]) != MCCL_OK)
            log_warn("port %u: %s", endpoint->port, error_text());
}

/* The connection that has no descriptor stays in the queue, and the poller would report it without
 * end: nobody listens for a moment. */
static void pause_listening(struct endpoint *endpoint, int error)
{
    const int64_t now_ns = os_now_ns();
    watch_listeners(endpoint, 0);
    endpoint->listen_again_ns = now_ns + FULL_PAUSE_NS;
    if (endpoint->full_logged_ns && now_ns < endpoint->full_logged_ns + FULL_LOG_NS)
        return;
    endpoint->full_logged_ns = now_ns;
    if (error == EMFILE)
        log_warn("port %u: incoming connections wait, all %d descriptors of this process are in "
                 "use; raise the limit (`ulimit -n`)",
                 endpoint->port, os_fd_limit());
    else
        log_warn("port %u: incoming connections wait, the system has no descriptor or memory for "
                 "them: %s; this process may open %d (`ulimit -n`)",
                 endpoint->port, strerror(error), os_fd_limit());
}

static int64_t listen_again(struct endpoint *endpoint, int64_t now_ns)
{
    if (endpoint->listen_again_ns == 0)
        return INT64_MAX;
    if (now_ns < endpoint->listen_again_ns)
        return endpoint->listen_again_ns;
    endpoint->listen_again_ns = 0;
    watch_listeners(endpoint, OS_POLL_READ);
    return INT64_MAX;
}

static int handshake_places(void)
{
    const int part = os_fd_limit() / HANDSHAKES_PART; /* programs change it as they run */
    return part < HANDSHAKES_MAX ? part : HANDSHAKES_MAX;
}

static bool is_shortage(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

static void accept_all(struct endpoint *endpoint, int listener)
{
    struct sockaddr_storage peer;
    const int places = handshake_places();
    for (int n = 0; n < 64; n++) {
        const int fd = os_socket_accept(listener, &peer);
        if (fd < 0) {
            if (is_shortage(errno))
                pause_listening(endpoint, errno);
            return;
        }
        if (endpoint->n_handshakes >= places) {
            endpoint->n_strangers++;
            os_fd_close(fd);
            continue;
        }
        conn_accept(endpoint, fd, &peer);
    }
}

static void log_strangers(struct endpoint *endpoint, int64_t now_ns)
{
    if (endpoint->n_strangers == 0 || now_ns < endpoint->strangers_logged_ns + STRANGERS_LOG_NS)
        return;
    log_warn(
        "port %u: closed %llu connection(s) that were not MCCL or did not know the job's secret",
        endpoint->port, (unsigned long long)endpoint->n_strangers);
    endpoint->n_strangers = 0;
    endpoint->strangers_logged_ns = now_ns;
}

static int64_t earlier(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t run_timers(struct endpoint *endpoint)
{
    const int64_t now_ns = os_now_ns();
    int64_t next_ns = INT64_MAX;
    for (struct conn *conn = endpoint->conns; conn; conn = conn->next) {
        if (conn->deadline_ns == 0 || conn->state == CONN_DEAD)
            continue;
        if (now_ns >= conn->deadline_ns)
            conn_on_time(conn);
        else
            next_ns = earlier(next_ns, conn->deadline_ns);
    }
    for (struct session *session = endpoint->sessions; session; session = bootstrap_next(session))
        next_ns = earlier(next_ns, bootstrap_on_time(session, now_ns));
    for (struct mccl_comm *comm = endpoint->comms; comm; comm = comm->next)
        next_ns = earlier(next_ns, comm_on_time(comm, now_ns));
    /* Last: what the others started or failed is dialled or given up in this round. */
    for (struct dial *dial = endpoint->dials; dial; dial = dial->next)
        next_ns = earlier(next_ns, dial_on_time(dial, now_ns));
    next_ns = earlier(next_ns, listen_again(endpoint, now_ns));
    log_strangers(endpoint, now_ns);
    return next_ns;
}

/* Frees what this round has finished; pointers to it may have been in the round's events. */
static void sweep(struct endpoint *endpoint, bool all)
{
    for (struct dial **at = &endpoint->dials; *at;) {
        struct dial *dial = *at;
        if (!dial->done && !all) {
            at = &dial->next;
            continue;
        }
        *at = dial->next;
        free(dial);
    }
    bootstrap_sweep(endpoint, all);
    for (struct conn **at = &endpoint->conns; *at;) {
        struct conn *conn = *at;
        if (all)
            conn_kill(conn, "endpoint closed");
        if (conn->state != CONN_DEAD) {
            at = &conn->next;
            continue;
        }
        *at = conn->next;
        conn_free(conn);
    }
}

static void serve(void *arg)
{
    struct endpoint *endpoint = arg;
    struct os_poll_event events[64];
    int64_t next_ns = 0;
    while (!atomic_load(&endpoint->stop)) {
        int64_t wait_ns = -1;
        if (next_ns != INT64_MAX) {
            wait_ns = next_ns - os_now_ns();
            wait_ns = wait_ns < 0 ? 0 : wait_ns;
        }
        const int n = os_poller_wait(endpoint->poller, events, 64, wait_ns);
        endpoint_lock(endpoint);
        for (int i = 0; i < n; i++) {
            int *listener = events[i].data;
            if (listener >= endpoint->listeners &&
                listener < endpoint->listeners + ENDPOINT_LISTENERS)
                accept_all(endpoint, *listener);
            else
                conn_on_event(events[i].data, events[i].events);
        }
        next_ns = run_timers(endpoint);
        sweep(endpoint, false);
        endpoint_unlock(endpoint);
    }
}

/* ---- life ---- */

static void endpoint_free(struct endpoint *endpoint)
{
    sweep(endpoint, true);
    for (int i = 0; i < endpoint->n_listeners; i++)
        os_fd_close(endpoint->listeners[i]);
    os_poller_destroy(endpoint->poller);
    pthread_mutex_destroy(&endpoint->lock);
    free(endpoint);
}

/* One endpoint serves all communicators: these settings count when it is made and cannot be another
 * communicator's own. */
static const char *const endpoint_settings[ENDPOINT_SETTINGS] = {"listen_addr", "port_base",
                                                                 "ifname"};

static enum setting_source value_of(const struct settings *settings, int i,
                                    char value[ENDPOINT_VALUE_BYTES])
{
    size_t row = 0;
    MCCL_ASSERT(config_find(endpoint_settings[i], &row) == MCCL_OK);
    config_format(settings, row, value, ENDPOINT_VALUE_BYTES);
    return (enum setting_source)settings->source[row];
}

/* Would the user have another endpoint than the one that is there? A value that one from a stronger
 * source overruled when it was made, such as a variable under a group's own setting, is no such
 * wish. */
static mccl_result check_settings(const struct endpoint *endpoint, const struct settings *settings)
{
    for (int i = 0; i < ENDPOINT_SETTINGS; i++) {
        char asked[ENDPOINT_VALUE_BYTES];
        const enum setting_source source = value_of(settings, i, asked);
        const char *const there = endpoint->made_with[i].value;
        if (source < SOURCE_ENVIRONMENT || source < endpoint->made_with[i].source ||
            strcmp(asked, there) == 0)
            continue;
        size_t row = 0;
        TRY(config_find(endpoint_settings[i], &row));
        const char *const variable = config_row(row)->variable;
        return error_set(
            MCCL_ERR_CONFIG,
            "%s=%s (%s): this process listens with %s=%s already, on port %u, and all groups of a "
            "process share one port and its addresses; set %s before the first group or id is "
            "made: in the environment, by mccl_set_defaults or, in Python, by mccl.init(%s=...)",
            variable, asked, config_source_name(source), variable, there[0] ? there : "(unset)",
            endpoint->port, variable, endpoint_settings[i]);
    }
    return MCCL_OK;
}

struct link_tcp_options endpoint_socket_options(const struct settings *settings)
{
    return (struct link_tcp_options){.sock_bufsize = (size_t)settings->sock_bufsize,
                                     .bufsize_chosen = config_is_explicit(settings, "sock_bufsize"),
                                     .notsent_lowat = (size_t)settings->tcp_lowat};
}

static mccl_result endpoint_create(const struct settings *settings, struct endpoint **created)
{
    struct endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (!endpoint)
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for the endpoint");
    pthread_mutex_init(&endpoint->lock, NULL);
    os_host_id(endpoint->host_id);
    os_host_name(endpoint->host_name, sizeof endpoint->host_name);
    endpoint->socket_options = endpoint_socket_options(settings);
    for (int i = 0; i < ENDPOINT_SETTINGS; i++)
        endpoint->made_with[i].source =
            (unsigned char)value_of(settings, i, endpoint->made_with[i].value);
    mccl_result result = os_poller_create(&endpoint->poller);
    if (result == MCCL_OK)
        result = endpoint_listen(endpoint, settings);
    if (result == MCCL_OK)
        result = os_thread_start(&endpoint->thread, serve, endpoint, "mccl-service");
    if (result != MCCL_OK) {
        endpoint_free(endpoint);
        return result;
    }
    *created = endpoint;
    return MCCL_OK;
}

mccl_result endpoint_acquire(const struct settings *settings, struct endpoint **endpoint)
{
    fork_init();
    pthread_mutex_lock(&global_lock);
    if (global_endpoint && global_generation != os_fork_generation())
        global_endpoint =
            NULL; /* the parent's: its sockets are closed here, its thread does not exist */
    mccl_result result = MCCL_OK;
    if (!global_endpoint) {
        result = endpoint_create(settings, &global_endpoint);
        global_generation = os_fork_generation();
    } else {
        result = check_settings(global_endpoint, settings);
    }
    if (result == MCCL_OK) {
        endpoint_lock(global_endpoint);
        global_endpoint->n_users++;
        endpoint_unlock(global_endpoint);
        *endpoint = global_endpoint;
    }
    pthread_mutex_unlock(&global_lock);
    return result;
}

void endpoint_drop_user_locked(struct endpoint *endpoint)
{
    endpoint->n_users--;
}

void endpoint_release(struct endpoint *endpoint)
{
    pthread_mutex_lock(&global_lock);
    endpoint_lock(endpoint);
    bootstrap_sweep(endpoint, false); /* finished sessions are users, too */
    endpoint->n_users--;
    const bool last = endpoint->n_users <= 0 && endpoint == global_endpoint;
    if (last)
        global_endpoint = NULL;
    endpoint_unlock(endpoint);
    if (last) {
        atomic_store(&endpoint->stop, true);
        os_poller_wake(endpoint->poller);
        os_thread_join(&endpoint->thread);
        endpoint_free(endpoint);
    }
    pthread_mutex_unlock(&global_lock);
}

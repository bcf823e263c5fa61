/* SPDX-License-Identifier: MIT
 *
 * One endpoint per process: the listening sockets (one port, one socket per published address) and
 * the service thread that owns the control plane: accepting, handshakes, dialling, bootstrap,
 * heartbeats, aborts, goodbyes. It exists while a communicator or an unfinished bootstrap session
 * does. Payload never passes through it.
 *
 * Locking: endpoint->lock guards everything in this struct, all conns, dials and sessions, and the
 * control part of communicators. The service thread holds it while it works and never blocks with
 * it. It is taken before comm->cause_lock and never while another lock of MCCL is held, except by
 * the owner of an engine.
 */
#ifndef MCCL_COMM_ENDPOINT_H
#define MCCL_COMM_ENDPOINT_H

#include "base/config.h"
#include "net/link.h"
#include "os/os.h"

#include <pthread.h>

struct conn;
struct dial;
struct session;
struct mccl_comm;

#define ENDPOINT_LISTENERS WIRE_MEMBER_ADDRESSES
#define ENDPOINT_SETTINGS 3      /* settings that make it what it is */
#define ENDPOINT_VALUE_BYTES 256 /* of any of them as text */

struct endpoint {
    pthread_mutex_t lock;
    int n_users; /* communicators and get_unique_id calls whose session goes on */
    struct os_poller *poller;
    struct os_thread thread;
    _Atomic bool stop;
    int listeners[ENDPOINT_LISTENERS];
    struct wire_address addresses[ENDPOINT_LISTENERS]; /* published; same order as listeners */
    int n_listeners;
    uint16_t port;
    /* What MCCL_IFNAME allows, for dialling; n_named is 0 without it. */
    struct os_interface named[ENDPOINT_LISTENERS];
    int n_named;
    uint8_t host_id[16];
    char host_name[32];
    struct conn *conns;
    struct dial *dials;
    struct session *sessions;
    struct mccl_comm *comms;
    int n_handshakes;     /* accepted connections that have not proved anything yet */
    uint64_t n_strangers; /* closed without a valid proof since the last log line */
    int64_t strangers_logged_ns;
    int64_t
        listen_again_ns; /* accepting pauses until then, for want of descriptors; 0: it goes on */
    int64_t full_logged_ns; /* 0: not said yet */
    struct link_tcp_options socket_options;
    /* What it was made with; read-only. */
    struct {
        char value[ENDPOINT_VALUE_BYTES];
        unsigned char source; /* enum setting_source */
    } made_with[ENDPOINT_SETTINGS];
};

/* What these settings ask of a socket: of those that listen, and of each link from the settings of
 * its own communicator. */
struct link_tcp_options endpoint_socket_options(const struct settings *settings);

/* The process's endpoint, started if need be with these settings. MCCL_ERR_CONFIG if it is there
 * already and the user asks for another one: other addresses, ports, interfaces. Every success
 * needs one endpoint_release. */
mccl_result endpoint_acquire(const struct settings *settings, struct endpoint **endpoint);
/* Stops and frees it when nobody uses it any more. Never called by the service thread. */
void endpoint_release(struct endpoint *endpoint);
/* One user less, without stopping anything: for the service thread. A later release cleans up. */
void endpoint_drop_user_locked(struct endpoint *endpoint);

void endpoint_lock(struct endpoint *endpoint);
void endpoint_unlock(struct endpoint *endpoint);
/* Makes the service thread look at its timers. */
void endpoint_wake(struct endpoint *endpoint);

/* The communicator with this id whose own rank is `rank`, or NULL. */
struct mccl_comm *endpoint_find_comm(struct endpoint *endpoint, const uint8_t id[16],
                                     uint32_t rank);

/* Which addresses to listen on, from MCCL_LISTEN_ADDR, MCCL_IFNAME and the launcher's word
 * (listen.c). */
mccl_result endpoint_listen(struct endpoint *endpoint, const struct settings *settings);

#endif

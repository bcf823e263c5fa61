/* SPDX-License-Identifier: MIT
 *
 * A connection from its first byte to the moment it belongs to its purpose. Handshake in a fixed
 * buffer inside the struct; only when the other side has proved that it holds the key may anything
 * be allocated for it. Control and bootstrap connections stay here and carry frames; data and
 * point-to-point ones give up their socket. Service thread only, or any thread under the endpoint's
 * lock.
 */
#ifndef MCCL_COMM_CONN_H
#define MCCL_COMM_CONN_H

#include "comm/handshake.h"
#include "mccl.h"
#include "os/os.h"

struct dial;
struct endpoint;
struct session;

enum conn_state {
    CONN_CONNECTING,
    CONN_WAIT_HELLO,     /* acceptor */
    CONN_WAIT_CHALLENGE, /* dialler */
    CONN_WAIT_PROOF,     /* acceptor */
    CONN_WAIT_ACCEPT,    /* dialler */
    CONN_FRAMES,         /* control and bootstrap */
    CONN_DEAD            /* to be freed at the end of the service thread's round */
};

struct conn {
    struct conn *next; /* endpoint's list */
    struct endpoint *endpoint;
    int fd;
    enum conn_state state;
    int64_t deadline_ns; /* of the handshake; 0: none */
    int peer;            /* rank at the other end, once known; else -1 */

    struct dial *dial;       /* dialler: what it is for, until the handshake is through */
    struct mccl_comm *comm;  /* control, bootstrap client: whose it is */
    struct session *session; /* bootstrap server: whose it is */

    struct wire_hello hello;
    struct wire_challenge challenge;
    uint8_t key[HANDSHAKE_KEY_BYTES];

    uint8_t fixed[sizeof(struct wire_challenge)]; /* handshake input */
    uint8_t *in; /* fixed, or malloc'ed when `state` is CONN_FRAMES */
    size_t in_size, in_cap;
    uint8_t *out; /* malloc'ed; frames that the socket did not take yet */
    size_t out_size, out_cap;
    struct os_address address; /* of the other end, for messages */
};

/* Wraps an accepted socket (takes it) and waits for a hello. NULL when memory is short; fd is
 * closed then. */
struct conn *conn_accept(struct endpoint *endpoint, int fd, const struct sockaddr_storage *peer);
/* Starts connecting for `dial` to `to`; `from` (may be NULL) is bound first. NULL with the error
 * text set. */
struct conn *conn_dial(struct endpoint *endpoint, struct dial *dial,
                       const struct sockaddr_storage *to, socklen_t to_size,
                       const struct os_address *from);

/* Something happened on the socket (OS_POLL_*). */
void conn_on_event(struct conn *conn, unsigned events);

/* Its deadline has passed. */
void conn_on_time(struct conn *conn);

/* Queues a frame (magic and version are filled in) and writes what it can; payload is copied.
 * False: the connection just died. */
bool conn_send_frame(struct conn *conn, const struct wire_frame *frame, const void *payload);

/* Closes the socket and marks the struct for freeing. `why` goes to the dial, if there is one. */
void conn_kill(struct conn *conn, const char *why);
/* Takes the socket out; the struct is marked for freeing. */
int conn_detach(struct conn *conn);
/* Frees a dead one. */
void conn_free(struct conn *conn);

#endif

/* SPDX-License-Identifier: MIT
 *
 * The communicator: who its ranks are, how to reach them, whether it still works. Control-plane
 * members are guarded by the endpoint's lock; the data plane is struct engine; the failure has a
 * lock of its own because everybody may fail a communicator.
 */
#ifndef MCCL_COMM_COMM_H
#define MCCL_COMM_COMM_H

#include "base/config.h"
#include "base/error.h"
#include "comm/endpoint.h"
#include "comm/engine.h"
#include "comm/handshake.h"
#include "comm/signature.h"

#include <pthread.h>

#define COMM_NAME_BYTES 64

enum comm_phase { COMM_CHECKING_IN, COMM_MESHING, COMM_READY, COMM_FAILED };

/* Why a communicator failed. */
struct cause {
    mccl_result result;
    int rank; /* at fault, or -1 */
    char text[512];
};

/* Endpoint's lock. */
struct peer {
    struct wire_member member;
    bool same_host;
    struct conn *control;
    /* Of the data link, until it is handed to the engine: sockets by channel, or -1. */
    int channels[WIRE_CHANNELS_MAX];
    bool shares;          /* one of them, to agree on shared memory by, and nothing else */
    bool have_data;       /* all sockets of the data link are there */
    bool ready;           /* it is connected with all ranks */
    bool p2p_wanted;      /* a point-to-point link was asked for */
    _Atomic bool goodbye; /* the peer said that it leaves; any thread */
    _Atomic bool left;    /* and it is gone; any thread */
    int64_t heard_ns;     /* last byte on the control link */
    bool probed;          /* the peer waits in this operation, which we have not reached yet */
    bool has_probed;      /* probe_seq is of the peer's last probe, answered or not */
    uint32_t probe_seq;
    struct signature probe_signature;
};

struct mccl_comm {
    struct mccl_comm *next; /* endpoint's list; endpoint's lock */
    _Atomic uint32_t refs;
    int rank, n_ranks;
    char name[COMM_NAME_BYTES];
    struct settings settings; /* read-only after creation */
    int64_t timeout_ms;       /* of the group: operations and initialisation */
    int64_t operation_ms;     /* default deadline of an operation */
    int64_t warn_ms;          /* after which a waiting operation is reported once */
    uint32_t fork_generation;
    uint8_t id[16], secret[32], key[HANDSHAKE_KEY_BYTES];
    uint64_t generation;
    uint32_t n_splits; /* under engine.submit_lock */
    int ranks_on_host; /* set before READY */
    /* What all ranks know alike of each other; set before READY. */
    int *hosts;    /* by rank: the host's number, counted from 0 in the order of ranks */
    int n_hosts;   /* 0 until then */
    bool shares;   /* all ranks ask for shared memory */
    bool may_spin; /* each of them can have a core; set before READY */
    struct endpoint *endpoint;

    /* endpoint's lock */
    struct peer *peers;
    struct conn *bootstrap;          /* client side of the check-in */
    bool checked_in;                 /* the other end holds our entry */
    char missing[400];               /* who has not checked in, who has, at last word */
    int64_t started_ns, deadline_ns; /* of the present phase of initialisation */
    int64_t waiting_logged_ns;
    int64_t heartbeat_due_ns; /* own heartbeats */
    int64_t silence_due_ns;   /* next look for silent ranks */
    int links_missing;        /* while MESHING: control and data links to come */
    int ranks_missing;        /* and ranks that are not connected with everybody yet */
    bool closing;             /* destroyed: peers' endings are of no interest any more */
    uint64_t heartbeats_sent, heartbeats_received;

    _Atomic uint32_t n_left; /* peers that have left */
    _Atomic uint32_t phase;  /* enum comm_phase; waited on */
    _Atomic bool was_ready;  /* phase has been READY; a failure since then belongs to operations */
    _Atomic bool failed;     /* cause is set */
    pthread_mutex_t cause_lock;
    struct cause cause; /* first failure; cause_lock until failed is set, read-only afterwards */

    struct engine engine;
};

/* Makes the object with one reference, opens the endpoint and registers the communicator there. */
mccl_result comm_create(int n_ranks, int rank, const uint8_t id[16], const uint8_t secret[32],
                        uint64_t generation, const mccl_config *config, struct mccl_comm **comm);
/* Leaves the group; see mccl_comm_destroy. Takes the handle's reference. */
void comm_destroy(struct mccl_comm *comm);
void comm_acquire(struct mccl_comm *comm);
void comm_release(struct mccl_comm *comm);

/* MCCL_OK if the handle may be used: not NULL, this process's, ready, not failed. Else code and
 * text. */
mccl_result comm_check(struct mccl_comm *comm, const char *what);

/* Records the first cause, tells the other ranks (unless they told us: `tell` false) and wakes
 * everybody. `_locked`: the endpoint's lock is held. `rank` at fault may be -1. */
void comm_fail(struct mccl_comm *comm, mccl_result result, int rank, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void comm_fail_locked(struct mccl_comm *comm, bool tell, mccl_result result, int rank,
                      const char *format, ...) __attribute__((format(printf, 5, 6)));
/* Fails with both sides' values; `own` may be NULL when too old to be known. */
void comm_mismatch(struct mccl_comm *comm, int peer, uint32_t seq, const struct signature *own,
                   const struct signature *theirs);
/* Sets the thread's error text from the cause and returns its code. */
mccl_result comm_cause(struct mccl_comm *comm);

/* ---- initialisation (comm_init.c); endpoint's lock held ---- */
/* Members are known: dials control and data links to all lower ranks. Table of n_ranks entries. */
void comm_start_mesh(struct mccl_comm *comm, const struct wire_member *table);
/* Whether a rank with these settings shares memory with ranks of its host that do so, too. */
bool comm_wants_memory(const struct settings *settings);
/* Whether this rank, as the one that dials, offers `peer` shared memory instead of channels. */
bool comm_offers_memory(const struct mccl_comm *comm, int peer);
/* Sets the socket options that the communicator's settings ask for. */
void comm_prepare_socket(const struct mccl_comm *comm, int fd);
/* A handshake for this communicator is through; takes the connection's socket for data and p2p. */
void comm_on_connection(struct mccl_comm *comm, struct conn *conn);
/* The peer is connected with every rank. */
void comm_on_peer_ready(struct mccl_comm *comm, int peer);
/* All ranks are, says one that knows before us. */
void comm_on_all_ready(struct mccl_comm *comm);
/* A dial gave up. */
void comm_on_dial_failed(struct mccl_comm *comm, const struct dial *dial);
/* Deadlines, heartbeats, silence. Returns when it wants to be called again. */
int64_t comm_on_time(struct mccl_comm *comm, int64_t now_ns);

/* ---- control frames (control.c) ---- */
/* Frame from a control link; endpoint's lock held. */
void control_on_frame(struct mccl_comm *comm, int peer, const struct wire_frame *frame,
                      const void *payload);
/* The control link ended; endpoint's lock held. */
void control_on_end(struct mccl_comm *comm, int peer, const char *why);
/* A data link to `peer` broke: reads what its control link has to say first, so that an abort which
 * names the real culprit is not overtaken by the closing of sockets. Takes the endpoint's lock. */
void control_link_lost(struct mccl_comm *comm, int peer, const char *why);
void control_send_heartbeats(struct mccl_comm *comm);
void control_send_ready(struct mccl_comm *comm);
void control_send_goodbyes(struct mccl_comm *comm);
void control_send_aborts(struct mccl_comm *comm);
/* "I wait for you in operation `seq`": takes the endpoint's lock. */
void control_probe(struct mccl_comm *comm, int peer, uint32_t seq,
                   const struct signature *signature);
/* Has the peer said so of operation `seq` or a later one? Takes the endpoint's lock. */
bool control_has_probed(struct mccl_comm *comm, int peer, uint32_t seq);
/* Compares a submitted operation with what peers that wait said, and tells them that it is here;
 * takes the endpoint's lock. */
void control_check_probes(struct mccl_comm *comm, uint32_t seq, const struct signature *signature);
/* Opens a point-to-point link to `peer` if there is none; takes the endpoint's lock. */
void control_want_p2p(struct mccl_comm *comm, int peer);

#endif

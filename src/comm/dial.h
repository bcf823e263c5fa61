/* SPDX-License-Identifier: MIT
 *
 * Getting one connection to one rank: the candidate addresses in order of preference, attempts
 * staggered by a fraction of a second until one completes its handshake (a wrong host may well
 * accept the connection: only the proof counts), rounds repeated with growing pauses until the
 * deadline. Under the endpoint's lock.
 */
#ifndef MCCL_COMM_DIAL_H
#define MCCL_COMM_DIAL_H

#include "comm/conn.h"

#define DIAL_CANDIDATES 48

struct dial_candidate {
    struct sockaddr_storage to;
    socklen_t to_size;
    struct os_address address;
    bool tried;
    char why[120]; /* why the last attempt failed; empty: none has (yet) */
};

struct dial {
    struct dial *next; /* endpoint's list */
    struct endpoint *endpoint;
    struct mccl_comm *comm;
    int peer; /* rank, or -1: the maker of the id */
    enum wire_purpose purpose;
    uint8_t channel;
    struct dial_candidate candidates[DIAL_CANDIDATES];
    int n_candidates, next_candidate;
    int n_active;        /* connections of this dial that are still trying */
    struct conn *chosen; /* has seen a valid challenge; the others are dropped */
    bool done;           /* to be freed at the end of the service thread's round */
    mccl_result verdict; /* if it is given up: ERR_CONNECT, or what somebody refused us for */
    bool all_refused;    /* in this round every candidate refused */
    int64_t next_attempt_ns, deadline_ns, backoff_ns;
    int64_t stale_after_ns; /* bootstrap: all refused until here is final (the id is dead, say) */
};

/* Starts dialling; the addresses are copied. `same_host`: loopback addresses are tried first, else
 * never. */
mccl_result dial_start(struct mccl_comm *comm, int peer, enum wire_purpose purpose, uint8_t channel,
                       const struct wire_address *addresses, int n_addresses, bool same_host,
                       int64_t deadline_ns);
/* Called by the service loop; returns the time at which it wants to be called again. */
int64_t dial_on_time(struct dial *dial, int64_t now_ns);
/* From conn: a valid challenge came. False: another attempt was faster, drop this one. */
bool dial_choose(struct dial *dial, struct conn *conn);
/* From conn: the handshake is through. */
void dial_succeeded(struct dial *dial, struct conn *conn);
/* From conn: this attempt failed. `refused`: by the answer of somebody who may be there; it is not
 * (yet) the one we look for, or has another secret or version. */
void dial_attempt_failed(struct dial *dial, struct conn *conn, const char *why, bool refused);
/* What became of each address that was tried: "10.0.0.2:29600: no answer; ...". */
void dial_describe(const struct dial *dial, char *text, size_t size);
/* The first unfinished dial of a communicator, or NULL. */
const struct dial *dial_find(const struct mccl_comm *comm);
/* Ends it and its attempts. */
void dial_cancel(struct dial *dial);

#endif

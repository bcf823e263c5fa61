/* SPDX-License-Identifier: MIT
 *
 * Point-to-point messages: matched by (peer, tag) in order of submission, on links of their own
 * that are opened on first use. Up to 64 KiB a message travels at once (eager) and may wait at the
 * receiver for its receive, within a bound per peer that the sender keeps account of; above, or
 * when the bound is reached, the sender announces the message and sends it when the receiver
 * fetches it. So an unmatched message never blocks others.
 */
#ifndef MCCL_COMM_P2P_H
#define MCCL_COMM_P2P_H

#include "mccl.h"
#include "net/link.h"
#include "os/os.h"

struct mccl_comm;
struct p2p;

#define P2P_EAGER_BYTES 65536      /* larger messages wait for the receiver: no copy, no store */
#define P2P_STORE_BYTES (4u << 20) /* eager bytes of one sender that may wait at one receiver */

struct p2p *p2p_create(struct mccl_comm *comm);
void p2p_destroy(struct p2p *p2p); /* NULL is ignored */

/* Any thread: puts the operation (a reference to `request`, which has signature, peer and tag) in
 * line. */
mccl_result p2p_submit(struct mccl_comm *comm, mccl_request *request, void *buffer, size_t bytes,
                       bool is_send, int64_t deadline_ns, bool attended);

/* Any thread: a submitted message waits for the owner of the engine to take it up. */
bool p2p_has_news(const struct mccl_comm *comm);

/* Owner of the engine. */
void p2p_add_link(struct mccl_comm *comm, int peer, struct link *link);
/* A link that came and is not wanted. */
void p2p_drop_link(struct mccl_comm *comm, struct link *link);
bool p2p_step(struct mccl_comm *comm);
bool p2p_is_live(const struct mccl_comm *comm); /* a send or receive is in flight */
void p2p_fail_all(struct mccl_comm *comm);
int64_t p2p_check_time(struct mccl_comm *comm,
                       int64_t now_ns); /* next deadline, INT64_MAX if none */
/* See progress_arm. */
bool p2p_arm(struct mccl_comm *comm);
void p2p_on_event(struct mccl_comm *comm, void *data); /* what p2p_add_link gave to the poller */

#endif

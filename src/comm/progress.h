/* SPDX-License-Identifier: MIT
 *
 * What driving does: starts operations, moves messages over the links, reduces. Owner of the engine
 * only.
 */
#ifndef MCCL_COMM_PROGRESS_H
#define MCCL_COMM_PROGRESS_H

#include "comm/engine.h"

/* One round over everything. True if anything moved. Never blocks. */
bool progress_step(struct mccl_comm *comm);
/* Owner, before it sleeps in the poller: links that would not wake it are told to. True if one has
 * something to do at once. */
bool progress_arm(struct mccl_comm *comm);
/* Takes note of what the poller said. */
void progress_on_events(struct mccl_comm *comm, const struct os_poll_event *events, int n_events);
/* Deadlines, watchdog, probes. Returns when it wants to be called again. */
int64_t progress_check_time(struct mccl_comm *comm, int64_t now_ns, int64_t probe_after_ns);

#endif

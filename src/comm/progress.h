/* SPDX-License-Identifier: MIT
 *
 * What driving does: starts operations, moves messages over the links, reduces. Owner of the engine
 * only.
 */
#ifndef MCCL_COMM_PROGRESS_H
#define MCCL_COMM_PROGRESS_H

#include "comm/engine.h"

/* The header of a message of `length` bytes that belongs to a collective. */
struct wire_frame progress_frame(const struct signature *signature, uint32_t seq, uint64_t length);
/* What follows from an error of a data link, whose text is set. */
void progress_link_failed(struct mccl_comm *comm, int peer);
/* Starts an operation (taken) of small.c: its messages have left or are on their way out, those of
 * the ranks in `arrived` lie in engine->small, where the others are to arrive too. */
void progress_resume(struct mccl_comm *comm, struct operation *operation, uint32_t arrived);
/* With few peers a failing read costs no more than asking the poller which one is ready. */
bool progress_reads_blindly(const struct mccl_comm *comm);
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

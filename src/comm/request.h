/* SPDX-License-Identifier: MIT
 *
 * Requests: the handle of one operation, and completion queues of them. A request is shared by the
 * user's handle, the operation in flight and a queue; the last one to let go frees it. It outlives
 * its communicator's connections.
 */
#ifndef MCCL_COMM_REQUEST_H
#define MCCL_COMM_REQUEST_H

#include "comm/signature.h"
#include "mccl.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct mccl_request {
    _Atomic uint32_t refs;
    _Atomic uint32_t done;  /* 1: all members below are final */
    struct mccl_comm *comm; /* holds a reference */
    struct signature signature;
    uint32_t seq;
    int peer; /* point-to-point: as asked for; else -1 */
    int32_t tag;
    _Atomic bool unattended; /* counted in engine.n_unattended */
    mccl_result result;
    char *text; /* owned; NULL if the operation succeeded */
    int source; /* recv: who sent; else -1 */
    int32_t source_tag;
    uint64_t bytes;
    _Atomic uint64_t bytes_done; /* received so far, for messages */
    _Atomic bool queued;         /* added to a queue and not taken out of it yet */
    _Atomic(mccl_queue *) queue; /* where it goes when it is done; whoever swaps it out pushes */
    _Atomic uint64_t user;
    struct mccl_request *queue_next;
};

/* Two references, for the caller and for the operation. NULL when memory is short. */
mccl_request *request_create(struct mccl_comm *comm, const struct signature *signature);
void request_acquire(mccl_request *request);
void request_release(mccl_request *request);
/* Makes it final: text is taken (malloc'ed or NULL). Wakes a queue. */
void request_finish(mccl_request *request, mccl_result result, char *text);
/* Sets the thread's error text and returns the result of a finished request. */
mccl_result request_report(const mccl_request *request);
/* Point in time `timeout_ms` after `now_ns`; -1 for none. */
int64_t request_until(int64_t now_ns, int64_t timeout_ms);

#endif

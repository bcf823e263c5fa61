/* SPDX-License-Identifier: MIT
 *
 * What every operation's entry point does after its own argument checks: options, groups, request,
 * submission. Any thread.
 */
#ifndef MCCL_API_CALL_H
#define MCCL_API_CALL_H

#include "coll/coll.h"
#include "comm/comm.h"
#include "comm/p2p.h"

/* A checked call on its way: a collective, or a message when kind is SEND or RECV. */
struct call {
    struct coll_call coll;
    struct mccl_comm *comm;
    int peer;     /* SEND, RECV */
    size_t bytes; /* of the caller's own buffer, for status and messages */
    mccl_options options;
    mccl_request **request; /* NULL: block */
    uint32_t wait_ms;       /* of the stream */
};

/* The thread's options for this call; taken, so that they apply once, whatever becomes of the
 * call. */
mccl_options call_take_options(void);

/* Submits now, or at the end of the thread's group. */
mccl_result call_run(const struct call *call);

/* Has the calling thread a group open? */
bool call_in_group(void);

/* Notes a bad argument: inside a group it fails the group. Returns `result`. */
mccl_result call_refuse(mccl_result result);

#endif

/* SPDX-License-Identifier: MIT
 *
 * The short way for a small all-reduce of a group that does nothing else: one thread submits it,
 * exchanges the vectors and reduces them, without a request, an operation or a schedule. On the
 * wire it is the same as ALGO_DIRECT, so that other ranks may go the long way. If it does not get
 * through at once, it becomes an ordinary operation, with whatever has been moved already.
 */
#ifndef MCCL_COMM_SMALL_H
#define MCCL_COMM_SMALL_H

#include "comm/engine.h"

/* A checked call. `send` may be `recv`. */
struct small_all_reduce {
    struct signature signature;
    const void *send;
    void *recv;
    size_t count, bytes;
    mccl_dtype dtype;
    mccl_op op;
};

enum small_outcome {
    SMALL_NO,     /* nothing was done: go the long way */
    SMALL_DONE,   /* recv has the result */
    SMALL_STALLED /* follow with small_resume or small_give_up */
};

/* At most SMALL_BYTES and SMALL_RANKS, and every rank's vector goes to every other in one message.
 * On SMALL_STALLED the caller owns the engine, *seq is the operation's sequence number, and a bit
 * of *arrived is set for every rank whose vector is there. */
enum small_outcome small_all_reduce(struct mccl_comm *comm, const struct small_all_reduce *call,
                                    uint32_t *seq, uint32_t *arrived);

/* Carries on as `operation` (taken), whose request the caller waits for, and gives up the engine.
 */
void small_resume(struct mccl_comm *comm, struct operation *operation, uint32_t arrived);

/* There is no memory for that: fails the communicator and gives up the engine. */
void small_give_up(struct mccl_comm *comm);

#endif

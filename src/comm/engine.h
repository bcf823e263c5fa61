/* SPDX-License-Identifier: MIT
 *
 * The data plane of one communicator: its links, its operations in flight, and whoever drives them.
 *
 * Whoever waits drives: the thread that waits for a request takes the token (one atomic word) and
 * moves all operations forward until its own is done. A background thread, started when first
 * needed, drives operations that nobody waits for. Everything marked "owner" below is touched only
 * by the thread that holds the token.
 *
 * Operations start in the order of submission, at most ENGINE_ACTIVE at once; those share links in
 * FIFO order.
 */
#ifndef MCCL_COMM_ENGINE_H
#define MCCL_COMM_ENGINE_H

#include "comm/request.h"
#include "comm/schedule.h"
#include "comm/signature.h"
#include "net/link.h"
#include "os/os.h"

#include <pthread.h>

#define ENGINE_ACTIVE 8 /* operations with a live schedule; bounds scratch memory */
#define ENGINE_SIGNATURES \
    64 /* recent operations that a peer's probe can be compared with; a power of two */
#define SMALL_BYTES 1024 /* of one vector on the short way, see small.h */
#define SMALL_RANKS 8
#define LINK_POSTED 16 /* sends of a link that are queued there and not complete */

struct mccl_comm;
struct p2p;

/* A collective from submission to completion. */
struct operation {
    struct operation *next; /* inbox, then active list */
    mccl_request *request;  /* holds a reference */
    uint32_t seq;
    struct signature signature;
    bool alone; /* starts only when everything before it is done (barrier) */
    bool started;
    bool probed; /* the ranks that this one waits for were asked whether they do the same */
    bool asked;  /* and now all ranks, so that they know who is there */
    bool oldest; /* nothing before it is active */
    int suspect; /* rank that seems to have left this operation out, while */
    int64_t suspect_until_ns; /* is not 0 */
    uint32_t steps_left;
    int64_t deadline_ns, warn_ns;
    int64_t submitted_ns;
    struct schedule schedule;
    /* Builds the schedule when the operation becomes active, from `call`, which it owns. */
    mccl_result (*build)(struct mccl_comm *comm, struct operation *operation);
    void *call;
    size_t call_capacity;
};

struct ready_step {
    struct operation *operation;
    uint32_t step;
};

/* One peer's data link. Owner. */
struct engine_link {
    struct link *link;
    int peer;
    bool readable;                       /* there may be something to read */
    struct operation *send_op, *recv_op; /* first with unposted sends / unfinished receives here */
    uint32_t send_step, recv_step;
    struct ready_step posted[LINK_POSTED]; /* ring, in order */
    uint64_t n_posted, n_completed;
    bool receiving; /* payload of recv_step is arriving */
    bool has_frame; /* a header waits for its operation */
    struct wire_frame frame;
};

struct incoming_link {
    struct link *link;
    int peer;
    bool p2p;
};

struct engine {
    _Atomic uint32_t token;     /* 1: somebody drives */
    _Atomic uint32_t blocked;   /* the driver sleeps in the poller */
    _Atomic uint32_t events;    /* bumped when waiters should look again; waited on */
    _Atomic uint32_t n_waiters; /* threads asleep on `events` */
    _Atomic uint32_t
        n_outstanding; /* operations submitted and not complete, point-to-point included */
    _Atomic uint32_t n_unattended; /* of these and of links that agree, how many the background
                                      thread must drive */
    struct os_poller *poller;

    pthread_mutex_t submit_lock;
    struct operation *inbox, *inbox_last; /* submit_lock */
    _Atomic uint32_t n_inbox;
    uint32_t next_seq;                 /* submit_lock */
    struct operation *free_operations; /* submit_lock */
    /* One more of them, taken and given without the lock. */
    _Atomic(struct operation *) spare_operation;
    _Atomic(mccl_request *) spare_request; /* one that nobody refers to: saves an allocation */
    struct incoming_link
        *incoming; /* submit_lock: links from the service thread, not taken over yet */
    int n_incoming, cap_incoming;
    _Atomic uint32_t n_incoming_hint;

    struct signature signatures[ENGINE_SIGNATURES]; /* submit_lock */
    uint32_t last_seq;                              /* of the newest one; submit_lock */
    bool any_signature;                             /* submit_lock */
    _Atomic uint32_t n_probes_pending; /* peers' probes of operations that we have not reached */

    /* owner */
    struct engine_link *links; /* one per rank; the own one is empty */
    struct operation *active, *active_last;
    int n_active;
    bool any_active;
    uint32_t last_active_seq; /* of the newest operation that became active */
    struct ready_step *ready; /* compute steps, FIFO ring */
    uint32_t ready_head, ready_tail, ready_cap;
    int64_t last_progress_ns;
    struct p2p *p2p;
    _Atomic uint64_t bytes_sent, bytes_received;
    _Atomic uint64_t operations_done, errors;
    unsigned char small[SMALL_RANKS][SMALL_BYTES]; /* arriving vectors of small.c */
    bool drained; /* everything failed; nothing will start any more */

    /* background thread */
    pthread_mutex_t thread_lock;
    struct os_thread thread;
    bool thread_started;            /* thread_lock */
    _Atomic uint32_t thread_signal; /* waited on */
    _Atomic bool thread_idle, thread_stop;
};

mccl_result engine_init(struct mccl_comm *comm);
void engine_fini(struct mccl_comm *comm);

/* A free operation object with an empty call; NULL when memory is short. */
struct operation *engine_operation(struct mccl_comm *comm);
void engine_operation_free(struct mccl_comm *comm, struct operation *operation);
/* Waits, driving, while MCCL_MAX_QUEUE_DEPTH operations are outstanding; comes before a submission,
 * or before all those of a group. */
mccl_result engine_make_room(struct mccl_comm *comm);
/* Gives the operation (taken) its place in the order and returns; tries a first step unless
 * `attended`: a waiter follows, whose own comes soon enough. */
mccl_result engine_submit(struct mccl_comm *comm, struct operation *operation, bool attended);

/* The token, for small.c. False if somebody else has it. */
bool engine_enter(struct mccl_comm *comm);
/* Gives it back, and sees to it that whoever needs it next knows. */
void engine_leave(struct mccl_comm *comm);
/* Owner: the place of an operation that starts at once. False if another one comes first. */
bool engine_next_seq(struct mccl_comm *comm, const struct signature *signature, uint32_t *seq);
/* The place that the next operation will get. Any thread. */
uint32_t engine_peek_seq(struct mccl_comm *comm);

/* The parts of a submission, for point-to-point: counts the request in; takes a first step or tells
 * whoever drives. */
void engine_count_in(struct mccl_comm *comm, mccl_request *request, bool attended);
void engine_kick(struct mccl_comm *comm, bool attended);

/* Drives or sleeps until the request is done or `until_ns` (-1: none) has come. */
void engine_wait(struct mccl_comm *comm, mccl_request *request, int64_t until_ns);
/* One non-blocking step, if nobody else drives. */
void engine_poke(struct mccl_comm *comm);
/* Nobody promises to wait for this request (any more): let the background thread have it. */
void engine_attend_in_background(struct mccl_comm *comm, mccl_request *request);

/* From the service thread: a link for `peer` (p2p: point-to-point). Taken. */
mccl_result engine_add_link(struct mccl_comm *comm, int peer, struct link *link, bool p2p);
/* Owner: a point-to-point link added while it was agreeing needs no driving for that any more. */
void engine_let_go(struct mccl_comm *comm);
/* Something outside changed (failure, new link): whoever drives looks again. Any thread. */
void engine_wake(struct mccl_comm *comm);
/* Gives operations in flight at most this long to finish. */
void engine_finish(struct mccl_comm *comm, int64_t at_most_ns);
/* Waits until nobody drives and fails everything in flight; needs comm->failed. After it no user
 * memory changes. */
void engine_quiesce(struct mccl_comm *comm);

/* Signature of operation `seq`. False if it is not submitted yet (*reached false) or too old. */
bool engine_signature(struct mccl_comm *comm, uint32_t seq, struct signature *signature,
                      bool *reached);

/* Wakes threads that sleep in engine_wait. */
void engine_notify_waiters(struct engine *engine);
/* Joins the background thread; not from that thread. */
void engine_stop_thread(struct mccl_comm *comm);

/* Owner: makes a request final and gives up the operation's reference; `text` is taken (malloc'ed
 * or NULL). */
void engine_complete(struct mccl_comm *comm, mccl_request *request, mccl_result result, char *text);
/* Owner: the same with the communicator's cause, in the words of the operation. */
void engine_fail_request(struct mccl_comm *comm, mccl_request *request);

#endif

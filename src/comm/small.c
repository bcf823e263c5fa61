/* SPDX-License-Identifier: MIT
 *
 * See small.h. Everything between engine_enter and engine_leave runs with the engine's token held.
 */
#include "comm/small.h"

#include "comm/comm.h"
#include "comm/progress.h"
#include "reduce/reduce.h"

#include <string.h>

#define SPIN_NS 50000LL /* as engine.c spins; then the long way does the rest */
#define CLOCK_EVERY 16  /* rounds between two looks at the clock */

/* Of one exchange. */
struct exchange {
    struct mccl_comm *comm;
    const struct small_all_reduce *call;
    struct wire_frame frame; /* what we send is also what we expect */
    uint32_t arrived, sent;  /* a bit for every rank */
};

/* Nothing in flight that could come first, and a link to everybody. Owner. */
static bool is_free(const struct mccl_comm *comm)
{
    const struct engine *engine = &comm->engine;
    if (atomic_load_explicit(&engine->n_outstanding, memory_order_relaxed) > 0 ||
        atomic_load_explicit(&engine->n_incoming_hint, memory_order_relaxed) > 0 ||
        atomic_load_explicit(&comm->failed, memory_order_relaxed))
        return false;
    for (int peer = 0; peer < comm->n_ranks; peer++)
        if (peer != comm->rank && !engine->links[peer].link)
            return false;
    return true;
}

static bool is_expected(const struct exchange *exchange, const struct wire_frame *frame)
{
    return memcmp(frame, &exchange->frame, sizeof *frame) == 0;
}

/* False: the long way must deal with this link. */
static bool receive(struct exchange *exchange, struct engine_link *link)
{
    struct link *transport = link->link;
    mccl_result result = MCCL_OK;
    /* It may read on into messages of later operations, of which the poller then has no news. */
    link->readable = true;
    if (!link->has_frame) {
        result = transport->ops->peek(transport, &link->frame);
        link->has_frame = result == MCCL_OK;
    }
    if (link->has_frame && !link->receiving) {
        if (!is_expected(exchange, &link->frame))
            return false;
        link->receiving = true;
    }
    if (link->receiving)
        result = transport->ops->receive(transport, exchange->comm->engine.small[link->peer]);
    if (result == MCCL_OK) {
        link->receiving = link->has_frame = false;
        exchange->arrived |= 1u << link->peer;
        return true;
    }
    if (result != MCCL_IN_PROGRESS)
        progress_link_failed(exchange->comm, link->peer);
    return result == MCCL_IN_PROGRESS && !transport->at_end;
}

static bool flush(struct exchange *exchange, struct engine_link *link)
{
    struct link *transport = link->link;
    const mccl_result result = transport->ops->flush(transport);
    if (result == MCCL_OK)
        exchange->sent |= 1u << link->peer;
    else if (result != MCCL_IN_PROGRESS)
        progress_link_failed(exchange->comm, link->peer);
    return result == MCCL_OK || result == MCCL_IN_PROGRESS;
}

/* One look at every link. False: the long way must go on. */
static bool look(struct exchange *exchange)
{
    struct mccl_comm *comm = exchange->comm;
    for (int i = 1; i < comm->n_ranks; i++) {
        const int peer = (comm->rank + i) % comm->n_ranks;
        struct engine_link *link = &comm->engine.links[peer];
        if (!(exchange->sent >> peer & 1) && !flush(exchange, link))
            return false;
        if (!(exchange->arrived >> peer & 1) && !receive(exchange, link))
            return false;
    }
    return true;
}

static bool run(struct exchange *exchange)
{
    const struct mccl_comm *comm = exchange->comm;
    const uint32_t all = (1u << comm->n_ranks) - 1;
    int64_t until_ns = 0;
    for (unsigned round = 1;; round++) {
        if (!look(exchange))
            return false;
        if ((exchange->sent & exchange->arrived) == all)
            return true;
        if (round % CLOCK_EVERY == 0) {
            const int64_t now_ns = os_now_ns();
            if (until_ns == 0)
                until_ns = now_ns + SPIN_NS;
            if (now_ns >= until_ns || atomic_load(&comm->failed))
                return false;
        }
        os_cpu_relax();
    }
}

static void reduce(const struct exchange *exchange)
{
    struct mccl_comm *comm = exchange->comm;
    const struct small_all_reduce *call = exchange->call;
    const void *srcs[SMALL_RANKS];
    for (int rank = 0; rank < comm->n_ranks; rank++)
        srcs[rank] = rank == comm->rank ? call->send : comm->engine.small[rank];
    reduce_run(call->op, call->dtype, call->recv, srcs, comm->n_ranks, call->count,
               call->op == MCCL_AVG ? comm->n_ranks : 1);
}

/* Only the owner writes these counters. */
static void add(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + value,
                          memory_order_relaxed);
}

static void account(const struct exchange *exchange)
{
    struct mccl_comm *comm = exchange->comm;
    struct engine *engine = &comm->engine;
    const uint64_t bytes = (uint64_t)(comm->n_ranks - 1) * exchange->call->bytes;
    add(&engine->bytes_sent, bytes);
    add(&engine->bytes_received, bytes);
    add(&engine->operations_done, 1);
    engine->any_active = true;
    engine->last_active_seq = exchange->frame.seq;
    for (int peer = 0; peer < comm->n_ranks; peer++) {
        engine->links[peer].n_posted++;
        engine->links[peer].n_completed++;
    }
}

enum small_outcome small_all_reduce(struct mccl_comm *comm, const struct small_all_reduce *call,
                                    uint32_t *seq, uint32_t *arrived)
{
    struct engine *engine = &comm->engine;
    struct exchange exchange = {.comm = comm, .call = call};
    if (!comm->may_spin || !engine_enter(comm))
        return SMALL_NO;
    if (!is_free(comm) || !engine_next_seq(comm, &call->signature, seq)) {
        engine_leave(comm);
        return SMALL_NO;
    }
    exchange.frame = progress_frame(&call->signature, *seq, call->bytes);
    exchange.arrived = exchange.sent = 1u << comm->rank;
    for (int i = 1; i < comm->n_ranks; i++) {
        struct link *link = engine->links[(comm->rank + i) % comm->n_ranks].link;
        const mccl_result queued = link->ops->send(link, &exchange.frame, call->send);
        MCCL_ASSERT(queued == MCCL_OK); /* nothing else is in the queue */
    }
    if (!run(&exchange)) {
        *arrived = exchange.arrived;
        return SMALL_STALLED;
    }
    reduce(&exchange);
    account(&exchange);
    engine_leave(comm);
    return SMALL_DONE;
}

void small_resume(struct mccl_comm *comm, struct operation *operation, uint32_t arrived)
{
    engine_count_in(comm, operation->request, true);
    progress_resume(comm, operation, arrived);
    engine_leave(comm);
}

void small_give_up(struct mccl_comm *comm)
{
    comm_fail(comm, MCCL_ERR_NO_MEMORY, comm->rank, "rank %d has no memory for an operation",
              comm->rank);
    engine_leave(comm);
}

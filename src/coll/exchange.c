/* SPDX-License-Identifier: MIT
 *
 * Collectives that only move parts from where they are to where they belong: all_gather, gather,
 * scatter and all_to_all, with equal parts or with counts. A call decides one part for every
 * ordered pair of ranks, and each part goes straight to its receiver; all of them are posted at
 * once. Called by the submitter, through coll_build.
 */
#include "coll/build.h"

/* One rank's part for another. `data` is NULL where a rank has nothing to say about it. Where each
 * side has a count of its own (`counted`), an empty part is said, too: else ranks whose counts
 * disagree would wait for each other in silence. */
struct outgoing {
    const unsigned char *data;
    size_t bytes;
    bool counted;
};

struct incoming {
    unsigned char *data;
    size_t bytes;
    bool counted;
};

static struct outgoing from_array(const void *data, size_t bytes)
{
    return (struct outgoing){bytes == 0 ? NULL : data, bytes, false};
}

static struct outgoing counted_from(const void *data, size_t bytes)
{
    return (struct outgoing){bytes == 0 ? NULL : data, bytes, true};
}

static struct outgoing from_block(const struct coll_call *call, size_t index, size_t bytes)
{
    return bytes == 0
               ? (struct outgoing){0}
               : (struct outgoing){(const unsigned char *)call->send + index * bytes, bytes, false};
}

static struct incoming into_array(void *data, size_t bytes)
{
    return (struct incoming){bytes == 0 ? NULL : data, bytes, false};
}

static struct incoming counted_into(void *data, size_t bytes)
{
    return (struct incoming){bytes == 0 ? NULL : data, bytes, true};
}

static struct incoming into_block(const struct coll_call *call, size_t index, size_t bytes)
{
    return bytes == 0
               ? (struct incoming){0}
               : (struct incoming){(unsigned char *)call->recv + index * bytes, bytes, false};
}

/* What this rank sends to `peer`. */
static struct outgoing outgoing_to(const struct coll_call *call, int rank, int peer)
{
    const size_t element = mccl_dtype_size(call->dtype);
    const bool is_root = rank == call->root;
    const size_t bytes = call->count * element;
    switch (call->kind) {
    case OP_ALL_GATHER:
        return from_array(call->send, bytes);
    case OP_ALL_GATHER_V:
        return from_array(call->send, call->recv_counts[rank] * element);
    case OP_GATHER:
        return peer == call->root ? from_array(call->send, bytes) : (struct outgoing){0};
    case OP_GATHER_V:
        return peer == call->root ? counted_from(call->send, bytes) : (struct outgoing){0};
    case OP_SCATTER:
        return is_root ? from_block(call, (size_t)peer, bytes) : (struct outgoing){0};
    case OP_SCATTER_V:
        return is_root ? counted_from(call->sends[peer], call->send_counts[peer] * element)
                       : (struct outgoing){0};
    case OP_ALL_TO_ALL:
        return from_block(call, (size_t)peer, bytes);
    default: /* OP_ALL_TO_ALL_V */
        return counted_from(call->sends[peer], call->send_counts[peer] * element);
    }
}

/* What this rank receives from `peer`. */
static struct incoming incoming_from(const struct coll_call *call, int rank, int peer)
{
    const size_t element = mccl_dtype_size(call->dtype);
    const bool is_root = rank == call->root;
    const size_t bytes = call->count * element;
    switch (call->kind) {
    case OP_ALL_GATHER:
    case OP_ALL_TO_ALL:
        return into_block(call, (size_t)peer, bytes);
    case OP_GATHER:
        return is_root ? into_block(call, (size_t)peer, bytes) : (struct incoming){0};
    case OP_GATHER_V:
        return is_root ? counted_into(call->recvs[peer], call->recv_counts[peer] * element)
                       : (struct incoming){0};
    case OP_SCATTER:
        return peer == call->root ? into_array(call->recv, bytes) : (struct incoming){0};
    case OP_SCATTER_V:
        return peer == call->root ? counted_into(call->recv, bytes) : (struct incoming){0};
    case OP_ALL_GATHER_V:
        return into_array(call->recvs[peer], call->recv_counts[peer] * element);
    default: /* OP_ALL_TO_ALL_V */
        return counted_into(call->recvs[peer], call->recv_counts[peer] * element);
    }
}

/* Message `round` of a part; true if there is one. The cut depends on the length of the part alone,
 * which is all that its two ends have in common. */
static bool send_round(const struct coll_env *env, struct schedule *schedule, int peer,
                       struct outgoing part, size_t round)
{
    const size_t size = cut_moved(env, part.bytes);
    const size_t length = cut_length(part.bytes, size, round);
    if (length > 0 || (part.counted && round == 0))
        schedule_send(schedule, peer, part.data ? part.data + round * size : NULL, length,
                      STEP_NONE);
    return length > 0;
}

static bool recv_round(const struct coll_env *env, struct schedule *schedule, int peer,
                       struct incoming part, size_t round)
{
    const size_t size = cut_moved(env, part.bytes);
    const size_t length = cut_length(part.bytes, size, round);
    if (length > 0 || (part.counted && round == 0))
        schedule_recv(schedule, peer, part.data ? part.data + round * size : NULL, length,
                      STEP_NONE);
    return length > 0;
}

void build_exchange(const struct coll_call *call, const struct coll_env *env,
                    enum coll_algorithm algorithm, struct schedule *schedule)
{
    (void)algorithm; /* all of them are this one: with one root it is called linear, else direct or
                        pairwise */
    const int rank = env->rank, n = env->n_ranks;
    bool more = n > 1;
    for (size_t round = 0; more; round++) {
        more = false;
        for (int lane = 1; lane < n; lane++) {
            /* Peers in an order that differs by rank, so that no rank is everybody's first. */
            const int to = (rank + lane) % n, from = (rank + n - lane) % n;
            more |= send_round(env, schedule, to, outgoing_to(call, rank, to), round);
            more |= recv_round(env, schedule, from, incoming_from(call, rank, from), round);
        }
    }
    /* Last, so that copying does not delay the first messages. */
    const struct outgoing mine = outgoing_to(call, rank, rank);
    const struct incoming place = incoming_from(call, rank, rank);
    copy_own(env, schedule, place.data, mine.data,
             mine.bytes < place.bytes ? mine.bytes : place.bytes);
}

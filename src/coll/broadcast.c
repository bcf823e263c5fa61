/* SPDX-License-Identifier: MIT
 *
 * Broadcast. TREE: down a binomial tree, for few ranks and little data. CHAIN: from each rank to
 * the next one, in pieces. SCATTER_GATHER: root gives each other rank a share, which that rank
 * passes on to the rest while it arrives; every rank then sends and receives the vector about once,
 * which is the least possible. Called by the submitter, through coll_build.
 */
#include "coll/build.h"

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Ranks are counted from root. The parent of a rank is the rank without its highest bit; the
 * largest subtrees are served first. */
static void build_tree(const struct coll_call *call, const struct coll_env *env,
                       struct schedule *schedule, size_t bytes)
{
    const unsigned n = (unsigned)env->n_ranks, root = (unsigned)call->root;
    const unsigned place = ((unsigned)env->rank + n - root) % n;
    const size_t piece = cut_moved(env, bytes);
    unsigned above = 1; /* first power of two above `place` */
    while (above <= place)
        above *= 2;
    for (size_t offset = 0; offset < bytes; offset += piece) {
        const size_t length = min_size(piece, bytes - offset);
        const unsigned char *src =
            (const unsigned char *)(place == 0 ? call->send : call->recv) + offset;
        uint32_t here = STEP_NONE;
        if (place > 0)
            here = schedule_recv(schedule, (int)((place - above / 2 + root) % n),
                                 (unsigned char *)call->recv + offset, length, STEP_NONE);
        for (unsigned child = above; place + child < n; child *= 2)
            schedule_send(schedule, (int)((place + child + root) % n), src, length, here);
    }
}

static void build_chain(const struct coll_call *call, const struct coll_env *env,
                        struct schedule *schedule, size_t bytes)
{
    const int n = env->n_ranks, place = (env->rank - call->root + n) % n;
    const size_t piece = cut_piped(env, bytes, 0, 2);
    for (size_t offset = 0; offset < bytes; offset += piece) {
        const size_t length = min_size(piece, bytes - offset);
        const unsigned char *src =
            (const unsigned char *)(place == 0 ? call->send : call->recv) + offset;
        uint32_t here = STEP_NONE;
        if (place > 0)
            here = schedule_recv(schedule, (env->rank + n - 1) % n,
                                 (unsigned char *)call->recv + offset, length, STEP_NONE);
        if (place + 1 < n)
            schedule_send(schedule, (env->rank + 1) % n, src, length, here);
    }
}

/* Share `index` belongs to the rank that is index + 1 places after root. */
static void build_shares(const struct coll_call *call, const struct coll_env *env,
                         struct schedule *schedule, size_t bytes)
{
    const int n = env->n_ranks;
    const size_t n_shares = (size_t)n - 1;
    const int place = (env->rank + n - call->root) % n;
    const size_t share = cut_shard(bytes, n_shares, 1);
    const size_t piece = cut_piped(env, share, 0, 2 * (size_t)n);
    for (size_t offset = 0; offset < share; offset += piece)
        for (size_t i = 0; i < n_shares; i++) {
            /* Everybody starts with another share, so that no rank is everybody's first. */
            const size_t index = (i + (size_t)place) % n_shares;
            const int holder = (call->root + 1 + (int)index) % n;
            const size_t length =
                cut_length(cut_length(bytes, share, index), piece, offset / piece);
            const size_t at = index * share + offset;
            if (length == 0)
                continue;
            if (place == 0) {
                schedule_send(schedule, holder, (const unsigned char *)call->send + at, length,
                              STEP_NONE);
                continue;
            }
            unsigned char *dst = (unsigned char *)call->recv + at;
            const bool mine = holder == env->rank;
            const uint32_t here =
                schedule_recv(schedule, mine ? call->root : holder, dst, length, STEP_NONE);
            for (int other = 1; mine && other < n - 1; other++)
                schedule_send(schedule, (call->root + 1 + ((int)index + other) % (n - 1)) % n, dst,
                              length, here);
        }
}

void build_broadcast(const struct coll_call *call, const struct coll_env *env,
                     enum coll_algorithm algorithm, struct schedule *schedule)
{
    const size_t bytes = call->count * mccl_dtype_size(call->dtype);
    if (bytes == 0)
        return;
    if (algorithm == ALGO_SCATTER_GATHER)
        build_shares(call, env, schedule, bytes);
    else if (algorithm == ALGO_CHAIN)
        build_chain(call, env, schedule, bytes);
    else
        build_tree(call, env, schedule, bytes);
    if (env->rank == call->root)
        copy_own(env, schedule, call->recv, call->send, bytes);
}

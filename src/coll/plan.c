/* SPDX-License-Identifier: MIT
 *
 * Chooses the algorithm of a call and has it built. The choice is the first row of a table that
 * fits, so what the library does at which size can be read here, and docs/algorithms.md tells why.
 * Pure functions, called by the submitter; every rank computes the same choice from the same
 * arguments.
 */
#include "base/config.h"
#include "base/error.h"
#include "coll/build.h"
#include "coll/force.h"

#define N_ANY INT32_MAX
#define BYTES_ANY SIZE_MAX
/* Limits are given for this value of MCCL_SMALL_MSG_THRESHOLD and move in proportion to it. */
#define SMALL_DEFAULT ((uint64_t)256 << 10)
#define KIB ((size_t)1 << 10)

/* What a limit is on. With S the call's count argument in bytes: */
enum measure {
    OF_COUNT,  /* S: the vector, or the block of one rank */
    OF_FANOUT, /* (n - 1) S: what a rank sends or receives if all get whole vectors */
};

#define TCP (1u << LINKS_TCP)
#define SHM (1u << LINKS_SHM)
#define MIXED (1u << LINKS_MIXED)
#define NET (TCP | MIXED)
#define ANY (TCP | SHM | MIXED)

struct row {
    enum op_kind kind;
    unsigned links; /* classes that it is for */
    int n_min, n_max;
    bool power; /* for powers of two only: the others would have to fold */
    enum measure measure;
    size_t most; /* bytes */
    enum coll_algorithm algorithm;
};

/* The first row that fits is taken. "Even" is where the models in cost.c are, with a for a
 * message's way and what it costs its port, b for a byte and n for ranks: a/b is 90 KB for TCP. The
 * tests in test_coll_model.c hold all rows against the models and against measurements. */
static const struct row rows[] = {
    /* One step a + (n-1)Sb against two 2a + 2(n-1)/n Sb: even at S = a/b * n/((n-1)(n-2)), that is
     * a message volume (n-1)S of 270, 180, 120 KB for n = 3, 4, 8. For n = 2 both send S, but the
     * second reduces half as much on each rank: measured on 16 cores, even at 128 to 256 KiB, and
     * 1.24 and 1.4 times as fast at 1 and 64 MiB. */
    {OP_ALL_REDUCE, ANY, 2, 2, false, OF_FANOUT, 256 * KIB, ALGO_DIRECT},
    /* log2(n) messages where direct sends n - 1, and log2(n) times the vector. Even with direct at
     * (n-1)S of 50 KB for n = 4 and from the first byte for n = 8, with two_shot at 300 KB to 1 MB;
     * with 8 ranks on 2 cores measured 1.5 to 2 times as fast as direct up to there. */
    {OP_ALL_REDUCE, NET, 4, 4, true, OF_FANOUT, 24 * KIB, ALGO_DIRECT},
    {OP_ALL_REDUCE, NET, 4, 4, true, OF_FANOUT, 192 * KIB, ALGO_RECURSIVE_DOUBLING},
    {OP_ALL_REDUCE, NET, 8, 8, true, OF_FANOUT, 512 * KIB, ALGO_RECURSIVE_DOUBLING},
    {OP_ALL_REDUCE, NET, 16, N_ANY, true, OF_FANOUT, 1024 * KIB, ALGO_RECURSIVE_DOUBLING},
    {OP_ALL_REDUCE, NET, 3, 7, false, OF_FANOUT, 256 * KIB, ALGO_DIRECT},
    {OP_ALL_REDUCE, NET, 12, N_ANY, false, OF_COUNT, 32 * KIB, ALGO_RECURSIVE_DOUBLING},
    {OP_ALL_REDUCE, NET, 9, N_ANY, false, OF_FANOUT, 256 * KIB, ALGO_DIRECT},
    /* Messages are cheap: a/b is 7 KB. */
    {OP_ALL_REDUCE, SHM, 8, N_ANY, true, OF_COUNT, 8 * KIB, ALGO_RECURSIVE_DOUBLING},
    {OP_ALL_REDUCE, SHM, 11, N_ANY, false, OF_COUNT, 4 * KIB, ALGO_RECURSIVE_DOUBLING},
    {OP_ALL_REDUCE, SHM, 3, N_ANY, false, OF_FANOUT, 16 * KIB, ALGO_DIRECT},
    /* Across hosts 2(H-1)/H S for each host of H, where two_shot takes as much for each rank. */
    {OP_ALL_REDUCE, MIXED, 3, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_TWO_LEVEL},
    /* The bytes of two_shot in 2 log2(n) messages instead of 2(n-1), and 1.5 times as many for
     * 16-bit floats, whose sums travel as float32. Even by the model for n = 8; measured with 8
     * ranks on 2 cores, 1.1 to 3 times as fast from 16 to 512 KiB. */
    {OP_ALL_REDUCE, ANY, 8, N_ANY, true, OF_COUNT, 512 * KIB, ALGO_RABENSEIFNER},
    /* The bytes of a ring in 2 steps instead of 2(n-1), and one rounding of 16-bit sums. */
    {OP_ALL_REDUCE, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_TWO_SHOT},

    /* n = 2: S to root is the least possible. */
    {OP_REDUCE, ANY, 2, 2, false, OF_COUNT, BYTES_ANY, ALGO_LINEAR},
    /* Root receives (n-1)S in one step, against S in two: even at (n-1)S = a/b * (n-1)/(n-2). */
    {OP_REDUCE, NET, 3, 5, false, OF_FANOUT, 256 * KIB, ALGO_LINEAR},
    {OP_REDUCE, NET, 6, 11, false, OF_FANOUT, 32 * KIB, ALGO_LINEAR},
    {OP_REDUCE, SHM, 3, 3, false, OF_FANOUT, 128 * KIB, ALGO_LINEAR},
    {OP_REDUCE, SHM, 4, 11, false, OF_FANOUT, 4 * KIB, ALGO_LINEAR},
    /* log2(n) messages at root instead of n - 1, and log2(n) times the bytes of scatter_gather. */
    {OP_REDUCE, NET, 6, N_ANY, false, OF_COUNT, 128 * KIB, ALGO_TREE},
    {OP_REDUCE, SHM, 4, N_ANY, false, OF_COUNT, 8 * KIB, ALGO_TREE},
    {OP_REDUCE, ANY, 3, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_SCATTER_GATHER},

    /* n = 2: a tree of one edge. */
    {OP_BROADCAST, ANY, 2, 2, false, OF_COUNT, BYTES_ANY, ALGO_TREE},
    /* log2(n) messages at the busiest rank, against n - 1 shares of S/(n-1) at every rank: short
     * shares cost more in messages than the tree does in bytes. Even at 100 to 250 KB, and at 10 to
     * 30 KB in shared memory. */
    {OP_BROADCAST, NET, 3, 4, false, OF_COUNT, 256 * KIB, ALGO_TREE},
    {OP_BROADCAST, NET, 5, N_ANY, false, OF_COUNT, 96 * KIB, ALGO_TREE},
    {OP_BROADCAST, SHM, 3, N_ANY, false, OF_COUNT, 16 * KIB, ALGO_TREE},
    {OP_BROADCAST, ANY, 3, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_SCATTER_GATHER},

    /* One step with the least bytes. */
    {OP_REDUCE_SCATTER, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_DIRECT},
    {OP_REDUCE_SCATTER_V, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_DIRECT},
    /* log2(n) messages instead of n - 1, with the same bytes, but one after the other. */
    {OP_ALL_GATHER, NET, 8, N_ANY, false, OF_COUNT, 8 * KIB, ALGO_BRUCK},
    {OP_ALL_GATHER, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_DIRECT},
    {OP_ALL_GATHER_V, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_DIRECT},
    /* log2(n) messages at root instead of n - 1; the bytes are the same. */
    {OP_GATHER, NET, 13, N_ANY, false, OF_COUNT, 16 * KIB, ALGO_TREE},
    {OP_GATHER, SHM, 12, N_ANY, false, OF_COUNT, 4 * KIB, ALGO_TREE},
    {OP_GATHER, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_LINEAR},
    {OP_GATHER_V, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_LINEAR},
    {OP_SCATTER, NET, 13, N_ANY, false, OF_COUNT, 4 * KIB, ALGO_TREE},
    {OP_SCATTER, SHM, 12, N_ANY, false, OF_COUNT, 1 * KIB, ALGO_TREE},
    {OP_SCATTER, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_LINEAR},
    {OP_SCATTER_V, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_LINEAR},
    /* log2(n) messages instead of n - 1, and log2(n)/2 times the bytes. With 8 ranks on 2 cores it
     * takes half of the time up to 1 KiB. */
    {OP_ALL_TO_ALL, NET, 8, N_ANY, false, OF_COUNT, 512, ALGO_BRUCK},
    {OP_ALL_TO_ALL, SHM, 13, N_ANY, false, OF_COUNT, 64, ALGO_BRUCK},
    {OP_ALL_TO_ALL, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_PAIRWISE},
    {OP_ALL_TO_ALL_V, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_PAIRWISE},
    {OP_BARRIER, ANY, 2, N_ANY, false, OF_COUNT, BYTES_ANY, ALGO_DISSEMINATION},
};

/* Who builds what, and from how many ranks on. ALGO_LOCAL is added by coll_build. */
static const struct builder {
    enum op_kind kind;
    enum coll_algorithm algorithm;
    int n_min;
    coll_builder *build;
} builders[] = {
    {OP_ALL_REDUCE, ALGO_DIRECT, 2, build_owners},
    {OP_ALL_REDUCE, ALGO_TWO_SHOT, 2, build_owners},
    {OP_ALL_REDUCE, ALGO_RING, 2, build_ring},
    {OP_ALL_REDUCE, ALGO_RING_FAST, 3, build_ring},
    {OP_ALL_REDUCE, ALGO_RECURSIVE_DOUBLING, 2, build_doubling},
    {OP_ALL_REDUCE, ALGO_RABENSEIFNER, 2, build_doubling},
    {OP_ALL_REDUCE, ALGO_TWO_LEVEL, 2, build_two_level},
    {OP_REDUCE, ALGO_LINEAR, 2, build_owners},
    {OP_REDUCE, ALGO_SCATTER_GATHER, 2, build_owners},
    {OP_REDUCE, ALGO_TREE, 2, build_reduce_tree},
    {OP_REDUCE, ALGO_CHAIN, 2, build_reduce_tree},
    {OP_REDUCE_SCATTER, ALGO_DIRECT, 2, build_owners},
    {OP_REDUCE_SCATTER, ALGO_RING, 2, build_reduce_ring},
    {OP_REDUCE_SCATTER_V, ALGO_DIRECT, 2, build_owners},
    {OP_REDUCE_SCATTER_V, ALGO_RING, 2, build_reduce_ring},
    {OP_BROADCAST, ALGO_TREE, 2, build_broadcast},
    {OP_BROADCAST, ALGO_SCATTER_GATHER, 2, build_broadcast},
    {OP_BROADCAST, ALGO_CHAIN, 2, build_broadcast},
    {OP_ALL_GATHER, ALGO_DIRECT, 2, build_exchange},
    {OP_ALL_GATHER, ALGO_RING, 2, build_gather_ring},
    {OP_ALL_GATHER, ALGO_BRUCK, 2, build_gather_bruck},
    {OP_ALL_GATHER_V, ALGO_DIRECT, 2, build_exchange},
    {OP_ALL_GATHER_V, ALGO_RING, 2, build_gather_ring},
    {OP_GATHER, ALGO_LINEAR, 2, build_exchange},
    {OP_GATHER, ALGO_TREE, 2, build_rows},
    {OP_GATHER_V, ALGO_LINEAR, 2, build_exchange},
    {OP_SCATTER, ALGO_LINEAR, 2, build_exchange},
    {OP_SCATTER, ALGO_TREE, 2, build_rows},
    {OP_SCATTER_V, ALGO_LINEAR, 2, build_exchange},
    {OP_ALL_TO_ALL, ALGO_PAIRWISE, 2, build_exchange},
    {OP_ALL_TO_ALL, ALGO_BRUCK, 2, build_bruck},
    {OP_ALL_TO_ALL_V, ALGO_PAIRWISE, 2, build_exchange},
    {OP_BARRIER, ALGO_DISSEMINATION, 2, build_barrier},
};

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

const char *coll_algorithm_name(enum coll_algorithm algorithm)
{
    static const char *const names[ALGO_COUNT] = {
        [ALGO_LOCAL] = "local",
        [ALGO_DIRECT] = "direct",
        [ALGO_TWO_SHOT] = "two_shot",
        [ALGO_RING] = "ring",
        [ALGO_RING_FAST] = "ring_fast",
        [ALGO_LINEAR] = "linear",
        [ALGO_TREE] = "tree",
        [ALGO_SCATTER_GATHER] = "scatter_gather",
        [ALGO_PAIRWISE] = "pairwise",
        [ALGO_DISSEMINATION] = "dissemination",
        [ALGO_RECURSIVE_DOUBLING] = "recursive_doubling",
        [ALGO_RABENSEIFNER] = "rabenseifner",
        [ALGO_CHAIN] = "chain",
        [ALGO_BRUCK] = "bruck",
        [ALGO_TWO_LEVEL] = "two_level",
    };
    return (unsigned)algorithm < ALGO_COUNT ? names[algorithm] : "?";
}

static bool fits(const struct row *row, size_t bytes, const struct coll_env *env)
{
    const int n = env->n_ranks;
    if (!(row->links >> env->links & 1) || n < row->n_min || n > row->n_max ||
        (row->power && (n & (n - 1)) != 0))
        return false;
    if (row->most == BYTES_ANY)
        return true;
    const uint64_t most = row->most * (uint64_t)env->small_bytes / SMALL_DEFAULT;
    return bytes <= (row->measure == OF_FANOUT ? most / (unsigned)(n - 1) : most);
}

/* The user's word on all_reduce, or ALGO_COUNT. RING_ALGO says which ring, once there is one. */
static enum coll_algorithm forced_all_reduce(const struct coll_env *env, size_t bytes)
{
    switch (env->allreduce_algo) {
    case ALLREDUCE_DIRECT:
        return ALGO_DIRECT;
    case ALLREDUCE_TWO_SHOT:
        return ALGO_TWO_SHOT;
    case ALLREDUCE_RECURSIVE_DOUBLING:
        return ALGO_RECURSIVE_DOUBLING;
    case ALLREDUCE_RABENSEIFNER:
        return ALGO_RABENSEIFNER;
    case ALLREDUCE_TWO_LEVEL:
        return ALGO_TWO_LEVEL;
    case ALLREDUCE_RING_CHUNKED:
        if (bytes <= env->small_bytes)
            return ALGO_DIRECT;
        break;
    case ALLREDUCE_RING:
        break;
    default:
        return ALGO_COUNT;
    }
    /* Two ranks have one link between them: a second direction adds nothing. */
    return env->ring_algo == RING_FAST && env->n_ranks > 2 ? ALGO_RING_FAST : ALGO_RING;
}

/* See force.h. */
static enum op_kind forced_kind;
static enum coll_algorithm forced_algorithm = ALGO_COUNT;

void coll_force(enum op_kind kind, enum coll_algorithm algorithm)
{
    forced_kind = kind;
    forced_algorithm = algorithm;
}

/* Must the operands be combined in the order of ranks? A product of complex numbers has a zero of
 * another sign where it is grouped otherwise, even if no number is rounded. */
static bool needs_order(const struct coll_call *call)
{
    return (call->kind == OP_ALL_REDUCE || call->kind == OP_REDUCE) && call->op == MCCL_PROD &&
           (call->dtype == MCCL_COMPLEX64 || call->dtype == MCCL_COMPLEX128);
}

/* Reduces parts of the group first, then their results. */
static bool groups(enum coll_algorithm algorithm)
{
    return algorithm == ALGO_RECURSIVE_DOUBLING || algorithm == ALGO_RABENSEIFNER ||
           algorithm == ALGO_TREE || algorithm == ALGO_TWO_LEVEL;
}

enum coll_algorithm coll_choose(const struct coll_call *call, const struct coll_env *env)
{
    if (env->n_ranks == 1)
        return ALGO_LOCAL;
    if (forced_algorithm != ALGO_COUNT && forced_kind == call->kind &&
        coll_has(call->kind, forced_algorithm, env->n_ranks))
        return forced_algorithm;
    const size_t bytes = call->count * mccl_dtype_size(call->dtype);
    if (call->kind == OP_ALL_REDUCE) {
        const enum coll_algorithm forced = forced_all_reduce(env, bytes);
        if (forced != ALGO_COUNT)
            return forced;
    }
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        if (rows[i].kind == call->kind && fits(&rows[i], bytes, env) &&
            !(needs_order(call) && groups(rows[i].algorithm)))
            return rows[i].algorithm;
    error_assert_failed("the table has a row for every collective", __FILE__, __LINE__);
}

/* With one rank every builder of a kind comes down to the same local steps: the first one serves.
 * Rings and SCATTER_GATHER come later in the table, since they need a peer. */
static const struct builder *find_builder(enum op_kind kind, enum coll_algorithm algorithm,
                                          int n_ranks)
{
    for (size_t i = 0; i < COUNT_OF(builders); i++) {
        const struct builder *builder = &builders[i];
        if (builder->kind != kind)
            continue;
        if (n_ranks == 1 && algorithm == ALGO_LOCAL)
            return builder;
        if (builder->algorithm == algorithm && n_ranks >= builder->n_min)
            return builder;
    }
    return NULL;
}

bool coll_has(enum op_kind kind, enum coll_algorithm algorithm, int n_ranks)
{
    return find_builder(kind, algorithm, n_ranks) != NULL;
}

mccl_result coll_build(const struct coll_call *call, const struct coll_env *env,
                       enum coll_algorithm algorithm, struct schedule *schedule)
{
    const struct builder *builder = find_builder(call->kind, algorithm, env->n_ranks);
    if (builder == NULL)
        return error_set(MCCL_ERR_UNSUPPORTED,
                         "%s has no algorithm '%s' for %d ranks; use the default",
                         op_kind_name(call->kind), coll_algorithm_name(algorithm), env->n_ranks);
    TRY(schedule_reset(schedule, env->n_ranks, call->dtype, call->op));
    schedule->factor = call->factor;
    builder->build(call, env, algorithm, schedule);
    if (schedule->failed != MCCL_OK)
        return error_set(schedule->failed,
                         "no memory to plan %s of %zu elements on %d ranks; free some and retry",
                         op_kind_name(call->kind), call->count, env->n_ranks);
    return MCCL_OK;
}

mccl_result coll_plan(const struct coll_call *call, const struct coll_env *env,
                      struct schedule *schedule)
{
    return coll_build(call, env, coll_choose(call, env), schedule);
}

/* The hash is FNV-1a, 64 bits, over the counts as little-endian 64-bit numbers. */
static uint64_t sum_up_counts(const size_t *counts, int n)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325), total = 0;
    bool equal = true;
    for (int i = 0; i < n; i++) {
        equal = equal && counts[i] == counts[0];
        total += counts[i];
        for (int shift = 0; shift < 64; shift += 8) {
            hash ^= ((uint64_t)counts[i] >> shift) & 0xff;
            hash *= UINT64_C(0x100000001b3);
        }
    }
    if (equal)
        return counts[0] & ~SIGNATURE_COUNTS_DIFFER;
    return SIGNATURE_COUNTS_DIFFER | (total & SIGNATURE_TOTAL_MASK) << SIGNATURE_HASH_BITS |
           hash >> (64 - SIGNATURE_HASH_BITS);
}

void coll_signature(const struct coll_call *call, int n_ranks, struct signature *signature)
{
    *signature = (struct signature){.kind = (uint8_t)call->kind,
                                    .dtype = (uint8_t)call->dtype,
                                    .reduce_op = SIGNATURE_NO_OP,
                                    .root = SIGNATURE_NO_ROOT,
                                    .count = call->count};
    switch (call->kind) {
    case OP_REDUCE:
        signature->root = (uint16_t)call->root;
        signature->reduce_op = (uint8_t)call->op;
        break;
    case OP_ALL_REDUCE:
    case OP_REDUCE_SCATTER:
        signature->reduce_op = (uint8_t)call->op;
        break;
    case OP_REDUCE_SCATTER_V:
        signature->reduce_op = (uint8_t)call->op;
        signature->count = sum_up_counts(call->send_counts, n_ranks);
        break;
    case OP_ALL_GATHER_V:
        signature->count = sum_up_counts(call->recv_counts, n_ranks);
        break;
    case OP_GATHER_V:
    case OP_SCATTER_V:
        signature->count = 0;
        signature->root = (uint16_t)call->root;
        break;
    case OP_BROADCAST:
    case OP_GATHER:
    case OP_SCATTER:
        signature->root = (uint16_t)call->root;
        break;
    case OP_ALL_TO_ALL_V:
        signature->count = 0;
        break;
    case OP_BARRIER:
        signature->count = 0;
        signature->dtype = MCCL_UINT8;
        break;
    case OP_ALL_GATHER:
    case OP_ALL_TO_ALL:
    case OP_SEND:
    case OP_RECV:
        break;
    }
}

/* SPDX-License-Identifier: MIT
 *
 * Reductions give the same bits on all ranks, and again in another group with other timing and
 * another number of channels: 1,000 random combinations of number of ranks, settings (algorithm,
 * ring, chunk, threshold), dtype, op and count, on random bits, so NaN patterns, infinities and
 * subnormals are among the values.
 */
/* limit: 150 s */
#include "support/check.h"
#include "support/harness.h"
#include "support/pattern.h"

#define N_GROUPS 125
#define N_CALLS 8 /* in each group: 1,000 in all */
#define N_RUNS 2
#define MAX_RANKS 8
#define MAX_COUNT 40000

enum kind { ALL_REDUCE, REDUCE_SCATTER, REDUCE, N_KINDS };

struct call {
    enum kind kind;
    mccl_dtype dtype;
    mccl_op op;
    size_t count; /* elements of a result */
    int root;
    bool in_place; /* all_reduce */
    uint64_t seed;
};

struct group {
    uint64_t seed;
    int run;
    char settings[160];
};

/* What the ranks of one group got: digests of the results. */
static uint64_t digests[N_RUNS][MAX_RANKS][N_CALLS];

/* The i-th number in [0, below) of a group. */
static size_t draw(uint64_t seed, int i, size_t below)
{
    return (size_t)(pattern_hash(seed, (uint64_t)i, 17) % below);
}

static bool is_complex(mccl_dtype dtype)
{
    return dtype == MCCL_COMPLEX64 || dtype == MCCL_COMPLEX128;
}

static bool is_real(mccl_dtype dtype)
{
    return dtype == MCCL_FLOAT32 || dtype == MCCL_FLOAT64 || dtype == MCCL_FLOAT16 ||
           dtype == MCCL_BFLOAT16;
}

static bool can_reduce(mccl_dtype dtype, mccl_op op)
{
    switch (op) {
    case MCCL_SUM:
    case MCCL_PROD:
        return true;
    case MCCL_MIN:
    case MCCL_MAX:
        return !is_complex(dtype);
    case MCCL_AVG:
    case MCCL_PREMUL_SUM:
        return is_real(dtype) || is_complex(dtype);
    default:
        return !is_real(dtype) && !is_complex(dtype);
    }
}

static struct call draw_call(const struct group *group, int index, int n)
{
    static const mccl_dtype dtypes[] = {MCCL_FLOAT32, MCCL_FLOAT64,   MCCL_FLOAT16,   MCCL_BFLOAT16,
                                        MCCL_INT8,    MCCL_UINT8,     MCCL_INT16,     MCCL_UINT16,
                                        MCCL_INT32,   MCCL_UINT32,    MCCL_INT64,     MCCL_UINT64,
                                        MCCL_BOOL,    MCCL_COMPLEX64, MCCL_COMPLEX128};
    const uint64_t seed = pattern_hash(group->seed, (uint64_t)index, 1);
    struct call call = {
        .kind = draw(seed, 0, 2) ? ALL_REDUCE : (enum kind)draw(seed, 1, N_KINDS),
        /* The four floats, whose order of adding shows, half of the time. */
        .dtype = dtypes[draw(seed, 2, 2) ? draw(seed, 3, 4)
                                         : draw(seed, 3, sizeof dtypes / sizeof dtypes[0])],
        .root = (int)draw(seed, 4, (size_t)n),
        .in_place = draw(seed, 5, 2) == 1,
        .seed = seed,
    };
    for (int i = 6; call.op = (mccl_op)draw(seed, i, MCCL_N_OPS), !can_reduce(call.dtype, call.op);)
        i++;
    /* Few, some, many. */
    static const size_t below[] = {10, 1500, MAX_COUNT};
    call.count = draw(seed, 101, below[draw(seed, 100, 3)]);
    return call;
}

static void fill_random(unsigned char *bytes, size_t size, mccl_dtype dtype, uint64_t seed,
                        int rank)
{
    for (size_t i = 0; i < size; i += 8) {
        const uint64_t bits = pattern_hash(seed, i, (uint64_t)rank + 100);
        memcpy(bytes + i, &bits, size - i < 8 ? size - i : 8);
    }
    if (dtype == MCCL_BOOL)
        for (size_t i = 0; i < size; i++)
            bytes[i] &= 1;
}

static uint64_t digest(const unsigned char *bytes, size_t size)
{
    uint64_t state = size;
    for (size_t i = 0; i < size; i++)
        state = (state ^ bytes[i]) * 1099511628211u; /* FNV-1a */
    return state;
}

/* Digest of the result; 0 where there is none. */
static uint64_t run_call(mccl_comm *comm, const struct call *call, int rank, int n)
{
    const size_t blocks = call->kind == REDUCE_SCATTER ? (size_t)n : 1;
    const size_t size = call->count * mccl_dtype_size(call->dtype);
    unsigned char *send = malloc(blocks * size + 1);
    unsigned char *recv = calloc(1, size + 1);
    CHECK(send != NULL && recv != NULL);
    fill_random(send, blocks * size, call->dtype, call->seed, rank);
    if (call->op == MCCL_PREMUL_SUM) {
        const mccl_options options = {.size = sizeof options, .factor = 0.3 * (rank + 1)};
        CHECK_OK(mccl_set_options(&options));
    }
    const bool in_place = call->kind == ALL_REDUCE && call->in_place;
    if (in_place)
        memcpy(recv, send, size);
    const void *from = in_place ? recv : send;
    bool has_result = true;
    switch (call->kind) {
    case ALL_REDUCE:
        CHECK_OK(mccl_all_reduce(from, recv, call->count, call->dtype, call->op, comm, NULL, NULL));
        break;
    case REDUCE_SCATTER:
        CHECK_OK(
            mccl_reduce_scatter(from, recv, call->count, call->dtype, call->op, comm, NULL, NULL));
        break;
    default:
        has_result = rank == call->root;
        CHECK_OK(mccl_reduce(from, has_result ? recv : NULL, call->count, call->dtype, call->op,
                             call->root, comm, NULL, NULL));
        break;
    }
    const uint64_t result = has_result ? digest(recv, size) : 0;
    free(send);
    free(recv);
    return result;
}

static void run_group(struct rank *self)
{
    const struct group *group = self->arg;
    static const int channels[] = {1, 2, 4, 8, 3};
    char settings[200];
    snprintf(settings, sizeof settings, "%s; channels=%d", group->settings,
             channels[(draw(group->seed, 5, 5) + (size_t)group->run) % 5]);
    mccl_comm *comm = rank_connect_with(self, settings, 60000);
    for (int i = 0; i < N_CALLS; i++) {
        const struct call call = draw_call(group, i, self->n);
        /* Who comes first differs between the runs. */
        const uint64_t timing = pattern_hash(call.seed, (uint64_t)group->run, 2);
        if (draw(timing, self->rank, 4) == 0)
            sleep_ms(1 + (int)draw(timing, self->rank + 100, 3));
        digests[group->run][self->rank][i] = run_call(comm, &call, self->rank, self->n);
    }
    CHECK_OK(mccl_comm_destroy(comm));
}

static void compare(const struct group *group, int n)
{
    for (int i = 0; i < N_CALLS; i++) {
        const struct call call = draw_call(group, i, n);
        for (int rank = 0; rank < n; rank++) {
            const uint64_t got = digests[0][rank][i];
            if (got != digests[1][rank][i] || (call.kind == ALL_REDUCE && got != digests[0][0][i]))
                CHECK_FAIL("call %d of group %llx (n=%d, %s): kind %d, %s, op %d, %zu elements: "
                           "rank %d has digest %llx, in the second run %llx; rank 0 has %llx",
                           i, (unsigned long long)group->seed, n, group->settings, (int)call.kind,
                           mccl_dtype_name(call.dtype), (int)call.op, call.count, rank,
                           (unsigned long long)got, (unsigned long long)digests[1][rank][i],
                           (unsigned long long)digests[0][0][i]);
        }
    }
}

int main(void)
{
    static const char *const algorithms[] = {"auto",         "direct",       "two_shot",
                                             "ring",         "ring_chunked", "recursive_doubling",
                                             "rabenseifner", "two_level"};
    static const char *const rings[] = {"auto", "basic", "chunked", "fast"};
    static const size_t chunks[] = {4096, 10000, 65536, 4194304};
    static const size_t thresholds[] = {0, 1000, 30000, 262144};
    for (int i = 0; i < N_GROUPS; i++) {
        struct group group = {.seed = pattern_hash(2026, (uint64_t)i, 0)};
        const int n = 2 + (int)draw(group.seed, 0, MAX_RANKS - 1);
        snprintf(group.settings, sizeof group.settings,
                 "allreduce_algo=%s; ring_algo=%s; chunk_bytes=%zu; small_msg_threshold=%zu",
                 algorithms[draw(group.seed, 1, sizeof algorithms / sizeof algorithms[0])],
                 rings[draw(group.seed, 2, 4)], chunks[draw(group.seed, 3, 4)],
                 thresholds[draw(group.seed, 4, 4)]);
        for (group.run = 0; group.run < N_RUNS; group.run++)
            threads_run(n, run_group, &group);
        compare(&group, n);
    }
    printf("%d combinations, %d runs each: the same bits\n", N_GROUPS * N_CALLS, N_RUNS);
    return 0;
}

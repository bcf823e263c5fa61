/* SPDX-License-Identifier: MIT
 *
 * Every collective, algorithm, dtype, op, root and kind of buffers against the reference, in the
 * simulator, in many random orders. All memory of a rank is compared, so that inputs that changed
 * and bytes written outside the results show. `test_coll SEED` repeats a run.
 */
/* limit: 120 s */
#include "base/config.h"
#include "coll/coll.h"
#include "coll_reference.h"
#include "coll_sim.h"

#define GUARD_BYTES 64
#define MEMORY_BYTES ((size_t)3 << 20)

struct test_case {
    enum op_kind kind;
    enum coll_algorithm algorithm;
    mccl_dtype dtype;
    mccl_op op;
    int n, root;
    bool in_place;
    size_t count;
    size_t chunk_bytes;
    int ring_algo, capacity, layout;
    size_t misalign;
};

struct rank {
    unsigned char memory[MEMORY_BYTES], expected[MEMORY_BYTES];
    size_t used;
    struct coll_call call;
    const void *sends[SIM_MAX_RANKS];
    void *recvs[SIM_MAX_RANKS];
    size_t send_counts[SIM_MAX_RANKS], recv_counts[SIM_MAX_RANKS];
};

static struct rank ranks[SIM_MAX_RANKS];
static struct schedule schedules[SIM_MAX_RANKS];
static uint64_t seed, n_cases;

static void fail_case(const struct test_case *test, const char *why)
{
    CHECK_FAIL("seed %llu: %s %s n=%d root=%d count=%zu %s %s %s chunk=%zu ring=%d capacity=%d "
               "layout=%d: %s",
               (unsigned long long)seed, op_kind_name(test->kind),
               coll_algorithm_name(test->algorithm), test->n, test->root, test->count,
               mccl_dtype_name(test->dtype), mccl_op_name(test->op),
               test->in_place ? "in place" : "out of place", test->chunk_bytes, test->ring_algo,
               test->capacity, test->layout, why);
}

/* ---- Shapes of the collectives
 * --------------------------------------------------------------------------- */

static bool reduces(enum op_kind kind)
{
    return kind == OP_ALL_REDUCE || kind == OP_REDUCE || kind == OP_REDUCE_SCATTER ||
           kind == OP_REDUCE_SCATTER_V;
}

static bool has_root(enum op_kind kind)
{
    return kind == OP_REDUCE || kind == OP_BROADCAST || kind == OP_GATHER || kind == OP_GATHER_V ||
           kind == OP_SCATTER || kind == OP_SCATTER_V;
}

static bool is_v(enum op_kind kind)
{
    return kind == OP_ALL_GATHER_V || kind == OP_REDUCE_SCATTER_V || kind == OP_GATHER_V ||
           kind == OP_SCATTER_V || kind == OP_ALL_TO_ALL_V;
}

/* One block per rank on the sending side, or on the receiving side; else one block. */
static bool sends_blocks(enum op_kind kind)
{
    return kind == OP_REDUCE_SCATTER || kind == OP_REDUCE_SCATTER_V || kind == OP_SCATTER ||
           kind == OP_SCATTER_V || kind == OP_ALL_TO_ALL || kind == OP_ALL_TO_ALL_V;
}

static bool receives_blocks(enum op_kind kind)
{
    return kind == OP_ALL_GATHER || kind == OP_ALL_GATHER_V || kind == OP_GATHER ||
           kind == OP_GATHER_V || kind == OP_ALL_TO_ALL || kind == OP_ALL_TO_ALL_V;
}

static bool uses_send(const struct test_case *test, int rank)
{
    const bool root_only =
        test->kind == OP_BROADCAST || test->kind == OP_SCATTER || test->kind == OP_SCATTER_V;
    return test->kind != OP_BARRIER && (!root_only || rank == test->root);
}

static bool uses_recv(const struct test_case *test, int rank)
{
    const bool root_only =
        test->kind == OP_REDUCE || test->kind == OP_GATHER || test->kind == OP_GATHER_V;
    return test->kind != OP_BARRIER && (!root_only || rank == test->root);
}

/* Elements that belong to `rank` in the _V kinds, some of them none. */
static size_t part_count(const struct test_case *test, int rank)
{
    if (!is_v(test->kind))
        return test->count;
    return test->count == 0 || rank % 3 == 2 ? 0 : test->count + (size_t)rank;
}

static size_t pair_count(const struct test_case *test, int from, int to)
{
    if (test->kind != OP_ALL_TO_ALL_V)
        return test->count;
    return test->count == 0 || (from + 2 * to) % 3 == 0 ? 0 : test->count + (size_t)(from + 2 * to);
}

static size_t send_count(const struct test_case *test, int rank, int block)
{
    if (test->kind == OP_ALL_TO_ALL_V)
        return pair_count(test, rank, block);
    return part_count(test, sends_blocks(test->kind) ? block : rank);
}

static size_t recv_count(const struct test_case *test, int rank, int block)
{
    if (test->kind == OP_ALL_TO_ALL_V)
        return pair_count(test, block, rank);
    return part_count(test, receives_blocks(test->kind) ? block : rank);
}

/* ---- Buffers
 * --------------------------------------------------------------------------------------------- */

/* Memory of a rank, after a guard. */
static unsigned char *take(struct rank *rank, size_t bytes)
{
    CHECK(rank->used + GUARD_BYTES + bytes + GUARD_BYTES + 1 <= MEMORY_BYTES);
    unsigned char *memory = rank->memory + rank->used + GUARD_BYTES;
    memset(rank->memory + rank->used, 0xa5, GUARD_BYTES + bytes + GUARD_BYTES);
    rank->used += GUARD_BYTES + (bytes + 15) / 16 * 16;
    return memory;
}

/* One block, or n of them: in a row, or apart and in reverse order for the _V kinds. */
static void take_blocks(const struct test_case *test, struct rank *rank, const size_t *counts,
                        int n_blocks, void **blocks)
{
    const size_t element = mccl_dtype_size(test->dtype);
    if (is_v(test->kind)) {
        for (int b = n_blocks - 1; b >= 0; b--)
            blocks[b] = counts[b] == 0 ? NULL : take(rank, counts[b] * element);
        return;
    }
    unsigned char *all = take(rank, counts[0] * element * (size_t)n_blocks);
    for (int b = 0; b < n_blocks; b++)
        blocks[b] = test->count == 0 ? NULL : all + (size_t)b * counts[0] * element;
}

static void take_buffers(const struct test_case *test, struct rank *rank, int index)
{
    void *sends[SIM_MAX_RANKS] = {0};
    const int n_sends = sends_blocks(test->kind) ? test->n : 1;
    const int n_recvs = receives_blocks(test->kind) ? test->n : 1;
    for (int b = 0; b < test->n; b++) {
        rank->send_counts[b] = send_count(test, index, b);
        rank->recv_counts[b] = recv_count(test, index, b);
        rank->recvs[b] = NULL;
    }
    rank->used = test->misalign;
    const bool both = uses_send(test, index) && uses_recv(test, index);
    if (uses_recv(test, index) && !(test->in_place && both && n_sends > n_recvs))
        take_blocks(test, rank, rank->recv_counts, n_recvs, rank->recvs);
    if (uses_send(test, index) && !(test->in_place && both && n_sends <= n_recvs))
        take_blocks(test, rank, rank->send_counts, n_sends, sends);
    if (test->in_place && both && n_sends > n_recvs)
        rank->recvs[0] = sends[index];
    else if (test->in_place && both)
        sends[0] = rank->recvs[n_recvs > 1 ? index : 0];
    for (int b = 0; b < test->n; b++)
        rank->sends[b] = sends[b];
}

static void fill_block(const struct test_case *test, int rank, int block, unsigned char *data,
                       size_t count)
{
    const size_t element = mccl_dtype_size(test->dtype);
    if (reduces(test->kind)) {
        for (size_t i = 0; i < count; i++)
            reference_operand(test->dtype, test->op, test->n, rank, (size_t)block, i,
                              data + i * element);
        return;
    }
    for (size_t i = 0; i < count * element; i++)
        data[i] = (unsigned char)reference_hash(rank, (size_t)block, i, 3);
}

/* What block `block` of this rank's result must hold. */
static void expect_block(const struct test_case *test, int rank, int block, unsigned char *data,
                         size_t count)
{
    const size_t element = mccl_dtype_size(test->dtype);
    const int index = sends_blocks(test->kind) ? rank : 0;
    if (reduces(test->kind)) {
        for (size_t i = 0; i < count; i++)
            reference_result(test->dtype, test->op, test->n, (size_t)index, i, data + i * element);
        return;
    }
    const bool from_root =
        test->kind == OP_BROADCAST || test->kind == OP_SCATTER || test->kind == OP_SCATTER_V;
    fill_block(test, from_root ? test->root : block, index, data, count);
}

static void prepare(const struct test_case *test, int index)
{
    struct rank *rank = &ranks[index];
    take_buffers(test, rank, index);
    const int n_sends = sends_blocks(test->kind) ? test->n : 1;
    const int n_recvs = receives_blocks(test->kind) ? test->n : 1;
    for (int b = 0; b < n_sends; b++)
        if (rank->sends[b] != NULL)
            fill_block(test, index, b,
                       rank->memory + ((const unsigned char *)rank->sends[b] - rank->memory),
                       rank->send_counts[b]);
    memcpy(rank->expected, rank->memory, rank->used + GUARD_BYTES);
    for (int b = 0; b < n_recvs; b++)
        if (rank->recvs[b] != NULL)
            expect_block(test, index, b,
                         rank->expected + ((unsigned char *)rank->recvs[b] - rank->memory),
                         rank->recv_counts[b]);
    rank->call = (struct coll_call){.kind = test->kind,
                                    .dtype = test->dtype,
                                    .op = test->op,
                                    .root = test->root,
                                    .factor = reference_factor(index),
                                    .send = rank->sends[0],
                                    .recv = rank->recvs[0],
                                    .count = test->count,
                                    .sends = rank->sends,
                                    .recvs = rank->recvs,
                                    .send_counts = rank->send_counts,
                                    .recv_counts = rank->recv_counts};
    if (test->kind == OP_GATHER_V)
        rank->call.count = rank->send_counts[0];
    if (test->kind == OP_SCATTER_V)
        rank->call.count = rank->recv_counts[0];
    if (test->kind == OP_REDUCE && test->in_place)
        rank->call.recv = (void *)(uintptr_t)rank->call.send; /* ignored on all ranks but root */
}

/* ---- Cases
 * -----------------------------------------------------------------------------------------------
 */

/* Which ranks share a host. */
enum { ONE_HOST, PAIRS, THREE_HOSTS, UNEVEN, N_LAYOUTS };

static const int *hosts_of(const struct test_case *test)
{
    static int hosts[SIM_MAX_RANKS];
    for (int rank = 0; rank < test->n; rank++)
        hosts[rank] = test->layout == PAIRS         ? rank / 2
                      : test->layout == THREE_HOSTS ? rank % (test->n < 3 ? test->n : 3)
                                                    : rank == 1;
    return test->layout == ONE_HOST ? NULL : hosts;
}

/* False if the algorithm does not do this. */
static bool run_case(const struct test_case *test, uint64_t *random)
{
    for (int index = 0; index < test->n; index++) {
        prepare(test, index);
        const struct coll_env env = {.rank = index,
                                     .n_ranks = test->n,
                                     .chunk_bytes = test->chunk_bytes,
                                     .small_bytes = 1024,
                                     .ring_algo = test->ring_algo,
                                     .hosts = hosts_of(test)};
        struct schedule *schedule = &schedules[index];
        const mccl_result result = coll_build(&ranks[index].call, &env, test->algorithm, schedule);
        if (result == MCCL_ERR_UNSUPPORTED)
            return false;
        CHECK_OK(result);
        if (schedule->scratch_size > 0)
            memset(schedule->scratch, 0xc3, schedule->scratch_size);
    }
    n_cases++;
    const char *error = sim_run(schedules, test->n, test->capacity, random);
    if (error != NULL)
        fail_case(test, error);
    for (int index = 0; index < test->n; index++) {
        const struct rank *rank = &ranks[index];
        const size_t size = rank->used + GUARD_BYTES;
        if (memcmp(rank->memory, rank->expected, size) == 0)
            continue;
        size_t at = 0;
        while (rank->memory[at] == rank->expected[at])
            at++;
        char why[128];
        snprintf(why, sizeof(why), "rank %d, byte %zu of its memory is 0x%02x, expected 0x%02x",
                 index, at, rank->memory[at], rank->expected[at]);
        fail_case(test, why);
    }
    return true;
}

/* The case with every root, placement and algorithm; rings in all three variants. True if one did
 * it. */
static bool run_variants(struct test_case test, uint64_t *random)
{
    static const size_t chunks[] = {64, 256, 1000, 4096, (size_t)1 << 20};
    static const int capacities[] = {0, 1, 3};
    bool any = false;
    for (int algorithm = 0; algorithm < ALGO_COUNT; algorithm++)
        for (test.root = 0; test.root < (has_root(test.kind) ? test.n : 1); test.root++)
            for (int variant = 0; variant < 4; variant++) {
                test.algorithm = (enum coll_algorithm)algorithm;
                test.in_place = variant % 2 == 1;
                test.ring_algo = variant < 2 ? RING_CHUNKED : RING_BASIC;
                if ((test.kind == OP_ALL_TO_ALL || test.kind == OP_ALL_TO_ALL_V) && test.in_place)
                    continue;
                if (variant >= 2 && test.algorithm != ALGO_RING && test.algorithm != ALGO_RING_FAST)
                    continue;
                /* Few pieces for long buffers most of the time, to save time; many often enough. */
                test.chunk_bytes = chunks[sim_random(random) % 5];
                if (test.count > 1000 && test.chunk_bytes < 1000 && sim_random(random) % 8 > 0)
                    test.chunk_bytes = 4096;
                test.capacity = capacities[sim_random(random) % 3];
                test.layout =
                    test.algorithm == ALGO_TWO_LEVEL ? (int)(sim_random(random) % N_LAYOUTS) : 0;
                test.misalign = sim_random(random) % 2;
                any |= run_case(&test, random);
            }
    return any;
}

static const int group_sizes[] = {1, 2, 3, 4, 5, 8};
static const int large_group_sizes[] = {6, 7, 11, 13, 16, 17}; /* now and then */

/* Group `i` of six. */
static int group_size(size_t i, uint64_t *random)
{
    return sim_random(random) % 8 == 0 ? large_group_sizes[i] : group_sizes[i];
}
static const size_t counts[] = {0, 1, 3, 17, 255, 4097};

/* `share` in 1000 of the combinations with long buffers. */
static void test_reductions(enum op_kind kind, unsigned share, uint64_t *random)
{
    for (int dtype = 0; dtype < MCCL_N_DTYPES; dtype++)
        for (int op = 0; op < MCCL_N_OPS; op++) {
            if (!mccl_op_supports((mccl_op)op, (mccl_dtype)dtype))
                continue;
            for (size_t i = 0; i < 6 * 6; i++) {
                const size_t count = counts[i / 6];
                if (count > 17 && sim_random(random) % 1000 >= (count > 255 ? share / 4 : share))
                    continue;
                const struct test_case test = {.kind = kind,
                                               .dtype = (mccl_dtype)dtype,
                                               .op = (mccl_op)op,
                                               .n = group_size(i % 6, random),
                                               .count = count};
                CHECK(run_variants(test, random));
            }
        }
}

static void test_moves(enum op_kind kind, uint64_t *random)
{
    for (int dtype = 0; dtype < MCCL_N_DTYPES; dtype++)
        for (size_t i = 0; i < 6 * 6; i++) {
            const struct test_case test = {.kind = kind,
                                           .dtype = (mccl_dtype)dtype,
                                           .n = group_size(i % 6, random),
                                           .count = counts[i / 6]};
            if (test.count == 4097 && sim_random(random) % 4 > 0)
                continue;
            CHECK(run_variants(test, random));
        }
}

/* Nobody leaves before everybody has come: a rank that does not start keeps all others in. */
static void test_barrier(uint64_t *random)
{
    for (int n = 1; n <= SIM_MAX_RANKS; n++)
        for (int absent = -1; absent < n; absent++) {
            const struct coll_call call = {.kind = OP_BARRIER, .dtype = MCCL_UINT8};
            for (int rank = 0; rank < n; rank++) {
                const struct coll_env env = {.rank = rank, .n_ranks = n, .chunk_bytes = 4096};
                CHECK_OK(coll_plan(&call, &env, &schedules[rank]));
                CHECK_EQ_U64(schedule_bytes_sent(&schedules[rank]), 0);
                for (uint32_t i = 0; rank == absent && i < schedules[rank].n_steps; i++)
                    schedules[rank].steps[i].waits_for++; /* for something that never comes */
            }
            const char *error = sim_run(schedules, n, 3, random);
            CHECK((error != NULL) == (absent >= 0 && n > 1));
            for (int rank = 0; rank < n && absent >= 0 && n > 1; rank++) {
                bool finished = true;
                for (uint32_t i = 0; i < schedules[rank].n_steps; i++)
                    finished = finished && schedules[rank].steps[i].started;
                CHECK(!finished);
            }
        }
}

static enum coll_algorithm choose(enum op_kind kind, int n, size_t bytes, int algo, int ring)
{
    const struct coll_call call = {.kind = kind, .dtype = MCCL_INT8, .count = bytes};
    const struct coll_env env = {.n_ranks = n,
                                 .small_bytes = 6000,
                                 .chunk_bytes = 4096,
                                 .allreduce_algo = algo,
                                 .ring_algo = ring};
    return coll_choose(&call, &env);
}

static void test_choice(void)
{
    const size_t large = (size_t)1 << 40;
    for (int kind = OP_ALL_REDUCE; kind <= OP_BARRIER; kind++)
        CHECK_EQ_I64(choose((enum op_kind)kind, 1, large, ALLREDUCE_RING, RING_FAST), ALGO_LOCAL);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 2, large, ALLREDUCE_AUTO, RING_AUTO), ALGO_TWO_SHOT);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 4, 2000, ALLREDUCE_AUTO, RING_AUTO), ALGO_DIRECT);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 4, 2001, ALLREDUCE_AUTO, RING_AUTO), ALGO_TWO_SHOT);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 4, large, ALLREDUCE_DIRECT, RING_AUTO), ALGO_DIRECT);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 2, 1, ALLREDUCE_TWO_SHOT, RING_AUTO), ALGO_TWO_SHOT);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 4, 1, ALLREDUCE_RING, RING_AUTO), ALGO_RING);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 3, 1, ALLREDUCE_RING, RING_FAST), ALGO_RING_FAST);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 2, 1, ALLREDUCE_RING, RING_FAST), ALGO_RING);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 4, 6000, ALLREDUCE_RING_CHUNKED, RING_AUTO), ALGO_DIRECT);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 4, 6001, ALLREDUCE_RING_CHUNKED, RING_AUTO), ALGO_RING);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 4, large, ALLREDUCE_AUTO, RING_FAST), ALGO_TWO_SHOT);
    CHECK_EQ_I64(choose(OP_REDUCE, 2, large, ALLREDUCE_RING, RING_AUTO), ALGO_LINEAR);
    CHECK_EQ_I64(choose(OP_REDUCE, 4, 2000, ALLREDUCE_AUTO, RING_AUTO), ALGO_LINEAR);
    CHECK_EQ_I64(choose(OP_REDUCE, 4, 2001, ALLREDUCE_AUTO, RING_AUTO), ALGO_SCATTER_GATHER);
    CHECK_EQ_I64(choose(OP_BROADCAST, 2, large, ALLREDUCE_AUTO, RING_AUTO), ALGO_TREE);
    CHECK_EQ_I64(choose(OP_BROADCAST, 4, 6000, ALLREDUCE_AUTO, RING_AUTO), ALGO_TREE);
    CHECK_EQ_I64(choose(OP_BROADCAST, 4, 6001, ALLREDUCE_AUTO, RING_AUTO), ALGO_SCATTER_GATHER);
    CHECK_EQ_I64(choose(OP_ALL_GATHER, 4, large, ALLREDUCE_RING, RING_AUTO), ALGO_DIRECT);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 8, 1000, ALLREDUCE_AUTO, RING_AUTO),
                 ALGO_RECURSIVE_DOUBLING);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 9, 700, ALLREDUCE_AUTO, RING_AUTO), ALGO_DIRECT);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 9, 1000, ALLREDUCE_AUTO, RING_AUTO), ALGO_TWO_SHOT);
    CHECK_EQ_I64(choose(OP_ALL_REDUCE, 3, 1, ALLREDUCE_RABENSEIFNER, RING_AUTO), ALGO_RABENSEIFNER);
    CHECK_EQ_I64(choose(OP_REDUCE, 9, 1000, ALLREDUCE_AUTO, RING_AUTO), ALGO_TREE);
    CHECK_EQ_STR(coll_algorithm_name(ALGO_SCATTER_GATHER), "scatter_gather");
    CHECK_EQ_STR(coll_algorithm_name(ALGO_COUNT), "?");

    const struct coll_call call = {.kind = OP_BROADCAST, .dtype = MCCL_INT8};
    const struct coll_env env = {.n_ranks = 4, .chunk_bytes = 4096};
    CHECK_RESULT(coll_build(&call, &env, ALGO_RING, &schedules[0]), MCCL_ERR_UNSUPPORTED);
}

static void test_signature(void)
{
    const size_t counts_a[3] = {1, 2, 3}, counts_b[3] = {1, 3, 2};
    struct coll_call call = {.kind = OP_ALL_GATHER_V, .dtype = MCCL_INT8, .recv_counts = counts_a};
    struct signature a, b;
    coll_signature(&call, 3, &a);
    call.recv_counts = counts_b;
    coll_signature(&call, 3, &b);
    CHECK(!signature_equal(&a, &b));
    /* 6 elements in all, and the first bits of FNV-1a over 24 bytes. */
    CHECK_EQ_U64(b.count, UINT64_C(0x80000000060a2f49));
    call.recv_counts = (const size_t[3]){5, 5, 5};
    coll_signature(&call, 3, &a);
    CHECK_EQ_U64(a.count, 5);
    CHECK_EQ_I64(a.reduce_op, SIGNATURE_NO_OP);
    CHECK_EQ_I64(a.root, SIGNATURE_NO_ROOT);
    call = (struct coll_call){
        .kind = OP_REDUCE, .dtype = MCCL_INT16, .op = MCCL_MAX, .root = 7, .count = 9};
    coll_signature(&call, 8, &a);
    const struct signature expected = {OP_REDUCE, MCCL_INT16, MCCL_MAX, 7, 9};
    CHECK(signature_equal(&a, &expected));
    call.kind = OP_SCATTER_V;
    coll_signature(&call, 8, &a);
    CHECK(a.count == 0 && a.root == 7 && a.reduce_op == SIGNATURE_NO_OP);
}

int main(int argc, char **argv)
{
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    uint64_t random = seed;
    test_choice();
    test_signature();
    test_barrier(&random);
    test_reductions(OP_ALL_REDUCE, 500, &random);
    test_reductions(OP_REDUCE, 200, &random);
    test_reductions(OP_REDUCE_SCATTER, 200, &random);
    test_reductions(OP_REDUCE_SCATTER_V, 200, &random);
    static const enum op_kind moves[] = {OP_BROADCAST, OP_ALL_GATHER, OP_ALL_GATHER_V,
                                         OP_GATHER,    OP_GATHER_V,   OP_SCATTER,
                                         OP_SCATTER_V, OP_ALL_TO_ALL, OP_ALL_TO_ALL_V};
    for (size_t i = 0; i < sizeof(moves) / sizeof(moves[0]); i++)
        test_moves(moves[i], &random);
    for (int rank = 0; rank < SIM_MAX_RANKS; rank++)
        schedule_free(&schedules[rank]);
    printf("seed %llu: %llu cases\n", (unsigned long long)seed, (unsigned long long)n_cases);
    return 0;
}

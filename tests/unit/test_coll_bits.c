/* SPDX-License-Identifier: MIT
 *
 * What floating point adds to correctness: all ranks hold the same bits whatever the order of
 * events, the direct algorithms add in rank order, and 16-bit sums are rounded once on every
 * algorithm. Random values of very different size, so that each order of adding gives other bits.
 */
#include "base/config.h"
#include "coll/coll.h"
#include "coll_sim.h"
#include "reduce/reduce.h"

#include <math.h>

#define N_MAX 13
#define COUNT 3001

static struct schedule schedules[N_MAX];
static float wide[N_MAX][COUNT]; /* operands; as 16-bit values they are exact in here */
static uint16_t half[N_MAX][COUNT];
static unsigned char results[2][N_MAX][COUNT * sizeof(float)];

static void make_operands(mccl_dtype dtype, uint64_t *random)
{
    for (int rank = 0; rank < N_MAX; rank++)
        for (int i = 0; i < COUNT; i++) {
            const double mantissa = (double)(sim_random(random) >> 40) / (1 << 24) + 0.5;
            const int exponent = (int)(sim_random(random) % 9) - 4;
            wide[rank][i] = (float)ldexp(sim_random(random) % 2 ? mantissa : -mantissa, exponent);
        }
    if (dtype == MCCL_FLOAT32)
        return;
    for (int rank = 0; rank < N_MAX; rank++) {
        reduce_narrow(dtype, half[rank], wide[rank], COUNT);
        reduce_widen(dtype, wide[rank], half[rank], COUNT);
    }
}

/* Three hosts with ranks in no order, one of them with one rank; the last ones not with few ranks.
 */
static const int hosts[N_MAX] = {0, 1, 0, 1, 2, 1, 0, 1, 1, 0, 1, 0, 1};

static void all_reduce(int n, mccl_dtype dtype, enum coll_algorithm algorithm, bool in_place,
                       unsigned char (*result)[COUNT * sizeof(float)], uint64_t *random)
{
    for (int rank = 0; rank < n; rank++) {
        const void *operand =
            dtype == MCCL_FLOAT32 ? (const void *)wide[rank] : (const void *)half[rank];
        if (in_place)
            memcpy(result[rank], operand, COUNT * mccl_dtype_size(dtype));
        const struct coll_call call = {.kind = OP_ALL_REDUCE,
                                       .dtype = dtype,
                                       .op = MCCL_SUM,
                                       .send = in_place ? result[rank] : operand,
                                       .recv = result[rank],
                                       .count = COUNT};
        const struct coll_env env = {
            .rank = rank, .n_ranks = n, .chunk_bytes = 1024, .hosts = hosts};
        CHECK_OK(coll_build(&call, &env, algorithm, &schedules[rank]));
    }
    const char *error = sim_run(schedules, n, (int)(sim_random(random) % 3), random);
    if (error != NULL)
        CHECK_FAIL("%s, n=%d: %s", coll_algorithm_name(algorithm), n, error);
}

static void check_rank_order(int n, const float *got)
{
    for (int i = 0; i < COUNT; i++) {
        float sum = wide[0][i];
        for (int rank = 1; rank < n; rank++)
            sum += wide[rank][i];
        if (sum != got[i])
            CHECK_FAIL("n=%d element %d: %.9g, expected %.9g", n, i, (double)got[i], (double)sum);
    }
}

/* One rounding to `mantissa_bits` of a sum of n terms in float32. */
static void check_one_rounding(int n, mccl_dtype dtype, int mantissa_bits, const void *got)
{
    static float values[COUNT];
    reduce_widen(dtype, values, got, COUNT);
    for (int i = 0; i < COUNT; i++) {
        double sum = 0, size = 0;
        for (int rank = 0; rank < n; rank++) {
            sum += (double)wide[rank][i];
            size += fabs((double)wide[rank][i]);
        }
        const double bound =
            ldexp(fabs(sum), -mantissa_bits - 1) + ldexp(size * n, -23) + ldexp(1, -24);
        if (fabs((double)values[i] - sum) > bound)
            CHECK_FAIL("%s n=%d element %d: %.9g is further than %.3g from %.9g",
                       mccl_dtype_name(dtype), n, i, (double)values[i], bound, sum);
    }
}

static void test_algorithm(int n, mccl_dtype dtype, enum coll_algorithm algorithm, uint64_t *random)
{
    const size_t size = COUNT * mccl_dtype_size(dtype);
    make_operands(dtype, random);
    all_reduce(n, dtype, algorithm, false, results[0], random);
    all_reduce(n, dtype, algorithm, true, results[1], random);
    for (int rank = 0; rank < n; rank++) {
        CHECK_EQ_MEM(results[0][rank], results[0][0], size);
        CHECK_EQ_MEM(results[1][rank], results[0][0], size);
    }
    if (dtype == MCCL_FLOAT16)
        check_one_rounding(n, dtype, 10, results[0][0]);
    else if (dtype == MCCL_BFLOAT16)
        check_one_rounding(n, dtype, 7, results[0][0]);
    else if (algorithm == ALGO_DIRECT || algorithm == ALGO_TWO_SHOT)
        check_rank_order(n, (const float *)(const void *)results[0][0]);
}

int main(void)
{
    static const enum coll_algorithm algorithms[] = {
        ALGO_DIRECT,       ALGO_TWO_SHOT, ALGO_RING, ALGO_RING_FAST, ALGO_RECURSIVE_DOUBLING,
        ALGO_RABENSEIFNER, ALGO_TWO_LEVEL};
    static const mccl_dtype dtypes[] = {MCCL_FLOAT32, MCCL_FLOAT16, MCCL_BFLOAT16};
    uint64_t random = 2;
    for (int n = 2; n <= N_MAX; n++)
        for (size_t a = 0; a < sizeof(algorithms) / sizeof(algorithms[0]); a++)
            for (size_t d = 0; d < sizeof(dtypes) / sizeof(dtypes[0]); d++)
                if (algorithms[a] != ALGO_RING_FAST || n > 2)
                    test_algorithm(n, dtypes[d], algorithms[a], &random);
    for (int rank = 0; rank < N_MAX; rank++)
        schedule_free(&schedules[rank]);
    return 0;
}

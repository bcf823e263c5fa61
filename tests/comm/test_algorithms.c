/* SPDX-License-Identifier: MIT
 *
 * Every all-reduce algorithm, with several piece sizes and thresholds: exact on the pattern data;
 * on random floats bit-identical on all ranks, in place and out of place, and again on a second
 * communicator; 16-bit floats within one rounding of the exact sum.
 */
/* limit: 240 s */
/* sanitize: not thread */
/* each rank is a process here: nothing that test_collectives_threads.c lacks */
#include "support/cases.h"
#include "support/check.h"
#include "support/harness.h"
#include "support/pattern.h"

#include <math.h>

static const char *const algorithms[] = {
    "allreduce_algo=auto",
    "allreduce_algo=direct",
    "allreduce_algo=two_shot",
    "allreduce_algo=ring; ring_algo=auto",
    "allreduce_algo=ring; ring_algo=basic",
    "allreduce_algo=ring; ring_algo=chunked",
    "allreduce_algo=ring; ring_algo=fast",
    "allreduce_algo=ring_chunked; ring_algo=ring_chunked",
    "allreduce_algo=ring_chunked; ring_algo=fast",
    "allreduce_algo=recursive_doubling",
    "allreduce_algo=rabenseifner",
    "allreduce_algo=two_level",
};
static const char *const sizes[] = {
    "",
    "chunk_bytes=4096; small_msg_threshold=0",
    "chunk_bytes=20000; small_msg_threshold=100000",
    "chunk_bytes=1G; small_msg_threshold=1G",
};
#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

static const size_t counts[] = {1, 7, 1000, 40003};
#define MAX_COUNT 40003
static const mccl_dtype float_dtypes[] = {MCCL_FLOAT32, MCCL_FLOAT64, MCCL_FLOAT16, MCCL_BFLOAT16};

static void exact_cases(mccl_comm *comm)
{
    static const struct {
        mccl_dtype dtype;
        mccl_op op;
    } kinds[] = {{MCCL_FLOAT32, MCCL_SUM},       {MCCL_INT16, MCCL_PROD},
                 {MCCL_BFLOAT16, MCCL_AVG},      {MCCL_FLOAT16, MCCL_MAX},
                 {MCCL_COMPLEX64, MCCL_PROD},    {MCCL_UINT8, MCCL_BXOR},
                 {MCCL_FLOAT16, MCCL_PREMUL_SUM}};
    struct collective_case test = {.kind = CASE_ALL_REDUCE};
    for (size_t k = 0; k < LENGTH(kinds); k++) {
        for (size_t c = 0; c < LENGTH(counts); c++) {
            test.dtype = kinds[k].dtype;
            test.op = kinds[k].op;
            test.count = counts[c];
            test.in_place = (k + c) % 2 == 1;
            test.seed++;
            case_run(comm, &test);
        }
    }
}

/* A number with random sign, fraction and an exponent in -8 .. 7, rounded to the dtype. */
static double random_float(mccl_dtype dtype, int rank, size_t at, void *dst)
{
    const uint64_t hash = pattern_hash(77 + (uint64_t)dtype, (uint64_t)rank, at);
    const double fraction = 1.0 + (double)(hash >> 12) * 0x1p-52;
    const double value = (hash & 1 ? -1.0 : 1.0) * ldexp(fraction, (int)(hash >> 1 & 15) - 8);
    if (dtype == MCCL_FLOAT64) {
        memcpy(dst, &value, sizeof value);
        return value;
    }
    if (dtype == MCCL_FLOAT32) {
        const float single = (float)value;
        memcpy(dst, &single, sizeof single);
        return single;
    }
    const uint16_t bits = pattern_half_round(dtype, value);
    memcpy(dst, &bits, sizeof bits);
    return pattern_half_value(dtype, bits);
}

static uint64_t hash_bytes(const void *data, size_t size)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t at = 0; at < size; at++)
        hash = (hash ^ ((const unsigned char *)data)[at]) * 0x100000001b3u;
    return hash;
}

/* The only freedom beside rounding is that of a float32 accumulator. */
static void check_one_rounding(mccl_dtype dtype, const void *result, size_t count, int n)
{
    for (size_t at = 0; at < count; at++) {
        double exact = 0.0, sizes_sum = 0.0;
        for (int rank = 0; rank < n; rank++) {
            uint16_t unused;
            const double value = random_float(dtype, rank, at, &unused);
            exact += value;
            sizes_sum += fabs(value);
        }
        uint16_t bits;
        memcpy(&bits, (const char *)result + 2 * at, sizeof bits);
        const double got = pattern_half_value(dtype, bits);
        const double best = pattern_half_value(dtype, pattern_half_round(dtype, exact));
        if (!(fabs(got - exact) <= fabs(best - exact) + sizes_sum * 0x1p-21))
            CHECK_FAIL("%s element %zu: got %.9g, exact %.9g, nearest %.9g", mccl_dtype_name(dtype),
                       at, got, exact, best);
    }
}

/* Returns the hash of the result, which is the same on all ranks. */
static uint64_t reduce_random(mccl_comm *comm, const struct rank *self, mccl_dtype dtype,
                              size_t count, bool in_place)
{
    const size_t size = mccl_dtype_size(dtype);
    char *send = malloc(count * size), *recv = in_place ? send : malloc(count * size);
    CHECK(send != NULL && recv != NULL);
    for (size_t at = 0; at < count; at++)
        random_float(dtype, self->rank, at, send + at * size);
    CHECK_OK(mccl_all_reduce(send, recv, count, dtype, MCCL_SUM, comm, NULL, NULL));
    uint64_t hashes[TEAM_MAX];
    const uint64_t own = hash_bytes(recv, count * size);
    CHECK_OK(mccl_all_gather(&own, hashes, 1, MCCL_UINT64, comm, NULL, NULL));
    for (int rank = 0; rank < self->n; rank++) {
        if (hashes[rank] != own)
            CHECK_FAIL("%s count=%zu: ranks %d and %d hold different results",
                       mccl_dtype_name(dtype), count, self->rank, rank);
    }
    if (size == 2 && count <= 1000)
        check_one_rounding(dtype, recv, count, self->n);
    if (!in_place)
        free(recv);
    free(send);
    return own;
}

static void random_floats(mccl_comm *comm, const struct rank *self, uint64_t *expected, bool first)
{
    for (size_t d = 0; d < LENGTH(float_dtypes); d++) {
        for (size_t c = 0; c < LENGTH(counts); c++) {
            const uint64_t hash = reduce_random(comm, self, float_dtypes[d], counts[c], !first);
            uint64_t *known = &expected[d * LENGTH(counts) + c];
            if (first)
                *known = hash;
            else if (hash != *known)
                CHECK_FAIL("%s count=%zu: the second run gave other bits",
                           mccl_dtype_name(float_dtypes[d]), counts[c]);
        }
    }
}

static void rank_main(struct rank *self)
{
    for (size_t a = 0; a < LENGTH(algorithms); a++) {
        for (size_t s = 0; s < LENGTH(sizes); s++) {
            char settings[256];
            uint64_t hashes[LENGTH(float_dtypes) * LENGTH(counts)];
            snprintf(settings, sizeof settings, "%s; %s", algorithms[a], sizes[s]);
            fprintf(stderr, "%s\n", settings); /* shown if this fails */
            for (int life = 0; life < 2; life++) {
                mccl_comm *comm = rank_connect_with(self, settings, 20000);
                if (life == 0)
                    exact_cases(comm);
                random_floats(comm, self, hashes, life == 0);
                CHECK_OK(mccl_barrier(comm, NULL, NULL));
                CHECK_OK(mccl_comm_destroy(comm));
            }
        }
    }
}

int main(void)
{
    for (int n = 2; n <= 5; n++) {
        const int64_t start = now_ms();
        team_run(n, 110, rank_main, NULL);
        printf("n=%d: %.1f s\n", n, (double)(now_ms() - start) / 1000.0);
        fflush(stdout);
    }
    return 0;
}

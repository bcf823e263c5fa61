/* SPDX-License-Identifier: MIT
 *
 * What the collectives cost: bytes per rank against the published lower bounds, steps and scratch
 * of huge and of wide calls, and how well sending, receiving and reducing overlap. The last is a
 * simulation in which each rank has one port out, one port in and one core, all working at once.
 * Schedules are built over addresses that nobody reads.
 */
#include "base/config.h"
#include "coll/coll.h"
#include "coll_timing.h"

#include <math.h>

#define MIB ((size_t)1 << 20)
/* In times to send a byte. A message takes as long to start as 20 KB to pass. */
static const struct timing_rates rates = {
    .message = 20e3, .byte = 1, .operand = 0.25, .copied = 0.25, .counts_all = true};

static struct schedule schedules[SIM_MAX_RANKS];

/* Addresses far apart, for up to 16 TiB each. */
static void *fake_address(int index)
{
    return (void *)((uintptr_t)(index + 1) << 44);
}

static size_t chunk_bytes = 4 * MIB;

static void build(enum op_kind kind, enum coll_algorithm algorithm, int n, size_t bytes,
                  bool in_place)
{
    for (int rank = 0; rank < n; rank++) {
        const struct coll_env env = {
            .rank = rank, .n_ranks = n, .chunk_bytes = chunk_bytes, .small_bytes = 256 << 10};
        struct coll_call call = {.kind = kind, .dtype = MCCL_FLOAT32, .op = MCCL_SUM, .factor = 1};
        call.send = fake_address(0);
        call.recv = in_place ? fake_address(0) : fake_address(1);
        call.count = bytes / sizeof(float);
        const bool parts =
            kind == OP_ALL_GATHER || kind == OP_REDUCE_SCATTER || kind == OP_ALL_TO_ALL;
        if (parts)
            call.count /= (size_t)n;
        if (algorithm == ALGO_COUNT)
            CHECK_OK(coll_plan(&call, &env, &schedules[rank]));
        else
            CHECK_OK(coll_build(&call, &env, algorithm, &schedules[rank]));
    }
}

static uint64_t bytes_received(const struct schedule *schedule)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < schedule->n_steps; i++)
        if (schedule->steps[i].kind == STEP_RECV)
            bytes += schedule->steps[i].size;
    return bytes;
}

/* ---- Bytes
 * -----------------------------------------------------------------------------------------------
 */

/* S is the whole vector (of all ranks, for the kinds that are cut into n parts). Bounds:
 * docs/algorithms.md. */
static double least_bytes(enum op_kind kind, int n, double s)
{
    switch (kind) {
    case OP_ALL_REDUCE:
        return 2.0 * (n - 1) / n * s;
    case OP_ALL_GATHER:
    case OP_REDUCE_SCATTER:
    case OP_ALL_TO_ALL:
        return (n - 1.0) / n * s;
    default: /* OP_BROADCAST, OP_REDUCE: every rank but one has to get, or to give, all of it */
        return s;
    }
}

static void test_bytes(void)
{
    static const enum op_kind kinds[] = {OP_ALL_REDUCE, OP_REDUCE,         OP_BROADCAST,
                                         OP_ALL_GATHER, OP_REDUCE_SCATTER, OP_ALL_TO_ALL};
    const size_t bytes = 64 * MIB;
    printf("%-16s %2s %10s %10s %10s %6s\n", "64 MiB, default", "n", "sent", "received", "bound",
           "ratio");
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++)
        for (int n = 2; n <= 8; n++) {
            build(kinds[k], ALGO_COUNT, n, bytes, false);
            uint64_t sent = 0, received = 0, all_sent = 0, all_received = 0;
            for (int rank = 0; rank < n; rank++) {
                const uint64_t out = schedule_bytes_sent(&schedules[rank]);
                const uint64_t in = bytes_received(&schedules[rank]);
                sent = out > sent ? out : sent;
                received = in > received ? in : received;
                all_sent += out;
                all_received += in;
            }
            const double bound = least_bytes(kinds[k], n, (double)bytes);
            const double ratio = (double)(sent > received ? sent : received) / bound;
            printf("%-16s %2d %10llu %10llu %10.0f %6.3f\n", op_kind_name(kinds[k]), n,
                   (unsigned long long)sent, (unsigned long long)received, bound, ratio);
            CHECK_EQ_U64(all_sent, all_received);
            CHECK(ratio <= 1.02);
        }
}

/* ---- Size of schedules
 * ----------------------------------------------------------------------------------- */

static void test_size(void)
{
    static const int group_sizes[] = {2, 3, 8};
    const size_t huge = (size_t)8 << 30;
    for (int kind = OP_ALL_REDUCE; kind < OP_BARRIER; kind++)
        for (size_t i = 0; i < 3; i++) {
            if (kind == OP_ALL_GATHER_V || kind == OP_REDUCE_SCATTER_V || kind == OP_GATHER_V ||
                kind == OP_SCATTER_V || kind == OP_ALL_TO_ALL_V)
                continue; /* the same code as without _v */
            build((enum op_kind)kind, ALGO_COUNT, group_sizes[i], huge, true);
            for (int rank = 0; rank < group_sizes[i]; rank++) {
                CHECK_LE_I64(schedules[rank].n_steps, 80000);
                CHECK_LE_I64(schedules[rank].scratch_size, 32 << 20);
            }
        }
    /* A wide group: the last rank alone, since it is built without the others. */
    for (size_t bytes = 4; bytes <= huge; bytes *= 64) {
        const struct coll_call call = {.kind = OP_ALL_REDUCE,
                                       .dtype = MCCL_FLOAT32,
                                       .send = fake_address(0),
                                       .recv = fake_address(0),
                                       .count = bytes / 4};
        const struct coll_env env = {
            .rank = 255, .n_ranks = 256, .chunk_bytes = chunk_bytes, .small_bytes = 256 << 10};
        CHECK_OK(coll_plan(&call, &env, &schedules[0]));
        CHECK_LE_I64(schedules[0].n_steps, 80000);
        if (bytes <= 256 * MIB)
            CHECK_LE_I64(schedules[0].scratch_size, 8 << 20);
    }
}

/* ---- Overlap
 * --------------------------------------------------------------------------------------------- */

static void test_overlap(void)
{
    static const struct {
        enum op_kind kind;
        enum coll_algorithm algorithm;
        double limit;
    } rows[] = {
        /* MESSAGE_COST is 8 % of a piece of 256 KiB. */
        {OP_ALL_REDUCE, ALGO_COUNT, 1.1},
        {OP_ALL_REDUCE, ALGO_RING, 1.1},
        {OP_REDUCE_SCATTER, ALGO_COUNT, 1.1},
        {OP_ALL_GATHER, ALGO_COUNT, 1.02},
        /* Roots make traffic uneven, and ports here serve one message at a time: some stay idle. */
        {OP_REDUCE, ALGO_COUNT, 1.35},
        {OP_BROADCAST, ALGO_COUNT, 1.35},
    };
    const size_t bytes = 64 * MIB;
    printf("%-16s %-15s %2s  time / bound, out of place and in place\n", "64 MiB", "algorithm",
           "n");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        for (int n = 2; n <= 8; n++) {
            const double bound = least_bytes(rows[i].kind, n, (double)bytes);
            double times[2];
            for (int in_place = 0; in_place < 2; in_place++) {
                build(rows[i].kind, rows[i].algorithm, n, bytes, in_place == 1);
                times[in_place] = timing_run(schedules, n, &rates) / bound;
            }
            printf("%-16s %-15s %2d  %.3f %.3f\n", op_kind_name(rows[i].kind),
                   rows[i].algorithm == ALGO_COUNT ? "default"
                                                   : coll_algorithm_name(rows[i].algorithm),
                   n, times[0], times[1]);
            CHECK(times[0] <= rows[i].limit && times[1] <= rows[i].limit);
        }
}

int main(void)
{
    test_bytes();
    test_size();
    chunk_bytes =
        4096; /* the least that the setting allows: more steps than wanted, unless bounded */
    test_size();
    chunk_bytes = 4 * MIB;
    test_overlap();
    for (int rank = 0; rank < SIM_MAX_RANKS; rank++)
        schedule_free(&schedules[rank]);
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * The schedule builder: order per peer, dependencies, operands, reuse after a reset, running out of
 * memory; and the text and comparison of signatures.
 */
#include "comm/schedule.h"
#include "comm/signature.h"
#include "support/check.h"

static struct schedule schedule;

/* Steps that wait for `index`, as a bit set. */
static uint64_t successors(uint32_t index)
{
    uint64_t set = 0;
    for (uint32_t e = schedule.steps[index].successors; e != STEP_NONE; e = schedule.edges[e].next)
        set |= UINT64_C(1) << schedule.edges[e].to;
    return set;
}

static void test_messages(void)
{
    unsigned char memory[64];
    CHECK_OK(schedule_reset(&schedule, 3, MCCL_INT32, MCCL_SUM));
    CHECK_EQ_U64(schedule.first_send[0], STEP_NONE);
    CHECK_EQ_U64(schedule.first_recv[2], STEP_NONE);
    const uint32_t a = schedule_send(&schedule, 1, memory, 8, STEP_NONE);
    const uint32_t b = schedule_send(&schedule, 2, memory + 8, 16, STEP_NONE);
    const uint32_t c = schedule_recv(&schedule, 1, memory + 24, 4, a);
    const uint32_t d = schedule_send(&schedule, 1, NULL, 0, c);
    CHECK_EQ_U64(schedule.n_steps, 4);
    CHECK_EQ_U64(schedule.first_send[1], a);
    CHECK_EQ_U64(schedule.steps[a].next_same_peer, d);
    CHECK_EQ_U64(schedule.steps[d].next_same_peer, STEP_NONE);
    CHECK_EQ_U64(schedule.last_send[1], d);
    CHECK_EQ_U64(schedule.first_send[2], b);
    CHECK_EQ_U64(schedule.last_send[2], b);
    CHECK_EQ_U64(schedule.first_recv[1], c);
    CHECK_EQ_U64(schedule.first_recv[2], STEP_NONE);
    CHECK_EQ_I64(schedule.steps[c].kind, STEP_RECV);
    CHECK_EQ_I64(schedule.steps[c].peer, 1);
    CHECK(schedule.steps[c].dst == memory + 24);
    CHECK_EQ_U64(schedule.steps[c].size, 4);
    CHECK_EQ_U64(schedule.steps[a].waits_for, 0);
    CHECK_EQ_U64(schedule.steps[d].waits_for, 1);
    CHECK_EQ_U64(successors(a), UINT64_C(1) << c);
    CHECK_EQ_U64(schedule_bytes_sent(&schedule), 24);
}

static void test_edges(void)
{
    int x[4] = {1, 2, 3, 4}, y[4] = {10, 20, 30, 40}, z[4] = {0};
    const void *srcs[2] = {x, y};
    CHECK_OK(schedule_reset(&schedule, 2, MCCL_INT32, MCCL_SUM));
    const uint32_t a = schedule_recv(&schedule, 1, x, sizeof(x), STEP_NONE);
    const uint32_t b = schedule_recv(&schedule, 1, y, sizeof(y), STEP_NONE);
    const uint32_t c = schedule_reduce(&schedule, z, srcs, 2, 4, 1, a);
    schedule_after(&schedule, c, b);
    schedule_after(&schedule, c, STEP_NONE);
    schedule_after(&schedule, STEP_NONE, a);
    const uint32_t d = schedule_copy(&schedule, x, z, sizeof(x), c);
    const uint32_t e = schedule_copy(&schedule, y, z, sizeof(y), c);
    srcs[0] = srcs[1] = NULL; /* the list was copied */
    CHECK_EQ_U64(schedule.steps[c].waits_for, 2);
    CHECK_EQ_U64(successors(a), UINT64_C(1) << c);
    CHECK_EQ_U64(successors(b), UINT64_C(1) << c);
    CHECK_EQ_U64(successors(c), UINT64_C(1) << d | UINT64_C(1) << e);
    schedule_compute(&schedule, &schedule.steps[c]);
    schedule_compute(&schedule, &schedule.steps[d]);
    const int sum[4] = {11, 22, 33, 44};
    CHECK_EQ_MEM(z, sum, sizeof(sum));
    CHECK_EQ_MEM(x, sum, sizeof(sum));
    CHECK_EQ_I64(y[3], 40);
}

static void test_float_steps(void)
{
    const uint16_t half[3] = {0x3c00, 0xc000, 0x3800}; /* 1, -2, 0.5 */
    const uint16_t tripled[3] = {0x4200, 0xc600, 0x3e00};
    float wide[3];
    uint16_t narrow[3];
    CHECK_OK(schedule_reset(&schedule, 1, MCCL_FLOAT16, MCCL_PREMUL_SUM));
    CHECK_EQ_I64(schedule.narrow_dtype, MCCL_FLOAT16);
    schedule.dtype = MCCL_FLOAT32;
    schedule.factor = 3.0;
    uint32_t step = schedule_widen(&schedule, wide, half, 3, STEP_NONE);
    step = schedule_scale(&schedule, wide, wide, 3, step);
    schedule_narrow(&schedule, narrow, wide, 3, step);
    for (uint32_t i = 0; i < schedule.n_steps; i++)
        schedule_compute(&schedule, &schedule.steps[i]);
    CHECK_EQ_F64(wide[1], -6.0);
    CHECK_EQ_MEM(narrow, tripled, sizeof(tripled));
}

/* Many steps, one waiting for all others: growth keeps everything. */
static void test_growth(void)
{
    enum { N = 5000 };
    static unsigned char memory[N];
    static const void *srcs[N];
    CHECK_OK(schedule_reset(&schedule, 2, MCCL_UINT8, MCCL_SUM));
    for (uint32_t i = 0; i < N; i++) {
        CHECK_EQ_U64(schedule_recv(&schedule, 0, &memory[i], 1, STEP_NONE), i);
        srcs[i] = &memory[i];
        memory[i] = (unsigned char)i;
    }
    unsigned char total = 0, expected = 0;
    const uint32_t last = schedule_reduce(&schedule, &total, srcs, N, 1, 1, STEP_NONE);
    for (uint32_t i = 0; i < N; i++)
        schedule_after(&schedule, last, i);
    CHECK_EQ_U64(schedule.steps[last].waits_for, N);
    uint32_t n = 0;
    for (uint32_t i = schedule.first_recv[0]; i != STEP_NONE;
         i = schedule.steps[i].next_same_peer) {
        CHECK_EQ_U64(i, n++);
        CHECK_EQ_U64(schedule.edges[schedule.steps[i].successors].to, last);
    }
    CHECK_EQ_U64(n, N);
    schedule_compute(&schedule, &schedule.steps[last]);
    for (uint32_t i = 0; i < N; i++)
        expected = (unsigned char)(expected + memory[i]);
    CHECK_EQ_I64(total, expected);
}

static void test_reuse(void)
{
    const struct step *steps = schedule.steps;
    CHECK_OK(schedule_reset(&schedule, 2, MCCL_FLOAT64, MCCL_MAX));
    CHECK_EQ_U64(schedule.n_steps, 0);
    CHECK_EQ_U64(schedule_bytes_sent(&schedule), 0);
    CHECK(schedule.steps == steps);
    unsigned char *scratch = schedule_scratch(&schedule, 1000);
    CHECK(scratch != NULL && (uintptr_t)scratch % 64 == 0);
    memset(scratch, 1, 1000);
    CHECK_OK(schedule_reset(&schedule, 40, MCCL_FLOAT64, MCCL_MAX));
    CHECK(schedule_scratch(&schedule, 500) == scratch);
    for (int peer = 0; peer < 40; peer++)
        CHECK(schedule.first_send[peer] == STEP_NONE && schedule.last_recv[peer] == STEP_NONE);
    /* What only a huge operation needs does not stay. */
    CHECK_OK(schedule_reset(&schedule, 2, MCCL_FLOAT64, MCCL_MAX));
    CHECK(schedule_scratch(&schedule, (size_t)32 << 20) != NULL);
    CHECK_OK(schedule_reset(&schedule, 2, MCCL_FLOAT64, MCCL_MAX));
    CHECK_EQ_U64(schedule.scratch_cap, 0);
    CHECK(schedule.scratch == NULL);
}

static void test_out_of_memory(void)
{
    unsigned char memory[8];
    const void *srcs[1] = {memory};
    CHECK_OK(schedule_reset(&schedule, 2, MCCL_UINT8, MCCL_SUM));
    CHECK(schedule_scratch(&schedule, SIZE_MAX) == NULL);
    CHECK_EQ_I64(schedule.failed, MCCL_ERR_NO_MEMORY);
    CHECK_EQ_U64(schedule_send(&schedule, 1, memory, 8, STEP_NONE), STEP_NONE);
    CHECK_EQ_U64(schedule_recv(&schedule, 1, memory, 8, STEP_NONE), STEP_NONE);
    CHECK_EQ_U64(schedule_copy(&schedule, memory, memory + 4, 4, STEP_NONE), STEP_NONE);
    CHECK_EQ_U64(schedule_reduce(&schedule, memory, srcs, 1, 8, 1, STEP_NONE), STEP_NONE);
    CHECK_EQ_U64(schedule.n_steps, 0);
    CHECK_EQ_U64(schedule.first_send[1], STEP_NONE);
    CHECK(schedule_scratch(&schedule, 8) == NULL);
    /* The next operation starts afresh. */
    CHECK_OK(schedule_reset(&schedule, 2, MCCL_UINT8, MCCL_SUM));
    CHECK(schedule_scratch(&schedule, 8) != NULL);
    CHECK_EQ_U64(schedule_send(&schedule, 1, memory, 8, STEP_NONE), 0);
    schedule_free(&schedule);
    CHECK(schedule.steps == NULL && schedule.scratch == NULL && schedule.cap_ranks == 0);
    schedule_free(&schedule);
}

static void check_text(struct signature signature, const char *expected)
{
    char text[160];
    signature_format(&signature, text, sizeof(text));
    CHECK_EQ_STR(text, expected);
    char small[8];
    signature_format(&signature, small, sizeof(small));
    CHECK(strlen(small) == 7 && memcmp(small, expected, 7) == 0);
}

static void test_signatures(void)
{
    const struct signature base = {OP_REDUCE, MCCL_FLOAT32, MCCL_SUM, 2, 4};
    struct signature other = base;
    CHECK(signature_equal(&base, &other));
    other.count = UINT64_C(4) | UINT64_C(1) << 40;
    CHECK(!signature_equal(&base, &other));
    other = base, other.root = 3;
    CHECK(!signature_equal(&base, &other));
    other = base, other.reduce_op = MCCL_AVG;
    CHECK(!signature_equal(&base, &other));
    other = base, other.dtype = MCCL_INT8;
    CHECK(!signature_equal(&base, &other));
    other = base, other.kind = OP_ALL_REDUCE;
    CHECK(!signature_equal(&base, &other));

    check_text(base, "reduce(count=4, dtype=float32, op=sum, root=2)");
    check_text((struct signature){OP_ALL_REDUCE, MCCL_BFLOAT16, MCCL_AVG, SIGNATURE_NO_ROOT, 1},
               "all_reduce(count=1, dtype=bfloat16, op=avg)");
    check_text((struct signature){OP_BARRIER, MCCL_UINT8, SIGNATURE_NO_OP, SIGNATURE_NO_ROOT, 0},
               "barrier()");
    check_text(
        (struct signature){OP_ALL_TO_ALL_V, MCCL_INT8, SIGNATURE_NO_OP, SIGNATURE_NO_ROOT, 0},
        "all_to_all_v(dtype=int8)");
    other = (struct signature){OP_ALL_GATHER_V, MCCL_INT8, SIGNATURE_NO_OP, SIGNATURE_NO_ROOT, 70};
    check_text(other, "all_gather_v(counts=70 each, dtype=int8)");
    other.count = SIGNATURE_COUNTS_DIFFER | UINT64_C(75) << SIGNATURE_HASH_BITS | 0xabc;
    check_text(other, "all_gather_v(counts=75 in all #000abc, dtype=int8)");
    other.count = UINT64_MAX;
    check_text(other, "all_gather_v(counts=549755813887 in all #ffffff, dtype=int8)");
    /* From the network anything may come. */
    check_text((struct signature){200, 99, 77, 65000, UINT64_MAX},
               "operation 200(count=18446744073709551615, dtype=99, op=77, root=65000)");
    CHECK_EQ_STR(op_kind_name(OP_SCATTER_V), "scatter_v");
    CHECK_EQ_STR(op_kind_name(0), "?");
}

int main(void)
{
    test_messages();
    test_edges();
    test_float_steps();
    test_growth();
    test_reuse();
    test_out_of_memory();
    test_signatures();
    return 0;
}

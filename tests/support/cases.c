/* SPDX-License-Identifier: MIT
 *
 * See cases.h. Every kind is brought to one form: this rank sends blocks (each with the pattern of
 * a source rank and a first position), receives blocks, and knows what each must hold. Blocks of
 * the _V kinds lie in reverse order with gaps between them, so that nobody can take them for one
 * buffer.
 */
#include "support/cases.h"

#include "support/check.h"
#include "support/harness.h"
#include "support/pattern.h"

#define GUARD_BYTES 64
#define GUARD_VALUE 0xa5
#define POISON_VALUE 0x5a
#define RANKS_MAX 16

static const struct {
    const char *name;
    bool reduces, rooted, in_place;
} kinds[] = {
#define X(name, reduces, rooted, in_place) {#name, reduces, rooted, in_place},
    CASE_KINDS(X)
#undef X
};

bool case_reduces(enum case_kind kind)
{
    return kinds[kind].reduces;
}

bool case_has_root(enum case_kind kind)
{
    return kinds[kind].rooted;
}

bool case_can_be_in_place(enum case_kind kind)
{
    return kinds[kind].in_place;
}

/* Memory of up to RANKS_MAX blocks, one behind the other or apart. */
struct area {
    unsigned char *memory;
    size_t size;
    int n;
    bool apart;
    void *block[RANKS_MAX];
    size_t count[RANKS_MAX];
};

struct run {
    const struct collective_case *test;
    mccl_comm *comm;
    int rank, n;
    size_t element;
    struct area send, recv;
};

static void area_init(struct area *area, int n, const size_t *counts, size_t element, bool apart)
{
    area->n = n;
    area->apart = apart;
    area->size = GUARD_BYTES;
    for (int i = 0; i < n; i++)
        area->size += counts[i] * element + (apart ? GUARD_BYTES : 0);
    area->size += GUARD_BYTES;
    area->memory = malloc(area->size);
    CHECK(area->memory != NULL);
    size_t at = GUARD_BYTES;
    for (int k = 0; k < n; k++) {
        const int i = apart ? n - 1 - k : k;
        area->count[i] = counts[i];
        area->block[i] = area->memory + at;
        at += counts[i] * element + (apart ? GUARD_BYTES : 0);
    }
}

static void area_paint(struct area *area, size_t element)
{
    memset(area->memory, GUARD_VALUE, area->size);
    for (int i = 0; i < area->n; i++)
        memset(area->block[i], POISON_VALUE, area->count[i] * element);
}

static _Noreturn void fail(const struct run *run, const char *what, int block, size_t at,
                           const unsigned char *got, const unsigned char *expected)
{
    const struct collective_case *test = run->test;
    fprintf(stderr,
            "%s %s %s count=%zu root=%d %s seed=%llu, rank %d of %d: ", kinds[test->kind].name,
            mccl_dtype_name(test->dtype), case_reduces(test->kind) ? mccl_op_name(test->op) : "-",
            test->count, test->root, test->in_place ? "in place" : "out of place",
            (unsigned long long)test->seed, run->rank, run->n);
    const size_t start = at - at % run->element;
    fprintf(stderr, "%s, block %d, element %zu: got", what, block, at / run->element);
    for (size_t k = 0; k < run->element; k++)
        fprintf(stderr, " %02x", got[start + k]);
    fprintf(stderr, ", expected");
    for (size_t k = 0; k < run->element; k++)
        fprintf(stderr, " %02x", expected ? expected[start + k] : GUARD_VALUE);
    fputc('\n', stderr);
    CHECK_FAIL("wrong bytes");
}

static void check_guard(const struct run *run, const char *what, int block,
                        const unsigned char *guard)
{
    for (size_t k = 0; k < GUARD_BYTES; k++) {
        if (guard[k] != GUARD_VALUE)
            fail(run, what, block, 0, guard + k, NULL);
    }
}

/* Bytes outside of all blocks are as they were. */
static void check_guards(const struct run *run, const struct area *area, const char *what)
{
    check_guard(run, what, -1, area->memory);
    check_guard(run, what, area->n, area->memory + area->size - GUARD_BYTES);
    for (int i = 0; area->apart && i < area->n; i++)
        check_guard(run, what, i, (unsigned char *)area->block[i] + area->count[i] * run->element);
}

static void check_block(const struct run *run, const char *what, int block, const void *got,
                        const void *expected, size_t count)
{
    const size_t size = count * run->element;
    if (size == 0 || memcmp(got, expected, size) == 0)
        return;
    const unsigned char *a = got, *b = expected;
    size_t at = 0;
    while (a[at] == b[at])
        at++;
    fail(run, what, block, at, a, b);
}

/* ---- block sizes ---- */

/* Elements of the block that belongs to rank r. */
static size_t v_count(const struct collective_case *test, int r, int n)
{
    if (test->count == 0)
        return 0;
    return test->count * (size_t)(r + 1) / (size_t)n + (size_t)(r % 3);
}

/* all_to_all_v: what `from` sends to `to`. */
static size_t pair_count(const struct collective_case *test, int from, int to)
{
    if (test->count == 0)
        return 0;
    return test->count / (size_t)(1 + (from * 3 + to) % 4) + (size_t)((from + 2 * to) % 3);
}

static void fill_counts(const struct run *run, size_t *send, int *n_send, size_t *recv, int *n_recv)
{
    const struct collective_case *test = run->test;
    const int n = run->n, me = run->rank;
    const bool root = me == test->root;
    *n_send = *n_recv = 1;
    send[0] = recv[0] = test->count;
    for (int r = 1; r < n; r++)
        send[r] = recv[r] = test->count;
    switch (test->kind) {
    case CASE_REDUCE:
        *n_recv = root ? 1 : 0;
        break;
    case CASE_BROADCAST:
        *n_send = root ? 1 : 0;
        break;
    case CASE_ALL_GATHER:
        *n_recv = n;
        break;
    case CASE_GATHER:
        *n_recv = root ? n : 0;
        break;
    case CASE_SCATTER:
        *n_send = root ? n : 0;
        break;
    case CASE_REDUCE_SCATTER:
        *n_send = n;
        break;
    case CASE_ALL_TO_ALL:
        *n_send = *n_recv = n;
        break;
    case CASE_REDUCE_SCATTER_V:
    case CASE_SCATTER_V:
        *n_send = test->kind == CASE_SCATTER_V && !root ? 0 : n;
        for (int r = 0; r < n; r++)
            send[r] = v_count(test, r, n);
        recv[0] = v_count(test, me, n);
        break;
    case CASE_ALL_GATHER_V:
    case CASE_GATHER_V:
        *n_recv = test->kind == CASE_GATHER_V && !root ? 0 : n;
        for (int r = 0; r < n; r++)
            recv[r] = v_count(test, r, n);
        send[0] = v_count(test, me, n);
        break;
    case CASE_ALL_TO_ALL_V:
        *n_send = *n_recv = n;
        for (int r = 0; r < n; r++) {
            send[r] = pair_count(test, me, r);
            recv[r] = pair_count(test, r, me);
        }
        break;
    default:
        break;
    }
}

/* ---- data ---- */

/* Where in a rank's pattern the block for rank `to` begins: a number that no two blocks share. */
static size_t block_first(int to)
{
    return (size_t)to * 37;
}

static mccl_op fill_op(const struct run *run)
{
    return case_reduces(run->test->kind) ? run->test->op : PATTERN_MOVE;
}

static bool sends_blocks(enum case_kind kind)
{
    return kind == CASE_REDUCE_SCATTER || kind == CASE_REDUCE_SCATTER_V || kind == CASE_SCATTER ||
           kind == CASE_SCATTER_V || kind == CASE_ALL_TO_ALL || kind == CASE_ALL_TO_ALL_V;
}

static void fill_send(const struct run *run, void *dst, int block, size_t count)
{
    const size_t first = sends_blocks(run->test->kind) ? block_first(block) : 0;
    pattern_fill(dst, count, run->test->dtype, fill_op(run), run->test->seed, run->rank, run->n,
                 first);
}

static void fill_expected(const struct run *run, void *dst, int block, size_t count)
{
    const struct collective_case *test = run->test;
    const size_t first = sends_blocks(test->kind) ? block_first(run->rank) : 0;
    if (case_reduces(test->kind)) {
        pattern_reduced(dst, count, test->dtype, test->op, test->seed, run->n, first);
        return;
    }
    const bool from_root =
        test->kind == CASE_BROADCAST || test->kind == CASE_SCATTER || test->kind == CASE_SCATTER_V;
    pattern_fill(dst, count, test->dtype, PATTERN_MOVE, test->seed, from_root ? test->root : block,
                 run->n, first);
}

/* ---- the call ---- */

/* In place, one of the two areas is part of the other. */
static void alias(struct run *run)
{
    struct area *send = &run->send, *recv = &run->recv;
    switch (run->test->kind) {
    case CASE_ALL_REDUCE:
    case CASE_REDUCE:
    case CASE_BROADCAST:
        if (send->n && recv->n)
            recv->block[0] = send->block[0];
        break;
    case CASE_ALL_GATHER:
    case CASE_ALL_GATHER_V:
    case CASE_GATHER:
    case CASE_GATHER_V:
        if (recv->n)
            send->block[0] = recv->block[run->rank];
        break;
    default: /* one block out of several sent */
        if (send->n)
            recv->block[0] = send->block[run->rank];
        break;
    }
}

static mccl_result call(struct run *run)
{
    const struct collective_case *t = run->test;
    mccl_comm *comm = run->comm;
    void *const *recvs = run->recv.block;
    const void *sends[RANKS_MAX];
    for (int r = 0; r < RANKS_MAX; r++)
        sends[r] = r < run->send.n ? run->send.block[r] : NULL;
    const void *send = run->send.n ? sends[0] : NULL;
    void *recv = run->recv.n ? recvs[0] : NULL;
    const size_t *send_counts = run->send.count, *recv_counts = run->recv.count;
    switch (t->kind) {
    case CASE_ALL_REDUCE:
        return mccl_all_reduce(send, recv, t->count, t->dtype, t->op, comm, NULL, NULL);
    case CASE_REDUCE:
        return mccl_reduce(send, recv, t->count, t->dtype, t->op, t->root, comm, NULL, NULL);
    case CASE_REDUCE_SCATTER:
        return mccl_reduce_scatter(send, recv, t->count, t->dtype, t->op, comm, NULL, NULL);
    case CASE_REDUCE_SCATTER_V:
        return mccl_reduce_scatter_v(sends, send_counts, recv, t->dtype, t->op, comm, NULL, NULL);
    case CASE_BROADCAST:
        return mccl_broadcast(send, recv, t->count, t->dtype, t->root, comm, NULL, NULL);
    case CASE_ALL_GATHER:
        return mccl_all_gather(send, recv, t->count, t->dtype, comm, NULL, NULL);
    case CASE_ALL_GATHER_V:
        return mccl_all_gather_v(send, recvs, recv_counts, t->dtype, comm, NULL, NULL);
    case CASE_GATHER:
        return mccl_gather(send, recv, t->count, t->dtype, t->root, comm, NULL, NULL);
    case CASE_GATHER_V:
        return mccl_gather_v(send, send_counts[0], recvs, recv_counts, t->dtype, t->root, comm,
                             NULL, NULL);
    case CASE_SCATTER:
        return mccl_scatter(send, recv, t->count, t->dtype, t->root, comm, NULL, NULL);
    case CASE_SCATTER_V:
        return mccl_scatter_v(sends, send_counts, recv, recv_counts[0], t->dtype, t->root, comm,
                              NULL, NULL);
    case CASE_ALL_TO_ALL:
        return mccl_all_to_all(send, recv, t->count, t->dtype, comm, NULL, NULL);
    case CASE_ALL_TO_ALL_V:
        return mccl_all_to_all_v(sends, send_counts, recvs, recv_counts, t->dtype, comm, NULL,
                                 NULL);
    default:
        return MCCL_ERR_INTERNAL;
    }
}

static void check_result(struct run *run)
{
    size_t largest = 1;
    for (int r = 0; r < run->recv.n; r++)
        largest = run->recv.count[r] > largest ? run->recv.count[r] : largest;
    for (int r = 0; r < run->send.n; r++)
        largest = run->send.count[r] > largest ? run->send.count[r] : largest;
    void *expected = malloc(largest * run->element);
    CHECK(expected != NULL);
    for (int r = 0; r < run->recv.n; r++) {
        if (r == 0 || !case_reduces(run->test->kind))
            fill_expected(run, expected, r, run->recv.count[r]);
        check_block(run, "wrong result", r, run->recv.block[r], expected, run->recv.count[r]);
    }
    for (int r = 0; r < run->send.n; r++) {
        /* The one block that holds a result now was checked above. */
        if (case_reduces(run->test->kind) && run->recv.n &&
            run->send.block[r] == run->recv.block[0])
            continue;
        fill_send(run, expected, r, run->send.count[r]);
        check_block(run, "send buffer changed", r, run->send.block[r], expected,
                    run->send.count[r]);
    }
    free(expected);
    check_guards(run, &run->send, "written beside the send buffer");
    check_guards(run, &run->recv, "written beside the receive buffer");
}

void case_run(mccl_comm *comm, const struct collective_case *test)
{
    struct run run = {.test = test, .comm = comm, .element = mccl_dtype_size(test->dtype)};
    size_t send_counts[RANKS_MAX], recv_counts[RANKS_MAX];
    int n_send = 0, n_recv = 0;
    CHECK_OK(mccl_comm_rank(comm, &run.rank));
    CHECK_OK(mccl_comm_count(comm, &run.n));
    CHECK(run.n <= RANKS_MAX);
    const bool apart = test->kind == CASE_REDUCE_SCATTER_V || test->kind == CASE_ALL_GATHER_V ||
                       test->kind == CASE_GATHER_V || test->kind == CASE_SCATTER_V ||
                       test->kind == CASE_ALL_TO_ALL_V;
    fill_counts(&run, send_counts, &n_send, recv_counts, &n_recv);
    area_init(&run.send, n_send, send_counts, run.element, apart);
    area_init(&run.recv, n_recv, recv_counts, run.element, apart);
    area_paint(&run.send, run.element);
    area_paint(&run.recv, run.element);
    if (test->in_place)
        alias(&run);
    for (int r = 0; r < run.send.n; r++)
        fill_send(&run, run.send.block[r], r, run.send.count[r]);
    if (test->op == MCCL_PREMUL_SUM && case_reduces(test->kind)) {
        mccl_options options = MCCL_OPTIONS_INIT;
        options.factor = pattern_factor(run.rank);
        CHECK_OK(mccl_set_options(&options));
    }
    const mccl_result result = call(&run);
    if (result != MCCL_OK)
        CHECK_FAIL("%s %s count=%zu on rank %d of %d: %s (%s)", kinds[test->kind].name,
                   mccl_dtype_name(test->dtype), test->count, run.rank, run.n,
                   mccl_result_name(result), mccl_last_error());
    check_result(&run);
    free(run.send.memory);
    free(run.recv.memory);
}

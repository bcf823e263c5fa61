/* SPDX-License-Identifier: MIT
 *
 * How many payload bytes each collective moves: for large counts at most 1.1 times the published
 * lower bound of a rank (Chan et al. 2007, "Collective communication: theory, practice, and
 * experience"; Thakur et al. 2005 for all-to-all), and not less than must move at all.
 */
/* limit: 60 s */
#include "support/check.h"
#include "support/harness.h"

#define BLOCK (1024 * 1024) /* bytes, uint8; with 5 KiB more it is no round number */
#define COUNT (BLOCK + 5000)

enum kind {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    BROADCAST,
    REDUCE,
    GATHER,
    SCATTER,
    ALL_TO_ALL,
    N_KINDS
};
static const char *const names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                    "reduce",     "gather",         "scatter",    "all_to_all"};

static mccl_result run_kind(enum kind kind, const void *send, void *recv, mccl_comm *comm)
{
    const mccl_dtype dtype = MCCL_UINT8;
    switch (kind) {
    case ALL_REDUCE:
        return mccl_all_reduce(send, recv, COUNT, dtype, MCCL_SUM, comm, NULL, NULL);
    case REDUCE_SCATTER:
        return mccl_reduce_scatter(send, recv, COUNT, dtype, MCCL_SUM, comm, NULL, NULL);
    case ALL_GATHER:
        return mccl_all_gather(send, recv, COUNT, dtype, comm, NULL, NULL);
    case BROADCAST:
        return mccl_broadcast(send, recv, COUNT, dtype, 0, comm, NULL, NULL);
    case REDUCE:
        return mccl_reduce(send, recv, COUNT, dtype, MCCL_SUM, 0, comm, NULL, NULL);
    case GATHER:
        return mccl_gather(send, recv, COUNT, dtype, 0, comm, NULL, NULL);
    case SCATTER:
        return mccl_scatter(send, recv, COUNT, dtype, 0, comm, NULL, NULL);
    default:
        return mccl_all_to_all(send, recv, COUNT, dtype, comm, NULL, NULL);
    }
}

/* Lower bound of bytes: what the busiest rank must send, and what a rank must receive. */
struct bound {
    double sent_root, sent_other; /* most that the root, and each other rank, has to send */
    double received_root, received_other;
};

static struct bound bound_of(enum kind kind, int n)
{
    const double s = COUNT, others = n - 1, share = others / n;
    switch (kind) {
    case ALL_REDUCE: /* n = 2: the whole vector once, which equals 2 * 1/2 */
        return (struct bound){2 * share * s, 2 * share * s, 2 * share * s, 2 * share * s};
    case REDUCE_SCATTER: /* of a vector of n blocks */
    case ALL_GATHER:
    case ALL_TO_ALL:
        return (struct bound){others * s, others * s, others * s, others * s};
    case BROADCAST: /* bandwidth-optimal: scatter, then all-gather among all but the root */
        return (struct bound){s, s, 0, s};
    case REDUCE: /* mirrored: reduce-scatter, then gather */
        return (struct bound){s, s, s, s};
    case GATHER:
        return (struct bound){0, s, others * s, 0};
    default: /* scatter */
        return (struct bound){others * s, 0, 0, s};
    }
}

static void check_at_most(const char *what, const char *name, const struct rank *self, uint64_t got,
                          double bound)
{
    if ((double)got > 1.1 * bound)
        CHECK_FAIL("%s, rank %d of %d: %s %llu bytes, bound %.0f", name, self->rank, self->n, what,
                   (unsigned long long)got, bound);
}

static mccl_stats stats_of(mccl_comm *comm)
{
    mccl_stats stats = {.size = sizeof stats};
    CHECK_OK(mccl_comm_get_stats(comm, &stats));
    return stats;
}

static void measure(struct rank *self, mccl_comm *comm, enum kind kind, const void *send,
                    void *recv)
{
    const int n = self->n;
    const bool root = self->rank == 0;
    const struct bound bound = bound_of(kind, n);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    const mccl_stats before = stats_of(comm);
    CHECK_OK(run_kind(kind, send, recv, comm));
    const mccl_stats after = stats_of(comm);
    const uint64_t sent = after.bytes_sent - before.bytes_sent;
    const uint64_t received = after.bytes_received - before.bytes_received;
    CHECK_EQ_U64(after.operations - before.operations, 1);
    CHECK_EQ_U64(after.errors, 0);
    check_at_most("sent", names[kind], self, sent, root ? bound.sent_root : bound.sent_other);
    check_at_most("received", names[kind], self, received,
                  root ? bound.received_root : bound.received_other);
    /* And everything arrives: over all ranks as much is received as sent. */
    int64_t totals[2] = {(int64_t)sent, (int64_t)received};
    CHECK_OK(mccl_all_reduce(totals, totals, 2, MCCL_INT64, MCCL_SUM, comm, NULL, NULL));
    CHECK_EQ_I64(totals[0], totals[1]);
    CHECK_GE_I64(totals[0], (int64_t)(n - 1) * COUNT); /* no kind can do with less */
    if (root)
        printf("n=%d %-14s root sent %6.2f, all ranks together %6.2f times the count\n", n,
               names[kind], (double)sent / COUNT, (double)totals[0] / COUNT);
}

static void rank_main(struct rank *self)
{
    const size_t size = (size_t)COUNT * (size_t)self->n;
    char *send = calloc(1, size), *recv = calloc(1, size);
    CHECK(send != NULL && recv != NULL);
    mccl_comm *comm = rank_connect_with(self, NULL, 20000);
    for (int kind = 0; kind < N_KINDS; kind++)
        measure(self, comm, (enum kind)kind, send, recv);
    /* Point to point counts too. */
    const mccl_stats before = stats_of(comm);
    if (self->rank == 0)
        CHECK_OK(mccl_send(send, 1000, MCCL_FLOAT32, 1, comm, NULL, NULL));
    else if (self->rank == 1)
        CHECK_OK(mccl_recv(recv, 1000, MCCL_FLOAT32, 0, comm, NULL, NULL));
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    const mccl_stats after = stats_of(comm);
    CHECK_EQ_U64(after.bytes_sent - before.bytes_sent, self->rank == 0 ? 4000 : 0);
    CHECK_EQ_U64(after.bytes_received - before.bytes_received, self->rank == 1 ? 4000 : 0);
    fflush(stdout);
    CHECK_OK(mccl_comm_destroy(comm));
    free(recv);
    free(send);
}

int main(void)
{
    for (int n = 2; n <= 5; n++)
        team_run(n, 30, rank_main, NULL);
    team_run(8, 30, rank_main, NULL);
    return 0;
}

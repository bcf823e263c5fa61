/* SPDX-License-Identifier: MIT
 *
 * See cost.h. The formulas are those of docs/algorithms.md, with two things more: every message
 * costs its port something besides the time that it is under way, and long data goes in pieces.
 */
#include "coll/cost.h"

/* Of reduced or forwarded data; see cut.c. */
#define PIECE (256.0 * 1024)

/* step and message: what a message of 4 bytes takes from rank to rank, and what one more adds that
 * is sent at the same time. byte: the inverse of a port's rate. reduced: kernels in the level-2
 * cache. First guesses: see docs/algorithms.md for what was measured. */
static const struct cost_rates rates[] = {
    [LINKS_TCP] = {10e-6, 5e-6, 1 / 5e9, 1 / 10e9},
    [LINKS_SHM] = {1e-6, 0.5e-6, 1 / 8e9, 1 / 10e9},
    [LINKS_MIXED] = {10e-6, 5e-6, 1 / 5e9, 1 / 10e9},
};

const struct cost_rates *cost_rates(enum coll_links links)
{
    return &rates[links];
}

double cost_seconds(const struct cost_terms *terms, const struct cost_rates *r)
{
    return terms->steps * r->step + terms->messages * r->message + terms->bytes * r->byte +
           terms->reduced * r->reduced;
}

struct size {
    double n, s;        /* ranks, bytes */
    double floor, ceil; /* log2(n), rounded */
    double power;       /* 2^floor */
    double fold;        /* 1 if n is no power of two */
    double bits;        /* ones in the numbers below n, altogether */
    double depth;       /* steps of Bruck's algorithms of which each waits for the one before */
};

static double least(double a, double b)
{
    return a < b ? a : b;
}

static double most(double a, double b)
{
    return a > b ? a : b;
}

static struct size measure(int n, double bytes)
{
    struct size z = {.n = n, .s = bytes, .power = 1};
    for (; 2 * z.power <= n; z.floor++)
        z.power *= 2;
    z.fold = z.power < n;
    z.ceil = z.floor + z.fold;
    for (int i = 0; i < n; i++)
        for (int bits = i; bits != 0; bits &= bits - 1)
            z.bits++;
    /* The last step hands on what is here after as many steps as that much takes. */
    double rest = z.fold;
    for (double handed_on = 1; z.fold > 0 && handed_on < n - z.power; handed_on *= 2)
        rest++;
    z.depth = most(z.floor, rest);
    return z;
}

static struct cost_terms all_reduce(enum coll_algorithm algorithm, const struct size *z)
{
    const double n = z->n, s = z->s, each = (n - 1) / n * s;
    const double steps = z->floor + 2 * z->fold, part = (z->power - 1) / z->power * s;
    /* Folding takes one vector more; of another one, the first piece. */
    const double folded = z->fold * (s + least(s, PIECE));
    switch (algorithm) {
    case ALGO_DIRECT:
        return (struct cost_terms){1, n - 1, (n - 1) * s, (n - 1) * s};
    case ALGO_TWO_SHOT:
    case ALGO_TWO_LEVEL: /* the model knows no hosts; on one it is the same */
        return (struct cost_terms){2, 2 * (n - 1), 2 * each, each};
    case ALGO_RING:
        return (struct cost_terms){2 * (n - 1), 2 * (n - 1), 2 * each, each};
    case ALGO_RING_FAST:
        return (struct cost_terms){2 * (n - 1), 4 * (n - 1), 2 * each, each};
    case ALGO_RECURSIVE_DOUBLING:
        return (struct cost_terms){steps, steps, z->floor * s + folded, (z->floor + z->fold) * s};
    default: /* ALGO_RABENSEIFNER */
        return (struct cost_terms){steps + z->floor, steps + z->floor, 2 * part + folded,
                                   part + z->fold * s};
    }
}

/* Shares of less than a cache line are not made: fewer ranks have one. */
static struct cost_terms scatter_gather(enum op_kind kind, const struct size *z)
{
    const double n_shares = most(1, least(z->n - 1, z->s / 64));
    const double share = least(z->s / (z->n - 1), PIECE);
    if (z->n == 2) /* root has no share: a broadcast ends after the first half */
        return kind == OP_BROADCAST ? (struct cost_terms){1, 1, z->s, 0}
                                    : (struct cost_terms){2, 2, z->s + share, 0};
    /* The second half begins with the first piece of each share. */
    return (struct cost_terms){2, n_shares + z->n - 2, z->s + (z->n - 2) * share, 0};
}

static struct cost_terms rooted(enum op_kind kind, enum coll_algorithm algorithm,
                                const struct size *z)
{
    const double n = z->n, s = z->s;
    struct cost_terms terms;
    switch (algorithm) {
    case ALGO_LINEAR:
        terms = (struct cost_terms){1, n - 1, (n - 1) * s, 0};
        break;
    case ALGO_TREE:
        terms = (struct cost_terms){z->floor, z->ceil, z->ceil * s, 0};
        break;
    case ALGO_CHAIN: /* the first piece goes all the way, the others follow */
        terms = (struct cost_terms){n - 1, n - 1, s + (n - 2) * least(s, PIECE), 0};
        break;
    default: /* ALGO_SCATTER_GATHER */
        terms = scatter_gather(kind, z);
        break;
    }
    terms.reduced = kind == OP_REDUCE ? terms.bytes : 0;
    return terms;
}

static struct cost_terms parts(enum op_kind kind, enum coll_algorithm algorithm,
                               const struct size *z)
{
    const double n = z->n, each = (n - 1) / n * z->s;
    struct cost_terms terms;
    switch (algorithm) {
    case ALGO_RING:
        terms = (struct cost_terms){n - 1, n - 1, each, 0};
        break;
    case ALGO_TREE:
        terms = (struct cost_terms){z->floor, z->ceil, each, 0};
        if (kind == OP_SCATTER) /* root's ports take turns: what a child passes on comes last */
            terms.bytes = (2 * n - 2 - z->ceil) / n * z->s;
        break;
    case ALGO_BRUCK:
        if (kind == OP_ALL_TO_ALL) /* packed at every stop, and put in place */
            return (struct cost_terms){z->depth, z->ceil, z->bits / n * z->s,
                                       (z->bits / n + 1) / 2 * z->s};
        /* A message is cut in two where the blocks of a rank go on with the first one. */
        terms = (struct cost_terms){z->depth, 1.5 * z->ceil - 0.5, each, 0};
        break;
    default: /* ALGO_DIRECT, ALGO_LINEAR, ALGO_PAIRWISE: everything at once */
        terms = (struct cost_terms){1, n - 1, each, 0};
        break;
    }
    terms.reduced = kind == OP_REDUCE_SCATTER ? each : 0;
    return terms;
}

bool cost_terms(enum op_kind kind, enum coll_algorithm algorithm, int n, double bytes,
                struct cost_terms *terms)
{
    const struct size z = measure(n, bytes);
    switch (kind) {
    case OP_ALL_REDUCE:
        *terms = all_reduce(algorithm, &z);
        break;
    case OP_REDUCE:
    case OP_BROADCAST:
        *terms = rooted(kind, algorithm, &z);
        break;
    case OP_ALL_GATHER:
    case OP_REDUCE_SCATTER:
    case OP_GATHER:
    case OP_SCATTER:
    case OP_ALL_TO_ALL:
        *terms = parts(kind, algorithm, &z);
        break;
    case OP_BARRIER:
        *terms = (struct cost_terms){z.ceil, z.ceil, 0, 0};
        break;
    default: /* parts of different size: as without _v */
        return false;
    }
    terms->messages += terms->bytes / PIECE;
    return true;
}

/* SPDX-License-Identifier: MIT
 *
 * The cost model: its formulas against a simulation of the schedules of all ranks, and the table's
 * choices against the formulas. The best algorithm is that with the lowest modelled time among all
 * that can do the call.
 */
/* limit: 120 s */
#include "base/config.h"
#include "coll/coll.h"
#include "coll/cost.h"
#include "coll_timing.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* A formula adds up what may overlap (moving, reducing) and leaves out where a port waits for
 * another: its time is that of the simulation but for this factor, either way. */
#define MODEL_FACTOR 1.8
/* The chosen algorithm's time is at most this many times the best one's. */
#define CHOICE_FACTOR 1.3

static const enum op_kind kinds[] = {OP_ALL_REDUCE, OP_REDUCE,         OP_BROADCAST,
                                     OP_ALL_GATHER, OP_REDUCE_SCATTER, OP_GATHER,
                                     OP_SCATTER,    OP_ALL_TO_ALL,     OP_BARRIER};
static const char *const link_names[N_LINKS] = {"tcp", "shm", "mixed"};
#define N_KINDS (sizeof(kinds) / sizeof(kinds[0]))

static struct schedule schedules[SIM_MAX_RANKS];
static bool verbose;

/* Has the kind one block per rank? Then `bytes` is all of them. */
static bool has_parts(enum op_kind kind)
{
    return kind != OP_ALL_REDUCE && kind != OP_REDUCE && kind != OP_BROADCAST;
}

static struct coll_call make_call(enum op_kind kind, int n, size_t bytes)
{
    struct coll_call call = {.kind = kind, .dtype = MCCL_FLOAT32, .op = MCCL_SUM, .factor = 1};
    /* Addresses that nobody reads. */
    call.send = (void *)((uintptr_t)1 << 44);
    call.recv = (void *)((uintptr_t)2 << 44);
    call.count = bytes / sizeof(float) / (has_parts(kind) ? (size_t)n : 1);
    return call;
}

static struct coll_env make_env(int rank, int n, enum coll_links links)
{
    return (struct coll_env){.rank = rank,
                             .n_ranks = n,
                             .chunk_bytes = 4 * MIB,
                             .small_bytes = 256 * KIB,
                             .links = links};
}

static double modelled(enum op_kind kind, enum coll_algorithm algorithm, int n, size_t bytes,
                       enum coll_links links)
{
    struct cost_terms terms;
    CHECK(cost_terms(kind, algorithm, n, (double)bytes, &terms));
    return cost_seconds(&terms, cost_rates(links));
}

static double simulated(enum op_kind kind, enum coll_algorithm algorithm, int n, size_t bytes,
                        enum coll_links links)
{
    const struct cost_rates *rates = cost_rates(links);
    const struct timing_rates timing = {.latency = rates->step,
                                        .message = rates->message,
                                        .byte = rates->byte,
                                        .operand = rates->reduced,
                                        .copied = rates->reduced / 2};
    const struct coll_call call = make_call(kind, n, bytes);
    for (int rank = 0; rank < n; rank++) {
        const struct coll_env env = make_env(rank, n, links);
        CHECK_OK(coll_build(&call, &env, algorithm, &schedules[rank]));
    }
    return timing_run(schedules, n, &timing);
}

static void check_formula(enum op_kind kind, enum coll_algorithm algorithm, int n, size_t bytes,
                          enum coll_links links)
{
    const double model = modelled(kind, algorithm, n, bytes, links);
    const double time = simulated(kind, algorithm, n, bytes, links);
    const bool holds = time <= model * MODEL_FACTOR && model <= time * MODEL_FACTOR;
    if (verbose || !holds)
        printf("%-15s %-18s n=%-2d %9zu B %-5s model %10.2f us, simulated %10.2f us: %.2f\n",
               op_kind_name(kind), coll_algorithm_name(algorithm), n, bytes, link_names[links],
               model * 1e6, time * 1e6, time / model);
    if (!verbose)
        CHECK(holds);
}

static void test_formulas(void)
{
    static const int sizes[] = {2, 3, 4, 5, 8, 12, 16};
    for (size_t k = 0; k < N_KINDS; k++)
        for (int algorithm = ALGO_LOCAL + 1; algorithm < ALGO_COUNT; algorithm++)
            for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
                for (size_t bytes = 4 * (size_t)sizes[i]; bytes <= 64 * MIB; bytes *= 16)
                    for (int links = 0; links < LINKS_MIXED; links++)
                        if (algorithm != ALGO_TWO_LEVEL && /* two_shot on one host */
                            coll_has(kinds[k], (enum coll_algorithm)algorithm, sizes[i]))
                            check_formula(kinds[k], (enum coll_algorithm)algorithm, sizes[i], bytes,
                                          (enum coll_links)links);
}

/* Returns the factor by which the choice is behind. */
static double check_choice(enum op_kind kind, int n, size_t bytes, enum coll_links links)
{
    const struct coll_call call = make_call(kind, n, bytes);
    const struct coll_env env = make_env(0, n, links);
    const enum coll_algorithm chosen = coll_choose(&call, &env);
    const double time = modelled(kind, chosen, n, bytes, links);
    double best_time = time;
    enum coll_algorithm best = chosen;
    for (int algorithm = ALGO_LOCAL + 1; algorithm < ALGO_COUNT; algorithm++) {
        if (algorithm == ALGO_TWO_LEVEL || !coll_has(kind, (enum coll_algorithm)algorithm, n))
            continue;
        const double other = modelled(kind, (enum coll_algorithm)algorithm, n, bytes, links);
        if (other < best_time) {
            best_time = other;
            best = (enum coll_algorithm)algorithm;
        }
    }
    const bool holds = time <= best_time * CHOICE_FACTOR;
    if (verbose || !holds)
        printf("%-15s n=%-2d %9zu B %-5s %-18s %10.2f us, best %-18s %10.2f us: %.2f\n",
               op_kind_name(kind), n, bytes, link_names[links], coll_algorithm_name(chosen),
               time * 1e6, coll_algorithm_name(best), best_time * 1e6, time / best_time);
    if (!verbose)
        CHECK(holds);
    return time / best_time;
}

static void test_choices(void)
{
    double worst = 1;
    for (size_t k = 0; k < N_KINDS; k++)
        for (int n = 2; n <= 16; n++)
            for (size_t bytes = 4; bytes <= 64 * MIB; bytes *= 2)
                for (int links = 0; links < N_LINKS; links++) {
                    if (has_parts(kinds[k]) && bytes < 4 * (size_t)n)
                        continue;
                    const double ratio = check_choice(kinds[k], n, bytes, (enum coll_links)links);
                    worst = ratio > worst ? ratio : worst;
                }
    printf("the choice takes at most %.2f times the best\n", worst);
}

int main(int argc, char **argv)
{
    verbose = argc > 1 && strcmp(argv[1], "-v") == 0;
    test_formulas();
    test_choices();
    for (int rank = 0; rank < SIM_MAX_RANKS; rank++)
        schedule_free(&schedules[rank]);
    return 0;
}

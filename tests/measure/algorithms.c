/* SPDX-License-Identifier: MIT
 *
 * Measures every algorithm of every collective between processes of this host and prints CSV:
 * op,algorithm,n,bytes,class,p50_us,min_us. `bytes` is S in docs/algorithms.md.
 *
 *     algorithms [-t tcp,shm] [-n 2,4,8] [-b 4,1024,65536,1048576] [-o all_reduce,...] [-r ROUNDS]
 *
 * The algorithms of one op and size take turns: each round runs all of them once. Ranks begin a
 * call together, at a page that they share, and its time is that from the last arrival to the end
 * of the slowest rank. Long calls get fewer rounds (at least 7). Ranks are not pinned. Linked with
 * the inside of the library, since only all_reduce's algorithm can be chosen by a setting.
 */
#include "coll/coll.h"
#include "coll/force.h"

#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS_MAX 64
#define ROUNDS_MAX 1001
#define LIST_MAX 32
#define LINE 128
#define WARM_UP 3
#define MIN_ROUNDS 7
#define SECONDS_EACH 0.6 /* for one algorithm, op, size and number of ranks, about */

static const struct {
    const char *name;
    enum op_kind kind;
    bool parts; /* one block per rank: S is all of them */
} ops[] = {
    {"all_reduce", OP_ALL_REDUCE, false}, {"reduce", OP_REDUCE, false},
    {"broadcast", OP_BROADCAST, false},   {"all_gather", OP_ALL_GATHER, true},
    {"gather", OP_GATHER, true},          {"scatter", OP_SCATTER, true},
    {"all_to_all", OP_ALL_TO_ALL, true},  {"reduce_scatter", OP_REDUCE_SCATTER, true},
};
#define N_OPS (sizeof(ops) / sizeof(ops[0]))

struct options {
    const char *transports[2], *op;
    size_t sizes[LIST_MAX];
    int groups[LIST_MAX];
    int n_transports, n_sizes, n_groups, rounds;
};

/* Shared by the ranks of a group. */
struct page {
    _Alignas(LINE) _Atomic uint32_t has_id;
    mccl_unique_id id;
    _Alignas(LINE) _Atomic uint32_t arrived;
    _Alignas(LINE) _Atomic uint32_t released; /* how often all had arrived */
    _Atomic int64_t released_ns;
    struct {
        _Alignas(LINE) _Atomic int64_t end_ns;
    } ranks[RANKS_MAX];
};

struct rank {
    const struct options *options;
    struct page *page;
    mccl_comm *comm;
    const char *transport;
    int rank, n;
    uint32_t n_waits;
    unsigned char *send, *recv;
};

static void check(mccl_result result, const char *what)
{
    if (result == MCCL_OK)
        return;
    fprintf(stderr, "algorithms: %s: %s\n", what, mccl_last_error());
    exit(1);
}

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Returns when all have called it as often as this rank; the time of that, by the last to come. */
static int64_t line_up(struct rank *self)
{
    struct page *page = self->page;
    const uint32_t round = ++self->n_waits;
    if (atomic_fetch_add(&page->arrived, 1) + 1 == round * (uint32_t)self->n) {
        atomic_store(&page->released_ns, now_ns());
        atomic_store(&page->released, round);
    }
    while ((int32_t)(atomic_load(&page->released) - round) < 0)
        sched_yield();
    return atomic_load(&page->released_ns);
}

static void call(struct rank *self, enum op_kind kind, size_t count)
{
    const void *in = self->send;
    void *out = self->recv;
    mccl_comm *comm = self->comm;
    mccl_result result = MCCL_OK;
    switch (kind) {
    case OP_ALL_REDUCE:
        result = mccl_all_reduce(in, out, count, MCCL_FLOAT32, MCCL_SUM, comm, NULL, NULL);
        break;
    case OP_REDUCE:
        result = mccl_reduce(in, out, count, MCCL_FLOAT32, MCCL_SUM, 0, comm, NULL, NULL);
        break;
    case OP_BROADCAST:
        result = mccl_broadcast(in, out, count, MCCL_FLOAT32, 0, comm, NULL, NULL);
        break;
    case OP_ALL_GATHER:
        result = mccl_all_gather(in, out, count, MCCL_FLOAT32, comm, NULL, NULL);
        break;
    case OP_GATHER:
        result = mccl_gather(in, out, count, MCCL_FLOAT32, 0, comm, NULL, NULL);
        break;
    case OP_SCATTER:
        result = mccl_scatter(in, out, count, MCCL_FLOAT32, 0, comm, NULL, NULL);
        break;
    case OP_ALL_TO_ALL:
        result = mccl_all_to_all(in, out, count, MCCL_FLOAT32, comm, NULL, NULL);
        break;
    default:
        result = mccl_reduce_scatter(in, out, count, MCCL_FLOAT32, MCCL_SUM, comm, NULL, NULL);
        break;
    }
    check(result, op_kind_name(kind));
}

/* Of the slowest rank, in microseconds. */
static double timed_call(struct rank *self, enum op_kind kind, enum coll_algorithm algorithm,
                         size_t count)
{
    coll_force(kind, algorithm);
    const int64_t start_ns = line_up(self);
    call(self, kind, count);
    atomic_store(&self->page->ranks[self->rank].end_ns, now_ns());
    line_up(self);
    int64_t end_ns = 0;
    for (int rank = 0; rank < self->n; rank++) {
        const int64_t other_ns = atomic_load(&self->page->ranks[rank].end_ns);
        end_ns = other_ns > end_ns ? other_ns : end_ns;
    }
    /* Nobody overwrites its end before all have read it. */
    line_up(self);
    return (double)(end_ns - start_ns) / 1e3;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Every rank sees the same times, and so decides the same. */
static int choose_rounds(const struct options *options, double us)
{
    if (options->rounds > 0)
        return options->rounds < ROUNDS_MAX ? options->rounds : ROUNDS_MAX;
    const double rounds = SECONDS_EACH * 1e6 / (us > 1 ? us : 1);
    return rounds > 301 ? 301 : rounds < MIN_ROUNDS ? MIN_ROUNDS : (int)rounds;
}

static void measure(struct rank *self, size_t op, size_t bytes)
{
    static double times[ALGO_COUNT][ROUNDS_MAX];
    const enum op_kind kind = ops[op].kind;
    const size_t blocks = ops[op].parts ? (size_t)self->n : 1;
    const size_t count = bytes / sizeof(float) / blocks > 0 ? bytes / sizeof(float) / blocks : 1;
    int rounds = WARM_UP;
    double slowest = 0;
    for (int round = -WARM_UP; round < rounds; round++) {
        for (int algorithm = ALGO_LOCAL + 1; algorithm < ALGO_COUNT; algorithm++) {
            if (!coll_has(kind, (enum coll_algorithm)algorithm, self->n))
                continue;
            const double us = timed_call(self, kind, (enum coll_algorithm)algorithm, count);
            if (round >= 0)
                times[algorithm][round] = us;
            else if (round == -1)
                slowest = us > slowest ? us : slowest;
        }
        if (round == -1)
            rounds = choose_rounds(self->options, slowest);
    }
    for (int algorithm = ALGO_LOCAL + 1; algorithm < ALGO_COUNT && self->rank == 0; algorithm++) {
        if (!coll_has(kind, (enum coll_algorithm)algorithm, self->n))
            continue;
        qsort(times[algorithm], (size_t)rounds, sizeof(double), by_value);
        printf("%s,%s,%d,%zu,%s,%.2f,%.2f\n", ops[op].name,
               coll_algorithm_name((enum coll_algorithm)algorithm), self->n,
               count * sizeof(float) * blocks, self->transport, times[algorithm][rounds / 2],
               times[algorithm][0]);
    }
    fflush(stdout);
}

static bool is_in(const char *list, const char *name)
{
    const size_t length = strlen(name);
    for (const char *at = list; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == '\0'))
            return true;
    }
    return list == NULL;
}

static void run_rank(struct rank *self)
{
    struct page *page = self->page;
    char settings[64];
    snprintf(settings, sizeof settings, "transport=%s", self->transport);
    mccl_config config = MCCL_CONFIG_INIT;
    config.settings = settings;
    check(mccl_set_defaults("listen_addr=loopback"), "defaults");
    if (self->rank == 0) {
        check(mccl_get_unique_id(&page->id), "unique id");
        atomic_store(&page->has_id, 1);
    }
    while (!atomic_load(&page->has_id))
        sched_yield();
    check(mccl_comm_init_rank(&self->comm, self->n, &page->id, self->rank, &config), "init");
    size_t largest = 4 * (size_t)self->n;
    for (int i = 0; i < self->options->n_sizes; i++)
        largest = self->options->sizes[i] > largest ? self->options->sizes[i] : largest;
    self->send = malloc(largest);
    self->recv = malloc(largest);
    if (self->send == NULL || self->recv == NULL)
        exit(1);
    memset(self->send, self->rank, largest);
    memset(self->recv, 0, largest);
    for (size_t op = 0; op < N_OPS; op++)
        for (int i = 0; i < self->options->n_sizes && is_in(self->options->op, ops[op].name); i++)
            measure(self, op, self->options->sizes[i]);
    line_up(self);
    check(mccl_comm_destroy(self->comm), "destroy");
    exit(0);
}

static void run_group(const struct options *options, const char *transport, int n)
{
    struct page *page =
        mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[RANKS_MAX];
    if (page == MAP_FAILED)
        exit(1);
    fflush(stdout);
    for (int rank = 0; rank < n; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) {
            struct rank self = {
                .options = options, .page = page, .transport = transport, .rank = rank, .n = n};
            run_rank(&self);
        }
        if (pids[rank] < 0)
            exit(1);
    }
    bool failed = false;
    for (int i = 0; i < n; i++) {
        int status;
        const pid_t ended = wait(&status);
        if (ended > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;
        for (int rank = 0; rank < n && !failed; rank++)
            if (pids[rank] != ended)
                kill(pids[rank], SIGKILL);
        failed = true;
    }
    munmap(page, sizeof(*page));
    if (failed)
        exit(1);
}

/* Splits "a,b,c" in place. */
static int split(char *text, const char **parts, int most)
{
    int n = 0;
    for (char *part = strtok(text, ","); part != NULL && n < most; part = strtok(NULL, ","))
        parts[n++] = part;
    return n;
}

static void parse(int argc, char **argv, struct options *options)
{
    const char *parts[LIST_MAX];
    for (int option; (option = getopt(argc, argv, "t:n:b:o:r:")) != -1;) {
        if (option == 'o') {
            options->op = optarg;
            continue;
        }
        if (option == 'r') {
            options->rounds = atoi(optarg);
            continue;
        }
        if (option == '?')
            exit(2);
        const int n = split(optarg, parts, option == 't' ? 2 : LIST_MAX);
        for (int i = 0; i < n; i++) {
            if (option == 't')
                options->transports[i] = parts[i];
            else if (option == 'n')
                options->groups[i] = atoi(parts[i]);
            else
                options->sizes[i] = strtoull(parts[i], NULL, 0);
        }
        *(option == 't'   ? &options->n_transports
          : option == 'n' ? &options->n_groups
                          : &options->n_sizes) = n;
    }
}

int main(int argc, char **argv)
{
    struct options options = {.transports = {"tcp", "shm"},
                              .n_transports = 2,
                              .groups = {2, 4, 8},
                              .n_groups = 3,
                              .sizes = {4, 1024, 8192, 65536, 262144, 1048576, 4194304},
                              .n_sizes = 7};
    parse(argc, argv, &options);
    printf("# cores=%ld\nop,algorithm,n,bytes,class,p50_us,min_us\n",
           sysconf(_SC_NPROCESSORS_ONLN));
    for (int t = 0; t < options.n_transports; t++)
        for (int i = 0; i < options.n_groups; i++)
            if (options.groups[i] >= 2 && options.groups[i] <= RANKS_MAX)
                run_group(&options, options.transports[t], options.groups[i]);
    return 0;
}

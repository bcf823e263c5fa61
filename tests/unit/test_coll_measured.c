/* SPDX-License-Identifier: MIT
 *
 * The table's choices against measurements: in each file docs/benchmarks/algorithms-*.csv (made by
 * tests/measure/algorithms.c) no algorithm may be ahead of the chosen one by more than
 * CHOICE_FACTOR.
 *
 * What counts as noise: two equal libraries differed by up to 1.5 in the median on machines like
 * these, so an algorithm is ahead only if it is in the median and in the least time both.
 * Differences below NOISE_US do not count. Where there are more ranks than cores, the scheduler
 * decides who waits: ahead is then by CROWDED_FACTOR.
 */
#include "base/config.h"
#include "coll/coll.h"
#include "support/check.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHOICE_FACTOR 1.3
#define CROWDED_FACTOR 2.0
#define NOISE_US 1.0

struct line {
    enum op_kind kind;
    enum coll_algorithm algorithm;
    enum coll_links links;
    int n;
    size_t bytes;
    double p50, min;
};

static const char *const class_names[N_LINKS] = {"tcp", "shm", "mixed"};
static struct line lines[20000];
static size_t n_lines;
static int cores, n_checked;
static bool failed;

static int find(const char *name, const char *const names[], int n)
{
    for (int i = 0; i < n; i++)
        if (names[i] != NULL && strcmp(name, names[i]) == 0)
            return i;
    CHECK_FAIL("unknown name '%s'", name);
    return -1;
}

static struct line parse(const char *text)
{
    const char *kinds[OP_BARRIER + 1] = {0}, *algorithms[ALGO_COUNT];
    char op[32], algorithm[32], class[16];
    struct line line;
    for (int kind = OP_ALL_REDUCE; kind <= OP_BARRIER; kind++)
        kinds[kind] = op_kind_name((unsigned)kind);
    for (int i = 0; i < ALGO_COUNT; i++)
        algorithms[i] = coll_algorithm_name((enum coll_algorithm)i);
    if (sscanf(text, "%31[^,],%31[^,],%d,%zu,%15[^,],%lf,%lf", op, algorithm, &line.n, &line.bytes,
               class, &line.p50, &line.min) != 7)
        CHECK_FAIL("not a row: %s", text);
    line.kind = (enum op_kind)find(op, kinds, OP_BARRIER + 1);
    line.algorithm = (enum coll_algorithm)find(algorithm, algorithms, ALGO_COUNT);
    line.links = (enum coll_links)find(class, class_names, N_LINKS);
    return line;
}

static void read_lines(const char *path)
{
    FILE *file = fopen(path, "r");
    char text[256];
    CHECK(file != NULL);
    n_lines = 0;
    cores = 0;
    while (fgets(text, sizeof text, file) != NULL) {
        if (text[0] == '#' || strncmp(text, "op,", 3) == 0) {
            sscanf(text, "# cores=%d", &cores);
            continue;
        }
        CHECK(n_lines < sizeof(lines) / sizeof(lines[0]));
        lines[n_lines++] = parse(text);
    }
    fclose(file);
    CHECK(cores > 0 && n_lines > 0);
}

static bool same_call(const struct line *a, const struct line *b)
{
    return a->kind == b->kind && a->n == b->n && a->bytes == b->bytes && a->links == b->links;
}

static enum coll_algorithm chosen_for(const struct line *line)
{
    const bool parts =
        line->kind != OP_ALL_REDUCE && line->kind != OP_REDUCE && line->kind != OP_BROADCAST;
    const struct coll_call call = {.kind = line->kind,
                                   .dtype = MCCL_FLOAT32,
                                   .op = MCCL_SUM,
                                   .count =
                                       line->bytes / sizeof(float) / (parts ? (size_t)line->n : 1)};
    const struct coll_env env = {.n_ranks = line->n,
                                 .chunk_bytes = (size_t)4 << 20,
                                 .small_bytes = (size_t)256 << 10,
                                 .links = line->links};
    return coll_choose(&call, &env);
}

static bool is_ahead(const struct line *a, const struct line *b)
{
    const double factor = a->n > cores ? CROWDED_FACTOR : CHOICE_FACTOR;
    return a->p50 * factor < b->p50 && a->min * factor < b->min && a->p50 + NOISE_US < b->p50;
}

/* `line` is the chosen one. */
static void check_line(const char *path, const struct line *line)
{
    const struct line *best = line;
    for (size_t i = 0; i < n_lines; i++)
        if (same_call(&lines[i], line) && is_ahead(&lines[i], line) && lines[i].p50 < best->p50)
            best = &lines[i];
    n_checked++;
    if (best == line)
        return;
    failed = true;
    printf("%s: %s n=%d %zu B %s: %s takes %.1f us (least %.1f), %s %.1f (%.1f)\n", path,
           op_kind_name(line->kind), line->n, line->bytes, class_names[line->links],
           coll_algorithm_name(line->algorithm), line->p50, line->min,
           coll_algorithm_name(best->algorithm), best->p50, best->min);
}

static void check_file(const char *path)
{
    read_lines(path);
    for (size_t i = 0; i < n_lines; i++)
        if (lines[i].algorithm == chosen_for(&lines[i]))
            check_line(path, &lines[i]);
}

int main(int argc, char **argv)
{
    char folder[4096], path[8192];
    if (argc > 1) {
        check_file(argv[1]);
        return failed;
    }
    snprintf(folder, sizeof folder, "%s", __FILE__);
    char *end = strstr(folder, "tests/unit/");
    CHECK(end != NULL);
    snprintf(end, sizeof folder - (size_t)(end - folder), "docs/benchmarks");
    DIR *dir = opendir(folder);
    CHECK(dir != NULL);
    for (const struct dirent *entry; (entry = readdir(dir)) != NULL;)
        if (strncmp(entry->d_name, "algorithms-", 11) == 0) {
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
            check_file(path);
        }
    closedir(dir);
    printf("%d choices checked\n", n_checked);
    CHECK(n_checked > 0);
    return failed;
}

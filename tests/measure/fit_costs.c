/* SPDX-License-Identifier: MIT
 *
 * Turns what bench/algorithms.c printed into the rates of src/coll/cost.c: for each class of links
 * the four that make the sum of squared relative errors of the modelled times least.
 *
 *     fit_costs [min] FILE...        (`min`: fit the least times instead of the medians)
 *
 * Groups of more ranks than cores are left out: there, ranks wait for each other's cores. Also
 * prints how far modelled and measured times are apart, in the middle and for 90 of 100 rows.
 */
#include "coll/cost.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_RATES 4
#define ROWS_MAX 20000
#define ROUNDS 20000

struct row {
    double terms[N_RATES]; /* per second of measured time */
};

static struct row rows[N_LINKS][ROWS_MAX];
static int n_rows[N_LINKS];
static const char *const class_names[N_LINKS] = {"tcp", "shm", "mixed"};

static int find_kind(const char *name)
{
    for (int kind = OP_ALL_REDUCE; kind <= OP_BARRIER; kind++)
        if (strcmp(name, op_kind_name((unsigned)kind)) == 0)
            return kind;
    return -1;
}

static int find_algorithm(const char *name)
{
    for (int algorithm = 0; algorithm < ALGO_COUNT; algorithm++)
        if (strcmp(name, coll_algorithm_name((enum coll_algorithm)algorithm)) == 0)
            return algorithm;
    return -1;
}

static void take_line(const char *line, int cores, bool least)
{
    char op[32], name[32], class[16];
    int n;
    size_t bytes;
    double p50, min;
    struct cost_terms terms;
    if (sscanf(line, "%31[^,],%31[^,],%d,%zu,%15[^,],%lf,%lf", op, name, &n, &bytes, class, &p50,
               &min) != 7 ||
        n > cores)
        return;
    const int kind = find_kind(op), algorithm = find_algorithm(name);
    const double seconds = (least ? min : p50) * 1e-6;
    if (kind < 0 || algorithm < 0 ||
        !cost_terms((enum op_kind)kind, (enum coll_algorithm)algorithm, n, (double)bytes, &terms))
        return;
    for (int links = 0; links < N_LINKS; links++)
        if (strcmp(class, class_names[links]) == 0 && n_rows[links] < ROWS_MAX)
            rows[links][n_rows[links]++] =
                (struct row){{terms.steps / seconds, terms.messages / seconds,
                              terms.bytes / seconds, terms.reduced / seconds}};
}

static bool read_file(const char *path, bool least)
{
    FILE *file = fopen(path, "r");
    char line[256];
    int cores = 1 << 20;
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "# cores=%d", &cores) != 1)
            take_line(line, cores, least);
    if (file != NULL)
        fclose(file);
    return file != NULL;
}

/* One rate after the other gets its best value for the others', not below 0, until none moves. */
static void fit(const struct row *data, int n, double *rates)
{
    for (int round = 0; round < ROUNDS; round++)
        for (int rate = 0; rate < N_RATES; rate++) {
            double slope = 0, square = 0;
            for (int i = 0; i < n; i++) {
                double rest = 1;
                for (int other = 0; other < N_RATES; other++)
                    rest -= other == rate ? 0 : data[i].terms[other] * rates[other];
                slope += rest * data[i].terms[rate];
                square += data[i].terms[rate] * data[i].terms[rate];
            }
            rates[rate] = square > 0 && slope > 0 ? slope / square : 0;
        }
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void report(int links)
{
    static double errors[ROWS_MAX];
    double rates[N_RATES] = {0};
    const int n = n_rows[links];
    if (n == 0)
        return;
    fit(rows[links], n, rates);
    for (int i = 0; i < n; i++) {
        double modelled = 0;
        for (int rate = 0; rate < N_RATES; rate++)
            modelled += rows[links][i].terms[rate] * rates[rate];
        errors[i] = modelled > 1 ? modelled : 1 / modelled;
    }
    qsort(errors, (size_t)n, sizeof(double), by_value);
    printf("%-5s %d rows: {%.2fe-6, %.2fe-6, 1 / %.2fe9, 1 / %.2fe9}, off by %.2f, 90 %% by %.2f\n",
           class_names[links], n, rates[0] * 1e6, rates[1] * 1e6, 1e-9 / rates[2], 1e-9 / rates[3],
           errors[n / 2], errors[n * 9 / 10]);
}

int main(int argc, char **argv)
{
    const bool least = argc > 1 && strcmp(argv[1], "min") == 0;
    for (int i = least ? 2 : 1; i < argc; i++)
        if (!read_file(argv[i], least)) {
            perror(argv[i]);
            return 1;
        }
    for (int links = 0; links < N_LINKS; links++)
        report(links);
    return 0;
}

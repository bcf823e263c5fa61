/* SPDX-License-Identifier: MIT
 *
 * The smallest complete program: N processes add up a vector.
 *
 *     ./all_reduce RANK N IDFILE
 *
 * Start it once for each RANK in 0 .. N-1, on one machine or several, in any order:
 *
 *     for r in 0 1 2; do ./all_reduce $r 3 /tmp/mccl-id & done; wait
 *
 * Rank 0 makes the group's id and hands it to the others through IDFILE (anything that carries a
 * line of text to the other processes does as well) and removes the file when all have joined.
 * Whoever holds the id can join, so only its owner may read the file. Nobody waits longer than
 * 30 s.
 */
#include "mccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define COUNT 1000000

/* Every call returns a result; mccl_last_error() has the whole sentence. */
static void check(mccl_result result, const char *what)
{
    if (result == MCCL_OK)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, mccl_result_name(result), mccl_last_error());
    exit(1);
}

/* Written beside and renamed, so that no reader sees half an id. */
static void write_id(const char *path, const mccl_unique_id *id)
{
    char text[MCCL_UNIQUE_ID_TEXT_BYTES], part[4096];
    check(mccl_unique_id_to_text(id, text), "mccl_unique_id_to_text");
    snprintf(part, sizeof part, "%s.part", path);
    umask(077);
    FILE *file = fopen(part, "w");
    if (!file || fprintf(file, "%s\n", text) < 0 || fclose(file) != 0 || rename(part, path) != 0) {
        perror(path);
        exit(1);
    }
}

static void read_id(const char *path, mccl_unique_id *id)
{
    char text[MCCL_UNIQUE_ID_TEXT_BYTES];
    const struct timespec pause = {0, 10 * 1000 * 1000};
    FILE *file = NULL;
    for (int tries = 0; tries < 3000 && !(file = fopen(path, "r")); tries++)
        nanosleep(&pause, NULL);
    if (!file || fscanf(file, "%1039s", text) != 1) {
        fprintf(stderr, "%s: no id there\n", path);
        exit(1);
    }
    fclose(file);
    check(mccl_unique_id_from_text(text, id), "mccl_unique_id_from_text");
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: %s RANK N IDFILE\n", argv[0]);
        return 2;
    }
    const int rank = atoi(argv[1]), n = atoi(argv[2]);

    mccl_unique_id id;
    if (rank == 0) {
        check(mccl_get_unique_id(&id), "mccl_get_unique_id");
        write_id(argv[3], &id);
    } else {
        read_id(argv[3], &id);
    }

    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 30000; /* for checking in and for every operation */
    check(mccl_comm_init_rank(&comm, n, &id, rank, &config), "mccl_comm_init_rank");
    if (rank == 0)
        unlink(argv[3]); /* everybody has it: the next run must not read it */

    /* Element i of rank r is r + i % 7: the sum over all ranks is known. */
    float *data = malloc(COUNT * sizeof *data);
    if (!data)
        return 1;
    for (int i = 0; i < COUNT; i++)
        data[i] = (float)(rank + i % 7);

    /* In place, on host memory (NULL stream), blocking (NULL request). */
    check(mccl_all_reduce(data, data, COUNT, MCCL_FLOAT32, MCCL_SUM, comm, NULL, NULL),
          "mccl_all_reduce");

    for (int i = 0; i < COUNT; i++) {
        const float expected = (float)(n * (n - 1) / 2 + n * (i % 7));
        if (data[i] != expected) {
            fprintf(stderr, "rank %d: element %d is %g, expected %g\n", rank, i, (double)data[i],
                    (double)expected);
            return 1;
        }
    }
    printf("rank %d of %d: %d sums are right\n", rank, n, COUNT);

    free(data);
    check(mccl_comm_destroy(comm), "mccl_comm_destroy");
    return 0;
}

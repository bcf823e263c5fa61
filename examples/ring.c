/* SPDX-License-Identifier: MIT
 *
 * Point to point: every rank sends a block to the next one and receives from the one before, N
 * times, so that each block goes once round the ring and comes home.
 *
 *     ./ring RANK N IDFILE
 *
 * Start it once for each RANK, as ./all_reduce (which explains the id and the file):
 *
 *     for r in 0 1 2; do ./ring $r 3 /tmp/mccl-id & done; wait
 */
#include "mccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define COUNT 100000

static void check(mccl_result result, const char *what)
{
    if (result == MCCL_OK)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, mccl_result_name(result), mccl_last_error());
    exit(1);
}

/* Rank 0 makes the id and publishes it in `path`; the others wait for it there. */
static void share_id(int rank, const char *path, mccl_unique_id *id)
{
    char text[MCCL_UNIQUE_ID_TEXT_BYTES], part[4096];
    const struct timespec pause = {0, 10 * 1000 * 1000};
    FILE *file = NULL;
    if (rank == 0) {
        check(mccl_get_unique_id(id), "mccl_get_unique_id");
        check(mccl_unique_id_to_text(id, text), "mccl_unique_id_to_text");
        snprintf(part, sizeof part, "%s.part", path);
        umask(077);
        file = fopen(part, "w");
        if (file && fprintf(file, "%s\n", text) > 0 && fclose(file) == 0 && rename(part, path) == 0)
            return;
    } else {
        for (int tries = 0; tries < 3000 && !(file = fopen(path, "r")); tries++)
            nanosleep(&pause, NULL);
        if (file && fscanf(file, "%1039s", text) == 1) {
            fclose(file);
            check(mccl_unique_id_from_text(text, id), "mccl_unique_id_from_text");
            return;
        }
    }
    fprintf(stderr, "%s: cannot %s the id\n", path, rank == 0 ? "write" : "read");
    exit(1);
}

/* One step round: `mine` goes to the next rank, `theirs` comes from the one before. */
static void pass_on(const int *mine, int *theirs, int rank, int n, mccl_comm *comm)
{
    mccl_request *sent = NULL;
    /* The send is not waited for until the receive is done. If all ranks waited for their sends
     * first, a block too large to travel ahead of its receiver would wait for ever; a group of
     * calls (mccl_group_start and mccl_group_end) is the other way to say this. */
    check(mccl_send(mine, COUNT, MCCL_INT32, (rank + 1) % n, comm, NULL, &sent), "mccl_send");
    check(mccl_recv(theirs, COUNT, MCCL_INT32, (rank + n - 1) % n, comm, NULL, NULL), "mccl_recv");
    check(mccl_request_wait(sent, -1), "mccl_request_wait");
    check(mccl_request_free(sent), "mccl_request_free");
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: %s RANK N IDFILE\n", argv[0]);
        return 2;
    }
    const int rank = atoi(argv[1]), n = atoi(argv[2]);
    static int mine[COUNT], theirs[COUNT];

    mccl_unique_id id;
    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 30000;
    share_id(rank, argv[3], &id);
    check(mccl_comm_init_rank(&comm, n, &id, rank, &config), "mccl_comm_init_rank");
    if (rank == 0)
        unlink(argv[3]); /* everybody has it: the next run must not read it */

    for (int i = 0; i < COUNT; i++)
        mine[i] = 1000000 * rank + i;
    for (int step = 1; step <= n; step++) {
        pass_on(mine, theirs, rank, n, comm);
        /* What arrives in step s started s ranks back. */
        const int origin = (rank - step + n) % n;
        for (int i = 0; i < COUNT; i++) {
            if (theirs[i] != 1000000 * origin + i) {
                fprintf(stderr, "rank %d, step %d: element %d is %d, expected %d\n", rank, step, i,
                        theirs[i], 1000000 * origin + i);
                return 1;
            }
        }
        memcpy(mine, theirs, sizeof mine);
    }
    printf("rank %d of %d: all blocks passed by and the own one came home\n", rank, n);
    check(mccl_comm_destroy(comm), "mccl_comm_destroy");
    return 0;
}

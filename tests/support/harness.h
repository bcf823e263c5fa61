/* SPDX-License-Identifier: MIT
 *
 * Runs n ranks of a test: as forked processes (a team, which the test's own process can watch, stop
 * and kill), or as threads of one process. No MCCL call may come before the fork. Ranks and parent
 * share a board in memory: ids, marks and values, all atomic. The first failed check of a rank ends
 * that rank with 1; the parent then shows its stderr and fails.
 */
#ifndef MCCL_TESTS_HARNESS_H
#define MCCL_TESTS_HARNESS_H

#include "mccl.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define TEAM_MAX 64 /* ranks */
#define BOARD_IDS 8 /* ids that may be on their way at once */

/* Shared by parent and ranks. */
struct board {
    _Atomic uint32_t id_group[BOARD_IDS]; /* number of the group whose id lies in id_text */
    char id_text[BOARD_IDS][MCCL_UNIQUE_ID_TEXT_BYTES];
    _Atomic int go;                  /* parent: the step that ranks may take */
    _Atomic int mark[TEAM_MAX];      /* rank: how far it got */
    _Atomic int64_t value[TEAM_MAX]; /* rank or parent: what the test likes */
};

struct rank {
    int rank, n;
    const void *arg; /* as given to the team */
    struct board *board;
    uint32_t n_groups; /* groups made so far through this struct */
};

typedef void rank_body(struct rank *self);

/* ---- for ranks; a failed call ends the rank ---- */

/* Id of the next group: rank 0 makes and publishes it, the others read it. Every rank calls it
 * equally often. */
void rank_next_id(struct rank *self, mccl_unique_id *id);
/* Joins the next group. `config` may be NULL. */
mccl_comm *rank_connect(struct rank *self, const mccl_config *config);
/* The same with a settings string and a time-out of operations (0: the default). */
mccl_comm *rank_connect_with(struct rank *self, const char *settings, int64_t timeout_ms);
void rank_mark(struct rank *self, int mark);
/* Until the parent says `step` or more. */
void rank_wait_go(struct rank *self, int step);

/* ---- processes, for the parent ---- */

struct team;

/* Starts n processes that run `body` and then exit with 0. `limit_s` seconds after the start (more
 * under a sanitizer) everything that is left is killed and the test fails. */
struct team *team_start(int n, int limit_s, rank_body *body, const void *arg);
struct board *team_board(struct team *team);
pid_t team_pid(const struct team *team, int rank);
/* Until this rank, or every rank, has marked `mark` or more. Fails if it ends before. */
void team_wait_mark(struct team *team, int rank, int mark);
void team_wait_marks(struct team *team, int mark);
void team_go(struct team *team, int step);
void team_signal(struct team *team, int rank, int signal_number);
/* Waits for one rank's end: its exit code, or 128 + the signal that ended it. */
int team_join(struct team *team, int rank);
/* What a joined rank wrote to stderr. Valid until team_end. */
const char *team_stderr(struct team *team, int rank);
/* Joins a rank and fails the test, showing its stderr, unless it ends with 0. */
void team_expect_ok(struct team *team, int rank);
/* Kills what is left (stopped processes too) and frees. */
void team_end(struct team *team);
/* All of it: n processes, each of which must end with 0. */
void team_run(int n, int limit_s, rank_body *body, const void *arg);

/* ---- threads ---- */

/* n threads of this process. */
void threads_run(int n, rank_body *body, const void *arg);

/* ---- time ---- */

/* Milliseconds of a clock that all processes of the host share. */
int64_t now_ms(void);
void sleep_ms(int ms);

#endif

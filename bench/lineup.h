/* SPDX-License-Identifier: MIT
 *
 * Lets the ranks of one team begin a call together without any library: a page that all of them map
 * (python/mccl/bench/lineup.py is the same for ranks in Python).
 */
#ifndef BENCH_LINEUP_H
#define BENCH_LINEUP_H

#include "library.h"

/* Maps the file for the life of the process. */
unsigned char *line_up_map(const char *path);
/* Returns when every rank has called it as often as this one. */
void line_up(const struct job *job);

/* Waiting in a loop: yields where ranks outnumber processors, and ends the process at DEADLINE_S.
 * Start with a zeroed one for each thing that is waited for. */
struct patience {
    uint64_t begin_ns;
    unsigned rounds;
};
void wait_a_little(struct patience *wait, const struct job *job, const char *what);

#endif

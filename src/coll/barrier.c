/* SPDX-License-Identifier: MIT
 *
 * Barrier by dissemination: in round k each rank tells the one 2^k places after it that it, and all
 * that it has heard of, are here. After ceil(log2 n) rounds everybody has heard of everybody.
 * Messages are empty. Called by the submitter, through coll_build.
 */
#include "coll/build.h"

void build_barrier(const struct coll_call *call, const struct coll_env *env,
                   enum coll_algorithm algorithm, struct schedule *schedule)
{
    (void)call;
    (void)algorithm;
    const int n = env->n_ranks;
    uint32_t heard[31]; /* distances are powers of two that fit an int */
    int n_heard = 0;
    for (int distance = 1; distance < n; distance *= 2) {
        const uint32_t tell =
            schedule_send(schedule, (env->rank + distance) % n, NULL, 0, STEP_NONE);
        /* Rounds come from different peers and may overtake each other: wait for all of them. */
        for (int i = 0; i < n_heard; i++)
            schedule_after(schedule, tell, heard[i]);
        heard[n_heard++] =
            schedule_recv(schedule, (env->rank + n - distance) % n, NULL, 0, STEP_NONE);
    }
}

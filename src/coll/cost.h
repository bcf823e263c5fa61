/* SPDX-License-Identifier: MIT
 *
 * What an algorithm costs, as a closed formula: the model from which the limits in plan.c come
 * where nothing was measured. Tests hold the formulas against a simulation of the schedules and the
 * choices against the formulas. Pure functions.
 */
#ifndef MCCL_COLL_COST_H
#define MCCL_COLL_COST_H

#include "coll/coll.h"

/* Along the critical path, of float32 data. */
struct cost_terms {
    double steps;    /* messages one after the other */
    double messages; /* that the busiest port handles */
    double bytes;    /* that pass through it */
    double reduced;  /* bytes that a core adds to others; copies count half */
};

/* Seconds for one of each. A port sends and receives at the same time. */
struct cost_rates {
    double step, message, byte, reduced;
};

/* False where there is no formula. `bytes` is S in docs/algorithms.md: the whole vector, or all n
 * blocks of a rank together. */
bool cost_terms(enum op_kind kind, enum coll_algorithm algorithm, int n, double bytes,
                struct cost_terms *terms);

const struct cost_rates *cost_rates(enum coll_links links);

double cost_seconds(const struct cost_terms *terms, const struct cost_rates *rates);

#endif

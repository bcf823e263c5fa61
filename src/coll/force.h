/* SPDX-License-Identifier: MIT
 *
 * A door for tests/measure/algorithms.c and tests, which link the inside of the library: makes
 * coll_choose take one algorithm for a kind, whatever the table says. Not for more than one thread
 * at a time, and all ranks must do the same.
 */
#ifndef MCCL_COLL_FORCE_H
#define MCCL_COLL_FORCE_H

#include "coll/coll.h"

/* ALGO_COUNT ends it. Ignored for groups in which there is no such algorithm. */
void coll_force(enum op_kind kind, enum coll_algorithm algorithm);

#endif

/* SPDX-License-Identifier: MIT
 *
 * Dependencies from the order in which a builder touches memory. Memory is cut into cells; a
 * builder that says which cells each step reads or writes, step after step, gets a schedule whose
 * result is that of carrying out the steps one by one, and in which whatever does not touch the
 * same cells may overlap. One builder at a time; lives on its stack.
 */
#ifndef MCCL_COLL_CELLS_H
#define MCCL_COLL_CELLS_H

#include "comm/schedule.h"

struct cell {
    uint32_t written; /* last step that wrote it, or STEP_NONE */
    uint32_t reads;   /* head of the steps that read it since then, in `reads`, or STEP_NONE */
};

struct cell_read {
    uint32_t step, next;
};

#define CELLS_INSIDE 32u /* cells and reads that need no allocation: enough for small messages */

struct cells {
    struct schedule *schedule;
    struct cell *cells;
    struct cell_read *reads;
    uint32_t n_reads, cap_reads;
    struct cell few_cells[CELLS_INSIDE];
    struct cell_read few_reads[CELLS_INSIDE];
};

/* False, and the schedule failed, if memory is short; cells_close is fine then, too. */
bool cells_open(struct cells *cells, struct schedule *schedule, size_t n_cells);
void cells_close(struct cells *cells);

/* `step` reads (writes) the cells [first, first + n). A step that does both says so by
 * cells_write alone. */
void cells_read(struct cells *cells, uint32_t step, size_t first, size_t n);
void cells_write(struct cells *cells, uint32_t step, size_t first, size_t n);

/* Has a step written this cell? */
bool cells_written(const struct cells *cells, size_t cell);

#endif

/* SPDX-License-Identifier: MIT
 *
 * See cells.h. A read waits for the last write; a write waits for the last write and for the reads
 * since then. Reads of a cell are a list, dropped by the next write. Called by builders.
 */
#include "coll/cells.h"

#include <stdlib.h>
#include <string.h>

bool cells_open(struct cells *cells, struct schedule *schedule, size_t n_cells)
{
    cells->schedule = schedule;
    cells->cells = cells->few_cells;
    cells->reads = cells->few_reads;
    cells->n_reads = 0;
    cells->cap_reads = CELLS_INSIDE;
    if (n_cells > CELLS_INSIDE) {
        cells->cells = malloc(n_cells * sizeof(*cells->cells));
        if (cells->cells == NULL) {
            schedule->failed = MCCL_ERR_NO_MEMORY;
            return false;
        }
    }
    for (size_t i = 0; i < n_cells; i++)
        cells->cells[i] = (struct cell){STEP_NONE, STEP_NONE};
    return true;
}

void cells_close(struct cells *cells)
{
    if (cells->cells != cells->few_cells)
        free(cells->cells);
    if (cells->reads != cells->few_reads)
        free(cells->reads);
}

/* Room for one more read. */
static bool grow(struct cells *cells)
{
    if (cells->n_reads < cells->cap_reads)
        return true;
    const bool inside = cells->reads == cells->few_reads;
    const size_t size = cells->cap_reads * sizeof(*cells->reads);
    struct cell_read *reads = realloc(inside ? NULL : cells->reads, 2 * size);
    if (reads == NULL) {
        cells->schedule->failed = MCCL_ERR_NO_MEMORY;
        return false;
    }
    if (inside)
        memcpy(reads, cells->few_reads, size);
    cells->reads = reads;
    cells->cap_reads *= 2;
    return true;
}

void cells_read(struct cells *cells, uint32_t step, size_t first, size_t n)
{
    uint32_t waited = STEP_NONE; /* neighbours are mostly written by one step: one edge does */
    for (size_t i = first; i < first + n && step != STEP_NONE && grow(cells); i++) {
        struct cell *cell = &cells->cells[i];
        if (cell->written != waited)
            schedule_after(cells->schedule, step, cell->written);
        waited = cell->written;
        cells->reads[cells->n_reads] = (struct cell_read){step, cell->reads};
        cell->reads = cells->n_reads++;
    }
}

void cells_write(struct cells *cells, uint32_t step, size_t first, size_t n)
{
    uint32_t waited = STEP_NONE;
    for (size_t i = first; i < first + n && step != STEP_NONE; i++) {
        struct cell *cell = &cells->cells[i];
        if (cell->written != waited)
            schedule_after(cells->schedule, step, cell->written);
        waited = cell->written;
        for (uint32_t read = cell->reads; read != STEP_NONE; read = cells->reads[read].next)
            if (cells->reads[read].step != step)
                schedule_after(cells->schedule, step, cells->reads[read].step);
        *cell = (struct cell){step, STEP_NONE};
    }
}

bool cells_written(const struct cells *cells, size_t cell)
{
    return cells->cells[cell].written != STEP_NONE;
}

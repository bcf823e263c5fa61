/* SPDX-License-Identifier: MIT
 *
 * The whole table of kernels, by the instructions that this file is compiled for.
 */
#include "reduce/kernels.h"

void REDUCE_NAME(reduce_fill, REDUCE_SET)(struct reduce_table *table)
{
    reduce_fill_integer(table);
    reduce_fill_float(table);
    reduce_fill_half(table);
    reduce_fill_complex(table);
}

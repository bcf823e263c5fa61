/* SPDX-License-Identifier: MIT
 *
 * How buffers are cut into messages, shards and pieces. Pure arithmetic, called by the builders;
 * the results are the same on all ranks as long as the arguments are.
 */
#include "coll/build.h"

/* Cost model: a piece that is reduced should still be in the level-2 cache when the reduction reads
 * it (1 MiB on current x86, more on Apple silicon), and be long enough to hide the cost of a
 * message: 256 KiB takes 40 us at 6 GB/s against a few us of system call. Measured on 16 cores:
 * 64 and 128 KiB with 2 and 4 ranks, 512 KiB and 1 MiB with 4, are no better beyond the noise
 * (docs/benchmarks.md). */
#define PIECE_BYTES ((size_t)256 << 10)
/* Scratch of one operation, so that groups of many ranks do not multiply it. */
#define SCRATCH_LIMIT ((size_t)8 << 20)
/* Steps of one schedule, about: 56 bytes each plus edges, so some 5 MiB at most. */
#define STEPS_LIMIT ((size_t)65536)

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

size_t round_up(size_t value, size_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* `size` rounded down to what may be cut, or as much more as keeps `total` within `max_parts`
 * parts. */
static size_t bound_cut(size_t size, size_t total, size_t max_parts)
{
    const size_t aligned = max_size(size / CUT_ALIGN * CUT_ALIGN, CUT_ALIGN);
    const size_t least = total / max_size(max_parts, 1) + 1;
    return max_size(aligned, max_parts > total / aligned ? 0 : round_up(least, CUT_ALIGN));
}

size_t cut_moved(const struct coll_env *env, size_t part_bytes)
{
    return bound_cut(env->chunk_bytes, part_bytes, STEPS_LIMIT / 2 / (size_t)env->n_ranks);
}

size_t cut_piped(const struct coll_env *env, size_t block_bytes, size_t n_slots,
                 size_t steps_per_piece)
{
    size_t size = min_size(env->chunk_bytes, PIECE_BYTES);
    size = min_size(size, SCRATCH_LIMIT / PIECE_DEPTH / max_size(n_slots, 1));
    size = bound_cut(size, block_bytes, STEPS_LIMIT / max_size(steps_per_piece, 1));
    return min_size(size, max_size(round_up(block_bytes, CUT_ALIGN), CUT_ALIGN));
}

size_t cut_shard(size_t count, size_t n_shards, size_t element_bytes)
{
    const size_t even = count / n_shards + (count % n_shards != 0);
    return round_up(max_size(even, 1), CUT_ALIGN / element_bytes);
}

size_t cut_length(size_t total, size_t size, size_t index)
{
    return total / size < index ? 0 : min_size(size, total - index * size);
}

void copy_own(const struct coll_env *env, struct schedule *schedule, void *dst, const void *src,
              size_t bytes)
{
    if (dst == src)
        return;
    const size_t piece = cut_moved(env, bytes);
    for (size_t offset = 0; offset < bytes; offset += piece)
        schedule_copy(schedule, (unsigned char *)dst + offset, (const unsigned char *)src + offset,
                      min_size(piece, bytes - offset), STEP_NONE);
}

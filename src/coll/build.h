/* SPDX-License-Identifier: MIT
 *
 * What the algorithm files of src/coll share: the shape of a builder, and how buffers are cut. A
 * builder adds the steps of one rank to an empty schedule. All ranks build at the same time without
 * talking, so whatever decides the order or the length of a message may depend only on what they
 * all know.
 */
#ifndef MCCL_COLL_BUILD_H
#define MCCL_COLL_BUILD_H

#include "coll/coll.h"

/* Adds the steps. Short of memory it marks the schedule as failed; coll_build looks at the end. */
typedef void coll_builder(const struct coll_call *call, const struct coll_env *env,
                          enum coll_algorithm algorithm, struct schedule *schedule);

coll_builder build_owners;    /* owners.c: everything that reduces, but for rings */
coll_builder build_ring;      /* ring.c: all_reduce */
coll_builder build_doubling;  /* doubling.c: all_reduce */
coll_builder build_two_level; /* two_level.c: all_reduce */
coll_builder build_broadcast; /* broadcast.c */
coll_builder build_exchange;  /* exchange.c: everything that only moves parts, but for broadcast */
coll_builder build_barrier;   /* barrier.c */
coll_builder build_gather_ring, build_gather_bruck; /* passing.c: all_gather */
coll_builder build_reduce_ring;                     /* passing.c: reduce_scatter */
coll_builder build_bruck;                           /* bruck.c: all_to_all */
coll_builder build_rows;                            /* tree.c: gather and scatter */
coll_builder build_reduce_tree;                     /* tree.c: reduce */

/* Reduced pieces in flight per peer: one arriving, one being reduced, one leaving, one to spare. */
#define PIECE_DEPTH 4u
/* Piece boundaries fall on multiples of this, which every element size divides. */
#define CUT_ALIGN ((size_t)64)

size_t round_up(size_t value, size_t multiple);

/* Bytes per message for a part of `part_bytes` that is only moved: env->chunk_bytes, or more where
 * that would give too many steps. */
size_t cut_moved(const struct coll_env *env, size_t part_bytes);

/* Bytes per message for blocks of up to `block_bytes` that are reduced or forwarded while they
 * arrive. A rank needs `n_slots` times PIECE_DEPTH of them as scratch and adds `steps_per_piece`
 * steps for each. */
size_t cut_piped(const struct coll_env *env, size_t block_bytes, size_t n_slots,
                 size_t steps_per_piece);

/* Elements per shard when `count` elements are spread over `n_shards`. */
size_t cut_shard(size_t count, size_t n_shards, size_t element_bytes);

/* Part `index` of the cut: how much of `total` lies in [index * size, (index + 1) * size). */
size_t cut_length(size_t total, size_t size, size_t index);

/* Copies within this rank, cut so that no step holds up the engine for long. Not if dst == src. */
void copy_own(const struct coll_env *env, struct schedule *schedule, void *dst, const void *src,
              size_t bytes);

#endif

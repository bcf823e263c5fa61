/* SPDX-License-Identifier: MIT
 *
 * Rooted collectives along a tree. TREE is binomial: log2(n) messages at root instead of n - 1, for
 * many ranks and little data; reduce, gather and scatter. CHAIN is a tree in which every rank has
 * one child, with the data in pieces: for reduce of long vectors. Ranks are counted from root on
 * ("places"); a binomial place has the children place + 1, + 2, + 4, ... below its lowest bit, so
 * that a subtree is a row of places. Called by the submitter, through coll_build.
 */
#include "coll/build.h"
#include "coll/cells.h"

#define CHILDREN_MAX 31 /* bits of a number of ranks */

struct tree {
    int n, root, place;
    int parent; /* places; -1 at root */
    int n_children, children[CHILDREN_MAX];
    int sizes[CHILDREN_MAX]; /* places in the subtree of a child */
    int size;                /* places in this rank's own */
};

static struct tree lay_out(const struct coll_env *env, int root, enum coll_algorithm algorithm)
{
    const int n = env->n_ranks;
    struct tree tree = {.n = n, .root = root, .place = (env->rank - root + n) % n, .size = 1};
    tree.parent = tree.place - 1;
    if (algorithm == ALGO_CHAIN) {
        tree.n_children = tree.place + 1 < n;
        tree.children[0] = tree.place + 1;
        return tree;
    }
    int distance = 1;
    for (; !(tree.place & distance) && tree.place + distance < n; distance *= 2) {
        const int child = tree.place + distance;
        tree.children[tree.n_children] = child;
        tree.sizes[tree.n_children++] = distance < n - child ? distance : n - child;
        tree.size = child + (distance < n - child ? distance : n - child) - tree.place;
    }
    if (tree.place > 0)
        tree.parent = tree.place & (tree.place - 1);
    return tree;
}

static int rank_of(const struct tree *tree, int place)
{
    return (place + tree->root) % tree->n;
}

/* ---- gather and scatter ---- */

struct rows {
    const struct coll_env *env;
    struct schedule *schedule;
    struct tree tree;
    size_t block; /* bytes */
    /* Root: the blocks of all ranks. Elsewhere: those of the subtree, by place. */
    unsigned char *memory;
    struct cells cells; /* one for each block of the subtree, by place */
};

static unsigned char *row_at(const struct rows *rows, int place)
{
    const struct tree *tree = &rows->tree;
    const int index = tree->place == 0 ? rank_of(tree, place) : place - tree->place;
    return rows->memory + (size_t)index * rows->block;
}

/* The blocks of places [first, first + n), which lie in a row also at root. */
static void move_part(struct rows *rows, int peer, int first, int n, bool sends)
{
    const size_t bytes = (size_t)n * rows->block, piece = cut_moved(rows->env, bytes);
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t length = cut_length(bytes, piece, at / piece);
        const size_t cell = (size_t)(first - rows->tree.place) + at / rows->block;
        const size_t n_cells = (at + length - 1) / rows->block - at / rows->block + 1;
        unsigned char *place = row_at(rows, first) + at;
        if (sends)
            cells_read(&rows->cells, schedule_send(rows->schedule, peer, place, length, STEP_NONE),
                       cell, n_cells);
        else
            cells_write(&rows->cells, schedule_recv(rows->schedule, peer, place, length, STEP_NONE),
                        cell, n_cells);
    }
}

/* To or from the rank at `other`; both sides cut where root's array begins again. */
static void move_row(struct rows *rows, int other, int first, int n, bool sends)
{
    const int wrap = rows->tree.n - rows->tree.root, peer = rank_of(&rows->tree, other);
    const int before = first < wrap && wrap < first + n ? wrap - first : n;
    move_part(rows, peer, first, before, sends);
    if (before < n)
        move_part(rows, peer, wrap, n - before, sends);
}

static void gather(struct rows *rows, const struct coll_call *call)
{
    const struct tree *tree = &rows->tree;
    for (int i = 0; i < tree->n_children; i++)
        move_row(rows, tree->children[i], tree->children[i], tree->sizes[i], false);
    const uint32_t first = rows->schedule->n_steps;
    if (tree->place == 0 || tree->n_children > 0)
        copy_own(rows->env, rows->schedule, row_at(rows, tree->place), call->send, rows->block);
    for (uint32_t step = first; step < rows->schedule->n_steps; step++)
        cells_write(&rows->cells, step, 0, 1);
    if (tree->place > 0)
        move_row(rows, tree->parent, tree->place, tree->size, true);
}

static void scatter(struct rows *rows, const struct coll_call *call)
{
    const struct tree *tree = &rows->tree;
    if (tree->place > 0)
        move_row(rows, tree->parent, tree->place, tree->size, false);
    for (int i = tree->n_children - 1; i >= 0; i--)
        move_row(rows, tree->children[i], tree->children[i], tree->sizes[i], true);
    const uint32_t first = rows->schedule->n_steps;
    if (tree->place == 0 || tree->n_children > 0)
        copy_own(rows->env, rows->schedule, call->recv, row_at(rows, tree->place), rows->block);
    for (uint32_t step = first; step < rows->schedule->n_steps; step++)
        cells_read(&rows->cells, step, 0, 1);
}

void build_rows(const struct coll_call *call, const struct coll_env *env,
                enum coll_algorithm algorithm, struct schedule *schedule)
{
    struct rows rows = {.env = env, .schedule = schedule};
    rows.tree = lay_out(env, call->root, algorithm);
    rows.block = call->count * mccl_dtype_size(call->dtype);
    const bool gathers = call->kind == OP_GATHER;
    const void *own = gathers ? call->send : call->recv, *all = gathers ? call->recv : call->send;
    if (rows.block == 0)
        return;
    /* Sends do not write to what they read. */
    if (rows.tree.place == 0)
        rows.memory = (unsigned char *)(uintptr_t)all;
    else if (rows.tree.n_children == 0)
        rows.memory = (unsigned char *)(uintptr_t)own;
    else
        rows.memory = schedule_scratch(schedule, (size_t)rows.tree.size * rows.block);
    if (schedule->failed != MCCL_OK || !cells_open(&rows.cells, schedule, (size_t)rows.tree.size))
        return;
    if (gathers)
        gather(&rows, call);
    else
        scatter(&rows, call);
    cells_close(&rows.cells);
}

/* ---- reduce ---- */

struct sums {
    const struct coll_call *call;
    struct schedule *schedule;
    struct tree tree;
    bool wide, prepared;           /* 16-bit floats as float32; widened or scaled before */
    size_t element, final_element; /* bytes, as summed and as given */
    size_t piece;                  /* elements */
    unsigned char *slots;          /* [1 + children][PIECE_DEPTH]: this rank's sum, theirs */
    struct cells cells;            /* one for each slot */
};

static size_t slot_cell(int which, size_t piece)
{
    return (size_t)which * PIECE_DEPTH + piece % PIECE_DEPTH;
}

static unsigned char *slot_at(const struct sums *sums, int which, size_t piece)
{
    return sums->slots + slot_cell(which, piece) * sums->piece * sums->element;
}

/* This rank's operand, ready to be added or sent: as it is, or made in its slot. */
static const unsigned char *operand(struct sums *sums, size_t piece, size_t length)
{
    const unsigned char *src =
        (const unsigned char *)sums->call->send + piece * sums->piece * sums->final_element;
    unsigned char *dst = slot_at(sums, 0, piece);
    if (!sums->prepared)
        return src;
    if (sums->wide) {
        cells_write(&sums->cells,
                    schedule_widen(sums->schedule, (float *)(void *)dst, src, length, STEP_NONE),
                    slot_cell(0, piece), 1);
        src = dst;
    }
    if (sums->call->op == MCCL_PREMUL_SUM)
        cells_write(&sums->cells, schedule_scale(sums->schedule, dst, src, length, STEP_NONE),
                    slot_cell(0, piece), 1);
    return dst;
}

/* Adds the sums of the children to `own`, in order of places, all in one pass. Returns where the
 * sum is. */
static const unsigned char *add_children(struct sums *sums, size_t piece, size_t length,
                                         const unsigned char *own)
{
    const struct tree *tree = &sums->tree;
    const bool ends = tree->place == 0 && !sums->wide;
    unsigned char *sum = slot_at(sums, 0, piece);
    if (ends)
        sum = (unsigned char *)sums->call->recv + piece * sums->piece * sums->element;
    const void *srcs[1 + CHILDREN_MAX] = {own};
    for (int i = 0; i < tree->n_children; i++) {
        unsigned char *theirs = slot_at(sums, 1 + i, piece);
        cells_write(&sums->cells,
                    schedule_recv(sums->schedule, rank_of(tree, tree->children[i]), theirs,
                                  length * sums->element, STEP_NONE),
                    slot_cell(1 + i, piece), 1);
        srcs[1 + i] = theirs;
    }
    const int divisor = tree->place == 0 && sums->call->op == MCCL_AVG ? tree->n : 1;
    const uint32_t step = schedule_reduce(sums->schedule, sum, srcs, 1 + tree->n_children, length,
                                          divisor, STEP_NONE);
    for (int i = 0; i < tree->n_children; i++)
        cells_read(&sums->cells, step, slot_cell(1 + i, piece), 1);
    cells_write(&sums->cells, step, slot_cell(0, piece), 1);
    return sum;
}

static void reduce_piece(struct sums *sums, size_t piece)
{
    const struct tree *tree = &sums->tree;
    const size_t length = cut_length(sums->call->count, sums->piece, piece);
    const unsigned char *sum = operand(sums, piece, length);
    if (tree->n_children > 0)
        sum = add_children(sums, piece, length, sum);
    uint32_t step = STEP_NONE;
    if (tree->place > 0)
        step = schedule_send(sums->schedule, rank_of(tree, tree->parent), sum,
                             length * sums->element, STEP_NONE);
    else if (sums->wide)
        step = schedule_narrow(sums->schedule,
                               (unsigned char *)sums->call->recv +
                                   piece * sums->piece * sums->final_element,
                               (const float *)(const void *)sum, length, STEP_NONE);
    if (sum == slot_at(sums, 0, piece))
        cells_read(&sums->cells, step, slot_cell(0, piece), 1);
}

void build_reduce_tree(const struct coll_call *call, const struct coll_env *env,
                       enum coll_algorithm algorithm, struct schedule *schedule)
{
    if (call->count == 0)
        return;
    struct sums sums = {.call = call, .schedule = schedule};
    sums.tree = lay_out(env, call->root, algorithm);
    sums.wide = call->dtype == MCCL_FLOAT16 || call->dtype == MCCL_BFLOAT16;
    sums.prepared = sums.wide || call->op == MCCL_PREMUL_SUM;
    sums.final_element = mccl_dtype_size(call->dtype);
    if (sums.wide)
        schedule->dtype = MCCL_FLOAT32;
    sums.element = mccl_dtype_size(schedule->dtype);
    /* Equal on all ranks: not this one's children, but the most that one has. */
    size_t n_slots = 2;
    for (int distance = 2; algorithm != ALGO_CHAIN && distance < env->n_ranks; distance *= 2)
        n_slots++;
    sums.piece = cut_piped(env, call->count * sums.element, n_slots, n_slots + 3) / sums.element;
    const size_t n_pieces = (call->count + sums.piece - 1) / sums.piece;
    const size_t n_used = (1 + (size_t)sums.tree.n_children) * PIECE_DEPTH;
    sums.slots = schedule_scratch(schedule, n_used * sums.piece * sums.element);
    if (sums.slots == NULL || !cells_open(&sums.cells, schedule, n_used))
        return;
    for (size_t piece = 0; piece < n_pieces; piece++)
        reduce_piece(&sums, piece);
    cells_close(&sums.cells);
}

/* SPDX-License-Identifier: MIT
 *
 * Reductions over any number of sources: picks the kernels, cuts the work into blocks that stay in
 * the first cache, and holds the floating-point mode. Called by whichever thread drives
 * communication; the tables are filled on the first call and constant afterwards.
 */
#include "reduce/reduce.h"

#include "base/error.h"
#include "os/os.h"
#include "reduce/fp_mode.h"
#include "reduce/kernels.h"

#include <pthread.h>
#include <string.h>

/* Accumulators of a block, in bytes. Two of these and a block of each source in turn fit the 32 KiB
 * first-level cache of every machine in use; measured flat from 2 to 8 KiB in cache. */
#define BLOCK_BYTES 8192

/* Best first. */
static const struct {
    const char *name;
    enum os_cpu needs;
    reduce_fill_fn *fill;
} sets[] = {
#ifdef MCCL_X86_KERNELS
    {"avx512", OS_CPU_AVX512, reduce_fill_avx512},
    {"avx2", OS_CPU_AVX2, reduce_fill_avx2},
#endif
    {"generic", OS_CPU_BASELINE, reduce_fill_generic},
};
#define N_SETS ((int)(sizeof sets / sizeof sets[0]))

static struct reduce_table tables[N_SETS];
static const struct reduce_table *chosen;
static pthread_once_t choose_once = PTHREAD_ONCE_INIT;

static void choose(void)
{
    for (int i = N_SETS - 1; i >= 0; i--)
        if (os_cpu_has(sets[i].needs)) {
            sets[i].fill(&tables[i]);
            chosen = &tables[i];
        }
}

static const struct reduce_table *kernels(void)
{
    pthread_once(&choose_once, choose);
    return chosen;
}

const char *reduce_kernel_set(void)
{
    return sets[kernels() - tables].name;
}

bool reduce_use_kernel_set(const char *name)
{
    (void)kernels();
    for (int i = 0; i < N_SETS; i++)
        if (strcmp(sets[i].name, name) == 0 && os_cpu_has(sets[i].needs)) {
            chosen = &tables[i];
            return true;
        }
    return false;
}

bool reduce_supports(mccl_op op, mccl_dtype dtype)
{
    return mccl_op_supports(op, dtype) != 0;
}

/* The real dtype of a complex one's parts; other dtypes are their own. */
static mccl_dtype part_of(mccl_dtype dtype)
{
    return dtype == MCCL_COMPLEX64 ? MCCL_FLOAT32 : dtype == MCCL_COMPLEX128 ? MCCL_FLOAT64 : dtype;
}

/* A reduction whose kernels are found. */
struct work {
    const struct reduce_type *type;
    struct reduce_kernel kernel;
    const void *const *srcs;
    int n_srcs;
    int divisor;
};

static const void *source(const struct work *work, int i, size_t offset)
{
    return (const char *)work->srcs[i] + offset;
}

/* One block where the accumulator is the dtype. `dst` may be one of the sources, so it is written
 * by the last fold only, after all of them have been read. */
static void run_block(const struct work *work, void *dst, size_t offset, size_t n)
{
    _Alignas(64) unsigned char acc[BLOCK_BYTES];
    const void *total = source(work, 0, offset);
    if (work->n_srcs == 1)
        work->type->settle(dst, total, n);
    for (int i = 1; i < work->n_srcs; i++) {
        void *const to = i == work->n_srcs - 1 ? dst : acc;
        work->kernel.fold(to, total, source(work, i, offset), n);
        total = to;
    }
    if (work->divisor > 1)
        work->type->divide(dst, n, work->divisor);
}

/* One block where the accumulator is wider than the dtype. */
static void run_block_widened(const struct work *work, void *dst, size_t offset, size_t n)
{
    _Alignas(64) unsigned char acc[BLOCK_BYTES];
    _Alignas(64) unsigned char next[BLOCK_BYTES];
    work->type->load(acc, source(work, 0, offset), n);
    for (int i = 1; i < work->n_srcs; i++) {
        work->type->load(next, source(work, i, offset), n);
        work->kernel.fold(acc, acc, next, n);
    }
    if (work->divisor > 1)
        work->type->divide(acc, n, work->divisor);
    work->type->store(dst, acc, n);
}

/* One pass over all sources where there is a kernel for it; blocks for what that leaves, less than
 * a tile, and for other operations. On a Zen 4 with AVX-512, float32 SUM of 3, 4 and 8 sources runs
 * at 1.1, 1.1 and 1.2 times the speed of blocks from the first cache, 1.0, 1.1 and 1.25 from the
 * second (256 KiB each), 1.3, 1.5 and 2 from memory (32 MiB each); AVG of any number at 1.4 and
 * more in cache; 16-bit SUM at 1.6 to 2.6 and MIN and MAX at 4 to 5, since a block widens and
 * narrows in passes of its own. It is slower, 0.75 to 0.95, only for 3 and 4 sources of 2 MiB whose
 * addresses agree in the lower 12 bits: pieces are 256 KiB at most. */
static void run_many(const struct work *work, void *dst, size_t count)
{
    const size_t size = work->type->size;
    const size_t most = BLOCK_BYTES / work->type->acc_size;
    size_t done = 0;
    if (work->kernel.many && work->n_srcs > 1)
        done = work->kernel.many(dst, work->srcs, work->n_srcs, count, work->divisor);
    for (; done < count; done += most) {
        const size_t n = count - done < most ? count - done : most;
        void *const to = (char *)dst + done * size;
        if (work->type->load)
            run_block_widened(work, to, done * size, n);
        else
            run_block(work, to, done * size, n);
    }
}

void reduce_run(mccl_op op, mccl_dtype dtype, void *dst, const void *const *srcs, int n_srcs,
                size_t count, int divisor)
{
    MCCL_ASSERT(reduce_supports(op, dtype) && n_srcs >= 1);
    if (op == MCCL_AVG || op == MCCL_PREMUL_SUM)
        op = MCCL_SUM;
    if (part_of(dtype) != dtype && (op != MCCL_PROD || n_srcs == 1)) {
        dtype = part_of(dtype);
        count *= 2;
    }
    const struct work work = {&kernels()->types[dtype], kernels()->kernels[op][dtype], srcs, n_srcs,
                              divisor};
    MCCL_ASSERT(divisor <= 1 || work.type->divide);

    const struct fp_mode saved = fp_mode_enter();
    if (n_srcs == 1 && divisor <= 1)
        work.type->settle(dst, srcs[0], count);
    else if (n_srcs == 2 && divisor <= 1)
        work.kernel.pair(dst, srcs[0], srcs[1], count);
    else
        run_many(&work, dst, count);
    fp_mode_leave(saved);
}

void reduce_scale(mccl_dtype dtype, void *dst, const void *src, size_t count, double factor)
{
    const mccl_dtype part = part_of(dtype);
    const struct reduce_type *const type = &kernels()->types[part];
    MCCL_ASSERT(type->scale);
    const struct fp_mode saved = fp_mode_enter();
    type->scale(dst, src, part == dtype ? count : 2 * count, factor);
    fp_mode_leave(saved);
}

void reduce_widen(mccl_dtype dtype, float *dst, const void *src, size_t count)
{
    const struct reduce_type *const type = &kernels()->types[dtype];
    MCCL_ASSERT(type->load);
    const struct fp_mode saved = fp_mode_enter();
    type->load(dst, src, count);
    fp_mode_leave(saved);
}

void reduce_narrow(mccl_dtype dtype, void *dst, const float *src, size_t count)
{
    const struct reduce_type *const type = &kernels()->types[dtype];
    MCCL_ASSERT(type->store);
    const struct fp_mode saved = fp_mode_enter();
    type->store(dst, src, count);
    fp_mode_leave(saved);
}

/* SPDX-License-Identifier: MIT
 *
 * The floating-point mode of the calling thread: round to nearest, denormals kept, no traps. The
 * thread may be the user's own and run in another mode (torch flushes denormals on request), and
 * all ranks must round alike; so every entry point of reduce.c enters this mode and leaves it
 * again.
 */
#ifndef MCCL_REDUCE_FP_MODE_H
#define MCCL_REDUCE_FP_MODE_H

#include <stdint.h>

#if defined(__x86_64__)

#include <xmmintrin.h>

struct fp_mode {
    unsigned mxcsr;
};

static inline struct fp_mode fp_mode_enter(void)
{
    const struct fp_mode saved = {_mm_getcsr()};
    _mm_setcsr(0x1f80); /* all exceptions masked, every mode bit off */
    return saved;
}

static inline void fp_mode_leave(struct fp_mode saved)
{
    _mm_setcsr(saved.mxcsr);
}

#elif defined(__aarch64__)

struct fp_mode {
    uint64_t fpcr;
};

static inline void fp_mode_write(uint64_t fpcr)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr) : "memory");
}

static inline struct fp_mode fp_mode_enter(void)
{
    struct fp_mode saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved.fpcr) : : "memory");
    if (saved.fpcr != 0) /* the usual value; writing is slow */
        fp_mode_write(0);
    return saved;
}

static inline void fp_mode_leave(struct fp_mode saved)
{
    if (saved.fpcr != 0)
        fp_mode_write(saved.fpcr);
}

#else

#include <fenv.h>

struct fp_mode {
    fenv_t env;
};

static inline struct fp_mode fp_mode_enter(void)
{
    struct fp_mode saved;
    fegetenv(&saved.env);
    fesetenv(FE_DFL_ENV);
    return saved;
}

static inline void fp_mode_leave(struct fp_mode saved)
{
    fesetenv(&saved.env);
}

#endif

#endif

/* SPDX-License-Identifier: MIT
 *
 * Threads of MCCL's own. Any thread may start one; whoever started it joins it.
 */
#include "os/os_internal.h"

#include "base/error.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#if defined(__APPLE__)
#include <pthread/qos.h>
#endif

_Static_assert(sizeof(pthread_t) <= sizeof(uintptr_t),
               "struct os_thread keeps a pthread_t in its handle");

static void *enter(void *arg)
{
    struct os_thread *thread = arg;

#if defined(__APPLE__)
    pthread_setname_np(thread->name);
    /* Performance cores: a rank that is late at an exchange delays all of them. */
    pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
#else
    pthread_setname_np(pthread_self(), thread->name);
#endif
    thread->run(thread->arg);
    return NULL;
}

/* All signals but those that a thread's own fault raises, which crash handlers want to see. */
static void signals_to_block(sigset_t *set)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};

    sigfillset(set);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        sigdelset(set, faults[i]);
}

mccl_result os_thread_start(struct os_thread *thread, void (*run)(void *), void *arg,
                            const char *name)
{
    sigset_t blocked, before;
    pthread_t handle;
    int error;

    thread->run = run;
    thread->arg = arg;
    snprintf(thread->name, sizeof(thread->name), "%s", name);

    signals_to_block(&blocked);
    pthread_sigmask(SIG_SETMASK, &blocked,
                    &before); /* the new thread inherits the mask from its first moment */
    error = pthread_create(&handle, NULL, enter, thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        errno = error;
        return os_error("pthread_create");
    }
    thread->handle = (uintptr_t)handle;
    return MCCL_OK;
}

void os_thread_join(struct os_thread *thread)
{
    const int error = pthread_join((pthread_t)thread->handle, NULL);

    MCCL_ASSERT(error == 0);
}

void os_thread_yield(void)
{
    sched_yield();
}

void os_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
    __asm__ volatile("yield" ::: "memory");
#else
    atomic_signal_fence(memory_order_seq_cst); /* no such instruction: only keep the loop */
#endif
}

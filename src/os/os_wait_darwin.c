/* SPDX-License-Identifier: MIT
 *
 * Wait on an address on macOS: os_sync_wait_on_address from 14.4 on, __ulock_wait before. Both are
 * looked up at run time, so one binary serves all systems and needs no declaration from Apple's
 * SDK. Any thread.
 */
#include "os/os_internal.h"

#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#define CLOCK_MACH_ABSOLUTE_TIME 32u /* OS_CLOCK_MACH_ABSOLUTE_TIME of os/clock.h */
#define ULOCK_COMPARE_AND_WAIT 0x1u
#define ULOCK_WAKE_ALL 0x100u
#define ULOCK_NO_ERRNO 0x1000000u

typedef int (*wait_function)(void *address, uint64_t value, size_t size, uint32_t flags);
typedef int (*wait_timeout_function)(void *address, uint64_t value, size_t size, uint32_t flags,
                                     uint32_t clock, uint64_t timeout_ns);
typedef int (*wake_function)(void *address, size_t size, uint32_t flags);
typedef int (*ulock_wait_function)(uint32_t operation, void *address, uint64_t value,
                                   uint32_t timeout_us);
typedef int (*ulock_wake_function)(uint32_t operation, void *address, uint64_t wake_value);

/* Written once, by find_calls. */
static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static struct {
    wait_function wait;
    wait_timeout_function wait_timeout;
    wake_function wake_all;
    ulock_wait_function ulock_wait;
    ulock_wake_function ulock_wake;
} g_calls;

static void find_calls(void)
{
    g_calls.wait = (wait_function)dlsym(RTLD_DEFAULT, "os_sync_wait_on_address");
    g_calls.wait_timeout =
        (wait_timeout_function)dlsym(RTLD_DEFAULT, "os_sync_wait_on_address_with_timeout");
    g_calls.wake_all = (wake_function)dlsym(RTLD_DEFAULT, "os_sync_wake_by_address_all");
    g_calls.ulock_wait = (ulock_wait_function)dlsym(RTLD_DEFAULT, "__ulock_wait");
    g_calls.ulock_wake = (ulock_wake_function)dlsym(RTLD_DEFAULT, "__ulock_wake");
}

/* Waking must use the same family of calls as waiting. */
static bool has_os_sync(void)
{
    return g_calls.wait != NULL && g_calls.wait_timeout != NULL && g_calls.wake_all != NULL;
}

static bool has_ulock(void)
{
    return g_calls.ulock_wait != NULL && g_calls.ulock_wake != NULL;
}

static void ulock_wait(void *address, uint32_t expected, int64_t timeout_ns)
{
    uint32_t timeout_us = 0; /* none */

    if (timeout_ns > 0) /* rounded up; cut to 71 minutes: the caller sees a spurious wake-up */
        timeout_us = timeout_ns >= (int64_t)UINT32_MAX * 1000
                         ? UINT32_MAX
                         : (uint32_t)((timeout_ns + 999) / 1000);
    g_calls.ulock_wait(ULOCK_COMPARE_AND_WAIT | ULOCK_NO_ERRNO, address, expected, timeout_us);
}

void os_wait(const _Atomic uint32_t *address, uint32_t expected, int64_t timeout_ns)
{
    void *word = (void *)(uintptr_t)address; /* the calls only read it */

    pthread_once(&g_once, find_calls);
    if (timeout_ns == 0)
        return; /* both families read 0 as something else */
    if (has_os_sync() && timeout_ns < 0) {
        g_calls.wait(word, expected, sizeof(*address), 0);
    } else if (has_os_sync()) {
        g_calls.wait_timeout(word, expected, sizeof(*address), 0, CLOCK_MACH_ABSOLUTE_TIME,
                             (uint64_t)timeout_ns);
    } else if (has_ulock()) {
        ulock_wait(word, expected, timeout_ns);
    } else {
        const struct timespec nap = {
            .tv_nsec = 50000}; /* no known system: poll, which the contract allows */
        nanosleep(&nap, NULL);
    }
}

void os_wake_all(const _Atomic uint32_t *address)
{
    void *word = (void *)(uintptr_t)address;

    pthread_once(&g_once, find_calls);
    if (has_os_sync())
        g_calls.wake_all(word, sizeof(*address), 0);
    else if (has_ulock())
        g_calls.ulock_wake(ULOCK_COMPARE_AND_WAIT | ULOCK_WAKE_ALL | ULOCK_NO_ERRNO, word, 0);
}

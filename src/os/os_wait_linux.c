/* SPDX-License-Identifier: MIT
 *
 * Wait on an address: the futex call. Any thread. The words are private to the process.
 */
#include "os/os_internal.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void os_wait(const _Atomic uint32_t *address, uint32_t expected, int64_t timeout_ns)
{
    const struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / OS_SEC),
                                     .tv_nsec = (long)(timeout_ns % OS_SEC)};

    /* EAGAIN (the value differs), EINTR, ETIMEDOUT: in each case the caller looks at the value
     * again. */
    syscall(SYS_futex, address, FUTEX_WAIT_PRIVATE, expected, timeout_ns < 0 ? NULL : &timeout,
            NULL, 0);
}

void os_wake_all(const _Atomic uint32_t *address)
{
    syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* SPDX-License-Identifier: MIT
 *
 * The one clock of MCCL. Any thread.
 */
#include "os/os_internal.h"

#include <time.h>

#if defined(__APPLE__)
/* Stands still while the machine sleeps, as CLOCK_MONOTONIC does on Linux: a closed lid is no
 * time-out. */
#define CLOCK CLOCK_UPTIME_RAW
#else
#define CLOCK CLOCK_MONOTONIC
#endif

int64_t os_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK, &now);
    return (int64_t)now.tv_sec * OS_SEC + now.tv_nsec;
}

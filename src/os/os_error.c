/* SPDX-License-Identifier: MIT
 *
 * Turns errno into the thread's error text for the calls of this folder, with the advice that
 * belongs to it. Any thread.
 */
#include "os/os_internal.h"

#include "base/error.h"

#include <errno.h>
#include <string.h>

static const char *advice(int number)
{
    switch (number) {
    case EMFILE:
        return "; this process has too many open files: raise its limit (ulimit -n)";
    case ENFILE:
        return "; this machine has too many open files: raise fs.file-max (Linux) or kern.maxfiles "
               "(macOS)";
    case EAGAIN:
        return "; a limit on threads or memory was reached: see ulimit -u and the container's pids "
               "limit";
    default:
        return "";
    }
}

mccl_result os_error(const char *call)
{
    const int number = errno;
    const mccl_result result = number == ENOMEM ? MCCL_ERR_NO_MEMORY : MCCL_ERR_SYSTEM;

    return error_set(result, "%s failed: %s (errno %d)%s", call, strerror(number), number,
                     advice(number));
}

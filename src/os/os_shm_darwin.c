/* SPDX-License-Identifier: MIT
 *
 * Memory that two processes share: not written for macOS yet, whose processes talk over TCP.
 */
#include "os/os.h"

#include "base/error.h"

bool os_shm_exists(void)
{
    return false;
}

mccl_result os_shm_create(size_t size, void **memory, int *fd)
{
    (void)size, (void)memory, (void)fd;
    return error_set(MCCL_ERR_UNSUPPORTED, "there is no shared memory on macOS in this version");
}

mccl_result os_shm_open(int pid, int fd, size_t size, void **memory)
{
    (void)pid, (void)fd;
    return os_shm_create(size, memory, NULL);
}

void os_shm_close(void *memory, size_t size)
{
    (void)memory, (void)size;
}

/* SPDX-License-Identifier: MIT
 *
 * Memory that two processes of one user share, without a name: it goes with them, also if they are
 * killed.
 */
#include "os/os_internal.h"

#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A peer that made it smaller would kill us by SIGBUS. */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static mccl_result map(int fd, size_t size, void **memory)
{
    void *const at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return os_error("mmap of shared memory");
    (void)madvise(at, size, MADV_DONTFORK); /* a forked child has no business in it */
    *memory = at;
    return MCCL_OK;
}

bool os_shm_exists(void)
{
    return true;
}

mccl_result os_shm_create(size_t size, void **memory, int *fd)
{
    os_fd_open_begin();
    const int made = os_fd_open_end(memfd_create("mccl", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (made < 0)
        return os_error("memfd_create");
    mccl_result result = MCCL_OK;
    if (ftruncate(made, (off_t)size) != 0 || fcntl(made, F_ADD_SEALS, SEALS) != 0)
        result = os_error("shared memory");
    if (result == MCCL_OK)
        result = map(made, size, memory);
    if (result != MCCL_OK)
        os_fd_close(made);
    else
        *fd = made;
    return result;
}

mccl_result os_shm_open(int pid, int fd, size_t size, void **memory)
{
    char path[64];
    struct stat found;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    os_fd_open_begin();
    const int opened = os_fd_open_end(open(path, O_RDWR | O_CLOEXEC));
    if (opened < 0)
        return os_error(path);
    mccl_result result = MCCL_OK;
    const int seals = fcntl(opened, F_GET_SEALS);
    if (fstat(opened, &found) != 0 || seals < 0)
        result = os_error(path);
    else if ((seals & F_SEAL_SHRINK) == 0 || (size_t)found.st_size != size)
        result = error_set(MCCL_ERR_SYSTEM, "%s is not the memory that was offered", path);
    else
        result = map(opened, size, memory);
    os_fd_close(opened);
    return result;
}

void os_shm_close(void *memory, size_t size)
{
    if (memory)
        (void)munmap(memory, size);
}

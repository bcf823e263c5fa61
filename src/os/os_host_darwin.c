/* SPDX-License-Identifier: MIT
 *
 * What a Mac is: its cores, its identity, its random numbers. Any thread.
 */
#include "os/os_internal.h"

#include "os/os_hmac.h"

#include <stdlib.h>
#include <string.h>
#include <sys/sysctl.h>
#include <unistd.h>

int os_cpu_count(void)
{
    const long online = sysconf(_SC_NPROCESSORS_ONLN);

    return online > 0 ? (int)online : 1;
}

mccl_result os_random(void *buffer, size_t size)
{
    arc4random_buf(buffer, size); /* cannot fail; reseeds itself after a fork */
    return MCCL_OK;
}

/* Hashes the boot's id; there are no network namespaces on macOS. */
void os_host_id(uint8_t id[16])
{
    char boot_id[64] = {0};
    size_t size = sizeof(boot_id) - 1;
    uint8_t digest[HMAC_BYTES];

    /* macOS has it since 10.10; without it all Macs would be one, so the worst case must differ. */
    if (sysctlbyname("kern.bootsessionuuid", boot_id, &size, NULL, 0) != 0)
        gethostname(boot_id, sizeof(boot_id) - 1);
    sha256(boot_id, strlen(boot_id), digest);
    memcpy(id, digest, 16);
}

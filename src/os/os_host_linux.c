/* SPDX-License-Identifier: MIT
 *
 * What a Linux host is: its cores, its identity, its random numbers. Any thread.
 */
#include "os/os_internal.h"

#include "os/os_hmac.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_CPUS (1 << 16)

int os_cpu_count(void)
{
    /* The kernel refuses a set that is smaller than its own, so grow until it fits. */
    for (int n_cpus = CPU_SETSIZE; n_cpus <= MAX_CPUS; n_cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)n_cpus);
        if (set == NULL)
            break;
        const size_t size = CPU_ALLOC_SIZE((size_t)n_cpus);
        const int count = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (count > 0)
            return count;
    }
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

mccl_result os_random(void *buffer, size_t size)
{
    uint8_t *next = buffer;

    while (size > 0) {
        const ssize_t n = getrandom(next, size, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return os_error("getrandom");
        next += n;
        size -= (size_t)n;
    }
    return MCCL_OK;
}

static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static uint8_t g_unlike_any[16];

static void make_unlike_any(void)
{
    if (os_random(g_unlike_any, sizeof(g_unlike_any)) != MCCL_OK)
        snprintf((char *)g_unlike_any, sizeof(g_unlike_any), "pid %d", os_pid());
}

/* Hashes the boot's id and the network namespace's file identity. */
void os_host_id(uint8_t id[16])
{
    struct {
        char boot_id[40];
        uint64_t device, inode;
    } host = {{0}, 0, 0};
    uint8_t digest[HMAC_BYTES];
    struct stat namespace_file;
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    const bool has_boot_id =
        file != NULL && fgets(host.boot_id, sizeof(host.boot_id), file) != NULL;

    if (file != NULL)
        fclose(file);
    if (!has_boot_id || stat("/proc/self/ns/net", &namespace_file) != 0) {
        pthread_once(
            &g_once,
            make_unlike_any); /* no /proc: TCP works between any two, so claim no kinship */
        memcpy(id, g_unlike_any, sizeof(g_unlike_any));
        return;
    }
    host.device = (uint64_t)namespace_file.st_dev;
    host.inode = (uint64_t)namespace_file.st_ino;
    sha256(&host, sizeof(host), digest);
    memcpy(id, digest, 16);
}

/* SPDX-License-Identifier: MIT
 *
 * Each rank counts its own arrivals in a cache line of the page and reads those of the others.
 */
#include "lineup.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPIN_NS 2000000u /* then the core is offered to others: a rank that is late may need it */
#define SPIN_ROUNDS 64u  /* between two looks at the clock */

unsigned char *line_up_map(const char *path)
{
    struct stat status;
    const int fd = open(path, O_RDWR);
    if (fd < 0 || fstat(fd, &status) != 0 || status.st_size < (off_t)PAGE_BYTES)
        fail("cannot open %s", path);
    void *page = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        fail("cannot map %s", path);
    close(fd);
    return page;
}

void wait_a_little(struct patience *wait, const struct job *job, const char *what)
{
    if (++wait->rounds % SPIN_ROUNDS && job->spins)
        return;
    const uint64_t now = now_ns();
    if (wait->begin_ns == 0)
        wait->begin_ns = now;
    if (now - wait->begin_ns > DEADLINE_S * UINT64_C(1000000000))
        fail("waited %d s for %s", DEADLINE_S, what);
    if (!job->spins || now - wait->begin_ns > SPIN_NS)
        sched_yield();
}

static _Atomic uint64_t *arrivals(const struct job *job, int rank)
{
    return (_Atomic uint64_t *)(void *)(job->page + (size_t)rank * CACHE_LINE);
}

void line_up(const struct job *job)
{
    const uint64_t own = atomic_fetch_add(arrivals(job, job->rank), 1) + 1;
    struct patience wait = {0};
    for (int rank = 0; rank < job->n; rank++)
        while (atomic_load_explicit(arrivals(job, rank), memory_order_acquire) < own)
            wait_a_little(&wait, job, "other ranks to line up");
}

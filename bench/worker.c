/* SPDX-License-Identifier: MIT
 *
 * One rank of one library, for `mccl bench`:
 *
 *     mccl-bench-rank LIBRARY RANK N FOLDER SCHED WAIT [PATH]
 *
 * FOLDER holds `socket`, where the driver listens, and `page`, the ranks' line-up. RANK is - where
 * the library's own launcher decides it. SCHED is rr for round-robin real-time scheduling, else -.
 * WAIT is yield where ranks outnumber processors, else spin. PATH is the shared library to open.
 * Requests are lines, answers are JSON objects of one line:
 *
 *                                       {"rank": 0}
 *     id                                {"id": "..."}              rank 0 only
 *     join ID                           {"version": "..."}
 *     run OP DTYPE BYTES WARM_UP CALLS  {"wrong": 0, "ns": [...]}  this rank's times
 *     congestion                        {"congestion": ["cubic"]}
 *
 * The end of the connection is the request to leave.
 */
#include "congestion.h"
#include "data.h"
#include "lineup.h"

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static const struct library *const libraries[] = {&lib_mccl, &lib_openmpi, &lib_raw, &lib_memcpy};

void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

void *symbol(void *handle, const char *name)
{
    void *found = dlsym(handle, name);
    if (!found)
        fail("%s", dlerror());
    return found;
}

static const struct library *find_library(const char *name)
{
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++)
        if (strcmp(libraries[i]->name, name) == 0)
            return libraries[i];
    fail("no library %s", name);
}

static void use_round_robin(void)
{
#ifdef __linux__
    const struct sched_param parameters = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR, &parameters) != 0)
        fail("SCHED_RR: %s", strerror(errno));
#else
    fail("SCHED_RR: Linux only");
#endif
}

/* Two streams over one socket: a stream must not be read and written in turns. */
struct driver {
    FILE *requests, *answers;
};

static struct driver connect_to_driver(const char *folder)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", folder);
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (length < 0 || (size_t)length >= sizeof address.sun_path || fd < 0 ||
        connect(fd, (const struct sockaddr *)&address, sizeof address) != 0)
        fail("cannot connect to %s/socket: %s", folder, strerror(errno));
    const struct driver driver = {fdopen(fd, "r"), fdopen(dup(fd), "w")};
    if (!driver.requests || !driver.answers)
        fail("fdopen: %s", strerror(errno));
    return driver;
}

static void run(FILE *answers, struct data *data, const struct job *job,
                const struct library *library, unsigned warm_up, unsigned calls)
{
    uint64_t wrong = 0;
    uint64_t *times = malloc((calls + 1) * sizeof *times);
    if (!times)
        fail("no memory for %u times", calls);
    for (unsigned i = 0; i < warm_up + calls; i++) {
        data_fill(data);
        line_up(job);
        const uint64_t begin_ns = now_ns();
        library->call(&data->call);
        const uint64_t end_ns = now_ns();
        if (i >= warm_up)
            times[i - warm_up] = end_ns - begin_ns;
        wrong += data_count_wrong(data);
    }
    fprintf(answers, "{\"wrong\": %llu, \"ns\": [", (unsigned long long)wrong);
    for (unsigned i = 0; i < calls; i++)
        fprintf(answers, "%s%llu", i ? ", " : "", (unsigned long long)times[i]);
    fprintf(answers, "]}\n");
    free(times);
}

static void answer(FILE *answers, char *request, struct data *data, const struct job *job,
                   const struct library *library)
{
    char text[ID_BYTES] = "", op_name[32], dtype_name[32];
    size_t bytes;
    unsigned warm_up, calls;
    request[strcspn(request, "\n")] = '\0';
    if (strcmp(request, "id") == 0) {
        library->new_id(text);
        fprintf(answers, "{\"id\": \"%s\"}\n", text);
    } else if (strncmp(request, "join ", 5) == 0) {
        library->join(request + 5);
        library->version(text, sizeof text);
        fprintf(answers, "{\"version\": \"%s\"}\n", text);
    } else if (strcmp(request, "congestion") == 0) {
        congestion_set(text, sizeof text);
        fprintf(answers, "{\"congestion\": [%s]}\n", text);
    } else if (sscanf(request, "run %31s %31s %zu %u %u", op_name, dtype_name, &bytes, &warm_up,
                      &calls) == 5 &&
               op_named(op_name) < N_OPS && dtype_named(dtype_name) < N_DTYPES) {
        data_set_up(data, job, library->only_moves, op_named(op_name), dtype_named(dtype_name),
                    bytes);
        run(answers, data, job, library, warm_up, calls);
    } else {
        fail("no such request: %s", request);
    }
    fflush(answers);
}

int main(int argc, char **argv)
{
    if (argc < 7 || argc > 8) {
        fprintf(stderr, "usage: mccl-bench-rank LIBRARY RANK N FOLDER SCHED WAIT [PATH]; `mccl "
                        "bench` starts it\n");
        return 2;
    }
    const struct library *library = find_library(argv[1]);
    struct job job = {
        .rank = strcmp(argv[2], "-") == 0 ? -1 : atoi(argv[2]),
        .n = atoi(argv[3]),
        .path = argc == 8 ? argv[7] : "",
        .spins = strcmp(argv[6], "spin") == 0,
    };
    if (job.n < 2 || job.n > MAX_RANKS || job.rank >= job.n)
        fail("rank %s of %s: at most %d ranks", argv[2], argv[3], MAX_RANKS);
    if (strcmp(argv[5], "rr") == 0)
        use_round_robin();
    char path[4096], request[ID_BYTES + 16];
    snprintf(path, sizeof path, "%s/page", argv[4]);
    job.page = line_up_map(path);
    library->open(&job);

    struct data data = {0};
    const struct driver driver = connect_to_driver(argv[4]);
    fprintf(driver.answers, "{\"rank\": %d}\n", job.rank);
    fflush(driver.answers);
    while (fgets(request, sizeof request, driver.requests))
        answer(driver.answers, request, &data, &job, library);
    library->leave();
    data_free(&data);
    return 0;
}

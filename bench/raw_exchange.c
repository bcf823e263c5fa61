/* SPDX-License-Identifier: MIT
 *
 * What the machine can do without a library: two processes send each other BYTES over a loopback
 * TCP connection, CALLS times, with the socket options that MCCL sets, and poll without sleeping.
 *
 *     raw_exchange BYTES CALLS
 *
 * Prints {"times_ns": [...], "wrong": N}: for each exchange the time of the slower side, and how
 * many bytes arrived with another value than was sent. Both sides begin together: they count in
 * shared memory. A few exchanges before are not timed: the kernel's buffers grow in them. For Linux
 * and macOS.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SYSCALL_BYTES ((size_t)256 << 10) /* measured best for exchanges from 64 KiB to 64 MiB */
#define NOTSENT_LOWAT 131072              /* the default of MCCL_TCP_LOWAT */
#define WARM_UP_CALLS 5
#define LINE 128

/* Shared by both sides; each writes its own half. */
struct side {
    _Alignas(LINE) _Atomic uint32_t arrivals;
    uint64_t wrong;
};

struct page {
    struct side sides[2];
    _Alignas(LINE) uint64_t times_ns[]; /* [2][calls] */
};

static void check(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "raw_exchange: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void set_options(int fd)
{
    const int on = 1, lowat = NOTSENT_LOWAT;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof lowat);
#ifdef TCP_CONGESTION
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
#endif
    check(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "fcntl");
}

/* Forks. Returns the rank, 0 in the parent, and one end of the connection. */
static int split(int *fd, pid_t *child)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int listening = socket(AF_INET, SOCK_STREAM, 0);
    check(listening >= 0 && bind(listening, (struct sockaddr *)&address, size) == 0 &&
              listen(listening, 1) == 0 &&
              getsockname(listening, (struct sockaddr *)&address, &size) == 0,
          "listen");
    *child = fork();
    check(*child >= 0, "fork");
    if (*child > 0) {
        *fd = accept(listening, NULL, NULL);
        check(*fd >= 0, "accept");
    } else {
        *fd = socket(AF_INET, SOCK_STREAM, 0);
        check(*fd >= 0 && connect(*fd, (struct sockaddr *)&address, size) == 0, "connect");
    }
    close(listening);
    set_options(*fd);
    return *child > 0 ? 0 : 1;
}

static void line_up(struct page *page, int rank)
{
    const uint32_t arrivals = atomic_fetch_add(&page->sides[rank].arrivals, 1) + 1;
    while (atomic_load(&page->sides[1 - rank].arrivals) < arrivals)
        ;
}

/* Bytes moved: 0 if the socket is not ready. */
static size_t moved(ptrdiff_t n, const char *what)
{
    check(n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)), what);
    return n > 0 ? (size_t)n : 0;
}

static void exchange(int fd, const unsigned char *out, unsigned char *in, size_t bytes)
{
    size_t sent = 0, received = 0;
    while (sent < bytes || received < bytes) {
        size_t most = bytes - sent < SYSCALL_BYTES ? bytes - sent : SYSCALL_BYTES;
        if (most > 0)
            sent += moved(send(fd, out + sent, most, 0), "send");
        most = bytes - received < SYSCALL_BYTES ? bytes - received : SYSCALL_BYTES;
        if (most > 0)
            received += moved(recv(fd, in + received, most, 0), "recv");
    }
}

/* Differs by rank, position and call; 251 is prime to every buffer size. */
static unsigned char value(int rank, size_t position, size_t call)
{
    return (unsigned char)((position + 101 * call + 53 * (size_t)rank) % 251);
}

static void run(struct page *page, int rank, int fd, size_t bytes, size_t calls)
{
    unsigned char *out = malloc(bytes), *in = calloc(bytes, 1);
    check(out && in, "malloc");
    for (size_t call = 0; call < WARM_UP_CALLS + calls; call++) {
        for (size_t i = 0; i < bytes; i++)
            out[i] = value(rank, i, call);
        line_up(page, rank);
        const uint64_t begin_ns = now_ns();
        exchange(fd, out, in, bytes);
        const uint64_t end_ns = now_ns();
        if (call >= WARM_UP_CALLS)
            page->times_ns[(size_t)rank * calls + call - WARM_UP_CALLS] = end_ns - begin_ns;
        for (size_t i = 0; i < bytes; i++)
            page->sides[rank].wrong += in[i] != value(1 - rank, i, call);
    }
    free(out);
    free(in);
}

static void print_result(const struct page *page, size_t calls)
{
    printf("{\"times_ns\": [");
    for (size_t call = 0; call < calls; call++) {
        const uint64_t first = page->times_ns[call], second = page->times_ns[calls + call];
        printf("%s%llu", call > 0 ? ", " : "",
               (unsigned long long)(first > second ? first : second));
    }
    printf("], \"wrong\": %llu}\n",
           (unsigned long long)(page->sides[0].wrong + page->sides[1].wrong));
}

int main(int argc, char **argv)
{
    const size_t bytes = argc == 3 ? strtoull(argv[1], NULL, 10) : 0;
    const size_t calls = argc == 3 ? strtoull(argv[2], NULL, 10) : 0;
    if (bytes == 0 || calls == 0 || calls > 1000000) {
        fprintf(stderr, "usage: raw_exchange BYTES CALLS\n");
        return 2;
    }
    struct page *page = mmap(NULL, sizeof *page + 2 * calls * sizeof page->times_ns[0],
                             PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(page != MAP_FAILED, "mmap");
    int fd;
    pid_t child;
    const int rank = split(&fd, &child);
    run(page, rank, fd, bytes, calls);
    if (rank > 0)
        return 0;
    int status = 0;
    check(waitpid(child, &status, 0) == child, "waitpid");
    if (status != 0)
        return 1;
    print_result(page, calls);
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * The platform layer's contract. One .c file per concern and system implements it; nothing above
 * this folder contains an #ifdef for an operating system. All functions may be called from any
 * thread unless they say otherwise. File descriptors made here are close-on-exec, non-blocking, and
 * closed in a forked child.
 */
#ifndef MCCL_OS_H
#define MCCL_OS_H

#include "mccl.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#define OS_MS 1000000LL     /* nanoseconds in a millisecond */
#define OS_SEC 1000000000LL /* and in a second */

/* ---- clock (os_clock.c) ---- */

/* Monotonic nanoseconds; does not jump with the wall clock. */
int64_t os_now_ns(void);

/* ---- threads (os_thread.c) ---- */

struct os_thread {
    uintptr_t handle; /* pthread_t */
    void (*run)(void *arg);
    void *arg;
    char name[16];
};

/* Starts a joinable thread with all signals blocked, so that Ctrl-C reaches the program's own
 * threads; only those that the thread's own faults raise (SIGSEGV, ...) stay open, for crash
 * handlers. `thread` must stay valid until os_thread_join. `name` is cut to 15 characters. */
mccl_result os_thread_start(struct os_thread *thread, void (*run)(void *), void *arg,
                            const char *name);
void os_thread_join(struct os_thread *thread);
/* Lets another runnable thread have the core. */
void os_thread_yield(void);
/* One pause inside a spin loop. */
void os_cpu_relax(void);
/* Cores this process may use (affinity counted where the system has it); at least 1. */
int os_cpu_count(void);
/* Process id and a short host name for messages ("host:pid" names a rank's process). */
int os_pid(void);
void os_host_name(char *text, size_t size);

/* ---- wait on address (os_wait_linux.c: futex; os_wait_darwin.c: os_sync_wait_on_address /
 * __ulock) ---- */

/* Sleeps while *address == expected, until woken or `timeout_ns` (-1: none) passed. May wake
 * spuriously. */
void os_wait(const _Atomic uint32_t *address, uint32_t expected, int64_t timeout_ns);
void os_wake_all(const _Atomic uint32_t *address);

/* ---- poller (os_poll_epoll.c, os_poll_kqueue.c) ---- */

#define OS_POLL_READ 1u
#define OS_POLL_WRITE 2u
#define OS_POLL_HUP 4u  /* reported only: the other side is gone; unread data may be left */
#define OS_POLL_EDGE 8u /* asked for only: report once per change, not as long as it holds */

struct os_poller; /* opaque */

struct os_poll_event {
    void *data;      /* what was given to add; NULL never appears */
    unsigned events; /* OS_POLL_READ | WRITE | HUP */
};

mccl_result os_poller_create(struct os_poller **poller);
void os_poller_destroy(struct os_poller *poller); /* NULL is ignored */
/* `events`: READ | WRITE | EDGE. Ask for READ to learn of HUP: macOS reports it with the direction
 * it ends. */
mccl_result os_poller_add(struct os_poller *poller, int fd, unsigned events, void *data);
/* Replaces events and data, and reports anew what is ready at the moment. */
mccl_result os_poller_modify(struct os_poller *poller, int fd, unsigned events, void *data);
void os_poller_remove(struct os_poller *poller, int fd);
/* Blocks until something is ready, os_poller_wake, or `timeout_ns` (0: do not block; -1: none).
 * Returns the number of events written, 0 for time-out, wake-up or EINTR. One thread at a time.
 * Time-outs are rounded up by at most 1 ms. Both directions of a descriptor come as one event,
 * except that macOS may spread them over two calls when `max_events` runs out. */
int os_poller_wait(struct os_poller *poller, struct os_poll_event *events, int max_events,
                   int64_t timeout_ns);
/* Makes the current or the next os_poller_wait return. Any thread; async-signal-safe. */
void os_poller_wake(struct os_poller *poller);

/* ---- descriptors and fork (os_fd.c) ---- */

/* Registers the pthread_atfork handlers once. Whoever has fork handlers of its own registers them
 * after these: the lock below, which comes last in the order, is then taken last. */
void os_fork_init(void);
/* Counts forks between the first process and this one: an object made under another number is the
 * parent's. */
uint32_t os_fork_generation(void);
/* Makes `fd` known, so that a forked child closes it. Everything in os_*.c does this itself. */
void os_fd_track(int fd);
/* Forgets and closes. -1 is ignored. Keeps errno. In a forked child only what the child itself
 * opened and tracked is closed: the parent's numbers may be someone else's there. */
void os_fd_close(int fd);
/* Descriptors that this process may have at the moment (`ulimit -n`). */
int os_fd_limit(void);
/* How many more it may open, up to `wanted`. Other threads may change it at any time. */
int os_fd_free(int wanted);

/* ---- sockets (os_socket.c): thin, errno semantics of POSIX evened out ---- */

/* A stream socket: non-blocking, close-on-exec, no SIGPIPE, TCP_NODELAY for inet families. -1 and
 * errno. */
int os_socket_stream(int family);
/* Accepts one connection with the same properties; -1 and errno (EAGAIN when there is none). */
int os_socket_accept(int listener, struct sockaddr_storage *peer);
/* send/recv with MSG_NOSIGNAL semantics, EINTR retried, at most 1 GiB a call. Returns bytes, 0 at
 * end of stream (recv), -1 for try again, -2 for an error (errno set; EPROTOTYPE read as
 * ECONNRESET, ENOBUFS as try again). */
struct iovec;
ptrdiff_t os_socket_send(int fd, const struct iovec *iov, int n_iov);
ptrdiff_t os_socket_recv(int fd, const struct iovec *iov, int n_iov);
/* Pending error of a connecting socket: 0 or an errno value. */
int os_socket_error(int fd);
/* Sets SO_SNDBUF and SO_RCVBUF; *granted is the smaller of what the system gave. */
mccl_result os_socket_buffers(int fd, size_t bytes, size_t *granted);
/* TCP_NOTSENT_LOWAT. MCCL_ERR_UNSUPPORTED where the system has none. */
mccl_result os_socket_notsent_lowat(int fd, size_t bytes);
/* Congestion control by name (Linux: TCP_CONGESTION). MCCL_ERR_UNSUPPORTED elsewhere or when
 * refused. */
mccl_result os_socket_congestion(int fd, const char *name);
/* The one in force; "" where the system does not tell. */
void os_socket_congestion_name(int fd, char *name, size_t size);
/* TCP keep-alive: probes after `idle_s` of silence, then every few seconds. Best effort. */
void os_socket_keepalive(int fd, int idle_s);
/* Makes close() send a reset at once instead of lingering. */
void os_socket_reset_on_close(int fd);

/* ---- interfaces and addresses (os_ifaddr_*.c, os_address.c) ---- */

/* An endpoint on the network, in the form that travels: 24 bytes, no scope id, port in host order.
 */
struct os_address {
    uint8_t family; /* 4 or 6; 0: none */
    uint8_t kind;   /* enum os_if_kind of the interface it belongs to */
    uint16_t port;
    uint32_t speed_mbps; /* of the interface; 0 unknown */
    uint8_t ip[16];      /* network order; IPv4 in the first four bytes */
};

/* BRIDGE: docker0, virbr0, bridge0, ...; VIRTUAL: tun, tap, awdl, utun, ...; a veth is WIRED. */
enum os_if_kind {
    OS_IF_LOOPBACK,
    OS_IF_WIRED,
    OS_IF_THUNDERBOLT,
    OS_IF_WIFI,
    OS_IF_BRIDGE,
    OS_IF_VIRTUAL,
    OS_IF_OTHER
};

struct os_interface {
    char name[32];
    unsigned index;
    enum os_if_kind kind;
    bool up;
    uint32_t speed_mbps;
    struct os_address address; /* port 0 */
    int prefix_bits;
};

/* Lists all (interface, address) pairs of this host, down interfaces and IPv6 link-local ones
 * included. *list is malloced; free() it. */
mccl_result os_interfaces(struct os_interface **list, size_t *n_list);

/* True for fe80::/10 and 169.254/16. */
bool os_address_is_link_local(const struct os_address *address);
bool os_address_is_loopback(const struct os_address *address);
bool os_address_equal_ip(const struct os_address *a, const struct os_address *b);
/* True if both lie in the same subnet of `bits` prefix bits. */
bool os_address_same_subnet(const struct os_address *a, const struct os_address *b, int bits);
/* "10.0.0.2:29600", "[fd00::2]:29600"; without the port if it is 0. */
void os_address_format(const struct os_address *address, char *text, size_t size);
/* Parses an IPv4 literal, or an IPv6 one (optionally in brackets, optionally with a %scope, which
 * is dropped). Port and speed become 0, kind LOOPBACK or OTHER; ::ffff:a.b.c.d becomes IPv4, here
 * and in from_sockaddr. */
bool os_address_parse(const char *text, struct os_address *address);
/* `scope` is the interface index for IPv6 link-local addresses, else ignored. Returns the length.
 */
socklen_t os_address_to_sockaddr(const struct os_address *address, unsigned scope,
                                 struct sockaddr_storage *out);
void os_address_from_sockaddr(const struct sockaddr_storage *in, struct os_address *address);

/* ---- host (os_host_*.c) ---- */

/* Equal for two processes exactly if they share a running kernel and a network namespace. */
void os_host_id(uint8_t id[16]);
/* From the system's generator (getrandom, arc4random_buf/getentropy). */
mccl_result os_random(void *buffer, size_t size);

/* ---- shared memory (os_shm_*.c) ---- */

/* Whether there is any on this system. */
bool os_shm_exists(void);
/* Zeroed memory that another process of this user can open by our pid and *fd, which stays open
 * until os_fd_close. It has no name. */
mccl_result os_shm_create(size_t size, void **memory, int *fd);
/* The same memory, if the other process is one of this user's and this container's. */
mccl_result os_shm_open(int pid, int fd, size_t size, void **memory);
/* Unmaps. NULL is ignored. */
void os_shm_close(void *memory, size_t size);

/* ---- processor (os_cpu.c) ---- */

enum os_cpu {
    OS_CPU_BASELINE, /* what every machine of the architecture has */
    OS_CPU_AVX2,     /* with F16C, which all that have AVX2 have */
    OS_CPU_AVX512,   /* F, BW, DQ and VL, and those of AVX2 */
};

/* May programs use these instructions: the processor has them and the system saves their registers.
 */
bool os_cpu_has(enum os_cpu level);

#endif

/* SPDX-License-Identifier: MIT
 *
 * What a process holds, as the system counts it: descriptors, threads, memory, listening ports.
 * From /proc, so on Linux only. Any thread.
 */
#ifndef MCCL_TESTS_PROC_H
#define MCCL_TESTS_PROC_H

#include <stdbool.h>
#include <stdint.h>

/* Of the calling process. */
int proc_fd_count(void);
int proc_thread_count(void);
int64_t proc_rss_kib(void);

/* TCP ports (IPv4 and IPv6) on which the calling process listens, ascending, without repetition.
 * Returns how many; at most `max` are written. */
int proc_listening_ports(int *ports, int max);
/* True if the calling process listens on a wildcard address. */
bool proc_listens_on_wildcard(void);

/* A socket that listens on 127.0.0.1:port (0: any), and its port. -1 if the port is taken. */
int proc_listen_on(int port, int *got);

#endif

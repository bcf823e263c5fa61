/* SPDX-License-Identifier: MIT
 *
 * What the files of this folder share and nobody else sees. Included first by each of them: it also
 * asks the C library for the system's own declarations, whatever the build passes on the command
 * line.
 */
#ifndef MCCL_OS_INTERNAL_H
#define MCCL_OS_INTERNAL_H

#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
#define _DARWIN_C_SOURCE 1
#endif

#include "os/os.h"

/* ---- os_fd.c ---- */

/* Bracket a system call that makes a descriptor: no fork of this process happens between the two,
 * so a child never inherits one that is not tracked yet. `end` tracks `fd` unless it is -1, keeps
 * errno, returns `fd`. */
void os_fd_open_begin(void);
int os_fd_open_end(int fd);
/* Sets close-on-exec and non-blocking mode where the call that made `fd` could not. False and
 * errno. */
bool os_fd_set_flags(int fd);

/* ---- os_error.c ---- */

/* Sets the error text "CALL failed: REASON (errno N)" with a next step where there is a known one,
 * from errno. */
mccl_result os_error(const char *call);

/* ---- os_ifaddr_linux.c, os_ifaddr_darwin.c ---- */

/* Fills kind and speed of `interface`, whose name and index are set. `fd` is any datagram socket,
 * `flags` the IFF_* flags. Leaves OS_IF_OTHER and 0 where the system does not tell. */
void os_interface_probe(int fd, unsigned flags, struct os_interface *interface);

#endif

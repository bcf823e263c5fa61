/* SPDX-License-Identifier: MIT
 *
 * Links through memory that two processes of one host share. Linux only; elsewhere they fall back
 * to the socket.
 */
#ifndef MCCL_SHM_LINK_H
#define MCCL_SHM_LINK_H

#include "net/link.h"

/* Takes ownership of a connected, authenticated, non-blocking socket, by which both sides agree to
 * share memory: the one that dialled offers it, the other one maps it, if `willing`. If it does not
 * work out they talk over the socket, and the log says why. On error the socket is closed. */
mccl_result link_shm_create(int fd, bool dialled, bool willing, struct link **link);

#endif

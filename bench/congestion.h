/* SPDX-License-Identifier: MIT
 *
 * One congestion control for everybody. bbr, the default of many Linux hosts, paces even loopback
 * and halves the rate of large messages. MCCL asks for cubic on its own sockets, so the others get
 * it too; macOS has nothing else.
 */
#ifndef BENCH_CONGESTION_H
#define BENCH_CONGESTION_H

#include <stddef.h>

/* Asks for it on every connected TCP socket of this process, whoever made it. `names` gets what
 * they have afterwards: each name once, in quotes, with commas between; nothing without such
 * sockets. */
void congestion_set(char *names, size_t size);

#endif

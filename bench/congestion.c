/* SPDX-License-Identifier: MIT
 *
 * The descriptors of a process are listed in /proc/self/fd on Linux.
 */
#include "congestion.h"

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#ifdef TCP_CONGESTION

#define WANTED "cubic"

static bool is_tcp_connection(int fd)
{
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    int type = 0;
    socklen_t type_size = sizeof type;
    return getpeername(fd, (struct sockaddr *)&address, &size) == 0 &&
           (address.ss_family == AF_INET || address.ss_family == AF_INET6) &&
           getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_size) == 0 && type == SOCK_STREAM;
}

void congestion_set(char *names, size_t size)
{
    names[0] = '\0';
    DIR *folder = opendir("/proc/self/fd");
    const struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        const int fd = atoi(entry->d_name);
        char name[20] = "", quoted[24];
        socklen_t name_size = 16;
        if (entry->d_name[0] == '.' || !is_tcp_connection(fd))
            continue;
        /* Where it is not allowed, what is found below tells. */
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, WANTED, strlen(WANTED));
        if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &name_size) != 0)
            continue;
        snprintf(quoted, sizeof quoted, "\"%s\"", name);
        const size_t used = strlen(names);
        if (!strstr(names, quoted))
            snprintf(names + used, size - used, "%s%s", used ? "," : "", quoted);
    }
    if (folder)
        closedir(folder);
}

#else

void congestion_set(char *names, size_t size)
{
    (void)size;
    names[0] = '\0';
}

#endif

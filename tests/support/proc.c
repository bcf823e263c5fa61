/* SPDX-License-Identifier: MIT
 *
 * See proc.h. Listening sockets of the process are those lines of /proc/self/net/tcp[6] whose inode
 * is behind one of its descriptors.
 */
#include "support/proc.h"

#include "support/check.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

static int count_entries(const char *path)
{
    DIR *directory = opendir(path);
    CHECK(directory != NULL);
    int n = 0;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
        n += entry->d_name[0] != '.';
    closedir(directory);
    return n;
}

int proc_fd_count(void)
{
    return count_entries("/proc/self/fd") - 1; /* less the one of the listing itself */
}

int proc_thread_count(void)
{
    return count_entries("/proc/self/task");
}

int64_t proc_rss_kib(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    long total = 0, resident = 0;
    CHECK(file != NULL && fscanf(file, "%ld %ld", &total, &resident) == 2);
    fclose(file);
    return (int64_t)resident * sysconf(_SC_PAGESIZE) / 1024;
}

/* True if one of the own descriptors is the socket with this inode. */
static bool owns_inode(unsigned long inode)
{
    char wanted[64];
    bool found = false;
    snprintf(wanted, sizeof wanted, "socket:[%lu]", inode);
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory != NULL);
    for (struct dirent *entry; !found && (entry = readdir(directory)) != NULL;) {
        char path[300], target[64];
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        const ssize_t length = readlink(path, target, sizeof target - 1);
        target[length > 0 ? length : 0] = '\0';
        found = strcmp(target, wanted) == 0;
    }
    closedir(directory);
    return found;
}

struct listeners {
    int ports[64];
    int n;
    bool wildcard;
};

static void add_port(struct listeners *found, int port)
{
    int at = 0;
    while (at < found->n && found->ports[at] < port)
        at++;
    if ((at < found->n && found->ports[at] == port) || found->n == 64)
        return;
    memmove(found->ports + at + 1, found->ports + at, (size_t)(found->n - at) * sizeof(int));
    found->ports[at] = port;
    found->n++;
}

static void read_table(const char *path, struct listeners *found)
{
    char line[512], address[64];
    FILE *file = fopen(path, "r");
    if (!file)
        return; /* no IPv6 here */
    while (fgets(line, sizeof line, file)) {
        unsigned port = 0, state = 0;
        unsigned long inode = 0;
        if (sscanf(line, " %*d: %63[0-9A-F]:%x %*s %x %*s %*s %*s %*d %*d %lu", address, &port,
                   &state, &inode) != 4 ||
            state != 0x0a /* LISTEN */ || !owns_inode(inode))
            continue;
        add_port(found, (int)port);
        found->wildcard |= strspn(address, "0") == strlen(address);
    }
    fclose(file);
}

static struct listeners find_listeners(void)
{
    struct listeners found = {.n = 0};
    read_table("/proc/self/net/tcp", &found);
    read_table("/proc/self/net/tcp6", &found);
    return found;
}

int proc_listening_ports(int *ports, int max)
{
    const struct listeners found = find_listeners();
    for (int i = 0; i < found.n && i < max; i++)
        ports[i] = found.ports[i];
    return found.n;
}

bool proc_listens_on_wildcard(void)
{
    return find_listeners().wildcard;
}

int proc_listen_on(int port, int *got)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    socklen_t size = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 1) != 0) {
        close(fd);
        return -1;
    }
    CHECK(getsockname(fd, (struct sockaddr *)&address, &size) == 0);
    *got = ntohs(address.sin_port);
    return fd;
}

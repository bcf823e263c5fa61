/* SPDX-License-Identifier: MIT
 *
 * The list of this host's (interface, address) pairs, from getifaddrs; kind and speed come from the
 * system's own file (os_ifaddr_linux.c, os_ifaddr_darwin.c). Any thread.
 */
#include "os/os_internal.h"

#include "base/error.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Leading one bits of a netmask of at most `n_bytes`. */
static int count_bits(const uint8_t *mask, int n_bytes)
{
    int bits = 0;

    while (bits < n_bytes * 8 && (mask[bits / 8] & (0x80 >> (bits % 8))) != 0)
        bits++;
    return bits;
}

static int prefix_bits(const struct sockaddr *mask, int family)
{
    const size_t offset = family == AF_INET ? offsetof(struct sockaddr_in, sin_addr)
                                            : offsetof(struct sockaddr_in6, sin6_addr);
    int n_bytes = family == AF_INET ? 4 : 16;

    if (mask == NULL)
        return n_bytes * 8; /* a point-to-point address */
#if defined(__APPLE__)
    /* Masks come without their trailing zeros: sa_len says how much there is. */
    if (mask->sa_len < offset + (size_t)n_bytes)
        n_bytes = mask->sa_len > offset ? (int)(mask->sa_len - offset) : 0;
#endif
    return count_bits((const uint8_t *)mask + offset, n_bytes);
}

static void read_address(const struct sockaddr *in, struct os_address *address)
{
    struct sockaddr_storage copy = {0};

    memcpy(&copy, in,
           in->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
    os_address_from_sockaddr(&copy, address);
    address->port = 0;
#if defined(__APPLE__)
    if (address->family == 6 && os_address_is_link_local(address))
        memset(address->ip + 2, 0, 2); /* the kernel keeps the scope id in there */
#endif
}

static bool is_inet(const struct ifaddrs *entry)
{
    return entry->ifa_addr != NULL &&
           (entry->ifa_addr->sa_family == AF_INET || entry->ifa_addr->sa_family == AF_INET6);
}

static void describe(int fd, const struct ifaddrs *entry, struct os_interface *interface)
{
    const unsigned usable = IFF_UP | IFF_RUNNING; /* switched on, and a cable in it */

    memset(interface, 0, sizeof(*interface));
    snprintf(interface->name, sizeof(interface->name), "%s", entry->ifa_name);
    interface->index = if_nametoindex(entry->ifa_name);
    interface->kind = OS_IF_OTHER;
    interface->up = (entry->ifa_flags & usable) == usable;
    interface->prefix_bits = prefix_bits(entry->ifa_netmask, entry->ifa_addr->sa_family);
    read_address(entry->ifa_addr, &interface->address);

    if (entry->ifa_flags & IFF_LOOPBACK)
        interface->kind = OS_IF_LOOPBACK;
    else
        os_interface_probe(fd, entry->ifa_flags, interface);
    interface->address.kind = (uint8_t)interface->kind;
    interface->address.speed_mbps = interface->speed_mbps;
}

/* A socket to ask about interfaces with; hosts without IPv4 have the other. -1 and errno. */
static int query_socket(void)
{
    os_fd_open_begin();
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (fd == -1)
        fd = socket(AF_INET6, SOCK_DGRAM, 0);
    return os_fd_open_end(fd);
}

mccl_result os_interfaces(struct os_interface **list, size_t *n_list)
{
    struct ifaddrs *entries;
    size_t n = 0;

    if (getifaddrs(&entries) != 0)
        return os_error("getifaddrs");
    for (const struct ifaddrs *entry = entries; entry != NULL; entry = entry->ifa_next)
        n += is_inet(entry);

    struct os_interface *interfaces = calloc(n + 1, sizeof(*interfaces)); /* never of size 0 */
    if (interfaces == NULL) {
        freeifaddrs(entries);
        return error_set(MCCL_ERR_NO_MEMORY, "out of memory for %zu interface addresses", n);
    }
    const int fd = query_socket(); /* -1: kinds stay OTHER, addresses are good all the same */
    n = 0;
    for (const struct ifaddrs *entry = entries; entry != NULL; entry = entry->ifa_next) {
        if (is_inet(entry))
            describe(fd, entry, &interfaces[n++]);
    }
    os_fd_close(fd);
    freeifaddrs(entries);
    *list = interfaces;
    *n_list = n;
    return MCCL_OK;
}

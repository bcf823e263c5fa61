/* SPDX-License-Identifier: MIT
 *
 * Kind and speed of an interface on macOS. The kind comes from two ioctls, the second of which has
 * stable numbers but no public header; what they leave open is told by the name. Any thread.
 */
#include "os/os_internal.h"

#include <net/if.h>
#include <net/route.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sockio.h>
#include <sys/sysctl.h>

#define BITS_PER_MBIT 1000000u

/* xnu's bsd/net/if_private.h: SIOCGIFTYPE fills these three words of the request's union. */
#define GET_TYPE _IOWR('i', 159, struct ifreq)
#define FAMILY_ETHERNET 2
#define SUBFAMILY_WIFI 3
#define SUBFAMILY_THUNDERBOLT 4
struct interface_type {
    uint32_t type, family, subfamily;
};
_Static_assert(sizeof(struct interface_type) <= sizeof(((struct ifreq *)0)->ifr_ifru),
               "fits the union");

static const struct {
    const char *prefix;
    enum os_if_kind kind;
} by_name[] = {
    {"bridge", OS_IF_BRIDGE}, {"awdl", OS_IF_VIRTUAL},  {"llw", OS_IF_VIRTUAL},
    {"utun", OS_IF_VIRTUAL},  {"ipsec", OS_IF_VIRTUAL}, {"ppp", OS_IF_VIRTUAL},
    {"gif", OS_IF_VIRTUAL},   {"stf", OS_IF_VIRTUAL},   {"tun", OS_IF_VIRTUAL},
    {"tap", OS_IF_VIRTUAL},   {"ap", OS_IF_VIRTUAL},    {"vmnet", OS_IF_VIRTUAL},
};

static bool ask(int fd, const struct os_interface *interface, unsigned long question,
                struct ifreq *request)
{
    memset(request, 0, sizeof(*request));
    memcpy(request->ifr_name, interface->name, strnlen(interface->name, IFNAMSIZ - 1));
    return ioctl(fd, question, request) == 0;
}

static enum os_if_kind kind_by_system(int fd, const struct os_interface *interface)
{
    struct interface_type type;
    struct ifreq request;

    if (ask(fd, interface, GET_TYPE, &request)) {
        memcpy(&type, &request.ifr_ifru, sizeof(type));
        if (type.family == FAMILY_ETHERNET && type.subfamily == SUBFAMILY_THUNDERBOLT)
            return OS_IF_THUNDERBOLT;
        if (type.family == FAMILY_ETHERNET && type.subfamily == SUBFAMILY_WIFI)
            return OS_IF_WIFI;
    }
    if (!ask(fd, interface, SIOCGIFFUNCTIONALTYPE, &request))
        return OS_IF_OTHER;
    switch (request.ifr_ifru.ifru_functional_type) {
    case IFRTYPE_FUNCTIONAL_WIRED:
        return OS_IF_WIRED;
    case IFRTYPE_FUNCTIONAL_WIFI_INFRA:
        return OS_IF_WIFI;
    case IFRTYPE_FUNCTIONAL_WIFI_AWDL:
        return OS_IF_VIRTUAL;
    default:
        return OS_IF_OTHER;
    }
}

/* The 64-bit figure of the interface list; SIOCGIFMEDIA says nothing about Thunderbolt, getifaddrs
 * has 32 bits. */
static uint32_t link_speed(unsigned index)
{
    int name[] = {CTL_NET, PF_ROUTE, 0, 0, NET_RT_IFLIST2, (int)index};
    struct if_msghdr2 header;
    uint64_t speed_mbps = 0;
    size_t size = 0;

    if (sysctl(name, 6, NULL, &size, NULL, 0) != 0)
        return 0;
    char *list = malloc(size + 1);
    if (list != NULL && sysctl(name, 6, list, &size, NULL, 0) == 0 && size >= sizeof(header)) {
        memcpy(&header, list,
               sizeof(header)); /* an interface's own message comes before its addresses */
        if (header.ifm_type == RTM_IFINFO2)
            speed_mbps = header.ifm_data.ifi_baudrate / BITS_PER_MBIT;
    }
    free(list);
    return speed_mbps > UINT32_MAX ? 0 : (uint32_t)speed_mbps;
}

void os_interface_probe(int fd, unsigned flags, struct os_interface *interface)
{
    (void)flags;
    interface->speed_mbps = link_speed(interface->index);
    for (size_t i = 0; i < sizeof(by_name) / sizeof(by_name[0]); i++) {
        if (strncmp(interface->name, by_name[i].prefix, strlen(by_name[i].prefix)) == 0) {
            interface->kind = by_name[i].kind;
            return;
        }
    }
    interface->kind = kind_by_system(fd, interface);
}

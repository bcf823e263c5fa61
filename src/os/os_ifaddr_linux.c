/* SPDX-License-Identifier: MIT
 *
 * Kind and speed of a Linux interface. Asked of the kernel by ioctl, which always speaks of the
 * caller's own network namespace; /sys/class/net may belong to another one and is used for Wi-Fi
 * only. Any thread.
 */
#include "os/os_internal.h"

#include <fnmatch.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define ARPHRD_IPOIB 32 /* ARPHRD_INFINIBAND */

struct rule {
    const char *pattern;
    enum os_if_kind kind;
};

/* Driver names (ethtool -i). Whatever else sits on Ethernet is WIRED: cards, veth, virtio, bonds,
 * VLANs, macvlan. */
static const struct rule by_driver[] = {
    {"bridge", OS_IF_BRIDGE},  {"openvswitch", OS_IF_BRIDGE}, {"thunderbolt*", OS_IF_THUNDERBOLT},
    {"tun", OS_IF_VIRTUAL},    {"wireguard", OS_IF_VIRTUAL},  {"vxlan", OS_IF_VIRTUAL},
    {"geneve", OS_IF_VIRTUAL},
};

/* For sandboxes where the kernel names no driver. */
static const struct rule by_name[] = {
    {"docker*", OS_IF_BRIDGE}, {"br-*", OS_IF_BRIDGE},
    {"virbr*", OS_IF_BRIDGE},  {"tun*", OS_IF_VIRTUAL},
    {"tap*", OS_IF_VIRTUAL},   {"wg*", OS_IF_VIRTUAL},
    {"wl*", OS_IF_WIFI},       {"thunderbolt*", OS_IF_THUNDERBOLT},
};

static bool look_up(const struct rule *rules, size_t n_rules, const char *text,
                    enum os_if_kind *kind)
{
    for (size_t i = 0; i < n_rules; i++) {
        if (fnmatch(rules[i].pattern, text, 0) == 0) {
            *kind = rules[i].kind;
            return true;
        }
    }
    return false;
}

static struct ifreq request_for(const struct os_interface *interface)
{
    struct ifreq request = {0};

    memcpy(request.ifr_name, interface->name, strnlen(interface->name, IFNAMSIZ - 1));
    return request;
}

/* `command` is one of ethtool's structures, filled with its command number. */
static bool ethtool(int fd, const struct os_interface *interface, void *command)
{
    struct ifreq request = request_for(interface);

    request.ifr_data = command;
    return ioctl(fd, SIOCETHTOOL, &request) == 0;
}

static uint32_t link_speed(int fd, const struct os_interface *interface)
{
    /* ETHTOOL_GSET is enough: it has 32 bits of Mbit/s and needs no second call for the mode
     * bitmaps. */
    struct ethtool_cmd settings = {.cmd = ETHTOOL_GSET};

    if (!ethtool(fd, interface, &settings))
        return 0;
    /* Not ethtool_cmd_speed(), whose shift overflows an int when the speed is unknown. */
    const uint32_t speed_mbps = (uint32_t)settings.speed_hi << 16 | settings.speed;
    return speed_mbps == (uint32_t)SPEED_UNKNOWN ? 0 : speed_mbps;
}

/* True if /sys/class/net/NAME is there, is this very interface, and has `entry` in it. */
static bool sysfs_has(const struct os_interface *interface, const char *entry)
{
    char path[128];
    unsigned index = 0;

    snprintf(path, sizeof(path), "/sys/class/net/%s/ifindex", interface->name);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    const bool same = fscanf(file, "%u", &index) == 1 && index == interface->index;
    fclose(file);
    snprintf(path, sizeof(path), "/sys/class/net/%s/%s", interface->name, entry);
    return same && access(path, F_OK) == 0;
}

static enum os_if_kind kind_by_hardware(int fd, unsigned flags,
                                        const struct os_interface *interface)
{
    struct ifreq request = request_for(interface);

    if (flags & IFF_POINTOPOINT)
        return OS_IF_VIRTUAL; /* tun, WireGuard, PPP, IP tunnels */
    if (ioctl(fd, SIOCGIFHWADDR, &request) != 0)
        return OS_IF_OTHER;
    switch (request.ifr_hwaddr.sa_family) {
    case ARPHRD_ETHER:
    case ARPHRD_IPOIB:
        return OS_IF_WIRED;
    case ARPHRD_NONE:
        return OS_IF_VIRTUAL;
    default:
        return OS_IF_OTHER;
    }
}

void os_interface_probe(int fd, unsigned flags, struct os_interface *interface)
{
    struct ethtool_drvinfo driver = {.cmd = ETHTOOL_GDRVINFO};
    const bool has_driver = ethtool(fd, interface, &driver) && driver.driver[0] != '\0';

    driver.driver[sizeof(driver.driver) - 1] = '\0';
    interface->speed_mbps = link_speed(fd, interface);
    if (sysfs_has(interface, "phy80211") || sysfs_has(interface, "wireless"))
        interface->kind = OS_IF_WIFI;
    else if (has_driver && look_up(by_driver, sizeof(by_driver) / sizeof(by_driver[0]),
                                   driver.driver, &interface->kind))
        return;
    else if (has_driver || !look_up(by_name, sizeof(by_name) / sizeof(by_name[0]), interface->name,
                                    &interface->kind))
        interface->kind = kind_by_hardware(fd, flags, interface);
}

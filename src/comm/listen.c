/* SPDX-License-Identifier: MIT
 *
 * Where the endpoint listens: which addresses (never the wildcard) and which port (one for all of
 * them). Runs once, in the thread that opens the endpoint.
 */
#include "base/error.h"
#include "base/log.h"
#include "comm/endpoint.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BACKLOG 512

struct choice {
    struct os_interface interfaces[ENDPOINT_LISTENERS];
    int n;
};

static void choose(struct choice *choice, const struct os_interface *interface)
{
    if (choice->n == ENDPOINT_LISTENERS)
        return;
    for (int i = 0; i < choice->n; i++)
        if (os_address_equal_ip(&choice->interfaces[i].address, &interface->address) &&
            choice->interfaces[i].index == interface->index)
            return;
    choice->interfaces[choice->n++] = *interface;
}

/* ---- MCCL_IFNAME: names, prefixes, =exact, ^exclusions, addresses, subnets; separated by commas
 */

/* "ADDRESS" or "ADDRESS/BITS"; without bits all of them count. False if it is neither. */
static bool parse_subnet(const char *text, struct os_address *address, int *bits)
{
    char ip[64];
    const size_t length = strcspn(text, "/");
    if (length >= sizeof ip)
        return false;
    memcpy(ip, text, length);
    ip[length] = '\0';
    if (!os_address_parse(ip, address))
        return false;
    const int most = address->family == 4 ? 32 : 128;
    *bits = most;
    if (text[length] == '\0')
        return true;
    char *end;
    const long given = strtol(text + length + 1, &end, 10);
    *bits = (int)given;
    return isdigit((unsigned char)text[length + 1]) && *end == '\0' && given <= most;
}

static bool term_matches(const char *term, const struct os_interface *interface)
{
    struct os_address address;
    int bits;
    if (parse_subnet(term, &address, &bits))
        return os_address_same_subnet(&address, &interface->address, bits);
    if (term[0] == '=')
        return strcmp(term + 1, interface->name) == 0;
    return strncmp(term, interface->name, strlen(term)) == 0;
}

static bool ifname_allows(const char *setting, const struct os_interface *interface)
{
    const bool exclude = setting[0] == '^';
    const char *const separators = exclude ? ", ^" : ", "; /* ^a,^b is meant as ^a,b */
    char list[256];
    snprintf(list, sizeof list, "%s", setting);
    char *rest = list;
    bool any = false;
    for (char *term; (term = strtok_r(rest, separators, &rest)) != NULL; any = true)
        if (term_matches(term, interface))
            return !exclude;
    return exclude && any;
}

static mccl_result nothing_matches(const char *variable, const char *value,
                                   const struct os_interface *interfaces, size_t n_interfaces)
{
    char list[512] = "";
    size_t used = 0;
    for (size_t i = 0; i < n_interfaces && used < sizeof list; i++) {
        char address[64];
        os_address_format(&interfaces[i].address, address, sizeof address);
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s %s%s", i ? ", " : "",
                                 interfaces[i].name, address, interfaces[i].up ? "" : " (down)");
    }
    return error_set(
        MCCL_ERR_CONFIG,
        "%s=%s: no interface that is up fits. Accepted: names or prefixes (eth0,en), =exact, "
        "^excluded, an address, a subnet (10.0.0.0/24). This host has: %s",
        variable, value, list);
}

/* ---- which addresses ---- */

/* Without any setting: what other hosts can plausibly reach, and loopback for ranks of this one. */
static bool is_default(const struct os_interface *interface)
{
    if (interface->kind == OS_IF_LOOPBACK)
        return interface->address.family == 4;
    return interface->kind != OS_IF_BRIDGE && interface->kind != OS_IF_VIRTUAL;
}

static mccl_result choose_listed(const char *setting, const struct os_interface *interfaces,
                                 size_t n_interfaces, struct choice *choice)
{
    char list[256];
    snprintf(list, sizeof list, "%s", setting);
    char *rest = list;
    for (char *term; (term = strtok_r(rest, ", ", &rest)) != NULL;) {
        struct os_address address;
        if (!os_address_parse(term, &address))
            return error_set(
                MCCL_ERR_CONFIG,
                "MCCL_LISTEN_ADDR=%s: '%s' is no IPv4 or IPv6 address; names are not looked up",
                setting, term);
        bool found = false;
        for (size_t i = 0; i < n_interfaces; i++)
            if (os_address_equal_ip(&address, &interfaces[i].address)) {
                choose(choice, &interfaces[i]);
                found = true;
            }
        if (!found && os_address_is_loopback(&address)) { /* all of 127/8 is ours */
            struct os_interface loopback = {.kind = OS_IF_LOOPBACK, .address = address};
            choose(choice, &loopback);
            found = true;
        }
        if (!found)
            return nothing_matches("MCCL_LISTEN_ADDR", term, interfaces, n_interfaces);
    }
    return MCCL_OK;
}

static mccl_result choose_addresses(const struct settings *settings,
                                    const struct os_interface *interfaces, size_t n_interfaces,
                                    struct choice *choice)
{
    const char *listen_addr = settings->listen_addr;
    const bool automatic = strcmp(listen_addr, "auto") == 0 || listen_addr[0] == '\0';
    if (!automatic && strcmp(listen_addr, "loopback") != 0)
        return choose_listed(listen_addr, interfaces, n_interfaces, choice);
    const bool local =
        !automatic || (settings->ifname[0] == '\0' && config_launcher_is_single_host());
    for (size_t i = 0; i < n_interfaces; i++) {
        const struct os_interface *interface = &interfaces[i];
        if (!interface->up)
            continue;
        if (local ? interface->kind == OS_IF_LOOPBACK && interface->address.family == 4
            : settings->ifname[0] ? ifname_allows(settings->ifname, interface)
                                  : is_default(interface))
            choose(choice, interface);
    }
    if (choice->n == 0 && settings->ifname[0])
        return nothing_matches("MCCL_IFNAME", settings->ifname, interfaces, n_interfaces);
    if (choice->n == 0) /* a host with nothing but an IPv6 loopback, or nothing up at all */
        for (size_t i = 0; i < n_interfaces; i++)
            if (interfaces[i].kind == OS_IF_LOOPBACK)
                choose(choice, &interfaces[i]);
    if (choice->n == 0)
        return error_set(
            MCCL_ERR_SYSTEM,
            "this host has no network interface that is up; bring one up (ip link set lo up)");
    return MCCL_OK;
}

/* ---- which port ---- */

static int open_listener(const struct os_address *address, unsigned scope, uint16_t port,
                         const struct link_tcp_options *options)
{
    struct os_address with_port = *address;
    with_port.port = port;
    struct sockaddr_storage where;
    const socklen_t size = os_address_to_sockaddr(&with_port, scope, &where);
    const int fd = os_socket_stream(where.ss_family);
    if (fd < 0)
        return -1;
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    link_tcp_prepare(fd, options);
    if (bind(fd, (struct sockaddr *)&where, size) != 0 || listen(fd, BACKLOG) != 0) {
        os_fd_close(fd);
        return -1;
    }
    return fd;
}

static uint16_t port_of(int fd)
{
    struct sockaddr_storage where;
    socklen_t size = sizeof where;
    struct os_address address = {0};
    if (getsockname(fd, (struct sockaddr *)&where, &size) == 0)
        os_address_from_sockaddr(&where, &address);
    return address.port;
}

/* Why a port could not be had. */
struct refusal {
    struct os_address where;
    int error;
};

static void publish(struct endpoint *endpoint, int fd, const struct os_interface *interface,
                    uint16_t port)
{
    struct wire_address *published = &endpoint->addresses[endpoint->n_listeners];
    *published = (struct wire_address){.family = interface->address.family,
                                       .kind = (uint8_t)interface->kind,
                                       .port = port,
                                       .speed_mbps = interface->speed_mbps};
    memcpy(published->ip, interface->address.ip, sizeof published->ip);
    endpoint->listeners[endpoint->n_listeners++] = fd;
}

/* Listens on every chosen address with one port. An address that cannot be bound at all is skipped
 * (IPv6 that is still tentative); a port that is taken on any of them is not used. */
static bool try_port(struct endpoint *endpoint, const struct choice *choice, uint16_t port,
                     struct refusal *refusal)
{
    endpoint->n_listeners = 0;
    for (int i = 0; i < choice->n; i++) {
        const struct os_interface *interface = &choice->interfaces[i];
        const int fd =
            open_listener(&interface->address, interface->index, port, &endpoint->socket_options);
        if (fd < 0) {
            *refusal = (struct refusal){interface->address, errno};
            refusal->where.port = port;
            if (refusal->error == EADDRNOTAVAIL)
                continue;
            while (endpoint->n_listeners > 0)
                os_fd_close(endpoint->listeners[--endpoint->n_listeners]);
            return false;
        }
        if (port == 0)
            port = port_of(fd);
        publish(endpoint, fd, interface, port);
    }
    endpoint->port = port;
    return endpoint->n_listeners > 0;
}

static mccl_result open_port(struct endpoint *endpoint, const struct settings *settings,
                             const struct choice *choice)
{
    struct refusal refusal = {.error = 0};
    if (settings->port_first == 0) {
        for (int attempt = 0; attempt < 16; attempt++)
            if (try_port(endpoint, choice, 0, &refusal))
                return MCCL_OK;
    } else {
        for (int port = settings->port_first; port <= settings->port_last; port++)
            if (try_port(endpoint, choice, (uint16_t)port, &refusal))
                return MCCL_OK;
    }
    char where[64];
    os_address_format(&refusal.where, where, sizeof where);
    return error_set(MCCL_ERR_SYSTEM,
                     "no port to listen on: all of %d-%d are taken or refused, at last %s (%s); "
                     "set MCCL_PORT_BASE to a free port or range (41000-41010)",
                     settings->port_first, settings->port_last, where, strerror(refusal.error));
}

mccl_result endpoint_listen(struct endpoint *endpoint, const struct settings *settings)
{
    struct os_interface *interfaces;
    size_t n_interfaces;
    struct choice choice = {.n = 0};
    TRY(os_interfaces(&interfaces, &n_interfaces));
    mccl_result result = choose_addresses(settings, interfaces, n_interfaces, &choice);
    free(interfaces);
    if (result == MCCL_OK)
        result = open_port(endpoint, settings, &choice);
    if (result != MCCL_OK)
        return result;
    for (int i = 0; i < endpoint->n_listeners; i++) {
        TRY(os_poller_add(endpoint->poller, endpoint->listeners[i], OS_POLL_READ,
                          &endpoint->listeners[i]));
        char text[64];
        const struct wire_address *published = &endpoint->addresses[i];
        struct os_address address = {.family = published->family, .port = published->port};
        memcpy(address.ip, published->ip, sizeof address.ip);
        os_address_format(&address, text, sizeof text);
        log_info("listening on %s", text);
    }
    if (settings->ifname[0]) {
        memcpy(endpoint->named, choice.interfaces, sizeof endpoint->named);
        endpoint->n_named = choice.n;
    }
    return MCCL_OK;
}

/* SPDX-License-Identifier: MIT
 *
 * Address arithmetic: text, sockaddr, subnets. Pure functions, any thread.
 */
#include "os/os_internal.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(struct os_address) == 24, "struct os_address is sent as it is");

static int ip_bytes(const struct os_address *address)
{
    return address->family == 4 ? 4 : address->family == 6 ? 16 : 0;
}

bool os_address_is_link_local(const struct os_address *address)
{
    const uint8_t *ip = address->ip;

    if (address->family == 4)
        return ip[0] == 169 && ip[1] == 254;
    return address->family == 6 && ip[0] == 0xfe && (ip[1] & 0xc0) == 0x80;
}

bool os_address_is_loopback(const struct os_address *address)
{
    static const uint8_t loopback6[16] = {[15] = 1};

    if (address->family == 4)
        return address->ip[0] == 127;
    return address->family == 6 && memcmp(address->ip, loopback6, sizeof(loopback6)) == 0;
}

bool os_address_equal_ip(const struct os_address *a, const struct os_address *b)
{
    return a->family == b->family && memcmp(a->ip, b->ip, (size_t)ip_bytes(a)) == 0;
}

bool os_address_same_subnet(const struct os_address *a, const struct os_address *b, int bits)
{
    const int whole = bits / 8, rest = bits % 8;

    if (a->family != b->family || ip_bytes(a) == 0 || bits < 0 || bits > ip_bytes(a) * 8)
        return false;
    if (memcmp(a->ip, b->ip, (size_t)whole) != 0)
        return false;
    return rest == 0 || ((a->ip[whole] ^ b->ip[whole]) >> (8 - rest)) == 0;
}

void os_address_format(const struct os_address *address, char *text, size_t size)
{
    char ip[INET6_ADDRSTRLEN] = "(no address)";

    if (ip_bytes(address) != 0)
        inet_ntop(address->family == 4 ? AF_INET : AF_INET6, address->ip, ip, sizeof(ip));
    if (address->port == 0)
        snprintf(text, size, "%s", ip);
    else
        snprintf(text, size, address->family == 6 ? "[%s]:%u" : "%s:%u", ip,
                 (unsigned)address->port);
}

static void set_ip4(struct os_address *address, const void *ip)
{
    address->family = 4;
    memcpy(address->ip, ip, 4);
}

/* An IPv4 address in IPv6 clothes (::ffff:10.0.0.2) becomes what it is, so that it compares equal.
 */
static void set_ip6(struct os_address *address, const struct in6_addr *ip)
{
    if (IN6_IS_ADDR_V4MAPPED(ip)) {
        set_ip4(address, ip->s6_addr + 12);
        return;
    }
    address->family = 6;
    memcpy(address->ip, ip, 16);
}

static void guess_kind(struct os_address *address)
{
    address->kind = os_address_is_loopback(address) ? OS_IF_LOOPBACK : OS_IF_OTHER;
}

/* Cuts "[...]" and "%scope" off `text`. False if they are malformed. */
static bool strip(char *text)
{
    const size_t length = strlen(text);

    if (text[0] == '[') {
        if (text[length - 1] != ']')
            return false;
        text[length - 1] = '\0';
        memmove(text, text + 1, length - 1);
    }
    char *scope = strchr(text, '%');
    if (scope != NULL) {
        if (scope[1] == '\0')
            return false;
        *scope = '\0';
    }
    return true;
}

bool os_address_parse(const char *text, struct os_address *address)
{
    char copy[INET6_ADDRSTRLEN + 32]; /* with brackets and a scope */
    struct os_address parsed = {0};
    struct in_addr ip4;
    struct in6_addr ip6;

    if (inet_pton(AF_INET, text, &ip4) == 1) { /* no brackets, no scope */
        set_ip4(&parsed, &ip4);
    } else {
        if ((size_t)snprintf(copy, sizeof(copy), "%s", text) >= sizeof(copy) || !strip(copy))
            return false;
        if (inet_pton(AF_INET6, copy, &ip6) != 1)
            return false;
        set_ip6(&parsed, &ip6);
    }
    guess_kind(&parsed);
    *address = parsed;
    return true;
}

socklen_t os_address_to_sockaddr(const struct os_address *address, unsigned scope,
                                 struct sockaddr_storage *out)
{
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(address->port)};
    struct sockaddr_in in4 = {.sin_family = AF_INET, .sin_port = htons(address->port)};

    memset(out, 0, sizeof(*out));
    if (address->family == 6) {
        memcpy(&in6.sin6_addr, address->ip, 16);
        if (os_address_is_link_local(address))
            in6.sin6_scope_id = scope;
#if defined(__APPLE__)
        in6.sin6_len = sizeof(in6);
#endif
        memcpy(out, &in6, sizeof(in6));
        return sizeof(in6);
    }
    memcpy(&in4.sin_addr, address->ip, 4);
#if defined(__APPLE__)
    in4.sin_len = sizeof(in4);
#endif
    memcpy(out, &in4, sizeof(in4));
    return sizeof(in4);
}

void os_address_from_sockaddr(const struct sockaddr_storage *in, struct os_address *address)
{
    struct sockaddr_in in4;
    struct sockaddr_in6 in6;

    memset(address, 0, sizeof(*address));
    if (in->ss_family == AF_INET) {
        memcpy(&in4, in, sizeof(in4));
        set_ip4(address, &in4.sin_addr);
        address->port = ntohs(in4.sin_port);
    } else if (in->ss_family == AF_INET6) {
        memcpy(&in6, in, sizeof(in6));
        set_ip6(address, &in6.sin6_addr);
        address->port = ntohs(in6.sin6_port);
    }
    guess_kind(address);
}

/* SPDX-License-Identifier: MIT
 *
 * os_address and os_interfaces: text round trips, bad input, subnets, and what a host certainly
 * has.
 */
#include "os_test.h"

#include <net/if.h>

static struct os_address parse(const char *text)
{
    struct os_address address;

    if (!os_address_parse(text, &address)) {
        printf("not parsed: %s\n", text);
        exit(1);
    }
    return address;
}

static void test_round_trips(void)
{
    static const struct {
        const char *in, *out, *with_port;
        int family;
    } cases[] = {
        {"10.0.0.2", "10.0.0.2", "10.0.0.2:29600", 4},
        {"255.255.255.255", "255.255.255.255", "255.255.255.255:29600", 4},
        {"fd00::2", "fd00::2", "[fd00::2]:29600", 6},
        {"[fd00:0:0:0::2]", "fd00::2", "[fd00::2]:29600", 6},
        {"fe80::1%eth0", "fe80::1", "[fe80::1]:29600", 6},
        {"[fe80::AbC%12]", "fe80::abc", "[fe80::abc]:29600", 6},
        {"::", "::", "[::]:29600", 6},
        {"2001:db8:1:2:3:4:5:6", "2001:db8:1:2:3:4:5:6", "[2001:db8:1:2:3:4:5:6]:29600", 6},
        {"::ffff:10.0.0.2", "10.0.0.2", "10.0.0.2:29600", 4}, /* what it is */
    };
    struct sockaddr_storage storage;
    struct os_address address, back;
    char text[64];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        address = parse(cases[i].in);
        CHECK_EQ_I64(address.family, cases[i].family);
        CHECK_EQ_I64(address.port, 0);
        os_address_format(&address, text, sizeof(text));
        CHECK_EQ_STR(text, cases[i].out);
        address.port = 29600;
        os_address_format(&address, text, sizeof(text));
        CHECK_EQ_STR(text, cases[i].with_port);

        const socklen_t length = os_address_to_sockaddr(&address, 3, &storage);
        CHECK_EQ_I64(length, address.family == 4 ? sizeof(struct sockaddr_in)
                                                 : sizeof(struct sockaddr_in6));
        os_address_from_sockaddr(&storage, &back);
        CHECK(os_address_equal_ip(&address, &back));
        CHECK_EQ_I64(back.port, 29600);
    }
    const struct os_address none = {0};
    os_address_format(&none, text, sizeof(text));
    CHECK_EQ_STR(text, "(no address)");
    address = parse("1.2.3.4");
    os_address_format(&address, text, 4); /* cut, not overrun */
    CHECK_EQ_STR(text, "1.2");
}

static void test_bad_input(void)
{
    static const char *const bad[] = {
        "",
        " ",
        "localhost",
        "10.0.0",
        "10.0.0.256",
        "10.0.0.2:80",
        "10.0.0.2 ",
        "[10.0.0.2]",
        "[::1",
        "::1]",
        "[]",
        "[",
        "]",
        "[::1]:80",
        "fe80::1%",
        "%eth0",
        "10.0.0.2%eth0",
        ":::",
        "12345::",
        "1:2:3:4:5:6:7:8:9",
        "fe80::1%a-scope-that-is-far-longer-than-the-name-of-any-network-interface-may-be-now",
    };
    struct os_address address = {.family = 99};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        if (os_address_parse(bad[i], &address)) {
            printf("parsed: \"%s\"\n", bad[i]);
            exit(1);
        }
        CHECK_EQ_I64(address.family, 99); /* untouched */
    }
}

static void test_scope(void)
{
    struct sockaddr_storage storage;
    struct sockaddr_in6 in6;
    struct os_address address = parse("fe80::1");

    os_address_to_sockaddr(&address, 5, &storage);
    memcpy(&in6, &storage, sizeof(in6));
    CHECK_EQ_I64(in6.sin6_scope_id, 5);
    address = parse("fd00::1");
    os_address_to_sockaddr(&address, 5, &storage);
    memcpy(&in6, &storage, sizeof(in6));
    CHECK_EQ_I64(in6.sin6_scope_id, 0);
    memset(&storage, 0, sizeof(storage));
    storage.ss_family = AF_UNIX;
    os_address_from_sockaddr(&storage, &address);
    CHECK_EQ_I64(address.family, 0);
}

static bool same_subnet(const char *a, const char *b, int bits)
{
    const struct os_address first = parse(a), second = parse(b);

    return os_address_same_subnet(&first, &second, bits);
}

static void test_predicates(void)
{
    static const struct {
        const char *text;
        bool loopback, link_local;
    } cases[] = {
        {"127.0.0.1", true, false},    {"127.9.9.9", true, false}, {"128.0.0.1", false, false},
        {"::1", true, false},          {"::2", false, false},      {"169.254.3.4", false, true},
        {"169.253.3.4", false, false}, {"fe80::1", false, true},   {"febf::1", false, true},
        {"fec0::1", false, false},     {"ff80::1", false, false},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct os_address address = parse(cases[i].text);
        CHECK_EQ_I64(os_address_is_loopback(&address), cases[i].loopback);
        CHECK_EQ_I64(os_address_is_link_local(&address), cases[i].link_local);
        CHECK_EQ_I64(address.kind, cases[i].loopback ? OS_IF_LOOPBACK : OS_IF_OTHER);
    }
    CHECK(same_subnet("10.1.2.3", "10.1.2.200", 24));
    CHECK(!same_subnet("10.1.2.3", "10.1.3.3", 24));
    CHECK(same_subnet("10.1.2.3", "10.1.3.3", 23));
    CHECK(same_subnet("192.168.1.1", "192.168.1.2", 30));
    CHECK(!same_subnet("192.168.1.3", "192.168.1.4", 30));
    CHECK(same_subnet("1.2.3.4", "200.2.3.4", 0));
    CHECK(same_subnet("1.2.3.4", "1.2.3.4", 32) && !same_subnet("1.2.3.4", "1.2.3.5", 32));
    CHECK(!same_subnet("1.2.3.4", "1.2.3.4", 33) && !same_subnet("1.2.3.4", "1.2.3.4", -1));
    CHECK(same_subnet("fd00::1:1", "fd00::1:ffff", 112) &&
          !same_subnet("fd00::1:1", "fd00::2:1", 112));
    CHECK(same_subnet("fd00::1", "fd00::1", 128) && !same_subnet("fd00::1", "fd00::1", 129));
    CHECK(!same_subnet("10.0.0.1", "::1", 0));

    const struct os_address four = parse("1.2.3.4"), six = parse("102:304::"), none = {0};
    CHECK(!os_address_equal_ip(&four, &six)); /* the same first bytes */
    CHECK(!os_address_equal_ip(&four, &none));
}

static void test_interfaces(void)
{
    static const char *const kinds[] = {"loopback", "wired",   "thunderbolt", "wifi",
                                        "bridge",   "virtual", "other"};
    struct os_interface *list;
    size_t n_list, n_loopback = 0;
    char text[64];

    CHECK_EQ_I64(os_interfaces(&list, &n_list), MCCL_OK);
    for (size_t i = 0; i < n_list; i++) {
        const struct os_interface *interface = &list[i];
        os_address_format(&interface->address, text, sizeof(text));
        printf("%s index %u %s %s %s/%d %u Mbit/s\n", interface->name, interface->index,
               kinds[interface->kind], interface->up ? "up" : "down", text, interface->prefix_bits,
               interface->speed_mbps);
        CHECK_EQ_I64(interface->index, if_nametoindex(interface->name));
        CHECK(interface->index != 0);
        CHECK_EQ_I64(interface->address.kind, interface->kind);
        CHECK_EQ_I64(interface->address.speed_mbps, interface->speed_mbps);
        CHECK_EQ_I64(interface->address.port, 0);
        CHECK(interface->prefix_bits <= (interface->address.family == 4 ? 32 : 128));
        if (strcmp(text, "127.0.0.1") == 0) {
            CHECK_EQ_I64(strncmp(interface->name, "lo", 2), 0);
            CHECK_EQ_I64(interface->kind, OS_IF_LOOPBACK);
            CHECK_EQ_I64(interface->prefix_bits, 8);
            CHECK(interface->up);
            n_loopback++;
        }
    }
    CHECK_EQ_I64(n_loopback, 1);
    free(list);
}

int main(void)
{
    test_round_trips();
    test_bad_input();
    test_scope();
    test_predicates();
    test_interfaces();
    return 0;
}

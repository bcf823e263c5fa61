/* SPDX-License-Identifier: MIT
 *
 * Where a process listens: PORT_BASE, LISTEN_ADDR and IFNAME, looked at from outside: which ports
 * the process holds and which addresses answer there. And that a wish which comes too late is
 * refused.
 */
/* limit: 60 s */
#include "support/check.h"
#include "support/harness.h"
#include "support/proc.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

static void set_variable(const char *name, const char *value)
{
    CHECK(setenv(name, value, 1) == 0);
}

static int only_port(void)
{
    int ports[8];
    CHECK_EQ_I64(proc_listening_ports(ports, 8), 1);
    return ports[0];
}

static void port_base(struct rank *self)
{
    set_variable("MCCL_PORT_BASE", "21200");
    mccl_comm *comm = rank_connect(self, NULL);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    /* Rank 0, which makes the id, comes first; the second on this host takes the next free port. */
    CHECK_EQ_I64(only_port(), 21200 + self->rank);
    CHECK(!proc_listens_on_wildcard());
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void port_taken(struct rank *self)
{
    int port = 0;
    const int fd = proc_listen_on(21300, &port);
    CHECK(fd >= 0);
    set_variable("MCCL_PORT_BASE", "21300");
    mccl_unique_id id;
    CHECK_OK(mccl_get_unique_id(&id));
    int ports[8];
    CHECK_EQ_I64(proc_listening_ports(ports, 8), 2); /* ours and the library's */
    CHECK_EQ_I64(ports[0], 21300);
    CHECK_EQ_I64(ports[1], 21301);
    close(fd);
    (void)self;
}

static void port_range_exhausted(struct rank *self)
{
    int port = 0, fds[3];
    for (int i = 0; i < 3; i++) {
        fds[i] = proc_listen_on(21400 + i, &port);
        CHECK(fds[i] >= 0);
    }
    set_variable("MCCL_PORT_BASE", "21400-21402");
    mccl_unique_id id;
    CHECK(mccl_get_unique_id(&id) != MCCL_OK);
    CHECK_HAS(mccl_last_error(), "21400");
    CHECK_HAS(mccl_last_error(), "21402");
    close(fds[1]);
    CHECK_OK(mccl_get_unique_id(&id));
    int ports[8];
    CHECK_EQ_I64(proc_listening_ports(ports, 8), 3);
    CHECK_EQ_I64(ports[1], 21401);
    close(fds[0]);
    close(fds[2]);
    (void)self;
}

static void port_any(struct rank *self)
{
    set_variable("MCCL_PORT_BASE", "0");
    mccl_comm *comm = rank_connect(self, NULL);
    CHECK_GE_I64(only_port(), 1024);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* Can somebody connect to address:port? */
static bool reachable(const char *text, int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    CHECK(inet_pton(AF_INET, text, &address.sin_addr) == 1);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const bool yes = connect(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return yes;
}

static void listen_addr(struct rank *self)
{
    /* All of 127/8 is local on Linux: an address that nobody else uses. */
    set_variable("MCCL_LISTEN_ADDR", "127.0.0.77");
    set_variable("MCCL_PORT_BASE", "0"); /* one that another process does not have elsewhere */
    mccl_comm *comm = rank_connect(self, NULL);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    const int port = only_port();
    CHECK(reachable("127.0.0.77", port));
    CHECK(!reachable("127.0.0.1", port));
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void listen_addr_not_ours(struct rank *self)
{
    mccl_unique_id id;
    set_variable("MCCL_LISTEN_ADDR", "192.0.2.1"); /* TEST-NET-1: nobody's */
    CHECK(mccl_get_unique_id(&id) != MCCL_OK);
    CHECK_HAS(mccl_last_error(), "192.0.2.1");
    set_variable("MCCL_LISTEN_ADDR", "0.0.0.0"); /* the wildcard is refused */
    CHECK(mccl_get_unique_id(&id) != MCCL_OK);
    CHECK_HAS(mccl_last_error(), "0.0.0.0");
    (void)self;
}

/* ---- a process has one endpoint ---- */

static mccl_config with_settings(const char *settings)
{
    mccl_config config = MCCL_CONFIG_INIT;
    config.settings = settings;
    return config;
}

static void expect_refused(const mccl_unique_id *id, const char *settings, const char *asked,
                           const char *in_force)
{
    mccl_comm *comm = NULL;
    const mccl_config config = with_settings(settings);
    CHECK_RESULT(mccl_comm_init_rank(&comm, 1, id, 0, &config), MCCL_ERR_CONFIG);
    CHECK_HAS(mccl_last_error(), asked);
    CHECK_HAS(mccl_last_error(), in_force);
    CHECK_HAS(mccl_last_error(), "mccl_set_defaults");
}

static void expect_accepted(const mccl_unique_id *id, const char *settings)
{
    mccl_comm *comm = NULL;
    const mccl_config config = with_settings(settings);
    CHECK_OK(mccl_comm_init_rank(&comm, 1, id, 0, &config));
    CHECK_OK(mccl_comm_destroy(comm));
}

/* The id has the addresses in it already. */
static void asked_too_late(struct rank *self)
{
    mccl_unique_id open, id;
    set_variable("MCCL_PORT_BASE", "0");
    CHECK_OK(mccl_get_unique_id(&open)); /* keeps the endpoint: nobody ever joins it */
    CHECK_OK(mccl_get_unique_id(&id));
    expect_refused(&id, "listen_addr=127.0.0.78", "MCCL_LISTEN_ADDR=127.0.0.78 (config)",
                   "MCCL_LISTEN_ADDR=loopback");
    expect_refused(&id, "port_base=21600", "MCCL_PORT_BASE=21600 (config)", "MCCL_PORT_BASE=0");
    expect_refused(&id, "ifname=lo", "MCCL_IFNAME=lo (config)", "MCCL_IFNAME=(unset)");
    CHECK_OK(mccl_set_defaults("port_base=21600"));
    expect_refused(&id, NULL, "MCCL_PORT_BASE=21600 (init)", "MCCL_PORT_BASE=0");
    CHECK_OK(mccl_set_defaults(NULL));
    set_variable("MCCL_LISTEN_ADDR", "127.0.0.78");
    expect_refused(&id, NULL, "MCCL_LISTEN_ADDR=127.0.0.78 (environment)",
                   "MCCL_LISTEN_ADDR=loopback");
    /* The same is no other wish, and no wish is none. */
    expect_accepted(&id, "listen_addr=localhost; port_base=0");
    CHECK_RESULT(mccl_get_unique_id(&id), MCCL_ERR_CONFIG);
    CHECK(unsetenv("MCCL_LISTEN_ADDR") == 0);
    CHECK_OK(mccl_get_unique_id(&id));
    expect_accepted(&id, NULL);
    (void)self;
}

/* Whoever does not make the id opens its endpoint as the group's own settings say; a variable that
 * they overrule does not stand in the way of later groups. */
static void own_settings(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(
        self, self->rank == 1 ? "listen_addr=127.0.0.79; port_base=0" : NULL, 20000);
    if (self->rank == 1) {
        mccl_unique_id id;
        CHECK(reachable("127.0.0.79", only_port()));
        CHECK(!reachable("127.0.0.1", only_port()));
        CHECK_OK(mccl_get_unique_id(&id));
        expect_accepted(&id, NULL);
        CHECK_OK(mccl_get_unique_id(&id));
        expect_refused(&id, "listen_addr=loopback", "MCCL_LISTEN_ADDR=loopback",
                       "MCCL_LISTEN_ADDR=127.0.0.79");
    }
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void ifname_lo(struct rank *self)
{
    CHECK(unsetenv("MCCL_LISTEN_ADDR") == 0);
    set_variable("MCCL_IFNAME", "lo");
    mccl_comm *comm = rank_connect(self, NULL);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK(reachable("127.0.0.1", only_port()));
    CHECK(!proc_listens_on_wildcard());
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
}

static void ifname_unknown(struct rank *self)
{
    mccl_unique_id id;
    CHECK(unsetenv("MCCL_LISTEN_ADDR") == 0);
    set_variable("MCCL_IFNAME", "nosuch7");
    CHECK_RESULT(mccl_get_unique_id(&id), MCCL_ERR_CONFIG);
    CHECK_HAS(mccl_last_error(), "nosuch7");
    CHECK_HAS(mccl_last_error(), "lo"); /* what there is instead */
    (void)self;
}

int main(void)
{
    team_run(2, 20, port_base, NULL);
    team_run(1, 20, port_taken, NULL);
    team_run(1, 20, port_range_exhausted, NULL);
    team_run(2, 20, port_any, NULL);
    team_run(2, 20, listen_addr, NULL);
    team_run(1, 20, listen_addr_not_ours, NULL);
    team_run(2, 20, ifname_lo, NULL);
    team_run(1, 20, ifname_unknown, NULL);
    team_run(1, 20, asked_too_late, NULL);
    team_run(2, 20, own_settings, NULL);
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * See dial.h. Preference among a peer's addresses: loopback if it shares our host, then subnets
 * that we share (on the interfaces of MCCL_IFNAME, if it is set), then wired and Thunderbolt before
 * Wi-Fi before bridges, faster before slower, and the peer's own order. The channels of a data link
 * take turns among the best ones, if these are by several interfaces.
 */
#include "comm/dial.h"

#include "base/error.h"
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STAGGER_NS \
    (250 * OS_MS) /* RFC 8305 recommends this pause between attempts at several addresses */
#define BACKOFF_FIRST_NS (10 * OS_MS)
#define BACKOFF_MAX_NS (500 * OS_MS)
#define STALE_NS (2 * OS_SEC) /* an id whose maker refuses for so long is dead */

static int kind_rank(unsigned kind)
{
    static const int ranks[] = {
        [OS_IF_LOOPBACK] = 0, [OS_IF_THUNDERBOLT] = 1, [OS_IF_WIRED] = 2, [OS_IF_OTHER] = 3,
        [OS_IF_WIFI] = 4,     [OS_IF_VIRTUAL] = 5,     [OS_IF_BRIDGE] = 6};
    return kind < sizeof ranks / sizeof *ranks ? ranks[kind] : 9;
}

struct scored {
    struct os_address address;
    unsigned interface; /* of ours, with a subnet that holds the address; 0: none */
    int score, order;
};

static int by_score(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    if (x->score != y->score)
        return x->score < y->score ? -1 : 1;
    if (x->address.speed_mbps != y->address.speed_mbps)
        return x->address.speed_mbps > y->address.speed_mbps ? -1 : 1;
    return x->order - y->order;
}

static bool is_ours(const struct os_address *address, const struct os_interface *interfaces,
                    size_t n_interfaces)
{
    for (size_t i = 0; i < n_interfaces; i++)
        if (os_address_equal_ip(address, &interfaces[i].address))
            return true;
    return false;
}

/* The interface that may be used and has the address in a subnet of its own; 0: there is none. */
static unsigned shared_interface(const struct os_address *address,
                                 const struct os_interface *interfaces, size_t n_interfaces)
{
    for (size_t i = 0; i < n_interfaces; i++)
        if (interfaces[i].up && interfaces[i].address.family == address->family &&
            os_address_same_subnet(address, &interfaces[i].address, interfaces[i].prefix_bits))
            return interfaces[i].index;
    return 0;
}

/* Puts first the address that suits a channel. Messages are cut evenly, so only addresses that are
 * as good as the best one take part, or all by interfaces that the user has named; and one of each
 * interface, since a second one (IPv6, say) would be the same cable. */
static void take_turns(struct scored *scored, int n, unsigned channel, bool named)
{
    int chosen[WIRE_MEMBER_ADDRESSES], n_chosen = 0;
    for (int i = 0; i < n && scored[0].interface; i++) {
        bool fits = scored[i].interface &&
                    (named || (scored[i].score == scored[0].score &&
                               scored[i].address.speed_mbps == scored[0].address.speed_mbps));
        for (int k = 0; k < n_chosen; k++)
            fits = fits && scored[chosen[k]].interface != scored[i].interface;
        if (fits)
            chosen[n_chosen++] = i;
    }
    if (n_chosen < 2)
        return;
    const int first = chosen[channel % (unsigned)n_chosen];
    const struct scored moved = scored[first];
    memmove(scored + 1, scored, (size_t)first * sizeof *scored);
    scored[0] = moved;
}

static void add_candidate(struct dial *dial, const struct os_address *address, unsigned scope)
{
    if (dial->n_candidates == DIAL_CANDIDATES)
        return;
    struct dial_candidate *candidate = &dial->candidates[dial->n_candidates++];
    candidate->address = *address;
    candidate->to_size = os_address_to_sockaddr(address, scope, &candidate->to);
}

/* IPv6 link-local addresses travel without a scope: every link of ours may be the right one. */
static void add_scoped(struct dial *dial, const struct os_address *address,
                       const struct os_interface *interfaces, size_t n_interfaces)
{
    for (size_t i = 0; i < n_interfaces; i++)
        if (interfaces[i].up && interfaces[i].kind != OS_IF_LOOPBACK &&
            interfaces[i].address.family == 6 && os_address_is_link_local(&interfaces[i].address))
            add_candidate(dial, address, interfaces[i].index);
}

static mccl_result list_candidates(struct dial *dial, const struct wire_address *addresses,
                                   int n_addresses, bool same_host)
{
    struct os_interface *interfaces;
    size_t n_interfaces;
    TRY(os_interfaces(&interfaces, &n_interfaces));
    const struct endpoint *endpoint = dial->endpoint;
    const struct os_interface *usable = endpoint->n_named ? endpoint->named : interfaces;
    const size_t n_usable = endpoint->n_named ? (size_t)endpoint->n_named : n_interfaces;
    struct scored scored[WIRE_MEMBER_ADDRESSES];
    int n = 0;
    for (int i = 0; i < n_addresses && i < WIRE_MEMBER_ADDRESSES; i++) {
        struct os_address address = {.family = addresses[i].family,
                                     .kind = addresses[i].kind,
                                     .port = addresses[i].port,
                                     .speed_mbps = addresses[i].speed_mbps};
        memcpy(address.ip, addresses[i].ip, sizeof address.ip);
        if (address.family != 4 && address.family != 6)
            continue;
        const bool loopback = os_address_is_loopback(&address);
        /* Elsewhere our own addresses (two docker0 with the same number, say) would only lead back
         * to ourselves. */
        if (!same_host && (loopback || is_ours(&address, interfaces, n_interfaces)))
            continue;
        int score = loopback ? 0 : kind_rank(address.kind);
        const unsigned interface = loopback ? 0 : shared_interface(&address, usable, n_usable);
        if (!loopback && !interface)
            score += 10;
        if (address.family == 6 && os_address_is_link_local(&address))
            score += 5; /* needs a guess about the link */
        scored[n] = (struct scored){address, interface, score, n};
        n++;
    }
    qsort(scored, (size_t)n, sizeof *scored, by_score);
    take_turns(scored, n, dial->channel, endpoint->n_named > 0);
    for (int i = 0; i < n; i++) {
        if (scored[i].address.family == 6 && os_address_is_link_local(&scored[i].address))
            add_scoped(dial, &scored[i].address, usable, n_usable);
        else
            add_candidate(dial, &scored[i].address, 0);
    }
    free(interfaces);
    return MCCL_OK;
}

mccl_result dial_start(struct mccl_comm *comm, int peer, enum wire_purpose purpose, uint8_t channel,
                       const struct wire_address *addresses, int n_addresses, bool same_host,
                       int64_t deadline_ns)
{
    struct dial *dial = calloc(1, sizeof *dial);
    if (!dial)
        return error_set(MCCL_ERR_NO_MEMORY, "no memory to dial rank %d", peer);
    dial->endpoint = comm->endpoint;
    dial->channel = channel;
    const mccl_result result = list_candidates(dial, addresses, n_addresses, same_host);
    if (result != MCCL_OK) {
        free(dial);
        return result;
    }
    dial->comm = comm;
    dial->peer = peer;
    dial->purpose = purpose;
    dial->deadline_ns = deadline_ns;
    dial->backoff_ns = BACKOFF_FIRST_NS;
    dial->stale_after_ns = os_now_ns() + STALE_NS;
    dial->verdict = MCCL_ERR_CONNECT;
    dial->all_refused = true;
    dial->next = comm->endpoint->dials;
    comm->endpoint->dials = dial;
    endpoint_wake(comm->endpoint);
    return MCCL_OK;
}

static void give_up(struct dial *dial)
{
    dial_cancel(dial);
    comm_on_dial_failed(dial->comm, dial);
}

/* Whoever names interfaces wants traffic to leave by them: by the one on the peer's subnet, or by
 * the only one. Else NULL, and routes decide: another one's address may be unknown at the peer. */
static const struct os_address *source_for(const struct endpoint *endpoint,
                                           const struct os_address *to)
{
    const struct os_interface *only = NULL;
    bool several = false;
    for (int i = 0; i < endpoint->n_named; i++) {
        const struct os_interface *named = &endpoint->named[i];
        if (named->address.family != to->family || named->kind == OS_IF_LOOPBACK ||
            (to->family == 6 && os_address_is_link_local(&named->address)))
            continue;
        if (os_address_same_subnet(&named->address, to, named->prefix_bits))
            return &named->address;
        several = several || (only && only->index != named->index);
        only = only ? only : named;
    }
    return only && !several ? &only->address : NULL;
}

static void attempt(struct dial *dial)
{
    struct dial_candidate *candidate = &dial->candidates[dial->next_candidate++];
    const struct os_address *to = &candidate->address;
    const bool free_source = os_address_is_loopback(to) ||
                             (to->family == 6 && os_address_is_link_local(to)); /* has a scope */
    candidate->tried = true;
    dial->n_active++;
    if (!conn_dial(dial->endpoint, dial, &candidate->to, candidate->to_size,
                   free_source ? NULL : source_for(dial->endpoint, to))) {
        dial->n_active--;
        dial->all_refused = false;
        snprintf(candidate->why, sizeof candidate->why, "%.110s", error_text());
    }
}

int64_t dial_on_time(struct dial *dial, int64_t now_ns)
{
    if (dial->done)
        return INT64_MAX;
    if (now_ns >= dial->deadline_ns) {
        give_up(dial);
        return INT64_MAX;
    }
    if (dial->chosen || now_ns < dial->next_attempt_ns)
        return dial->chosen || dial->deadline_ns < dial->next_attempt_ns ? dial->deadline_ns
                                                                         : dial->next_attempt_ns;
    if (dial->next_candidate < dial->n_candidates) {
        attempt(dial);
        dial->next_attempt_ns = now_ns + (dial->n_active > 0 ? STAGGER_NS : 0);
    } else if (dial->n_active > 0) {
        dial->next_attempt_ns = dial->deadline_ns;
    } else { /* the round is over */
        if (dial->purpose == PURPOSE_BOOTSTRAP && dial->all_refused && dial->n_candidates > 0 &&
            now_ns >= dial->stale_after_ns) {
            give_up(dial);
            return INT64_MAX;
        }
        dial->next_candidate = 0;
        dial->all_refused = true;
        dial->next_attempt_ns = now_ns + dial->backoff_ns;
        dial->backoff_ns =
            2 * dial->backoff_ns < BACKOFF_MAX_NS ? 2 * dial->backoff_ns : BACKOFF_MAX_NS;
    }
    return dial->next_attempt_ns < dial->deadline_ns ? dial->next_attempt_ns : dial->deadline_ns;
}

static void drop_attempts(struct dial *dial, const struct conn *but)
{
    for (struct conn *conn = dial->endpoint->conns; conn; conn = conn->next)
        if (conn->dial == dial && conn != but) {
            conn_kill(conn, "no longer needed");
            dial->n_active--;
        }
}

bool dial_choose(struct dial *dial, struct conn *conn)
{
    if (dial->chosen || dial->done)
        return false;
    dial->chosen = conn;
    drop_attempts(dial, conn);
    return true;
}

void dial_succeeded(struct dial *dial, struct conn *conn)
{
    drop_attempts(dial, conn);
    dial->done = true;
}

void dial_attempt_failed(struct dial *dial, struct conn *conn, const char *why, bool refused)
{
    /* The same link-local address on several links counts as one: their fates differ in nothing
     * that a reader could use. */
    for (int i = 0; i < dial->n_candidates; i++) {
        struct dial_candidate *candidate = &dial->candidates[i];
        if (candidate->tried && candidate->address.port == conn->address.port &&
            os_address_equal_ip(&candidate->address, &conn->address))
            snprintf(candidate->why, sizeof candidate->why, "%s", why);
    }
    dial->n_active--;
    if (!refused)
        dial->all_refused = false;
    if (dial->chosen == conn) {
        dial->chosen = NULL;
        dial->next_candidate = dial->n_candidates;
    }
    dial->next_attempt_ns = 0; /* the next address need not wait */
}

void dial_cancel(struct dial *dial)
{
    drop_attempts(dial, NULL);
    dial->done = true;
}

void dial_describe(const struct dial *dial, char *text, size_t size)
{
    size_t used = 0;
    snprintf(text, size, "it published no address that can be reached from here");
    for (int i = 0; i < dial->n_candidates && used < size; i++) {
        const struct dial_candidate *candidate = &dial->candidates[i];
        char where[64];
        if (!candidate->tried ||
            (i > 0 && os_address_equal_ip(&candidate->address, &candidate[-1].address)))
            continue;
        os_address_format(&candidate->address, where, sizeof where);
        used += (size_t)snprintf(text + used, size - used, "%s%s: %s", used ? "; " : "", where,
                                 candidate->why[0] ? candidate->why : "no answer");
    }
}

const struct dial *dial_find(const struct mccl_comm *comm)
{
    for (const struct dial *dial = comm->endpoint->dials; dial; dial = dial->next)
        if (dial->comm == comm && !dial->done)
            return dial;
    return NULL;
}

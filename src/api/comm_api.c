/* SPDX-License-Identifier: MIT
 *
 * Entry points that make, split, query and end communicators. Any thread.
 */
#include "api/call.h"
#include "base/log.h"
#include "comm/bootstrap.h"
#include "comm/comm.h"
#include "comm/dial.h"
#include "os/os_hmac.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static_assert(sizeof(struct unique_id) == MCCL_UNIQUE_ID_BYTES, "the public size is the real one");

/* ---- unique ids ---- */

mccl_result mccl_get_unique_id(mccl_unique_id *id)
{
    if (!id)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_get_unique_id: id is NULL");
    struct settings settings;
    struct endpoint *endpoint;
    struct unique_id made;
    TRY(config_load(NULL, &settings));
    log_set_level(settings.log_level);
    TRY(endpoint_acquire(&settings, &endpoint));
    const mccl_result result = bootstrap_make_id(endpoint, settings.auth_key, &made);
    if (result != MCCL_OK) {
        endpoint_release(endpoint);
        return result;
    }
    memcpy(id->opaque, &made, sizeof made);
    return MCCL_OK;
}

mccl_result mccl_unique_id_to_text(const mccl_unique_id *id, char *text)
{
    static const char digits[] = "0123456789abcdef";
    if (!id || !text)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_unique_id_to_text: %s is NULL",
                         id ? "text" : "id");
    text += sprintf(text, "mccl1:");
    for (size_t i = 0; i < sizeof id->opaque; i++) {
        *text++ = digits[id->opaque[i] >> 4];
        *text++ = digits[id->opaque[i] & 15];
    }
    *text = '\0';
    return MCCL_OK;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

mccl_result mccl_unique_id_from_text(const char *text, mccl_unique_id *id)
{
    mccl_unique_id parsed;
    if (!text || !id)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_unique_id_from_text: %s is NULL",
                         text ? "id" : "text");
    if (strncmp(text, "mccl1:", 6) != 0 || strlen(text) != 6 + 2 * sizeof parsed.opaque)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "mccl_unique_id_from_text: not the text of a unique id (\"mccl1:\" and "
                         "%zu hexadecimal digits); it has %zu characters",
                         2 * sizeof parsed.opaque, strlen(text));
    text += 6;
    for (size_t i = 0; i < sizeof parsed.opaque; i++) {
        const int high = hex_digit(text[2 * i]), low = hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return error_set(MCCL_ERR_INVALID_ARGUMENT,
                             "mccl_unique_id_from_text: character %zu is no hexadecimal digit",
                             6 + 2 * i);
        parsed.opaque[i] = (unsigned char)(high << 4 | low);
    }
    struct unique_id inner;
    memcpy(&inner, parsed.opaque, sizeof inner);
    TRY(bootstrap_check_id(&inner));
    *id = parsed;
    return MCCL_OK;
}

/* ---- making communicators ---- */

static mccl_result check_config(const char *what, const mccl_config *config)
{
    if (!config)
        return MCCL_OK;
    if (config->size != sizeof *config)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "%s: config.size is %zu, expected %zu; start from MCCL_CONFIG_INIT", what,
                         config->size, sizeof *config);
    if (config->timeout_ms < 0)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "%s: config.timeout_ms is %lld; it must not be negative", what,
                         (long long)config->timeout_ms);
    if (config->flags & ~MCCL_CONFIG_NONBLOCKING)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "%s: config.flags is 0x%x; only MCCL_CONFIG_NONBLOCKING is known", what,
                         config->flags);
    return MCCL_OK;
}

/* Waits unless the caller wants to; on failure the object goes and the reason stays. */
static mccl_result settle(struct mccl_comm *comm, const mccl_config *config, mccl_comm **out)
{
    if (!config || !(config->flags & MCCL_CONFIG_NONBLOCKING)) {
        const mccl_result result = mccl_comm_wait_ready(comm, -1);
        if (result != MCCL_OK) {
            char text[ERROR_TEXT_BYTES];
            snprintf(text, sizeof text, "%s", error_text());
            comm_destroy(comm);
            return error_set(result, "%s", text);
        }
    }
    *out = comm;
    return MCCL_OK;
}

static mccl_result start_check_in(struct mccl_comm *comm, const struct unique_id *id)
{
    struct endpoint *endpoint = comm->endpoint;
    mccl_result result = MCCL_OK;
    endpoint_lock(endpoint);
    bootstrap_adopt_key(endpoint, comm);
    if (comm->n_ranks == 1) {
        struct wire_member self;
        bootstrap_member(comm, &self);
        comm_start_mesh(comm, &self);
        bootstrap_forget(endpoint, comm);
    } else {
        const bool same_host = memcmp(id->host_id, endpoint->host_id, sizeof id->host_id) == 0;
        result = dial_start(comm, -1, PURPOSE_BOOTSTRAP, 0, id->addresses, id->n_addresses,
                            same_host, comm->deadline_ns);
    }
    endpoint_unlock(endpoint);
    return result;
}

mccl_result mccl_comm_init_rank(mccl_comm **comm, int n_ranks, const mccl_unique_id *id, int rank,
                                const mccl_config *config)
{
    if (!comm || !id)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_comm_init_rank: %s is NULL",
                         comm ? "id" : "comm");
    if (n_ranks < 1 || n_ranks > 65535)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "mccl_comm_init_rank: n_ranks is %d; 1 .. 65535 are possible", n_ranks);
    if (rank < 0 || rank >= n_ranks)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "mccl_comm_init_rank: rank is %d; a group of %d has ranks 0 .. %d", rank,
                         n_ranks, n_ranks - 1);
    TRY(check_config("mccl_comm_init_rank", config));
    struct unique_id inner;
    memcpy(&inner, id->opaque, sizeof inner);
    TRY(bootstrap_check_id(&inner));
    struct mccl_comm *made;
    TRY(comm_create(n_ranks, rank, inner.comm_id, inner.secret, inner.generation, config, &made));
    const mccl_result result = start_check_in(made, &inner);
    if (result != MCCL_OK)
        comm_fail(made, result, -1, "%s", error_text());
    return settle(made, config, comm);
}

mccl_result mccl_comm_wait_ready(mccl_comm *comm, int64_t timeout_ms)
{
    if (!comm)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_comm_wait_ready: comm is NULL");
    if (comm->fork_generation != os_fork_generation())
        return comm_check(comm, "mccl_comm_wait_ready");
    const int64_t until_ns = request_until(os_now_ns(), timeout_ms);
    for (;;) {
        const uint32_t phase = atomic_load(&comm->phase);
        if (phase == COMM_READY)
            return MCCL_OK;
        if (phase == COMM_FAILED) /* perhaps before this thread woke up to see it ready */
            return atomic_load(&comm->was_ready) ? MCCL_OK : comm_cause(comm);
        const int64_t left_ns = until_ns < 0 ? -1 : until_ns - os_now_ns();
        if (until_ns >= 0 && left_ns <= 0)
            return MCCL_IN_PROGRESS;
        os_wait(&comm->phase, phase, left_ns);
    }
}

/* ---- splitting ---- */

/* What every rank tells the others before a split. */
struct split_entry {
    int32_t color, key, rank, reserved;
    struct wire_member member; /* for the settings that must agree */
};

static int by_key(const void *a, const void *b)
{
    const struct split_entry *x = a, *y = b;
    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* Id and secret of the new group follow from the old one's secret, so that nothing secret has to
 * travel. */
static void derive(const struct mccl_comm *comm, uint32_t number, int color, const char *label,
                   uint8_t out[HMAC_BYTES])
{
    struct {
        char label[16];
        uint8_t id[16];
        uint32_t number;
        int32_t color;
    } text = {.number = number, .color = color};
    snprintf(text.label, sizeof text.label, "%s", label);
    memcpy(text.id, comm->id, sizeof text.id);
    hmac_sha256(comm->secret, sizeof comm->secret, &text, sizeof text, out);
}

static mccl_result form(struct mccl_comm *parent, const struct split_entry *members, int n,
                        int color, uint32_t number, const mccl_config *config, mccl_comm **out)
{
    int rank = 0;
    while (members[rank].rank != parent->rank)
        rank++;
    uint8_t id[HMAC_BYTES], secret[HMAC_BYTES];
    derive(parent, number, color, "mccl split id", id);
    derive(parent, number, color, "mccl split key", secret);
    mccl_config used = MCCL_CONFIG_INIT;
    if (config)
        used = *config;
    if (used.timeout_ms == 0)
        used.timeout_ms = parent->timeout_ms;
    struct mccl_comm *made;
    TRY(comm_create(n, rank, id, secret, parent->generation, &used, &made));
    struct wire_member *table = calloc((size_t)n, sizeof *table);
    if (!table) {
        comm_destroy(made);
        return error_set(MCCL_ERR_NO_MEMORY, "mccl_comm_split: no memory for %d ranks", n);
    }
    for (int i = 0; i < n; i++) {
        table[i] = members[i].member;
        table[i].rank = (uint32_t)i;
        table[i].n_ranks = (uint32_t)n;
    }
    endpoint_lock(made->endpoint);
    comm_start_mesh(made, table);
    endpoint_unlock(made->endpoint);
    endpoint_wake(made->endpoint);
    free(table);
    return settle(made, &used, out);
}

mccl_result mccl_comm_split(mccl_comm *comm, int color, int key, mccl_comm **new_comm,
                            const mccl_config *config)
{
    if (!new_comm)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_comm_split: new_comm is NULL");
    if (color < MCCL_SPLIT_NOCOLOR)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "mccl_comm_split: color is %d; it is 0 or more, or MCCL_SPLIT_NOCOLOR",
                         color);
    TRY(check_config("mccl_comm_split", config));
    TRY(comm_check(comm, "mccl_comm_split"));
    if (call_in_group())
        return error_set(MCCL_ERR_INVALID_USAGE,
                         "mccl_comm_split inside a group: it has to talk at once; call it before "
                         "mccl_group_start or after mccl_group_end");
    struct settings settings;
    TRY(config_load(config ? config->settings : NULL, &settings));
    struct split_entry own = {.color = color, .key = key, .rank = comm->rank};
    bootstrap_member(comm, &own.member);
    own.member.shares = comm_wants_memory(&settings);
    own.member.heartbeat_ms = (uint32_t)settings.heartbeat_interval_ms;
    bootstrap_agree_on(&settings, &own.member);

    struct split_entry *all = calloc((size_t)comm->n_ranks, sizeof *all);
    if (!all)
        return error_set(MCCL_ERR_NO_MEMORY, "mccl_comm_split: no memory");
    mccl_result result = mccl_all_gather(&own, all, sizeof own, MCCL_UINT8, comm, NULL, NULL);
    pthread_mutex_lock(&comm->engine.submit_lock);
    const uint32_t number = comm->n_splits++;
    pthread_mutex_unlock(&comm->engine.submit_lock);
    int n = 0;
    for (int i = 0; i < comm->n_ranks && result == MCCL_OK; i++) {
        char text[300];
        if (all[i].color != color)
            continue;
        if (n > 0 && bootstrap_disagree(&all[0].member, &all[i].member, text, sizeof text))
            result = error_set(MCCL_ERR_MISMATCH, "mccl_comm_split: %s", text);
        all[n++] = all[i];
    }
    if (result == MCCL_OK && color == MCCL_SPLIT_NOCOLOR) {
        *new_comm = NULL;
    } else if (result == MCCL_OK) {
        qsort(all, (size_t)n, sizeof *all, by_key);
        result = form(comm, all, n, color, number, config, new_comm);
    }
    free(all);
    return result;
}

/* ---- ending and asking ---- */

mccl_result mccl_comm_destroy(mccl_comm *comm)
{
    if (comm)
        comm_destroy(comm);
    return MCCL_OK;
}

mccl_result mccl_comm_abort(mccl_comm *comm)
{
    if (!comm)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_comm_abort: comm is NULL");
    if (comm->fork_generation != os_fork_generation())
        return comm_check(comm, "mccl_comm_abort");
    comm_fail(comm, MCCL_ERR_ABORTED, comm->rank, "rank %d called mccl_comm_abort", comm->rank);
    engine_quiesce(comm);
    return MCCL_OK;
}

mccl_result mccl_comm_get_async_error(mccl_comm *comm, mccl_result *error)
{
    if (!comm || !error)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_comm_get_async_error: %s is NULL",
                         comm ? "error" : "comm");
    if (comm->fork_generation != os_fork_generation())
        return comm_check(comm, "mccl_comm_get_async_error");
    *error = atomic_load(&comm->failed) ? comm_cause(comm) : MCCL_OK;
    return MCCL_OK;
}

mccl_result mccl_comm_rank(const mccl_comm *comm, int *rank)
{
    if (!comm || !rank)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_comm_rank: %s is NULL",
                         comm ? "rank" : "comm");
    *rank = comm->rank;
    return MCCL_OK;
}

mccl_result mccl_comm_count(const mccl_comm *comm, int *n_ranks)
{
    if (!comm || !n_ranks)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_comm_count: %s is NULL",
                         comm ? "n_ranks" : "comm");
    *n_ranks = comm->n_ranks;
    return MCCL_OK;
}

mccl_result mccl_comm_get_stats(mccl_comm *comm, mccl_stats *stats)
{
    if (!comm || !stats || stats->size != sizeof *stats)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "mccl_comm_get_stats: comm or stats is NULL, or stats->size is not %zu",
                         sizeof *stats);
    TRY(comm->fork_generation == os_fork_generation() ? MCCL_OK
                                                      : comm_check(comm, "mccl_comm_get_stats"));
    stats->operations = atomic_load(&comm->engine.operations_done);
    stats->errors = atomic_load(&comm->engine.errors);
    stats->bytes_sent = atomic_load(&comm->engine.bytes_sent);
    stats->bytes_received = atomic_load(&comm->engine.bytes_received);
    endpoint_lock(comm->endpoint);
    stats->heartbeats_sent = comm->heartbeats_sent;
    stats->heartbeats_received = comm->heartbeats_received;
    endpoint_unlock(comm->endpoint);
    return MCCL_OK;
}

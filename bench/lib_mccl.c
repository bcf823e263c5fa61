/* SPDX-License-Identifier: MIT
 *
 * MCCL through its public header. The library is opened by path, so that the worker measures the
 * one that it is told to.
 */
#include "library.h"
#include "mccl.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define FUNCTIONS(X)       \
    X(get_unique_id)       \
    X(unique_id_to_text)   \
    X(unique_id_from_text) \
    X(comm_init_rank)      \
    X(comm_destroy)        \
    X(version_string)      \
    X(last_error)          \
    X(all_reduce)          \
    X(reduce)              \
    X(broadcast)           \
    X(all_gather)          \
    X(reduce_scatter)      \
    X(gather)              \
    X(scatter)             \
    X(all_to_all)          \
    X(send)                \
    X(recv)                \
    X(barrier)             \
    X(group_start)         \
    X(group_end)

static struct {
#define X(name) __typeof__(&mccl_##name) name;
    FUNCTIONS(X)
#undef X
} f;

static const struct job *own;
static mccl_unique_id unique_id;
static mccl_comm *comm;

static const mccl_dtype dtypes[] = {
    [DTYPE_float32] = MCCL_FLOAT32, [DTYPE_float64] = MCCL_FLOAT64,
    [DTYPE_float16] = MCCL_FLOAT16, [DTYPE_bfloat16] = MCCL_BFLOAT16,
    [DTYPE_int8] = MCCL_INT8,       [DTYPE_uint8] = MCCL_UINT8,
    [DTYPE_int32] = MCCL_INT32,     [DTYPE_int64] = MCCL_INT64,
};

static void check(mccl_result result)
{
    if (result != MCCL_OK)
        fail("mccl: %s", f.last_error());
}

static void open_library(struct job *job)
{
    own = job;
    void *handle = dlopen(job->path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        fail("%s", dlerror());
#define X(name)                                      \
    do {                                             \
        void *found = symbol(handle, "mccl_" #name); \
        memcpy(&f.name, &found, sizeof found);       \
    } while (0);
    FUNCTIONS(X)
#undef X
}

static void new_id(char *text)
{
    check(f.get_unique_id(&unique_id));
    check(f.unique_id_to_text(&unique_id, text));
}

static void join(const char *text)
{
    check(f.unique_id_from_text(text, &unique_id));
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = DEADLINE_S * 1000;
    check(f.comm_init_rank(&comm, own->n, &unique_id, own->rank, &config));
}

static void version(char *text, size_t size)
{
    snprintf(text, size, "MCCL %s", f.version_string());
}

static void call(const struct call *c)
{
    const mccl_dtype type = dtypes[c->dtype];
    const int next = (own->rank + 1) % own->n, previous = (own->rank + own->n - 1) % own->n;
    switch (c->op) {
    case OP_all_reduce:
        check(f.all_reduce(c->send, c->recv, c->count, type, MCCL_SUM, comm, NULL, NULL));
        break;
    case OP_reduce:
        check(f.reduce(c->send, c->recv, c->count, type, MCCL_SUM, 0, comm, NULL, NULL));
        break;
    case OP_broadcast:
        check(f.broadcast(c->send, c->recv, c->count, type, 0, comm, NULL, NULL));
        break;
    case OP_all_gather:
        check(f.all_gather(c->send, c->recv, c->count, type, comm, NULL, NULL));
        break;
    case OP_reduce_scatter:
        check(f.reduce_scatter(c->send, c->recv, c->count, type, MCCL_SUM, comm, NULL, NULL));
        break;
    case OP_gather:
        check(f.gather(c->send, c->recv, c->count, type, 0, comm, NULL, NULL));
        break;
    case OP_scatter:
        check(f.scatter(c->send, c->recv, c->count, type, 0, comm, NULL, NULL));
        break;
    case OP_all_to_all:
        check(f.all_to_all(c->send, c->recv, c->count, type, comm, NULL, NULL));
        break;
    case OP_send_recv:
        check(f.group_start());
        check(f.send(c->send, c->count, type, next, comm, NULL, NULL));
        check(f.recv(c->recv, c->count, type, previous, comm, NULL, NULL));
        check(f.group_end());
        break;
    default:
        check(f.barrier(comm, NULL, NULL));
    }
}

static void leave(void)
{
    check(f.comm_destroy(comm));
}

const struct library lib_mccl = {
    .name = "mccl",
    .open = open_library,
    .new_id = new_id,
    .join = join,
    .version = version,
    .call = call,
    .leave = leave,
};

/* SPDX-License-Identifier: MIT
 *
 * Entry points of all operations: they check what can be checked without any other rank, and
 * describe the call. A bad argument is refused here, before anything is sent, and leaves the
 * communicator usable.
 */
#include "api/call.h"
#include "api/stream.h"
#include "reduce/reduce.h"

#include <stdarg.h>
#include <stdio.h>

struct checker {
    const char *what; /* "all_reduce" */
    struct call *call;
    mccl_result result;
};

static void refuse(struct checker *check, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void refuse(struct checker *check, const char *format, ...)
{
    if (check->result != MCCL_OK)
        return;
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    check->result = error_set(MCCL_ERR_INVALID_ARGUMENT, "%s: %s", check->what, text);
}

static size_t width(const struct checker *check)
{
    return mccl_dtype_size(check->call->coll.dtype);
}

/* Communicator, dtype, stream: common to all. */
static void check_common(struct checker *check, mccl_stream *stream)
{
    struct call *call = check->call;
    call->options = call_take_options();
    const mccl_result usable = comm_check(call->comm, check->what);
    if (usable != MCCL_OK) {
        check->result = usable;
        return;
    }
    if (width(check) == 0)
        refuse(check, "dtype is %d, which is no mccl_dtype", (int)call->coll.dtype);
    if (stream && mccl_stream_address(stream, NULL, 0, &(void *){NULL}) != MCCL_OK)
        refuse(check, "stream is not a host stream; only those exist so far");
    else if (stream)
        call->wait_ms = atomic_load_explicit(&stream->wait_ms, memory_order_relaxed);
}

/* "float32, float64, ...": what `op` can reduce. */
static void list_dtypes(mccl_op op, char *text, size_t size)
{
    size_t used = 0;
    for (int dtype = 0; dtype < MCCL_N_DTYPES && used < size; dtype++)
        if (reduce_supports(op, (mccl_dtype)dtype))
            used += (size_t)snprintf(text + used, size - used, "%s%s", used > 0 ? ", " : "",
                                     mccl_dtype_name((mccl_dtype)dtype));
}

static void check_op(struct checker *check)
{
    struct coll_call *coll = &check->call->coll;
    if (check->result != MCCL_OK)
        return;
    if ((unsigned)coll->op >= MCCL_N_OPS) {
        refuse(check, "op is %d, which is no mccl_op", (int)coll->op);
    } else if (!reduce_supports(coll->op, coll->dtype)) {
        char supported[256];
        list_dtypes(coll->op, supported, sizeof supported);
        check->result =
            error_set(MCCL_ERR_UNSUPPORTED, "%s: op %s cannot reduce dtype %s; it can reduce %s",
                      check->what, mccl_op_name(coll->op), mccl_dtype_name(coll->dtype), supported);
    }
    coll->factor = check->call->options.factor;
}

static void check_root(struct checker *check, int root)
{
    if (check->result == MCCL_OK && (root < 0 || root >= check->call->comm->n_ranks))
        refuse(check, "root is %d; the ranks of group '%s' are 0 .. %d", root,
               check->call->comm->name, check->call->comm->n_ranks - 1);
    check->call->coll.root = root;
}

/* `count` elements times `blocks` must be addressable, and the buffer there if there is anything in
 * it. */
static size_t check_buffer(struct checker *check, const char *name, const void *buffer,
                           size_t count, size_t blocks)
{
    if (check->result != MCCL_OK)
        return 0;
    if (count > PTRDIFF_MAX / width(check) / blocks) {
        refuse(check, "count is %zu: more bytes than an address space holds", count);
        return 0;
    }
    if (!buffer && count > 0)
        refuse(check, "%s is NULL and count is %zu", name, count);
    return count * blocks * width(check);
}

/* Equal pointers where the header allows them; anything else must not overlap. */
static void check_overlap(struct checker *check, const void *send, size_t send_bytes,
                          const void *recv, size_t recv_bytes, size_t allowed_offset,
                          bool send_is_inside)
{
    if (check->result != MCCL_OK || send_bytes == 0 || recv_bytes == 0)
        return;
    const uintptr_t s = (uintptr_t)send, r = (uintptr_t)recv;
    if (s + send_bytes <= r || r + recv_bytes <= s)
        return;
    const bool allowed = send_is_inside ? s == r + allowed_offset : r == s + allowed_offset;
    if (!allowed || allowed_offset == SIZE_MAX)
        refuse(check,
               "send and recv overlap other than in place (see mccl.h for the in-place rule)");
}

static size_t block_offset(const struct checker *check, size_t count)
{
    return check->result == MCCL_OK ? (size_t)check->call->comm->rank * count * width(check) : 0;
}

static size_t ranks(const struct checker *check)
{
    return check->result == MCCL_OK ? (size_t)check->call->comm->n_ranks : 1;
}

/* Arrays of n pointers and counts. Returns the bytes of this rank's own entry. */
static size_t check_arrays(struct checker *check, const char *name, const void *const *buffers,
                           const char *counts_name, const size_t *counts)
{
    if (check->result != MCCL_OK)
        return 0;
    if (!counts || !buffers) {
        refuse(check, "%s is NULL", counts ? name : counts_name);
        return 0;
    }
    for (int rank = 0; rank < check->call->comm->n_ranks; rank++) {
        if (!buffers[rank] && counts[rank] > 0)
            refuse(check, "%s[%d] is NULL and its count is %zu", name, rank, counts[rank]);
        if (counts[rank] > PTRDIFF_MAX / width(check))
            refuse(check, "%s[%d] is %zu: more bytes than an address space holds", counts_name,
                   rank, counts[rank]);
    }
    return check->result == MCCL_OK ? counts[check->call->comm->rank] * width(check) : 0;
}

static mccl_result finish(struct checker *check)
{
    return check->result == MCCL_OK ? call_run(check->call) : call_refuse(check->result);
}

#define BEGIN(kind_, name_)                                                                    \
    struct call call = {                                                                       \
        .coll = {.kind = (kind_), .dtype = dtype, .send = send, .recv = recv, .count = count}, \
        .comm = comm,                                                                          \
        .request = request};                                                                   \
    struct checker check = {.what = (name_), .call = &call};                                   \
    check_common(&check, stream)

mccl_result mccl_all_reduce(const void *send, void *recv, size_t count, mccl_dtype dtype,
                            mccl_op op, mccl_comm *comm, mccl_stream *stream,
                            mccl_request **request)
{
    BEGIN(OP_ALL_REDUCE, "all_reduce");
    call.coll.op = op;
    check_op(&check);
    call.bytes = check_buffer(&check, "send", send, count, 1);
    check_buffer(&check, "recv", recv, count, 1);
    check_overlap(&check, send, call.bytes, recv, call.bytes, 0, false);
    return finish(&check);
}

mccl_result mccl_all_reduce_by(mccl_all_reduce_args *args)
{
    if (!args || args->size != sizeof *args)
        return call_refuse(error_set(MCCL_ERR_INVALID_ARGUMENT,
                                     "mccl_all_reduce_by: size is %zu, expected %zu",
                                     args ? args->size : 0, sizeof *args));
    args->request = NULL;
    return mccl_all_reduce(args->send, args->recv, args->count, args->dtype, args->op, args->comm,
                           args->stream, &args->request);
}

mccl_result mccl_reduce(const void *send, void *recv, size_t count, mccl_dtype dtype, mccl_op op,
                        int root, mccl_comm *comm, mccl_stream *stream, mccl_request **request)
{
    BEGIN(OP_REDUCE, "reduce");
    call.coll.op = op;
    check_op(&check);
    check_root(&check, root);
    call.bytes = check_buffer(&check, "send", send, count, 1);
    if (check.result == MCCL_OK && comm->rank == root) {
        check_buffer(&check, "recv", recv, count, 1);
        check_overlap(&check, send, call.bytes, recv, call.bytes, 0, false);
    }
    return finish(&check);
}

mccl_result mccl_broadcast(const void *send, void *recv, size_t count, mccl_dtype dtype, int root,
                           mccl_comm *comm, mccl_stream *stream, mccl_request **request)
{
    BEGIN(OP_BROADCAST, "broadcast");
    check_root(&check, root);
    call.bytes = check_buffer(&check, "recv", recv, count, 1);
    if (check.result == MCCL_OK && comm->rank == root) {
        check_buffer(&check, "send", send, count, 1);
        check_overlap(&check, send, call.bytes, recv, call.bytes, 0, false);
    }
    return finish(&check);
}

mccl_result mccl_all_gather(const void *send, void *recv, size_t count, mccl_dtype dtype,
                            mccl_comm *comm, mccl_stream *stream, mccl_request **request)
{
    BEGIN(OP_ALL_GATHER, "all_gather");
    call.bytes = check_buffer(&check, "send", send, count, 1);
    const size_t all = check_buffer(&check, "recv", recv, count, ranks(&check));
    check_overlap(&check, send, call.bytes, recv, all, block_offset(&check, count), true);
    return finish(&check);
}

mccl_result mccl_reduce_scatter(const void *send, void *recv, size_t count, mccl_dtype dtype,
                                mccl_op op, mccl_comm *comm, mccl_stream *stream,
                                mccl_request **request)
{
    BEGIN(OP_REDUCE_SCATTER, "reduce_scatter");
    call.coll.op = op;
    check_op(&check);
    call.bytes = check_buffer(&check, "recv", recv, count, 1);
    const size_t all = check_buffer(&check, "send", send, count, ranks(&check));
    check_overlap(&check, send, all, recv, call.bytes, block_offset(&check, count), false);
    return finish(&check);
}

mccl_result mccl_gather(const void *send, void *recv, size_t count, mccl_dtype dtype, int root,
                        mccl_comm *comm, mccl_stream *stream, mccl_request **request)
{
    BEGIN(OP_GATHER, "gather");
    check_root(&check, root);
    call.bytes = check_buffer(&check, "send", send, count, 1);
    if (check.result == MCCL_OK && comm->rank == root) {
        const size_t all = check_buffer(&check, "recv", recv, count, ranks(&check));
        check_overlap(&check, send, call.bytes, recv, all, block_offset(&check, count), true);
    }
    return finish(&check);
}

mccl_result mccl_scatter(const void *send, void *recv, size_t count, mccl_dtype dtype, int root,
                         mccl_comm *comm, mccl_stream *stream, mccl_request **request)
{
    BEGIN(OP_SCATTER, "scatter");
    check_root(&check, root);
    call.bytes = check_buffer(&check, "recv", recv, count, 1);
    if (check.result == MCCL_OK && comm->rank == root) {
        const size_t all = check_buffer(&check, "send", send, count, ranks(&check));
        check_overlap(&check, send, all, recv, call.bytes, block_offset(&check, count), false);
    }
    return finish(&check);
}

mccl_result mccl_all_to_all(const void *send, void *recv, size_t count, mccl_dtype dtype,
                            mccl_comm *comm, mccl_stream *stream, mccl_request **request)
{
    BEGIN(OP_ALL_TO_ALL, "all_to_all");
    call.bytes = check_buffer(&check, "send", send, count, ranks(&check));
    check_buffer(&check, "recv", recv, count, ranks(&check));
    check_overlap(&check, send, call.bytes, recv, call.bytes, SIZE_MAX, false);
    return finish(&check);
}

/* ---- one pointer and count per rank ---- */

static const void *const *constant(void *const *pointers)
{
    union {
        void *const *in;
        const void *const *out;
    } cast = {.in = pointers};
    return cast.out;
}

/* A rank's message to itself has one length. */
static void check_own(struct checker *check, size_t send_count, size_t recv_count)
{
    if (check->result == MCCL_OK && send_count != recv_count)
        refuse(check,
               "rank %d sends %zu elements to itself but receives %zu; make the counts agree",
               check->call->comm->rank, send_count, recv_count);
}

mccl_result mccl_all_gather_v(const void *send, void *const *recvs, const size_t *recv_counts,
                              mccl_dtype dtype, mccl_comm *comm, mccl_stream *stream,
                              mccl_request **request)
{
    void *const recv = NULL;
    const size_t count = 0;
    BEGIN(OP_ALL_GATHER_V, "all_gather_v");
    call.coll.recvs = recvs;
    call.coll.recv_counts = recv_counts;
    call.bytes = check_arrays(&check, "recvs", constant(recvs), "recv_counts", recv_counts);
    if (check.result == MCCL_OK)
        check_buffer(&check, "send", send, recv_counts[comm->rank], 1);
    return finish(&check);
}

mccl_result mccl_reduce_scatter_v(const void *const *sends, const size_t *counts, void *recv,
                                  mccl_dtype dtype, mccl_op op, mccl_comm *comm,
                                  mccl_stream *stream, mccl_request **request)
{
    const void *const send = NULL;
    const size_t count = 0;
    BEGIN(OP_REDUCE_SCATTER_V, "reduce_scatter_v");
    call.coll.op = op;
    call.coll.sends = sends;
    call.coll.send_counts = counts;
    check_op(&check);
    call.bytes = check_arrays(&check, "sends", sends, "counts", counts);
    if (check.result == MCCL_OK)
        check_buffer(&check, "recv", recv, counts[comm->rank], 1);
    return finish(&check);
}

mccl_result mccl_gather_v(const void *send, size_t count, void *const *recvs,
                          const size_t *recv_counts, mccl_dtype dtype, int root, mccl_comm *comm,
                          mccl_stream *stream, mccl_request **request)
{
    void *const recv = NULL;
    BEGIN(OP_GATHER_V, "gather_v");
    check_root(&check, root);
    call.bytes = check_buffer(&check, "send", send, count, 1);
    if (check.result == MCCL_OK && comm->rank == root) {
        call.coll.recvs = recvs;
        call.coll.recv_counts = recv_counts;
        check_arrays(&check, "recvs", constant(recvs), "recv_counts", recv_counts);
        if (check.result == MCCL_OK)
            check_own(&check, count, recv_counts[root]);
    }
    return finish(&check);
}

mccl_result mccl_scatter_v(const void *const *sends, const size_t *send_counts, void *recv,
                           size_t count, mccl_dtype dtype, int root, mccl_comm *comm,
                           mccl_stream *stream, mccl_request **request)
{
    const void *const send = NULL;
    BEGIN(OP_SCATTER_V, "scatter_v");
    check_root(&check, root);
    call.bytes = check_buffer(&check, "recv", recv, count, 1);
    if (check.result == MCCL_OK && comm->rank == root) {
        call.coll.sends = sends;
        call.coll.send_counts = send_counts;
        check_arrays(&check, "sends", sends, "send_counts", send_counts);
        if (check.result == MCCL_OK)
            check_own(&check, send_counts[root], count);
    }
    return finish(&check);
}

mccl_result mccl_all_to_all_v(const void *const *sends, const size_t *send_counts,
                              void *const *recvs, const size_t *recv_counts, mccl_dtype dtype,
                              mccl_comm *comm, mccl_stream *stream, mccl_request **request)
{
    const void *const send = NULL;
    void *const recv = NULL;
    const size_t count = 0;
    BEGIN(OP_ALL_TO_ALL_V, "all_to_all_v");
    call.coll.sends = sends;
    call.coll.send_counts = send_counts;
    call.coll.recvs = recvs;
    call.coll.recv_counts = recv_counts;
    check_arrays(&check, "sends", sends, "send_counts", send_counts);
    check_arrays(&check, "recvs", constant(recvs), "recv_counts", recv_counts);
    if (check.result == MCCL_OK) {
        check_own(&check, send_counts[comm->rank], recv_counts[comm->rank]);
        for (int rank = 0; rank < comm->n_ranks; rank++)
            call.bytes += send_counts[rank] * width(&check);
    }
    return finish(&check);
}

mccl_result mccl_barrier(mccl_comm *comm, mccl_stream *stream, mccl_request **request)
{
    const mccl_dtype dtype = MCCL_UINT8;
    const void *const send = NULL;
    void *const recv = NULL;
    const size_t count = 0;
    BEGIN(OP_BARRIER, "barrier");
    return finish(&check);
}

/* ---- point to point ---- */

static void check_peer(struct checker *check, int peer, bool any)
{
    if (check->result != MCCL_OK)
        return;
    check->call->peer = peer;
    if (any && peer == MCCL_ANY_SOURCE)
        return;
    if (peer < 0 || peer >= check->call->comm->n_ranks)
        refuse(check, "peer is %d; the ranks of group '%s' are 0 .. %d", peer,
               check->call->comm->name, check->call->comm->n_ranks - 1);
}

mccl_result mccl_send(const void *buffer, size_t count, mccl_dtype dtype, int peer, mccl_comm *comm,
                      mccl_stream *stream, mccl_request **request)
{
    const void *const send = buffer;
    void *const recv = NULL;
    BEGIN(OP_SEND, "send");
    check_peer(&check, peer, false);
    call.bytes = check_buffer(&check, "buffer", buffer, count, 1);
    if (check.result == MCCL_OK && call.options.tag < 0)
        refuse(&check, "tag is %d; it must not be negative when sending", call.options.tag);
    return finish(&check);
}

mccl_result mccl_recv(void *buffer, size_t count, mccl_dtype dtype, int peer, mccl_comm *comm,
                      mccl_stream *stream, mccl_request **request)
{
    const void *const send = NULL;
    void *const recv = buffer;
    BEGIN(OP_RECV, "recv");
    check_peer(&check, peer, true);
    call.bytes = check_buffer(&check, "buffer", buffer, count, 1);
    return finish(&check);
}

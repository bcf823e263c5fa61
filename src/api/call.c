/* SPDX-License-Identifier: MIT
 *
 * See call.h. Groups are kept per thread: calls are copied, arrays included, and submitted in order
 * at the outermost end; only then are the ones without a request waited for.
 */
#include "api/call.h"

#include "comm/small.h"

#include <stdlib.h>
#include <string.h>

/* One deferred call of a group; `arrays` holds copies of the caller's arrays. */
struct deferred {
    struct deferred *next;
    struct call call;
    mccl_request *waiting; /* of a call without a request, once submitted */
    void *arrays;
};

static _Thread_local mccl_options next_options;
static _Thread_local bool have_options;

static _Thread_local struct {
    int depth;
    struct deferred *first, *last;
    mccl_result failed;
    char text[ERROR_TEXT_BYTES];
} group;

/* ---- options ---- */

mccl_result mccl_set_options(const mccl_options *options)
{
    have_options = false;
    if (!options)
        return MCCL_OK;
    if (options->size != sizeof *options)
        return error_set(
            MCCL_ERR_INVALID_ARGUMENT,
            "mccl_set_options: size is %zu, expected %zu; start from MCCL_OPTIONS_INIT",
            options->size, sizeof *options);
    if (options->timeout_ms < 0 || options->tag < MCCL_ANY_TAG)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "mccl_set_options: timeout_ms is %lld, tag is %d; neither may be negative",
                         (long long)options->timeout_ms, options->tag);
    next_options = *options;
    have_options = true;
    return MCCL_OK;
}

mccl_options call_take_options(void)
{
    const mccl_options none = MCCL_OPTIONS_INIT;
    const mccl_options taken = have_options ? next_options : none;
    have_options = false;
    return taken;
}

/* ---- copies of the caller's arrays ---- */

static size_t arrays_size(const struct coll_call *coll, int n)
{
    size_t n_arrays = 0;
    n_arrays += (coll->sends != NULL) + (size_t)(coll->recvs != NULL);
    n_arrays += (coll->send_counts != NULL) + (size_t)(coll->recv_counts != NULL);
    return n_arrays * (size_t)n * sizeof(uint64_t);
}

static_assert(sizeof(void *) <= sizeof(uint64_t) && sizeof(size_t) <= sizeof(uint64_t),
              "slots hold either");

static const void *copy_array(unsigned char **to, const void *array, size_t bytes)
{
    if (!array)
        return NULL;
    const void *copy = memcpy(*to, array, bytes);
    *to += bytes;
    return copy;
}

/* Points *coll at copies in `memory`, which holds arrays_size bytes. */
static void copy_arrays(struct coll_call *coll, int n, void *memory)
{
    unsigned char *to = memory;
    const size_t pointers = (size_t)n * sizeof(void *), counts = (size_t)n * sizeof(size_t);
    coll->sends = copy_array(&to, coll->sends, pointers);
    coll->recvs = copy_array(&to, coll->recvs, pointers);
    coll->send_counts = copy_array(&to, coll->send_counts, counts);
    coll->recv_counts = copy_array(&to, coll->recv_counts, counts);
}

/* ---- submission ---- */

/* The same on all ranks. Whether memory is really shared shows later, on each link by itself. */
static enum coll_links links_of(const struct mccl_comm *comm)
{
    if (comm->n_hosts <= 1)
        return comm->shares ? LINKS_SHM : LINKS_TCP;
    return comm->n_hosts < comm->n_ranks ? LINKS_MIXED : LINKS_TCP;
}

static struct coll_env env_of(const struct mccl_comm *comm)
{
    const struct settings *settings = &comm->settings;
    return (struct coll_env){.rank = comm->rank,
                             .n_ranks = comm->n_ranks,
                             .chunk_bytes = (size_t)settings->chunk_bytes,
                             .small_bytes = (size_t)settings->small_msg_threshold,
                             .allreduce_algo = settings->allreduce_algo,
                             .ring_algo = settings->ring_algo,
                             .links = links_of(comm),
                             .hosts = comm->hosts};
}

static mccl_result build(struct mccl_comm *comm, struct operation *operation)
{
    const struct coll_env env = env_of(comm);
    return coll_plan(operation->call, &env, &operation->schedule);
}

static mccl_result fill_operation(struct operation *operation, const struct call *call)
{
    const size_t extra = arrays_size(&call->coll, call->comm->n_ranks);
    if (operation->call_capacity < sizeof call->coll + extra) {
        void *grown = realloc(operation->call, sizeof call->coll + extra);
        if (!grown)
            return error_set(MCCL_ERR_NO_MEMORY, "no memory for an operation");
        operation->call = grown;
        operation->call_capacity = sizeof call->coll + extra;
    }
    struct coll_call *coll = operation->call;
    *coll = call->coll;
    copy_arrays(coll, call->comm->n_ranks, coll + 1);
    operation->build = build;
    operation->alone = coll->kind == OP_BARRIER;
    return MCCL_OK;
}

/* The operation of `request`, which keeps both references. */
static mccl_result make_operation(const struct call *call, mccl_request *request,
                                  struct operation **made)
{
    struct mccl_comm *comm = call->comm;
    struct operation *operation = engine_operation(comm);
    if (!operation)
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for an operation");
    const mccl_result result = fill_operation(operation, call);
    if (result != MCCL_OK) {
        engine_operation_free(comm, operation);
        return result;
    }
    operation->request = request;
    operation->signature = request->signature;
    operation->submitted_ns = os_now_ns();
    const int64_t ms = call->options.timeout_ms > 0 ? call->options.timeout_ms : comm->operation_ms;
    const int64_t deadline_ns = request_until(operation->submitted_ns, ms);
    operation->deadline_ns = deadline_ns < 0 ? INT64_MAX : deadline_ns;
    operation->warn_ns = operation->submitted_ns + comm->warn_ms * OS_MS;
    *made = operation;
    return MCCL_OK;
}

/* Takes one of the request's references on success. */
static mccl_result start_collective(const struct call *call, mccl_request *request, bool attended)
{
    struct operation *operation;
    TRY(make_operation(call, request, &operation));
    return engine_submit(call->comm, operation, attended);
}

static mccl_result start_message(const struct call *call, mccl_request *request, bool attended)
{
    const struct coll_call *coll = &call->coll;
    const bool is_send = coll->kind == OP_SEND;
    const int64_t ms =
        call->options.timeout_ms > 0 ? call->options.timeout_ms : call->comm->operation_ms;
    const int64_t deadline_ns = request_until(os_now_ns(), ms);
    union {
        const void *in;
        void *out;
    } buffer = {.in = is_send ? coll->send : coll->recv};
    request->peer = call->peer;
    request->tag = call->options.tag;
    return p2p_submit(call->comm, request, buffer.out, call->bytes, is_send,
                      deadline_ns < 0 ? INT64_MAX : deadline_ns, attended);
}

/* On success *started has a reference for the caller. `attended`: the caller is going to wait for
 * this very operation. */
static mccl_result start(const struct call *call, bool attended, mccl_request **started)
{
    struct mccl_comm *comm = call->comm;
    const bool message = call->coll.kind == OP_SEND || call->coll.kind == OP_RECV;
    struct signature signature;
    coll_signature(&call->coll, comm->n_ranks, &signature);
    mccl_request *request = request_create(comm, &signature);
    if (!request)
        return error_set(MCCL_ERR_NO_MEMORY, "no memory for a request");
    request->bytes = call->bytes;
    const mccl_result result = message ? start_message(call, request, attended)
                                       : start_collective(call, request, attended);
    if (result != MCCL_OK) {
        request_release(request);
        request_release(request);
        return result;
    }
    *started = request;
    return MCCL_OK;
}

static mccl_result finish(mccl_request *request)
{
    const mccl_result result = mccl_request_wait(request, -1);
    request_release(request);
    return result;
}

/* ---- the short way ---- */

static bool is_small(const struct call *call)
{
    const struct coll_call *coll = &call->coll;
    const struct coll_env env = env_of(call->comm);
    return coll->kind == OP_ALL_REDUCE && coll->op != MCCL_PREMUL_SUM && call->bytes > 0 &&
           call->bytes <= SMALL_BYTES && env.n_ranks > 1 && env.n_ranks <= SMALL_RANKS &&
           coll_choose(coll, &env) == ALGO_DIRECT && call->bytes <= env.chunk_bytes;
}

/* It did not get through at once: an operation like any other, which goes on from there. */
static mccl_result resume(const struct call *call, const struct signature *signature, uint32_t seq,
                          uint32_t arrived, mccl_request **started)
{
    struct mccl_comm *comm = call->comm;
    struct operation *operation = NULL;
    mccl_request *request = request_create(comm, signature);
    if (!request || make_operation(call, request, &operation) != MCCL_OK) {
        small_give_up(comm);
        if (request) {
            request_release(request);
            request_release(request);
        }
        return comm_cause(comm);
    }
    request->bytes = call->bytes;
    operation->seq = request->seq = seq;
    small_resume(comm, operation, arrived);
    *started = request;
    return MCCL_OK;
}

/* Submits a call that its caller waits for. *started is NULL if it is done. */
static mccl_result start_attended(const struct call *call, mccl_request **started)
{
    const struct coll_call *coll = &call->coll;
    struct small_all_reduce small = {.send = coll->send,
                                     .recv = coll->recv,
                                     .count = coll->count,
                                     .bytes = call->bytes,
                                     .dtype = coll->dtype,
                                     .op = coll->op};
    uint32_t seq, arrived;
    if (!is_small(call))
        return start(call, true, started);
    coll_signature(coll, call->comm->n_ranks, &small.signature);
    switch (small_all_reduce(call->comm, &small, &seq, &arrived)) {
    case SMALL_DONE:
        *started = NULL;
        return MCCL_OK;
    case SMALL_STALLED:
        return resume(call, &small.signature, seq, arrived, started);
    case SMALL_NO:
        break;
    }
    return start(call, true, started);
}

static mccl_result defer(const struct call *call)
{
    struct deferred *deferred = calloc(1, sizeof *deferred);
    const size_t extra = arrays_size(&call->coll, call->comm->n_ranks);
    if (deferred && extra > 0)
        deferred->arrays = malloc(extra);
    if (!deferred || (extra > 0 && !deferred->arrays)) {
        free(deferred);
        return call_refuse(error_set(MCCL_ERR_NO_MEMORY, "no memory for a call of a group"));
    }
    deferred->call = *call;
    copy_arrays(&deferred->call.coll, call->comm->n_ranks, deferred->arrays);
    comm_acquire(call->comm);
    if (group.last)
        group.last->next = deferred;
    else
        group.first = deferred;
    group.last = deferred;
    if (call->request)
        *call->request = NULL;
    return MCCL_OK;
}

mccl_result call_refuse(mccl_result result)
{
    if (group.depth > 0 && group.failed == MCCL_OK) {
        group.failed = result;
        strncpy(group.text, error_text(), sizeof group.text - 1);
    }
    return result;
}

mccl_result call_run(const struct call *call)
{
    if (group.depth > 0 && call->request && call->wait_ms > 0)
        return call_refuse(error_set(MCCL_ERR_INVALID_USAGE,
                                     "%s: its stream says to wait, but a group's calls begin at "
                                     "its end; pass another stream or NULL",
                                     op_kind_name(call->coll.kind)));
    if (group.depth > 0)
        return defer(call);
    TRY(comm_check(call->comm, op_kind_name(call->coll.kind)));
    TRY(engine_make_room(call->comm));
    mccl_request *request;
    if (call->request && call->wait_ms == 0)
        return start(call, false, call->request);
    TRY(start_attended(call, &request));
    if (!request) {
        if (call->request)
            *call->request = NULL;
        return MCCL_OK;
    }
    if (!call->request)
        return finish(request);
    *call->request = request;
    const mccl_result result = mccl_request_wait(request, call->wait_ms);
    if (result != MCCL_IN_PROGRESS) {
        *call->request = NULL;
        request_release(request);
    }
    return result;
}

/* ---- groups ---- */

mccl_result mccl_group_start(void)
{
    group.depth++;
    return MCCL_OK;
}

bool call_in_group(void)
{
    return group.depth > 0;
}

/* All or nothing as far as it can be known beforehand: a communicator that cannot be used fails
 * all. A group needs room once: its calls may depend on each other, so none waits for one before
 * it to end. */
static mccl_result check_group(const struct deferred *first, bool *several)
{
    for (const struct deferred *deferred = first; deferred; deferred = deferred->next) {
        TRY(comm_check(deferred->call.comm, op_kind_name(deferred->call.coll.kind)));
        TRY(engine_make_room(deferred->call.comm));
        *several = *several || deferred->call.comm != first->call.comm;
    }
    return MCCL_OK;
}

static mccl_result submit_group(struct deferred *first)
{
    bool several = false;
    TRY(check_group(first, &several));
    mccl_result result = MCCL_OK;
    for (struct deferred *deferred = first; deferred && result == MCCL_OK;
         deferred = deferred->next) {
        mccl_request *request;
        /* This thread can drive one communicator at a time; others need their own threads. */
        const bool attended = !deferred->call.request && !several;
        result = start(&deferred->call, attended, &request);
        if (result != MCCL_OK)
            break;
        if (deferred->call.request)
            *deferred->call.request = request;
        else
            deferred->waiting = request;
    }
    char text[ERROR_TEXT_BYTES] = "";
    if (result != MCCL_OK)
        strncpy(text, error_text(), sizeof text - 1);
    for (struct deferred *deferred = first; deferred; deferred = deferred->next) {
        if (!deferred->waiting)
            continue;
        const mccl_result done = finish(deferred->waiting);
        if (done != MCCL_OK && result == MCCL_OK) {
            result = done;
            strncpy(text, error_text(), sizeof text - 1);
        }
    }
    return result == MCCL_OK ? MCCL_OK : error_set(result, "%s", text);
}

mccl_result mccl_group_end(void)
{
    if (group.depth == 0)
        return error_set(MCCL_ERR_INVALID_USAGE, "mccl_group_end without mccl_group_start");
    if (--group.depth > 0)
        return MCCL_OK;
    struct deferred *first = group.first;
    mccl_result result = group.failed;
    group.first = group.last = NULL;
    group.failed = MCCL_OK;
    result = result != MCCL_OK ? error_set(result, "%s", group.text) : submit_group(first);
    while (first) {
        struct deferred *next = first->next;
        comm_release(first->call.comm);
        free(first->arrays);
        free(first);
        first = next;
    }
    return result;
}

/* SPDX-License-Identifier: MIT
 *
 * See request.h. A finished request reaches its queue exactly once: whoever swaps the queue pointer
 * out, the thread that finishes or the one that adds, pushes it.
 */
#include "comm/request.h"

#include "base/error.h"
#include "comm/comm.h"
#include "os/os.h"

#include <pthread.h>
#include <stdlib.h>

struct mccl_queue {
    _Atomic uint32_t refs; /* the user's handle and one per request added */
    pthread_mutex_t lock;
    mccl_request *first, *last; /* finished; lock */
    _Atomic uint32_t events;    /* bumped by every push and by close; waited on */
    _Atomic bool closed;
};

mccl_request *request_create(struct mccl_comm *comm, const struct signature *signature)
{
    mccl_request *request = atomic_exchange(&comm->engine.spare_request, NULL);
    if (!request)
        request = malloc(sizeof *request);
    if (!request)
        return NULL;
    *request = (mccl_request){.comm = comm};
    atomic_init(&request->refs, 2);
    comm_acquire(comm);
    request->signature = *signature;
    request->peer = -1;
    request->source = -1;
    request->source_tag = -1;
    request->tag = -1;
    return request;
}

void request_acquire(mccl_request *request)
{
    atomic_fetch_add(&request->refs, 1);
}

void request_release(mccl_request *request)
{
    if (!request || atomic_fetch_sub(&request->refs, 1) != 1)
        return;
    struct mccl_comm *comm = request->comm;
    free(request->text);
    free(atomic_exchange(&comm->engine.spare_request, request));
    comm_release(comm);
}

static void queue_release(mccl_queue *queue)
{
    if (atomic_fetch_sub(&queue->refs, 1) != 1)
        return;
    while (queue->first) {
        mccl_request *request = queue->first;
        queue->first = request->queue_next;
        request_release(request);
    }
    pthread_mutex_destroy(&queue->lock);
    free(queue);
}

/* Takes the queue's reference to the request along. */
static void queue_push(mccl_queue *queue, mccl_request *request)
{
    pthread_mutex_lock(&queue->lock);
    request->queue_next = NULL;
    if (queue->last)
        queue->last->queue_next = request;
    else
        queue->first = request;
    queue->last = request;
    pthread_mutex_unlock(&queue->lock);
    atomic_fetch_add(&queue->events, 1);
    os_wake_all(&queue->events);
    queue_release(queue);
}

void request_finish(mccl_request *request, mccl_result result, char *text)
{
    request->result = result;
    request->text = text;
    atomic_store(&request->done, 1); /* pairs with the loads in wait, test and queue_add */
    mccl_queue *queue = atomic_exchange(&request->queue, NULL);
    if (queue)
        queue_push(queue, request);
}

mccl_result request_report(const mccl_request *request)
{
    if (request->result == MCCL_OK)
        return MCCL_OK;
    return error_set(request->result, "%s",
                     request->text ? request->text : mccl_result_text(request->result));
}

int64_t request_until(int64_t now_ns, int64_t timeout_ms)
{
    /* Longer than a year means for ever, and would overflow in nanoseconds. */
    return timeout_ms < 0 || timeout_ms > 365LL * 86400000 ? -1 : now_ns + timeout_ms * OS_MS;
}

mccl_result mccl_queue_create(mccl_queue **queue)
{
    if (!queue)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_queue_create: queue is NULL");
    mccl_queue *made = calloc(1, sizeof *made);
    if (!made)
        return error_set(MCCL_ERR_NO_MEMORY, "mccl_queue_create: no memory");
    atomic_init(&made->refs, 1);
    pthread_mutex_init(&made->lock, NULL);
    *queue = made;
    return MCCL_OK;
}

mccl_result mccl_queue_add(mccl_queue *queue, mccl_request *request, uint64_t user)
{
    if (!queue || !request)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_queue_add: %s is NULL",
                         queue ? "request" : "queue");
    if (atomic_load(&queue->closed))
        return error_set(MCCL_ERR_INVALID_USAGE, "mccl_queue_add: the queue is closed");
    if (!atomic_load(&request->done) && request->comm->fork_generation != os_fork_generation())
        return comm_check(request->comm, "mccl_queue_add");
    if (atomic_exchange(&request->queued, true))
        return error_set(MCCL_ERR_INVALID_USAGE,
                         "mccl_queue_add: the request is in a queue already");
    atomic_store(&request->user, user);
    request_acquire(request);
    atomic_fetch_add(&queue->refs, 1);
    atomic_store(&request->queue, queue);
    if (atomic_load(&request->done)) {
        if (atomic_exchange(&request->queue, NULL))
            queue_push(queue, request);
        return MCCL_OK;
    }
    engine_attend_in_background(request->comm, request);
    return MCCL_OK;
}

static mccl_request *queue_pop(mccl_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    mccl_request *request = queue->first;
    if (request) {
        queue->first = request->queue_next;
        if (!queue->first)
            queue->last = NULL;
    }
    pthread_mutex_unlock(&queue->lock);
    return request;
}

mccl_result mccl_queue_wait(mccl_queue *queue, int64_t timeout_ms, uint64_t *user,
                            mccl_result *result)
{
    if (!queue || !user || !result)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_queue_wait: NULL argument");
    const int64_t until_ns = request_until(os_now_ns(), timeout_ms);
    for (;;) {
        const uint32_t events = atomic_load(&queue->events);
        if (atomic_load(&queue->closed))
            return error_set(MCCL_ERR_ABORTED, "mccl_queue_wait: the queue was closed");
        mccl_request *request = queue_pop(queue);
        if (request) {
            *user = atomic_load(&request->user);
            *result = request_report(request);
            atomic_store(&request->queued, false);
            request_release(request);
            return MCCL_OK;
        }
        const int64_t left_ns = until_ns < 0 ? -1 : until_ns - os_now_ns();
        if (until_ns >= 0 && left_ns <= 0)
            return MCCL_IN_PROGRESS;
        os_wait(&queue->events, events, left_ns);
    }
}

mccl_result mccl_queue_close(mccl_queue *queue)
{
    if (!queue)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_queue_close: queue is NULL");
    atomic_store(&queue->closed, true);
    atomic_fetch_add(&queue->events, 1);
    os_wake_all(&queue->events);
    return MCCL_OK;
}

mccl_result mccl_queue_destroy(mccl_queue *queue)
{
    if (!queue)
        return MCCL_OK;
    if (!atomic_load(&queue->closed))
        return error_set(MCCL_ERR_INVALID_USAGE, "mccl_queue_destroy: close the queue first");
    queue_release(queue);
    return MCCL_OK;
}

mccl_result mccl_request_wait(mccl_request *request, int64_t timeout_ms)
{
    if (!request)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_request_wait: request is NULL");
    if (!atomic_load(&request->done)) {
        if (request->comm->fork_generation != os_fork_generation())
            return error_set(MCCL_ERR_INVALID_USAGE, "mccl_request_wait: the request belongs to "
                                                     "the parent process; a forked child must make "
                                                     "a communicator of its own");
        const int64_t until_ns = timeout_ms < 0 ? -1 : request_until(os_now_ns(), timeout_ms);
        engine_wait(request->comm, request, until_ns);
        if (!atomic_load(&request->done))
            return MCCL_IN_PROGRESS;
    }
    return request_report(request);
}

mccl_result mccl_request_test(mccl_request *request)
{
    if (!request)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_request_test: request is NULL");
    if (!atomic_load(&request->done) && request->comm->fork_generation == os_fork_generation())
        engine_poke(request->comm);
    return atomic_load(&request->done) ? request_report(request) : MCCL_IN_PROGRESS;
}

mccl_result mccl_request_free(mccl_request *request)
{
    /* Nobody can wait for it any more, so somebody has to drive it. */
    if (request && !atomic_load(&request->done) &&
        request->comm->fork_generation == os_fork_generation())
        engine_attend_in_background(request->comm, request);
    request_release(request);
    return MCCL_OK;
}

mccl_result mccl_request_get_status(mccl_request *request, mccl_status *status)
{
    if (!request || !status || status->size != sizeof *status)
        return error_set(
            MCCL_ERR_INVALID_ARGUMENT,
            "mccl_request_get_status: request or status is NULL, or status->size is not %zu",
            sizeof *status);
    if (!atomic_load(&request->done))
        return MCCL_IN_PROGRESS;
    status->source = request->source;
    status->tag = request->source_tag;
    status->bytes = request->bytes;
    return MCCL_OK;
}

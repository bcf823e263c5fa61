/* SPDX-License-Identifier: MIT
 *
 * Streams. Any thread.
 */
#include "api/stream.h"
#include "base/error.h"

#include <stdlib.h>

mccl_result mccl_stream_create(mccl_device device, void *native, mccl_stream **stream)
{
    if (!stream)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_stream_create: stream is NULL");
    if (device != MCCL_DEVICE_HOST || native)
        return error_set(MCCL_ERR_UNSUPPORTED,
                         "mccl_stream_create: device %d with native object %p; only "
                         "MCCL_DEVICE_HOST with NULL exists in this version",
                         (int)device, native);
    mccl_stream *made = calloc(1, sizeof *made);
    if (!made)
        return error_set(MCCL_ERR_NO_MEMORY, "mccl_stream_create: no memory");
    made->device = device;
    *stream = made;
    return MCCL_OK;
}

mccl_result mccl_stream_destroy(mccl_stream *stream)
{
    free(stream);
    return MCCL_OK;
}

mccl_result mccl_stream_set_wait(mccl_stream *stream, uint32_t wait_ms)
{
    if (!stream)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_stream_set_wait: stream is NULL");
    atomic_store_explicit(&stream->wait_ms, wait_ms, memory_order_relaxed);
    return MCCL_OK;
}

mccl_result mccl_stream_address(mccl_stream *stream, void *buffer, size_t offset, void **address)
{
    if (!address)
        return error_set(MCCL_ERR_INVALID_ARGUMENT, "mccl_stream_address: address is NULL");
    if (stream && stream->device != MCCL_DEVICE_HOST)
        return error_set(MCCL_ERR_UNSUPPORTED, "mccl_stream_address: device %d",
                         (int)stream->device);
    *address = (unsigned char *)buffer + offset;
    return MCCL_OK;
}

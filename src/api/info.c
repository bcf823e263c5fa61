/* SPDX-License-Identifier: MIT
 *
 * Version, last error, settings and streams: calls that need no communicator. Any thread.
 */
#include "base/config.h"
#include "base/error.h"
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

const char *mccl_last_error(void)
{
    return error_text();
}

int mccl_version(void)
{
    return MCCL_VERSION_MAJOR * 10000 + MCCL_VERSION_MINOR * 100 + MCCL_VERSION_PATCH;
}

const char *mccl_version_string(void)
{
    return TEXT(MCCL_VERSION_MAJOR) "." TEXT(MCCL_VERSION_MINOR) "." TEXT(MCCL_VERSION_PATCH);
}

mccl_result mccl_set_defaults(const char *settings)
{
    return config_set_defaults(settings);
}

mccl_result mccl_setting_get_info(size_t index, mccl_setting_info *info)
{
    const mccl_setting_info *row = config_row(index);
    if (!info || !row)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         info ? "mccl_setting_get_info: there is no row %zu"
                              : "mccl_setting_get_info: info is NULL (row %zu)",
                         index);
    *info = *row;
    return MCCL_OK;
}

mccl_result mccl_setting_get(const mccl_comm *comm, const char *name, char *value,
                             size_t value_size, char *source, size_t source_size)
{
    if (!name || !value || value_size == 0)
        return error_set(MCCL_ERR_INVALID_ARGUMENT,
                         "mccl_setting_get: name or value is NULL, or value_size is 0");
    struct settings fresh;
    const struct settings *settings = comm ? &comm->settings : &fresh;
    size_t index;
    TRY(config_find(name, &index));
    if (!comm)
        TRY(config_load(NULL, &fresh));
    config_format(settings, index, value, value_size);
    if (source && source_size > 0)
        snprintf(source, source_size, "%s",
                 config_source_name((enum setting_source)settings->source[index]));
    return MCCL_OK;
}

/* ---- streams ---- */

struct mccl_stream {
    mccl_device device;
};

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

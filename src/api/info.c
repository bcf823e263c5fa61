/* SPDX-License-Identifier: MIT
 *
 * Version, last error and settings: calls that need no communicator. Any thread.
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

/* SPDX-License-Identifier: MIT
 *
 * Where the buffers of an operation live, and how long its call waits.
 */
#ifndef MCCL_API_STREAM_H
#define MCCL_API_STREAM_H

#include "mccl.h"

#include <stdatomic.h>

struct mccl_stream {
    mccl_device device;
    _Atomic uint32_t wait_ms; /* of calls with a request */
};

#endif

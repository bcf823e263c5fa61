/* SPDX-License-Identifier: MIT
 *
 * A library whose sums have one wrong element; all else comes from the libmccl that it is linked
 * to. REAL is the path of that.
 */
#include "mccl.h"

#include <dlfcn.h>
#include <string.h>

/* Linkers drop a library that nothing is taken from. */
mccl_result (*const wrong_mccl_is_linked)(mccl_unique_id *) = mccl_get_unique_id;

mccl_result mccl_all_reduce(const void *send, void *recv, size_t count, mccl_dtype dtype,
                            mccl_op op, mccl_comm *comm, mccl_stream *stream,
                            mccl_request **request)
{
    __typeof__(&mccl_all_reduce) real;
    void *found = dlsym(dlopen(REAL, RTLD_NOW), "mccl_all_reduce");
    memcpy(&real, &found, sizeof real);
    const mccl_result result = real(send, recv, count, dtype, op, comm, stream, request);
    ((float *)recv)[count / 2] += 1.0f;
    return result;
}

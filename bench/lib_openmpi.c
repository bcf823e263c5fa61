/* SPDX-License-Identifier: MIT
 *
 * Open MPI, opened at run time, so that it is no dependency: what mpi.h would declare is declared
 * here. Its handles are addresses of objects that libmpi exports (Open MPI 2 to 5). The worker is
 * started by mpirun, which decides the ranks.
 */
#include "library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

typedef void *object; /* MPI_Comm, MPI_Datatype, MPI_Op */

#define IN_PLACE ((void *)1) /* MPI_IN_PLACE */
#define STATUS_IGNORE NULL
#define MAX_VERSION 256 /* MPI_MAX_LIBRARY_VERSION_STRING */

/* X(member, name, parameters): functions that return MPI_SUCCESS or end the process themselves. */
#define FUNCTIONS(X)                                                                         \
    X(init, "MPI_Init", (int *, char ***))                                                   \
    X(finalize, "MPI_Finalize", (void))                                                      \
    X(comm_rank, "MPI_Comm_rank", (object, int *))                                           \
    X(comm_size, "MPI_Comm_size", (object, int *))                                           \
    X(version, "MPI_Get_library_version", (char *, int *))                                   \
    X(all_reduce, "MPI_Allreduce", (const void *, void *, int, object, object, object))      \
    X(reduce, "MPI_Reduce", (const void *, void *, int, object, object, int, object))        \
    X(broadcast, "MPI_Bcast", (void *, int, object, int, object))                            \
    X(all_gather, "MPI_Allgather", (const void *, int, object, void *, int, object, object)) \
    X(reduce_scatter, "MPI_Reduce_scatter_block",                                            \
      (const void *, void *, int, object, object, object))                                   \
    X(gather, "MPI_Gather", (const void *, int, object, void *, int, object, int, object))   \
    X(scatter, "MPI_Scatter", (const void *, int, object, void *, int, object, int, object)) \
    X(all_to_all, "MPI_Alltoall", (const void *, int, object, void *, int, object, object))  \
    X(send_recv, "MPI_Sendrecv",                                                             \
      (const void *, int, object, int, int, void *, int, object, int, int, object, void *))  \
    X(barrier, "MPI_Barrier", (object))

static struct {
#define X(member, name, parameters) int(*member) parameters;
    FUNCTIONS(X)
#undef X
} f;

/* Open MPI 4 has no 16-bit floats: they can be moved, and the driver does not ask for sums. */
static const char *const dtype_symbols[N_DTYPES] = {
    [DTYPE_float32] = "ompi_mpi_float",   [DTYPE_float64] = "ompi_mpi_double",
    [DTYPE_float16] = "ompi_mpi_int16_t", [DTYPE_bfloat16] = "ompi_mpi_int16_t",
    [DTYPE_int8] = "ompi_mpi_int8_t",     [DTYPE_uint8] = "ompi_mpi_uint8_t",
    [DTYPE_int32] = "ompi_mpi_int32_t",   [DTYPE_int64] = "ompi_mpi_int64_t",
};

static const struct job *own;
static object world, sum, dtypes[N_DTYPES];

static void check(int result)
{
    if (result != 0)
        fail("openmpi: a call returned %d", result);
}

static void open_library(struct job *job)
{
    own = job;
    /* Global, since its components expect to find its symbols. */
    void *handle = dlopen(job->path, RTLD_NOW | RTLD_GLOBAL);
    if (!handle)
        fail("%s", dlerror());
#define X(member, name, parameters)              \
    do {                                         \
        void *found = symbol(handle, name);      \
        memcpy(&f.member, &found, sizeof found); \
    } while (0);
    FUNCTIONS(X)
#undef X
    world = symbol(handle, "ompi_mpi_comm_world");
    sum = symbol(handle, "ompi_mpi_op_sum");
    for (int dtype = 0; dtype < N_DTYPES; dtype++)
        dtypes[dtype] = symbol(handle, dtype_symbols[dtype]);
    check(f.init(NULL, NULL));
    int n = 0;
    check(f.comm_rank(world, &job->rank));
    check(f.comm_size(world, &n));
    if (n != job->n)
        fail("openmpi: %d ranks instead of %d", n, job->n);
}

static void new_id(char *text)
{
    strcpy(text, "-"); /* mpirun has joined the ranks */
}

/* Makes every connection that a call can need: they are made on first use. */
static void join(const char *id)
{
    (void)id;
    unsigned char out[MAX_RANKS] = {0}, in[MAX_RANKS];
    check(f.all_to_all(out, 1, dtypes[DTYPE_uint8], in, 1, dtypes[DTYPE_uint8], world));
    check(f.barrier(world));
}

static void version(char *text, size_t size)
{
    char whole[MAX_VERSION] = "";
    int length = 0;
    check(f.version(whole, &length));
    whole[strcspn(whole, ",")] = '\0'; /* "Open MPI v4.1.4, package: ..." */
    snprintf(text, size, "%s", whole);
}

static void call(const struct call *c)
{
    const object type = dtypes[c->dtype];
    const int count = (int)c->count, n = own->n;
    const int next = (own->rank + 1) % n, previous = (own->rank + n - 1) % n;
    if (c->count > INT_MAX)
        fail("openmpi: %zu elements, at most %d", c->count, INT_MAX);
    switch (c->op) {
    case OP_all_reduce:
        check(f.all_reduce(IN_PLACE, c->recv, count, type, sum, world));
        break;
    case OP_reduce:
        check(f.reduce(own->rank == 0 ? IN_PLACE : c->recv, own->rank == 0 ? c->recv : NULL, count,
                       type, sum, 0, world));
        break;
    case OP_broadcast:
        check(f.broadcast(c->recv, count, type, 0, world));
        break;
    case OP_all_gather:
        check(f.all_gather(c->send, count, type, c->recv, count, type, world));
        break;
    case OP_reduce_scatter:
        check(f.reduce_scatter(c->send, c->recv, count, type, sum, world));
        break;
    case OP_gather:
        check(f.gather(c->send, count, type, c->recv, count, type, 0, world));
        break;
    case OP_scatter:
        check(f.scatter(c->send, count, type, c->recv, count, type, 0, world));
        break;
    case OP_all_to_all:
        check(f.all_to_all(c->send, count, type, c->recv, count, type, world));
        break;
    case OP_send_recv:
        check(f.send_recv(c->send, count, type, next, 0, c->recv, count, type, previous, 0, world,
                          STATUS_IGNORE));
        break;
    default:
        check(f.barrier(world));
    }
}

static void leave(void)
{
    check(f.finalize());
}

const struct library lib_openmpi = {
    .name = "openmpi",
    .open = open_library,
    .new_id = new_id,
    .join = join,
    .version = version,
    .call = call,
    .leave = leave,
};

/* SPDX-License-Identifier: MIT
 *
 * MCCL: collective communication between processes on Macs and Linux machines.
 *
 * This is the whole public interface. Read top to bottom it is the manual; docs/ has the longer
 * story.
 *
 * Conventions
 *  - Every fallible call returns mccl_result; MCCL_OK is 0. mccl_last_error() has the full sentence
 *    for the calling thread. Output arguments come last and are written only on success.
 *  - Argument order and in-place rules are those of NCCL. Counts are elements of `dtype`, never
 *    bytes.
 *  - A NULL `stream` means host memory. A NULL `request` means "block until done".
 *  - Collectives of one communicator must be called in the same order, with the same arguments, on
 *    all of its ranks. Ranks that disagree get MCCL_ERR_MISMATCH, which names both sides' values.
 *  - Ranks belong to a communicator, not to the process: several ranks may live in one process
 *    (threads).
 *  - Thread safety: every function may be called from any thread. Concurrent submissions to one
 *    communicator are serialised in the order in which they arrive; two communicators are
 *    independent of each other.
 *  - A bad local argument leaves the communicator usable. A time-out, a mismatch or a lost peer
 *    fails the communicator for good: every later call returns the first cause.
 *  - Buffers handed to an operation belong to it until its request completes. After mccl_comm_abort
 *    returns no byte of user memory is changed any more.
 */
#ifndef MCCL_H
#define MCCL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(MCCL_BUILDING)
#define MCCL_API __attribute__((visibility("default")))
#else
#define MCCL_API
#endif

#define MCCL_VERSION_MAJOR 0
#define MCCL_VERSION_MINOR 1
#define MCCL_VERSION_PATCH 0

/* ---- Results --------------------------------------------------------------------------------- */

/* X(name, value, text): the enum, mccl_result_name and mccl_result_text all come from this list. */
#define MCCL_RESULTS(X)                            \
    X(OK, 0, "success")                            \
    X(IN_PROGRESS, 1, "not finished yet")          \
    X(ERR_INVALID_ARGUMENT, 2, "invalid argument") \
    X(ERR_UNSUPPORTED, 3, "not supported")         \
    X(ERR_CONFIG, 4, "bad setting")                \
    X(ERR_MISMATCH, 5, "ranks disagree")           \
    X(ERR_TIMEOUT, 6, "deadline passed")           \
    X(ERR_PEER_LOST, 7, "peer lost")               \
    X(ERR_ABORTED, 8, "aborted")                   \
    X(ERR_CONNECT, 9, "cannot connect")            \
    X(ERR_AUTH, 10, "authentication failed")       \
    X(ERR_SYSTEM, 11, "system call failed")        \
    X(ERR_NO_MEMORY, 12, "out of memory")          \
    X(ERR_INVALID_USAGE, 13, "invalid usage")      \
    X(ERR_INTERNAL, 14, "internal error")

typedef enum mccl_result {
#define MCCL_X(name, value, text) MCCL_##name = value,
    MCCL_RESULTS(MCCL_X)
#undef MCCL_X
} mccl_result;

/* "MCCL_ERR_TIMEOUT" and "deadline passed". Never NULL, also for values that are no mccl_result. */
MCCL_API const char *mccl_result_name(mccl_result result);
MCCL_API const char *mccl_result_text(mccl_result result);

/* Full text of the calling thread's last failed call: what, where, which value, what to do next.
 * Valid until the thread's next MCCL call. Never NULL. */
MCCL_API const char *mccl_last_error(void);

/* major * 10000 + minor * 100 + patch of the library that is loaded, and the same as "0.1.0". */
MCCL_API int mccl_version(void);
MCCL_API const char *mccl_version_string(void);

/* ---- Data types and reduction operations ----------------------------------------------------- */

/* X(name, value, text, bytes). The float8 types are moved, never reduced. BOOL is one byte holding
 * 0 or 1. */
#define MCCL_DTYPES(X)                           \
    X(FLOAT32, 0, "float32", 4)                  \
    X(FLOAT64, 1, "float64", 8)                  \
    X(FLOAT16, 2, "float16", 2)                  \
    X(BFLOAT16, 3, "bfloat16", 2)                \
    X(INT8, 4, "int8", 1)                        \
    X(UINT8, 5, "uint8", 1)                      \
    X(INT16, 6, "int16", 2)                      \
    X(UINT16, 7, "uint16", 2)                    \
    X(INT32, 8, "int32", 4)                      \
    X(UINT32, 9, "uint32", 4)                    \
    X(INT64, 10, "int64", 8)                     \
    X(UINT64, 11, "uint64", 8)                   \
    X(BOOL, 12, "bool", 1)                       \
    X(COMPLEX64, 13, "complex64", 8)             \
    X(COMPLEX128, 14, "complex128", 16)          \
    X(FLOAT8_E4M3FN, 15, "float8_e4m3fn", 1)     \
    X(FLOAT8_E5M2, 16, "float8_e5m2", 1)         \
    X(FLOAT8_E4M3FNUZ, 17, "float8_e4m3fnuz", 1) \
    X(FLOAT8_E5M2FNUZ, 18, "float8_e5m2fnuz", 1) \
    X(FLOAT8_E8M0FNU, 19, "float8_e8m0fnu", 1)

typedef enum mccl_dtype {
#define MCCL_X(name, value, text, bytes) MCCL_##name = value,
    MCCL_DTYPES(MCCL_X)
#undef MCCL_X
        MCCL_N_DTYPES
} mccl_dtype;

/* X(name, value, text).
 *  SUM, PROD   integers wrap; float16 and bfloat16 accumulate in float32 and are rounded once;
 *              complex allowed; on BOOL they are OR and AND.
 *  MIN, MAX    NaN wins; -0 < +0; not for complex. On BOOL they are AND and OR.
 *  AVG         SUM divided by the number of ranks; floating point and complex only.
 *  PREMUL_SUM  each rank's input is first multiplied by that rank's mccl_options.factor; floating
 *              point and complex only.
 *  BAND, BOR, BXOR  integers and BOOL.
 * A floating-point result that is NaN is always the canonical quiet NaN. */
#define MCCL_OPS(X)                \
    X(SUM, 0, "sum")               \
    X(PROD, 1, "prod")             \
    X(MIN, 2, "min")               \
    X(MAX, 3, "max")               \
    X(AVG, 4, "avg")               \
    X(PREMUL_SUM, 5, "premul_sum") \
    X(BAND, 6, "band")             \
    X(BOR, 7, "bor")               \
    X(BXOR, 8, "bxor")

typedef enum mccl_op {
#define MCCL_X(name, value, text) MCCL_##name = value,
    MCCL_OPS(MCCL_X)
#undef MCCL_X
        MCCL_N_OPS
} mccl_op;

/* Bytes of one element; 0 for a value that is no mccl_dtype. */
MCCL_API size_t mccl_dtype_size(mccl_dtype dtype);
/* "float32", "sum"; "?" for a value outside the enum. */
MCCL_API const char *mccl_dtype_name(mccl_dtype dtype);
MCCL_API const char *mccl_op_name(mccl_op op);
/* 1 if `op` can reduce `dtype`, else 0. */
MCCL_API int mccl_op_supports(mccl_op op, mccl_dtype dtype);

/* ---- Handles --------------------------------------------------------------------------------- */

typedef struct mccl_comm mccl_comm;       /* one rank's membership in a group of ranks */
typedef struct mccl_request mccl_request; /* one operation in flight, reference-counted */
typedef struct mccl_stream mccl_stream;   /* a device and the order of its work */
typedef struct mccl_queue mccl_queue;     /* completion queue: wait for any of many requests */

/* ---- Settings -------------------------------------------------------------------------------- */

/* Every setting has a row in one table: name, type, default, unit, range, help. The same table
 * reads the environment (MCCL_CHUNK_BYTES=...), the strings below ("chunk_bytes=16777216;
 * ifname=en5") and makes the documentation. Precedence: mccl_config.settings, then
 * mccl_set_defaults, then the environment, then the link profile, then the default. A bad value is
 * MCCL_ERR_CONFIG and the text names setting, value, range. */

/* Settings for communicators that this process makes from now on, over the environment. NULL or ""
 * clears. */
MCCL_API mccl_result mccl_set_defaults(const char *settings);

typedef struct mccl_setting_info {
    const char *name;     /* "chunk_bytes" */
    const char *variable; /* "MCCL_CHUNK_BYTES" */
    const char *type;     /* "bytes", "int", "ms", "enum", "string", "bool", "ports", "float" */
    const char *default_value;
    const char *range; /* "4096 .. 1073741824", or the words of an enum */
    const char *help;
    const char *available; /* "" if live, else why a value other than the default is refused */
} mccl_setting_info;

/* Row `index` of the table, MCCL_ERR_INVALID_ARGUMENT past its end. The strings are static. */
MCCL_API mccl_result mccl_setting_get_info(size_t index, mccl_setting_info *info);

/* The value now in force as text, and where it came from ("config", "init", "environment",
 * "profile", "default"), for a communicator or, with NULL, for the next one to be made. Truncated
 * to the given sizes and always terminated; `source` may be NULL. */
MCCL_API mccl_result mccl_setting_get(const mccl_comm *comm, const char *name, char *value,
                                      size_t value_size, char *source, size_t source_size);

/* ---- Communicators --------------------------------------------------------------------------- */

#define MCCL_UNIQUE_ID_BYTES 512
#define MCCL_UNIQUE_ID_TEXT_BYTES 1040 /* terminating zero included */

/* Names a group that is about to be made: version, job id, generation, secret, and up to 16
 * addresses of the process that made it. Whoever holds it can join the group: hand it over by a
 * private channel. */
typedef struct mccl_unique_id {
    unsigned char opaque[MCCL_UNIQUE_ID_BYTES];
} mccl_unique_id;

/* Makes an id. Opens this process's endpoint, so the caller must live until all ranks have checked
 * in, and is usually one of the ranks. Does not block. */
MCCL_API mccl_result mccl_get_unique_id(mccl_unique_id *id);
/* Text form: printable, no spaces. `text` holds MCCL_UNIQUE_ID_TEXT_BYTES. */
MCCL_API mccl_result mccl_unique_id_to_text(const mccl_unique_id *id, char *text);
MCCL_API mccl_result mccl_unique_id_from_text(const char *text, mccl_unique_id *id);

/* Zero-initialise, set `size`, then what is wanted: MCCL_CONFIG_INIT does the first two. */
typedef struct mccl_config {
    size_t size;          /* sizeof(mccl_config); anything else than a known size is refused */
    int64_t timeout_ms;   /* for operations and check-in; 0: the library's default of 30 minutes */
    const char *settings; /* "name=value; name=value", or NULL */
    const char *name;     /* shown in errors and logs, or NULL; copied */
    uint32_t flags;       /* MCCL_CONFIG_NONBLOCKING or 0 */
} mccl_config;

#define MCCL_CONFIG_INIT                      \
    {                                         \
        sizeof(mccl_config), 0, NULL, NULL, 0 \
    }
/* mccl_comm_init_rank and mccl_comm_split return at once; finish with mccl_comm_wait_ready. */
#define MCCL_CONFIG_NONBLOCKING 1u

/* Joins the group named by `id` as `rank` of `n_ranks`. Blocks until all ranks are connected, the
 * time-out passes (the text names the ranks that are missing) or MCCL_CONNECT_TIMEOUT_MS passes
 * once all have checked in. `config` may be NULL. */
MCCL_API mccl_result mccl_comm_init_rank(mccl_comm **comm, int n_ranks, const mccl_unique_id *id,
                                         int rank, const mccl_config *config);

/* MCCL_OK once the communicator has become ready (what fails later, operations report),
 * MCCL_IN_PROGRESS after `timeout_ms` (-1: as long as its deadline allows), else the reason why it
 * cannot become ready. */
MCCL_API mccl_result mccl_comm_wait_ready(mccl_comm *comm, int64_t timeout_ms);

#define MCCL_SPLIT_NOCOLOR (-1)
/* Collective over `comm`: ranks of equal `color` form a new communicator ordered by (key, rank);
 * with MCCL_SPLIT_NOCOLOR a rank takes part in the call only and gets NULL. Blocks until all ranks
 * of `comm` have called it, and, but for MCCL_CONFIG_NONBLOCKING, until the new group is connected.
 * Not inside a group of calls. */
MCCL_API mccl_result mccl_comm_split(mccl_comm *comm, int color, int key, mccl_comm **new_comm,
                                     const mccl_config *config);

/* Leaves the group cleanly: gives operations in flight a short while (at most 2 s), and messages
 * that are sent but not yet asked for another one (at most 1 s), says goodbye, frees. Local: does
 * not wait for other ranks otherwise. NULL is ignored. Requests survive and report an
 * error if unfinished. */
MCCL_API mccl_result mccl_comm_destroy(mccl_comm *comm);

/* Fails everything in flight on this communicator here and tells the other ranks. The handle stays
 * valid (and failed) until mccl_comm_destroy. May be called from any thread, also while others
 * wait. */
MCCL_API mccl_result mccl_comm_abort(mccl_comm *comm);

/* The first failure of the communicator, or MCCL_OK. Does not block. */
MCCL_API mccl_result mccl_comm_get_async_error(mccl_comm *comm, mccl_result *error);

MCCL_API mccl_result mccl_comm_rank(const mccl_comm *comm, int *rank);
MCCL_API mccl_result mccl_comm_count(const mccl_comm *comm, int *n_ranks);

typedef struct mccl_stats {
    size_t size;             /* set by the caller: sizeof(mccl_stats) */
    uint64_t operations;     /* completed, failed ones included */
    uint64_t errors;         /* failed */
    uint64_t bytes_sent;     /* payload handed to links, headers excluded */
    uint64_t bytes_received; /* payload taken from links, headers excluded */
    uint64_t heartbeats_sent;
    uint64_t heartbeats_received;
} mccl_stats;
MCCL_API mccl_result mccl_comm_get_stats(mccl_comm *comm, mccl_stats *stats);

/* ---- Streams --------------------------------------------------------------------------------- */

typedef enum mccl_device { MCCL_DEVICE_HOST = 0, MCCL_DEVICE_METAL = 1 } mccl_device;

/* `native` is the device's own queue object, NULL for the host. Only MCCL_DEVICE_HOST exists so
 * far. */
MCCL_API mccl_result mccl_stream_create(mccl_device device, void *native, mccl_stream **stream);
MCCL_API mccl_result mccl_stream_destroy(mccl_stream *stream);
/* From now on a call on `stream` with a request waits for its operation itself, up to `wait_ms` (0
 * at first), which saves a caller that has to come back now and then a second call. If the
 * operation is done by then, the call returns its result and *request is NULL, else
 * MCCL_IN_PROGRESS. Such calls cannot be part of a group. */
MCCL_API mccl_result mccl_stream_set_wait(mccl_stream *stream, uint32_t wait_ms);
/* The pointer to pass to operations on `stream` for byte `offset` of a device `buffer`; on the host
 * that is the buffer's address plus the offset. */
MCCL_API mccl_result mccl_stream_address(mccl_stream *stream, void *buffer, size_t offset,
                                         void **address);

/* ---- Options --------------------------------------------------------------------------------- */

typedef struct mccl_options {
    size_t size;        /* sizeof(mccl_options) */
    int64_t timeout_ms; /* this operation's own deadline; 0: the communicator's */
    int32_t tag;   /* send and recv: matched together with the peer; >= 0; recv: MCCL_ANY_TAG too */
    double factor; /* MCCL_PREMUL_SUM: multiplies this rank's input */
} mccl_options;

#define MCCL_OPTIONS_INIT               \
    {                                   \
        sizeof(mccl_options), 0, 0, 1.0 \
    }
#define MCCL_ANY_SOURCE (-1)
#define MCCL_ANY_TAG (-1)

/* Options for the next operation that the calling thread submits, and for that one only; copied.
 * NULL: none. */
MCCL_API mccl_result mccl_set_options(const mccl_options *options);

/* ---- Collectives ------------------------------------------------------------------------------ *
 * n is the number of ranks. "In place" says which pointers may be equal; buffers must not overlap
 * otherwise. Arrays of pointers and counts have n entries and are copied during the call. Any count
 * may be 0. */

/* recv[i] = op over ranks of send[i], count elements. In place: send == recv. Bit-identical on all
 * ranks. */
MCCL_API mccl_result mccl_all_reduce(const void *send, void *recv, size_t count, mccl_dtype dtype,
                                     mccl_op op, mccl_comm *comm, mccl_stream *stream,
                                     mccl_request **request);

/* The same with its arguments in a struct that a caller may keep from call to call: foreign
 * function interfaces, such as Python's ctypes, pay for each argument. `request` is a result: NULL
 * after an error. */
typedef struct mccl_all_reduce_args {
    size_t size; /* sizeof(mccl_all_reduce_args) */
    const void *send;
    void *recv;
    size_t count;
    mccl_dtype dtype;
    mccl_op op;
    mccl_comm *comm;
    mccl_stream *stream;
    mccl_request *request;
} mccl_all_reduce_args;
MCCL_API mccl_result mccl_all_reduce_by(mccl_all_reduce_args *args);

/* As all_reduce, result on `root` only; elsewhere `recv` is ignored and `send` unchanged. In place:
 * send == recv. */
MCCL_API mccl_result mccl_reduce(const void *send, void *recv, size_t count, mccl_dtype dtype,
                                 mccl_op op, int root, mccl_comm *comm, mccl_stream *stream,
                                 mccl_request **request);

/* recv = root's send. `send` is read on root only. In place: send == recv. */
MCCL_API mccl_result mccl_broadcast(const void *send, void *recv, size_t count, mccl_dtype dtype,
                                    int root, mccl_comm *comm, mccl_stream *stream,
                                    mccl_request **request);

/* recv[r * send_count ...] = rank r's send. recv holds n * send_count. In place: send == recv +
 * rank * send_count. */
MCCL_API mccl_result mccl_all_gather(const void *send, void *recv, size_t send_count,
                                     mccl_dtype dtype, mccl_comm *comm, mccl_stream *stream,
                                     mccl_request **request);

/* recvs[r] = rank r's send, recv_counts[r] elements; a rank sends recv_counts[rank]. All ranks pass
 * the same recv_counts. In place: send == recvs[rank]. */
MCCL_API mccl_result mccl_all_gather_v(const void *send, void *const *recvs,
                                       const size_t *recv_counts, mccl_dtype dtype, mccl_comm *comm,
                                       mccl_stream *stream, mccl_request **request);

/* recv = op over ranks of block `rank` of send; send holds n * recv_count. In place: recv == send +
 * rank * recv_count. */
MCCL_API mccl_result mccl_reduce_scatter(const void *send, void *recv, size_t recv_count,
                                         mccl_dtype dtype, mccl_op op, mccl_comm *comm,
                                         mccl_stream *stream, mccl_request **request);

/* recv = op over ranks of their sends[rank]; sends[r] has counts[r] elements, the same counts on
 * all ranks. In place: recv == sends[rank]. */
MCCL_API mccl_result mccl_reduce_scatter_v(const void *const *sends, const size_t *counts,
                                           void *recv, mccl_dtype dtype, mccl_op op,
                                           mccl_comm *comm, mccl_stream *stream,
                                           mccl_request **request);

/* On root recv[r * send_count ...] = rank r's send; `recv` is ignored elsewhere.
 * In place: send == recv + rank * send_count on root. */
MCCL_API mccl_result mccl_gather(const void *send, void *recv, size_t send_count, mccl_dtype dtype,
                                 int root, mccl_comm *comm, mccl_stream *stream,
                                 mccl_request **request);

/* On root recvs[r] = rank r's send, recv_counts[r] elements; both arrays are ignored elsewhere. A
 * count that does not match what rank r sends is MCCL_ERR_MISMATCH. In place: send == recvs[rank]
 * on root. */
MCCL_API mccl_result mccl_gather_v(const void *send, size_t send_count, void *const *recvs,
                                   const size_t *recv_counts, mccl_dtype dtype, int root,
                                   mccl_comm *comm, mccl_stream *stream, mccl_request **request);

/* recv = block `rank` of root's send, which holds n * recv_count; `send` is ignored elsewhere.
 * In place: recv == send + rank * recv_count on root. */
MCCL_API mccl_result mccl_scatter(const void *send, void *recv, size_t recv_count, mccl_dtype dtype,
                                  int root, mccl_comm *comm, mccl_stream *stream,
                                  mccl_request **request);

/* recv = root's sends[rank], send_counts[rank] elements; both arrays are ignored elsewhere.
 * In place: recv == sends[rank] on root. */
MCCL_API mccl_result mccl_scatter_v(const void *const *sends, const size_t *send_counts, void *recv,
                                    size_t recv_count, mccl_dtype dtype, int root, mccl_comm *comm,
                                    mccl_stream *stream, mccl_request **request);

/* recv[r * count ...] = block `rank` of rank r's send; both hold n * count. Not in place. */
MCCL_API mccl_result mccl_all_to_all(const void *send, void *recv, size_t count, mccl_dtype dtype,
                                     mccl_comm *comm, mccl_stream *stream, mccl_request **request);

/* recvs[r] = rank r's sends[rank]. recv_counts[r] here must equal send_counts[rank] there. Not in
 * place. */
MCCL_API mccl_result mccl_all_to_all_v(const void *const *sends, const size_t *send_counts,
                                       void *const *recvs, const size_t *recv_counts,
                                       mccl_dtype dtype, mccl_comm *comm, mccl_stream *stream,
                                       mccl_request **request);

/* Completes on a rank only after every rank has called it. */
MCCL_API mccl_result mccl_barrier(mccl_comm *comm, mccl_stream *stream, mccl_request **request);

/* ---- Point to point --------------------------------------------------------------------------- *
 * Matched by (peer, tag) in order of submission, independent of collectives. A message of up to 64
 * KiB may complete on the sender before the receiver asks for it. Sending to oneself works. The
 * counts and dtypes of both sides must agree. */

MCCL_API mccl_result mccl_send(const void *buffer, size_t count, mccl_dtype dtype, int peer,
                               mccl_comm *comm, mccl_stream *stream, mccl_request **request);
/* `peer` may be MCCL_ANY_SOURCE; mccl_request_get_status tells who it was. */
MCCL_API mccl_result mccl_recv(void *buffer, size_t count, mccl_dtype dtype, int peer,
                               mccl_comm *comm, mccl_stream *stream, mccl_request **request);

/* ---- Groups of calls -------------------------------------------------------------------------- *
 * Calls between start and end, on any communicators, are submitted together at the outermost end;
 * those with a NULL request are waited for there. Per thread; nests. The first error fails all of
 * the group: nothing of it is submitted, and mccl_group_end returns that error. */
MCCL_API mccl_result mccl_group_start(void);
MCCL_API mccl_result mccl_group_end(void);

/* ---- Requests -------------------------------------------------------------------------------- */

/* Waits for completion, driving communication itself. MCCL_OK when the operation is done,
 * MCCL_IN_PROGRESS when `timeout_ms` (-1: none but the operation's own deadline) passed first, else
 * the operation's error. */
MCCL_API mccl_result mccl_request_wait(mccl_request *request, int64_t timeout_ms);

/* MCCL_OK, MCCL_IN_PROGRESS or the operation's error, after one non-blocking step of progress. */
MCCL_API mccl_result mccl_request_test(mccl_request *request);

/* Gives the handle up. An unfinished operation goes on; its buffers stay in use until it is done.
 * NULL is ignored. */
MCCL_API mccl_result mccl_request_free(mccl_request *request);

typedef struct mccl_status {
    size_t size;    /* set by the caller: sizeof(mccl_status) */
    int source;     /* recv: rank inside the communicator that sent; else -1 */
    int32_t tag;    /* recv: tag of the message; else -1 */
    uint64_t bytes; /* payload bytes of the operation's own buffer */
} mccl_status;
/* Of a finished request; MCCL_IN_PROGRESS before that. */
MCCL_API mccl_result mccl_request_get_status(mccl_request *request, mccl_status *status);

/* ---- Completion queue ------------------------------------------------------------------------ */

MCCL_API mccl_result mccl_queue_create(mccl_queue **queue);
/* `user` comes back from mccl_queue_wait once `request` is done; the queue holds a reference of its
 * own, so the caller may free the request. A background thread drives the operation from now on. */
MCCL_API mccl_result mccl_queue_add(mccl_queue *queue, mccl_request *request, uint64_t user);
/* Blocks for the next finished request. MCCL_OK: *user and *result are set (and mccl_last_error, if
 * it failed). MCCL_IN_PROGRESS: `timeout_ms` passed (-1: none). MCCL_ERR_ABORTED: the queue was
 * closed. */
MCCL_API mccl_result mccl_queue_wait(mccl_queue *queue, int64_t timeout_ms, uint64_t *user,
                                     mccl_result *result);
/* Wakes all waiters with MCCL_ERR_ABORTED, now and in future. */
MCCL_API mccl_result mccl_queue_close(mccl_queue *queue);
/* Closed queues only, with no waiter left. */
MCCL_API mccl_result mccl_queue_destroy(mccl_queue *queue);

#ifdef __cplusplus
}
#endif

#endif

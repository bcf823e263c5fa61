/* SPDX-License-Identifier: MIT
 *
 * What a library has to offer to be measured by one rank (worker.c). All functions end the process
 * with a line on standard error when something fails: the driver shows that line.
 */
#ifndef BENCH_LIBRARY_H
#define BENCH_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ID_BYTES                                                                                   \
    2048               /* of the text that rank 0 hands to the others, more than any library needs \
                        */
#define DEADLINE_S 120 /* the longest that a rank waits for the others */
#define MAX_RANKS 16   /* places in the page; sums of data.c stay exact up to here */
#define CACHE_LINE 128 /* Apple silicon's; a multiple of everybody else's */
#define PAGE_RING 4096u /* where lib_memcpy.c has its memory in the page */
#define PAGE_BYTES (4u << 20)

/* X(name): the operations, as the driver names them. */
#define OPS(X)        \
    X(all_reduce)     \
    X(reduce)         \
    X(broadcast)      \
    X(all_gather)     \
    X(reduce_scatter) \
    X(gather)         \
    X(scatter)        \
    X(all_to_all)     \
    X(send_recv)      \
    X(barrier)

enum op {
#define X(name) OP_##name,
    OPS(X)
#undef X
        N_OPS
};

/* X(name, bytes): element types, named as in torch. */
#define DTYPES(X)  \
    X(float32, 4)  \
    X(float64, 8)  \
    X(float16, 2)  \
    X(bfloat16, 2) \
    X(int8, 1)     \
    X(uint8, 1)    \
    X(int32, 4)    \
    X(int64, 8)

enum dtype {
#define X(name, bytes) DTYPE_##name,
    DTYPES(X)
#undef X
        N_DTYPES
};

struct job {
    int rank;         /* -1 until `open`, where the library's own launcher decides it */
    int n;            /* number of ranks */
    bool spins;       /* ranks do not outnumber processors: waiting need not yield */
    const char *path; /* shared library to load */
    unsigned char *page;
};

/* One call. Sums are meant where something is reduced, the root is rank 0, send_recv goes round
 * (to rank + 1, from rank - 1). */
struct call {
    enum op op;
    enum dtype dtype;
    const void *send; /* == recv for all_reduce, reduce and broadcast */
    void *recv;
    size_t count; /* elements: of the whole where all ranks hold it, else of one rank's block */
    size_t send_bytes, recv_bytes; /* of this rank's two buffers */
};

struct library {
    const char *name;
    bool only_moves; /* n = 2, moves the bytes that the operation has to move, reduces nothing */
    void (*open)(struct job *job);
    void (*new_id)(char *text); /* rank 0; text holds ID_BYTES */
    void (*join)(const char *id);
    void (*version)(char *text, size_t size);
    void (*call)(const struct call *call);
    void (*leave)(void);
};

extern const struct library lib_mccl, lib_openmpi, lib_raw, lib_memcpy;

/* worker.c */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t now_ns(void);
/* The function or object `name` of an open shared library. */
void *symbol(void *handle, const char *name);

#endif

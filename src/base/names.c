/* SPDX-License-Identifier: MIT
 *
 * Names and properties of the public enums, all from the X-macros of mccl.h. Pure functions, any
 * thread; values outside an enum may come from a caller's cast or from the network and are
 * answered, never trusted.
 */
#include "mccl.h"

const char *mccl_result_name(mccl_result result)
{
    switch (result) {
#define MCCL_X(name, value, text) \
    case MCCL_##name:             \
        return "MCCL_" #name;
        MCCL_RESULTS(MCCL_X)
#undef MCCL_X
    }
    return "MCCL_ERR_UNKNOWN";
}

const char *mccl_result_text(mccl_result result)
{
    switch (result) {
#define MCCL_X(name, value, text) \
    case MCCL_##name:             \
        return text;
        MCCL_RESULTS(MCCL_X)
#undef MCCL_X
    }
    return "unknown result";
}

struct dtype_row {
    const char *text;
    size_t size;
};

static const struct dtype_row dtype_rows[MCCL_N_DTYPES] = {
#define MCCL_X(name, value, text, bytes) [MCCL_##name] = {text, bytes},
    MCCL_DTYPES(MCCL_X)
#undef MCCL_X
};

static const char *const op_texts[MCCL_N_OPS] = {
#define MCCL_X(name, value, text) [MCCL_##name] = text,
    MCCL_OPS(MCCL_X)
#undef MCCL_X
};

static int is_dtype(mccl_dtype dtype)
{
    return (unsigned)dtype < MCCL_N_DTYPES;
}

static int is_op(mccl_op op)
{
    return (unsigned)op < MCCL_N_OPS;
}

size_t mccl_dtype_size(mccl_dtype dtype)
{
    return is_dtype(dtype) ? dtype_rows[dtype].size : 0;
}

const char *mccl_dtype_name(mccl_dtype dtype)
{
    return is_dtype(dtype) ? dtype_rows[dtype].text : "?";
}

const char *mccl_op_name(mccl_op op)
{
    return is_op(op) ? op_texts[op] : "?";
}

enum dtype_class { CLASS_MOVED_ONLY, CLASS_INTEGER, CLASS_BOOL, CLASS_REAL, CLASS_COMPLEX };

static enum dtype_class class_of(mccl_dtype dtype)
{
    switch (dtype) {
    case MCCL_INT8:
    case MCCL_UINT8:
    case MCCL_INT16:
    case MCCL_UINT16:
    case MCCL_INT32:
    case MCCL_UINT32:
    case MCCL_INT64:
    case MCCL_UINT64:
        return CLASS_INTEGER;
    case MCCL_BOOL:
        return CLASS_BOOL;
    case MCCL_FLOAT32:
    case MCCL_FLOAT64:
    case MCCL_FLOAT16:
    case MCCL_BFLOAT16:
        return CLASS_REAL;
    case MCCL_COMPLEX64:
    case MCCL_COMPLEX128:
        return CLASS_COMPLEX;
    default:
        return CLASS_MOVED_ONLY;
    }
}

int mccl_op_supports(mccl_op op, mccl_dtype dtype)
{
    const enum dtype_class class = class_of(dtype);
    if (class == CLASS_MOVED_ONLY)
        return 0;
    switch (op) {
    case MCCL_SUM:
    case MCCL_PROD:
        return 1;
    case MCCL_MIN:
    case MCCL_MAX:
        return class != CLASS_COMPLEX;
    case MCCL_AVG:
    case MCCL_PREMUL_SUM:
        return class == CLASS_REAL || class == CLASS_COMPLEX;
    case MCCL_BAND:
    case MCCL_BOR:
    case MCCL_BXOR:
        return class == CLASS_INTEGER || class == CLASS_BOOL;
    default:
        return 0;
    }
}

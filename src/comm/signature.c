/* SPDX-License-Identifier: MIT
 *
 * Comparing and printing operation signatures. Called by whoever drives the engine and by error
 * paths; the values printed may come straight from the network, so nothing here trusts them.
 */
#include "comm/signature.h"

#include <inttypes.h>
#include <stdio.h>

const char *op_kind_name(unsigned kind)
{
    switch (kind) {
#define X(name, value, text) \
    case value:              \
        return text;
        OP_KINDS(X)
#undef X
    default:
        return "?";
    }
}

bool signature_equal(const struct signature *a, const struct signature *b)
{
    return a->kind == b->kind && a->dtype == b->dtype && a->reduce_op == b->reduce_op &&
           a->root == b->root && a->count == b->count;
}

/* The count member means different things; see signature.h. */
static void format_count(const struct signature *signature, char *text, size_t size)
{
    switch (signature->kind) {
    case OP_ALL_GATHER_V:
    case OP_REDUCE_SCATTER_V:
        if (signature->count & SIGNATURE_COUNTS_DIFFER)
            snprintf(text, size, "counts=%" PRIu64 " in all #%06" PRIx64 ", ",
                     signature->count >> SIGNATURE_HASH_BITS & SIGNATURE_TOTAL_MASK,
                     signature->count & ((UINT64_C(1) << SIGNATURE_HASH_BITS) - 1));
        else
            snprintf(text, size, "counts=%" PRIu64 " each, ", signature->count);
        return;
    case OP_GATHER_V:
    case OP_SCATTER_V:
    case OP_ALL_TO_ALL_V:
    case OP_BARRIER:
        text[0] = '\0';
        return;
    default:
        snprintf(text, size, "count=%" PRIu64 ", ", signature->count);
        return;
    }
}

void signature_format(const struct signature *signature, char *text, size_t size)
{
    char kind[32], count[48], dtype[32], op[32], root[32];

    if (op_kind_name(signature->kind)[0] != '?')
        snprintf(kind, sizeof(kind), "%s", op_kind_name(signature->kind));
    else
        snprintf(kind, sizeof(kind), "operation %u", signature->kind);
    format_count(signature, count, sizeof(count));
    if (signature->dtype < MCCL_N_DTYPES)
        snprintf(dtype, sizeof(dtype), "dtype=%s", mccl_dtype_name((mccl_dtype)signature->dtype));
    else
        snprintf(dtype, sizeof(dtype), "dtype=%u", signature->dtype);
    if (signature->reduce_op == SIGNATURE_NO_OP)
        op[0] = '\0';
    else if (signature->reduce_op < MCCL_N_OPS)
        snprintf(op, sizeof(op), ", op=%s", mccl_op_name((mccl_op)signature->reduce_op));
    else
        snprintf(op, sizeof(op), ", op=%u", signature->reduce_op);
    if (signature->root == SIGNATURE_NO_ROOT)
        root[0] = '\0';
    else
        snprintf(root, sizeof(root), ", root=%u", signature->root);

    if (signature->kind == OP_BARRIER)
        snprintf(text, size, "%s()", kind);
    else
        snprintf(text, size, "%s(%s%s%s%s)", kind, count, dtype, op, root);
}

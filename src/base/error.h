/* SPDX-License-Identifier: MIT
 *
 * Result codes and the thread's error text. The function that decides an error sets the text;
 * callers only pass the code on.
 */
#ifndef MCCL_BASE_ERROR_H
#define MCCL_BASE_ERROR_H

#include "mccl.h"

#define ERROR_TEXT_BYTES 1024

/* Sets the calling thread's error text (cut to ERROR_TEXT_BYTES) and returns `result`. */
mccl_result error_set(mccl_result result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The calling thread's text: "" if nothing failed yet. */
const char *error_text(void);

/* Returns from the calling function with the code of a failed expression. */
#define TRY(expression)                               \
    do {                                              \
        const mccl_result try_result_ = (expression); \
        if (try_result_ != MCCL_OK)                   \
            return try_result_;                       \
    } while (0)

/* For broken invariants of our own only, never for input. Stays on in release builds. */
#define MCCL_ASSERT(condition)                                   \
    do {                                                         \
        if (!(condition))                                        \
            error_assert_failed(#condition, __FILE__, __LINE__); \
    } while (0)
_Noreturn void error_assert_failed(const char *condition, const char *file, int line);

#endif

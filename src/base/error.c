/* SPDX-License-Identifier: MIT
 *
 * The thread's error text. Any thread; each sees its own text only, so nothing here locks.
 */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char thread_text[ERROR_TEXT_BYTES];

mccl_result error_set(mccl_result result, const char *format, ...)
{
    /* Formatted aside first: an argument may be the present text, extended by its caller. */
    char text[ERROR_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (length < 0)
        text[0] = '\0';
    memcpy(thread_text, text, strlen(text) + 1);
    return result;
}

const char *error_text(void)
{
    return thread_text;
}

_Noreturn void error_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr,
            "mccl FATAL %s:%d: internal error, '%s' does not hold. Please report this line.\n",
            file, line, condition);
    abort();
}

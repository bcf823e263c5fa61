/* SPDX-License-Identifier: MIT
 *
 * Log lines on stderr. Any thread; level and host prefix are process-wide, the context is the
 * thread's own.
 */
#include "base/log.h"

#include "os/os.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LINE_BYTES 2048
#define CONTEXT_BYTES 160

static _Atomic int current_level = LOG_WARN;
static _Thread_local char thread_context[CONTEXT_BYTES];

void log_set_level(int level)
{
    /* Relaxed here and below: the level orders nothing, a line more or less is all that can happen.
     */
    atomic_store_explicit(&current_level, level, memory_order_relaxed);
}

int log_get_level(void)
{
    return atomic_load_explicit(&current_level, memory_order_relaxed);
}

void log_set_context(const char *context)
{
    snprintf(thread_context, sizeof(thread_context), "%s", context ? context : "");
}

static const char *level_name(enum log_level level)
{
    static const char *const names[] = {"OFF", "FATAL", "ERROR", "WARN", "INFO", "DEBUG", "TRACE"};
    return level >= LOG_OFF && level <= LOG_TRACE ? names[level] : "?";
}

/* A control character inside the text, perhaps sent by a peer, must not start a second line or
 * steer a terminal. */
static void flatten(char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            *text = ' ';
}

/* Bytes that snprintf has really put into `room` bytes (terminating zero excluded). */
static size_t written(int length, size_t room)
{
    if (length < 0 || room == 0)
        return 0;
    return (size_t)length < room ? (size_t)length : room - 1;
}

static void write_line(const char *line, size_t size)
{
    while (size > 0) {
        const ssize_t n = write(STDERR_FILENO, line, size);
        if (n > 0) {
            line += n;
            size -= (size_t)n;
        } else if (n == 0 || errno != EINTR) {
            return; /* stderr is closed or full and non-blocking: nobody is left to tell */
        }
    }
}

void log_write(enum log_level level, const char *format, ...)
{
    const int saved_errno =
        errno; /* a log line between a failed call and its report changes nothing */
    char line[LINE_BYTES];
    char host[64];
    os_host_name(host, sizeof(host));

    const size_t room = sizeof(line) - 1; /* one byte stays free for the newline */
    const char *const gap = thread_context[0] ? " " : "";
    size_t used = written(snprintf(line, room, "mccl %s [%s:%d]%s%s: ", level_name(level), host,
                                   os_pid(), gap, thread_context),
                          room);
    va_list args;
    va_start(args, format);
    used += written(vsnprintf(line + used, room - used, format, args), room - used);
    va_end(args);

    flatten(line);
    line[used] = '\n';
    write_line(line, used + 1);
    errno = saved_errno;
}

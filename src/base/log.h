/* SPDX-License-Identifier: MIT
 *
 * One event per line on stderr: "mccl WARN [host:pid] rank 1/4 group 'x': text". Lines are written
 * with one write(2), so those of several processes do not mix. Nothing is formatted when the level
 * is off.
 */
#ifndef MCCL_BASE_LOG_H
#define MCCL_BASE_LOG_H

#include <stdatomic.h>

enum log_level { LOG_OFF = 0, LOG_FATAL, LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG, LOG_TRACE };

/* Process-wide: the level of the newest communicator's settings. Atomic. */
void log_set_level(int level);
int log_get_level(void);

/* Prefix for lines of the calling thread, such as "rank 1/4 group 'x'"; NULL or "" for none.
 * Copied. */
void log_set_context(const char *context);

void log_write(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_at(level, ...) \
    ((int)(level) <= log_get_level() ? log_write((level), __VA_ARGS__) : (void)0)
#define log_error(...) log_at(LOG_ERROR, __VA_ARGS__)
#define log_warn(...) log_at(LOG_WARN, __VA_ARGS__)
#define log_info(...) log_at(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_at(LOG_DEBUG, __VA_ARGS__)

#endif

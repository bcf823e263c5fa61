/* SPDX-License-Identifier: MIT
 *
 * Small helpers for names and values as people type them. ASCII only, on purpose: the C library's
 * versions change their mind with the program's locale. Pure functions, any thread.
 */
#ifndef MCCL_BASE_TEXT_H
#define MCCL_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

bool text_equal(const char *a, const char *b); /* ignoring case */
/* True if `text` begins with `prefix`, ignoring case. */
bool text_has_prefix(const char *text, const char *prefix);
/* Copies the `size` bytes at `from` without the white space around them. False if they do not fit.
 */
bool text_copy_trimmed(const char *from, size_t size, char *to, size_t to_size);
/* Least number of characters to insert, delete or replace, ignoring case; SIZE_MAX above 63
 * characters. */
size_t text_distance(const char *a, const char *b);

#endif

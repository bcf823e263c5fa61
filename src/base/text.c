/* SPDX-License-Identifier: MIT
 *
 * Text helpers; see text.h.
 */
#include "base/text.h"

#include <stdint.h>
#include <string.h>

#define DISTANCE_MAX_LENGTH 63

static int lower(char c)
{
    return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : (unsigned char)c;
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

bool text_equal(const char *a, const char *b)
{
    while (*a && lower(*a) == lower(*b))
        a++, b++;
    return lower(*a) == lower(*b);
}

bool text_has_prefix(const char *text, const char *prefix)
{
    while (*prefix && lower(*text) == lower(*prefix))
        text++, prefix++;
    return *prefix == '\0';
}

bool text_copy_trimmed(const char *from, size_t size, char *to, size_t to_size)
{
    while (size > 0 && is_space(from[0]))
        from++, size--;
    while (size > 0 && is_space(from[size - 1]))
        size--;
    if (size >= to_size)
        return false;
    memcpy(to, from, size);
    to[size] = '\0';
    return true;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Levenshtein's recurrence with one row kept: row[j] is the distance of a's first i characters to
 * b's first j. */
size_t text_distance(const char *a, const char *b)
{
    const size_t length_a = strlen(a);
    const size_t length_b = strlen(b);
    if (length_a > DISTANCE_MAX_LENGTH || length_b > DISTANCE_MAX_LENGTH)
        return SIZE_MAX;
    size_t row[DISTANCE_MAX_LENGTH + 1];
    for (size_t j = 0; j <= length_b; j++)
        row[j] = j;
    for (size_t i = 1; i <= length_a; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= length_b; j++) {
            const size_t above = row[j];
            const size_t replace = diagonal + (lower(a[i - 1]) != lower(b[j - 1]));
            row[j] = min_size(replace, min_size(above, row[j - 1]) + 1);
            diagonal = above;
        }
    }
    return row[length_b];
}

/* SPDX-License-Identifier: MIT
 *
 * The rows of the settings table and the two things one can do with a row: read a value from text,
 * and write it back. Used by config.c only; everything else goes through config.h. Constant data
 * and pure functions, any thread.
 */
#ifndef MCCL_BASE_CONFIG_TABLE_H
#define MCCL_BASE_CONFIG_TABLE_H

#include "base/config.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How a value is written and which member type of struct settings holds it. */
enum value_type {
    VALUE_BYTES,     /* int64_t; 4096, 64K, 4 MiB, 1GB: suffixes count in powers of 1024 */
    VALUE_INT,       /* int64_t */
    VALUE_MS,        /* int64_t */
    VALUE_RATIO,     /* double, above 0 and at most 1 */
    VALUE_BOOL,      /* bool */
    VALUE_ENUM,      /* int: struct word's value */
    VALUE_WORD,      /* char[]: struct word's text */
    VALUE_TEXT,      /* char[] */
    VALUE_ADDRESSES, /* char[]: "auto", "loopback" or address literals with commas between */
    VALUE_PORTS,     /* two ints from `offset` on: first and last port */
};

/* A word of an enum. The first row of a value is the one that is printed; the others are other
 * spellings. */
struct word {
    const char *text; /* NULL ends the list */
    int value;
    bool refused; /* known, but not there yet: info.available says why */
};

struct setting_row {
    mccl_setting_info info; /* info.default_value is read like any other value */
    enum value_type type;
    bool zero_is_off;    /* numbers: 0 is allowed below `min` */
    bool secret;         /* never printed */
    size_t offset, size; /* of the member in struct settings */
    int64_t min, max;    /* BYTES, INT, MS */
    const struct word *words;
    const char
        *thunderbolt; /* value under LINK_PROFILE=thunderbolt, unless set otherwise; or NULL */
};

/* Rows in the order of the documentation. */
extern const struct setting_row config_rows[];
extern const size_t config_n_rows;

/* Reads `text` into the row's member. MCCL_ERR_CONFIG names the setting as `source` spells it, the
 * value (unless it is secret) and what is accepted. */
mccl_result config_value_parse(const struct setting_row *row, const char *text,
                               enum setting_source source, struct settings *settings);
/* The same for a value whose text cannot be had: says that it is longer than any that could be
 * accepted. */
mccl_result config_value_too_long(const struct setting_row *row, enum setting_source source);
/* The variable if the value is from the environment, else the name. */
const char *config_shown_name(const struct setting_row *row, enum setting_source source);
/* Writes the member as text that config_value_parse reads back; a secret as "set" or "". */
void config_value_format(const struct setting_row *row, const struct settings *settings, char *text,
                         size_t size);

#endif

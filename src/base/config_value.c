/* SPDX-License-Identifier: MIT
 *
 * One value of the settings table: text to member and back, with the error texts people see. Pure
 * functions, any thread. Nothing here depends on the locale.
 */
#include "base/config_table.h"

#include "base/error.h"
#include "base/text.h"
#include "os/os.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PORT_MAX 65535
#define PORT_SPREAD 1023 /* ports tried after a single first one */
#define SHOWN_VALUE 80   /* characters of a bad value that an error text repeats */

static void *member(const struct setting_row *row, struct settings *settings)
{
    return (char *)settings + row->offset;
}

static const void *member_const(const struct setting_row *row, const struct settings *settings)
{
    return (const char *)settings + row->offset;
}

/* ---- reading ---- */

/* Decimal digits at *text, which moves past them. False for none and beyond int64_t. */
static bool parse_digits(const char **text, int64_t *value)
{
    const char *at = *text;
    int64_t total = 0;
    if (*at < '0' || *at > '9')
        return false;
    for (; *at >= '0' && *at <= '9'; at++) {
        const int digit = *at - '0';
        if (total > (INT64_MAX - digit) / 10)
            return false;
        total = total * 10 + digit;
    }
    *text = at;
    *value = total;
    return true;
}

static bool parse_integer(const char *text, int64_t *value)
{
    return parse_digits(&text, value) && *text == '\0';
}

/* "64", "64K", "64 KiB", "64kb": always powers of 1024. */
static bool parse_bytes(const char *text, int64_t *value)
{
    static const struct {
        const char *suffix;
        int shift;
    } units[] = {{"", 0},    {"B", 0},    {"K", 10}, {"KB", 10}, {"KiB", 10}, {"M", 20},
                 {"MB", 20}, {"MiB", 20}, {"G", 30}, {"GB", 30}, {"GiB", 30}};
    int64_t number;
    if (!parse_digits(&text, &number))
        return false;
    while (*text == ' ')
        text++;
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (!text_equal(text, units[i].suffix))
            continue;
        if (number > INT64_MAX >> units[i].shift)
            return false;
        *value = number << units[i].shift;
        return true;
    }
    return false;
}

static bool parse_number(const struct setting_row *row, const char *text, void *to)
{
    int64_t value;
    if (!(row->type == VALUE_BYTES ? parse_bytes(text, &value) : parse_integer(text, &value)))
        return false;
    if ((value < row->min || value > row->max) && !(row->zero_is_off && value == 0))
        return false;
    memcpy(to, &value, sizeof(value));
    return true;
}

/* "0.01", ".5", "1", "1e-05" (Python's spelling). Up to 15 digits over a power of ten that a double
 * holds exactly make the one division below correctly rounded. */
static bool parse_ratio(const char *text, void *to)
{
    double digits = 0;
    int n_digits = 0;
    int places = 0;
    bool after_point = false;
    for (; (*text >= '0' && *text <= '9') || (*text == '.' && !after_point); text++) {
        if (*text == '.') {
            after_point = true;
            continue;
        }
        digits = digits * 10 + (*text - '0');
        n_digits++;
        places += after_point;
    }
    int64_t exponent = 0;
    if (text_has_prefix(text, "e-")) {
        text += 2;
        if (!parse_digits(&text, &exponent) || exponent > 22)
            return false;
    }
    if (*text != '\0' || n_digits == 0 || n_digits > 15 || places + exponent > 22)
        return false;
    double scale = 1;
    for (int64_t i = 0; i < places + exponent; i++)
        scale *= 10;
    const double value = digits / scale;
    if (!(value > 0 && value <= 1))
        return false;
    memcpy(to, &value, sizeof(value));
    return true;
}

static bool parse_bool(const char *text, bool *to)
{
    static const char *const yes[] = {"on", "1", "true", "yes"};
    static const char *const no[] = {"off", "0", "false", "no"};
    for (size_t i = 0; i < sizeof(yes) / sizeof(yes[0]); i++) {
        if (text_equal(text, yes[i]) || text_equal(text, no[i])) {
            *to = text_equal(text, yes[i]);
            return true;
        }
    }
    return false;
}

static const struct word *find_word(const struct word *words, const char *text)
{
    for (; words->text; words++)
        if (text_equal(words->text, text))
            return words;
    return NULL;
}

/* First row of a value: the spelling that is printed. */
static const char *word_of(const struct word *words, int value)
{
    for (; words->text; words++)
        if (words->value == value)
            return words->text;
    return "?";
}

static bool parse_text(const struct setting_row *row, const char *text, char *to)
{
    const size_t length = strlen(text);
    if (length >= row->size)
        return false;
    memcpy(to, text, length + 1);
    return true;
}

/* The wildcard address is refused: what listens on it is reachable from every network the host is
 * on. */
static bool is_address(const char *text)
{
    static const uint8_t wildcard[16];
    struct os_address address;
    if (!os_address_parse(text, &address))
        return false;
    return memcmp(address.ip, wildcard, address.family == 4 ? 4 : 16) != 0;
}

static bool parse_addresses(const struct setting_row *row, const char *text, char *to)
{
    if (text_equal(text, "auto"))
        return parse_text(row, "auto", to);
    if (text_equal(text, "loopback") || text_equal(text, "localhost"))
        return parse_text(row, "loopback", to);
    char list[sizeof(((struct settings *)0)->listen_addr)];
    size_t used = 0;
    for (;;) {
        const size_t length = strcspn(text, ",");
        char item[64];
        if (!text_copy_trimmed(text, length, item, sizeof(item)) || !is_address(item))
            return false;
        const int n = snprintf(list + used, sizeof(list) - used, "%s%s", used > 0 ? "," : "", item);
        if (n < 0 || (size_t)n >= sizeof(list) - used)
            return false;
        used += (size_t)n;
        if (text[length] == '\0')
            return parse_text(row, list, to);
        text += length + 1;
    }
}

static int last_port_of(int first)
{
    if (first == 0)
        return 0;
    return first + PORT_SPREAD < PORT_MAX ? first + PORT_SPREAD : PORT_MAX;
}

static bool parse_ports(const char *text, int *to)
{
    int64_t first, last;
    if (!parse_digits(&text, &first) || first > PORT_MAX)
        return false;
    if (*text == '\0') {
        to[0] = (int)first;
        to[1] = last_port_of((int)first);
        return true;
    }
    if (*text++ != '-' || !parse_integer(text, &last) || first < 1 || last < first ||
        last > PORT_MAX)
        return false;
    to[0] = (int)first;
    to[1] = (int)last;
    return true;
}

/* A value that is understood but asks for what is not there. Only rows with info.available have
 * any. */
static bool is_refused(const struct setting_row *row, const char *text)
{
    if (row->words) {
        const struct word *const word = find_word(row->words, text);
        return word && word->refused;
    }
    bool on;
    return row->type == VALUE_BOOL && row->info.available[0] && parse_bool(text, &on) && on;
}

static bool parse_value(const struct setting_row *row, const char *text, void *to)
{
    switch (row->type) {
    case VALUE_BYTES:
    case VALUE_INT:
    case VALUE_MS:
        return parse_number(row, text, to);
    case VALUE_RATIO:
        return parse_ratio(text, to);
    case VALUE_BOOL:
        return parse_bool(text, to);
    case VALUE_ENUM:
    case VALUE_WORD: {
        const struct word *const word = find_word(row->words, text);
        if (!word)
            return false;
        if (row->type == VALUE_WORD)
            return parse_text(row, word_of(row->words, word->value), to);
        *(int *)to = word->value;
        return true;
    }
    case VALUE_TEXT:
        return parse_text(row, text, to);
    case VALUE_ADDRESSES:
        return parse_addresses(row, text, to);
    case VALUE_PORTS:
        return parse_ports(text, to);
    }
    return false;
}

/* ---- errors ---- */

const char *config_shown_name(const struct setting_row *row, enum setting_source source)
{
    return source == SOURCE_ENVIRONMENT ? row->info.variable : row->info.name;
}

static const char *unit_of(const struct setting_row *row)
{
    return row->type == VALUE_BYTES ? " bytes" : row->type == VALUE_MS ? " ms" : "";
}

mccl_result config_value_too_long(const struct setting_row *row, enum setting_source source)
{
    return error_set(MCCL_ERR_CONFIG, "%s (%s): the value is too long; must be %s%s",
                     config_shown_name(row, source), config_source_name(source), row->info.range,
                     unit_of(row));
}

mccl_result config_value_parse(const struct setting_row *row, const char *text,
                               enum setting_source source, struct settings *settings)
{
    const char *const equals = row->secret ? "" : "=";
    const char *const value = row->secret ? "" : text;
    if (is_refused(row, text))
        return error_set(MCCL_ERR_CONFIG, "%s%s%.*s (%s): %s", config_shown_name(row, source),
                         equals, SHOWN_VALUE, value, config_source_name(source),
                         row->info.available);
    if (!parse_value(row, text, member(row, settings)))
        return error_set(MCCL_ERR_CONFIG, "%s%s%.*s (%s): must be %s%s",
                         config_shown_name(row, source), equals, SHOWN_VALUE, value,
                         config_source_name(source), row->info.range, unit_of(row));
    return MCCL_OK;
}

/* ---- writing ---- */

static void format_ports(const int *ports, char *text, size_t size)
{
    if (ports[1] == last_port_of(ports[0]))
        snprintf(text, size, "%d", ports[0]);
    else
        snprintf(text, size, "%d-%d", ports[0], ports[1]);
}

static void format_ratio(const void *from, char *text, size_t size)
{
    double value;
    memcpy(&value, from, sizeof(value));
    snprintf(text, size, "%.15g", value);
    for (char *at = text; size > 0 && *at; at++)
        if (*at == ',') /* some locales' decimal point */
            *at = '.';
}

void config_value_format(const struct setting_row *row, const struct settings *settings, char *text,
                         size_t size)
{
    const void *const from = member_const(row, settings);
    switch (row->type) {
    case VALUE_BYTES:
    case VALUE_INT:
    case VALUE_MS:
        snprintf(text, size, "%" PRId64, *(const int64_t *)from);
        break;
    case VALUE_RATIO:
        format_ratio(from, text, size);
        break;
    case VALUE_BOOL:
        snprintf(text, size, "%s", *(const bool *)from ? "on" : "off");
        break;
    case VALUE_ENUM:
        snprintf(text, size, "%s", word_of(row->words, *(const int *)from));
        break;
    case VALUE_WORD:
    case VALUE_TEXT:
    case VALUE_ADDRESSES:
        if (row->secret)
            snprintf(text, size, "%s", *(const char *)from ? "set" : "");
        else
            snprintf(text, size, "%s", (const char *)from);
        break;
    case VALUE_PORTS:
        format_ports(from, text, size);
        break;
    }
}

/* SPDX-License-Identifier: MIT
 *
 * Checks for tests. A failed one prints file, line, expression, what was got and what was expected,
 * and ends the process with 1, so that the first failure is the last line. Leave with 0 for success
 * and through CHECK_SKIP (77) when the machine lacks what the test needs. Any thread, any forked
 * child.
 */
#ifndef MCCL_TESTS_CHECK_H
#define MCCL_TESTS_CHECK_H

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* _Exit: neither atexit handlers nor other threads get to run in a process that is already wrong.
 */
#define CHECK_FAIL(...)                                 \
    do {                                                \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__);                   \
        fputc('\n', stderr);                            \
        fflush(NULL);                                   \
        _Exit(1);                                       \
    } while (0)

#define CHECK(condition)                                       \
    do {                                                       \
        if (!(condition))                                      \
            CHECK_FAIL("CHECK(%s) does not hold", #condition); \
    } while (0)

#define CHECK_COMPARE_(type, format, got, relation, expected)                                      \
    do {                                                                                           \
        const type got_ = (type)(got);                                                             \
        const type expected_ = (type)(expected);                                                   \
        if (!(got_ relation expected_))                                                            \
            CHECK_FAIL("%s is " format ", expected " #relation " " format, #got, got_, expected_); \
    } while (0)

/* Whole numbers of any signed type, and of any unsigned type or size. */
#define CHECK_EQ_I64(got, expected) CHECK_COMPARE_(long long, "%lld", got, ==, expected)
#define CHECK_EQ_U64(got, expected) CHECK_COMPARE_(unsigned long long, "%llu", got, ==, expected)
#define CHECK_LE_I64(got, bound) CHECK_COMPARE_(long long, "%lld", got, <=, bound)
#define CHECK_GE_I64(got, bound) CHECK_COMPARE_(long long, "%lld", got, >=, bound)
/* Exact: for values that have one right result. */
#define CHECK_EQ_F64(got, expected) CHECK_COMPARE_(double, "%.17g", got, ==, expected)

#define CHECK_EQ_STR(got, expected)                                             \
    do {                                                                        \
        const char *got_ = (got);                                               \
        const char *expected_ = (expected);                                     \
        if (strcmp(got_, expected_) != 0)                                       \
            CHECK_FAIL("%s is \"%s\", expected \"%s\"", #got, got_, expected_); \
    } while (0)

/* `text` contains `part`. */
#define CHECK_HAS(text, part)                                                               \
    do {                                                                                    \
        const char *text_ = (text);                                                         \
        const char *part_ = (part);                                                         \
        if (strstr(text_, part_) == NULL)                                                   \
            CHECK_FAIL("%s is \"%s\", expected it to contain \"%s\"", #text, text_, part_); \
    } while (0)

/* Prints the first byte that differs. */
#define CHECK_EQ_MEM(got, expected, size)                                                      \
    do {                                                                                       \
        const unsigned char *got_ = (const unsigned char *)(got);                              \
        const unsigned char *expected_ = (const unsigned char *)(expected);                    \
        const size_t size_ = (size);                                                           \
        for (size_t at_ = 0; at_ < size_; at_++) {                                             \
            if (got_[at_] != expected_[at_])                                                   \
                CHECK_FAIL("%s: byte %zu of %zu is 0x%02x, expected 0x%02x", #got, at_, size_, \
                           got_[at_], expected_[at_]);                                         \
        }                                                                                      \
    } while (0)

/* For files that include "mccl.h": the call returns exactly this code. Prints the error text if
 * not. */
#define CHECK_RESULT(call, expected)                                                      \
    do {                                                                                  \
        const mccl_result got_ = (call);                                                  \
        const mccl_result expected_ = (expected);                                         \
        if (got_ != expected_)                                                            \
            CHECK_FAIL("%s returned %s (%s), expected %s", #call, mccl_result_name(got_), \
                       mccl_last_error(), mccl_result_name(expected_));                   \
    } while (0)
#define CHECK_OK(call) CHECK_RESULT(call, MCCL_OK)

/* Says why this machine cannot run the test; ctest shows it as skipped. */
#define CHECK_SKIP(...)      \
    do {                     \
        printf("skipped: "); \
        printf(__VA_ARGS__); \
        putchar('\n');       \
        fflush(NULL);        \
        _Exit(77);           \
    } while (0)

#endif

/* SPDX-License-Identifier: MIT
 *
 * Log lines, error texts and names: exact text, one write per line, levels, and each thread's own
 * state.
 */
#include "base/error.h"
#include "base/log.h"
#include "os/os.h"
#include "support/check.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static int saved_stderr, read_end;

static void catch_stderr(void)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    saved_stderr = dup(STDERR_FILENO);
    CHECK(saved_stderr >= 0 && dup2(ends[1], STDERR_FILENO) >= 0);
    close(ends[1]);
    read_end = ends[0];
}

/* Everything written since catch_stderr; valid until the next call. */
static const char *caught(void)
{
    static char text[1 << 16];
    size_t used = 0;
    CHECK(dup2(saved_stderr, STDERR_FILENO) >= 0);
    close(saved_stderr);
    for (;;) {
        const ssize_t n = read(read_end, text + used, sizeof(text) - 1 - used);
        CHECK(n >= 0);
        if (n == 0)
            break;
        used += (size_t)n;
    }
    close(read_end);
    text[used] = '\0';
    return text;
}

static void expect_line(const char *got, const char *level, const char *rest)
{
    char host[64], expected[4096];
    os_host_name(host, sizeof(host));
    snprintf(expected, sizeof(expected), "mccl %s [%s:%d]%s\n", level, host, (int)getpid(), rest);
    CHECK_EQ_STR(got, expected);
}

static void test_lines(void)
{
    log_set_level(LOG_WARN);
    catch_stderr();
    log_warn("value %d of '%s'", 7, "x");
    expect_line(caught(), "WARN", ": value 7 of 'x'");

    log_set_context("rank 1/4 group 'x'");
    catch_stderr();
    log_error("lost");
    expect_line(caught(), "ERROR", " rank 1/4 group 'x': lost");
    log_set_context(NULL);
    catch_stderr();
    errno = EPIPE;
    log_error("two\nlines \x1b[31m\x7f");
    CHECK_EQ_I64(errno, EPIPE);
    expect_line(caught(), "ERROR", ": two lines  [31m ");
}

static int n_evaluated;

static int evaluated(void)
{
    return ++n_evaluated;
}

static void test_levels(void)
{
    CHECK_EQ_I64(log_get_level(), LOG_WARN);
    catch_stderr();
    log_info("%d", evaluated());
    log_debug("%d", evaluated());
    CHECK_EQ_STR(caught(), "");
    CHECK_EQ_I64(n_evaluated, 0); /* arguments of a line that is off are not even computed */
    log_set_level(LOG_DEBUG);
    catch_stderr();
    log_debug("%d", evaluated());
    log_at(LOG_TRACE, "%d", evaluated());
    expect_line(caught(), "DEBUG", ": 1");
    log_set_level(LOG_OFF);
    catch_stderr();
    log_error("never");
    log_at(LOG_FATAL, "never");
    CHECK_EQ_STR(caught(), "");
    log_set_level(LOG_WARN);
}

static void test_long_line(void)
{
    static char text[10000];
    memset(text, 'x', sizeof(text) - 1);
    catch_stderr();
    log_warn("%s", text);
    const char *const line = caught();
    CHECK_HAS(line, "mccl WARN [");
    CHECK_EQ_U64(strlen(line), 2047); /* cut, newline kept */
    CHECK(line[2045] == 'x' && line[2046] == '\n');
}

#define N_THREADS 4
#define N_LINES 100

static atomic_int n_ready;

static void *write_lines(void *arg)
{
    const int id = *(const int *)arg;
    char context[32];
    snprintf(context, sizeof(context), "rank %d", id);
    log_set_context(context);
    atomic_fetch_add(&n_ready, 1);
    while (atomic_load(&n_ready) < N_THREADS)
        os_thread_yield(); /* until every thread has set its context */
    for (int i = 0; i < N_LINES; i++) {
        error_set(MCCL_ERR_TIMEOUT, "thread %d line %d", id, i);
        log_warn("%s", error_text());
    }
    return NULL;
}

/* Lines of several threads come whole, each with its own thread's context and error text. */
static void test_threads(void)
{
    pthread_t threads[N_THREADS];
    int ids[N_THREADS], n_lines[N_THREADS] = {0};
    error_set(MCCL_ERR_AUTH, "mine");
    catch_stderr();
    for (int i = 0; i < N_THREADS; i++) {
        ids[i] = i;
        CHECK(pthread_create(&threads[i], NULL, write_lines, &ids[i]) == 0);
    }
    for (int i = 0; i < N_THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_EQ_STR(error_text(), "mine");
    const char *line = caught();
    for (int k = 0; k < N_THREADS * N_LINES; k++) {
        const char *const after = strchr(line, ']');
        int context, thread, number, end = 0;
        CHECK(after != NULL);
        CHECK_EQ_I64(
            sscanf(after, "] rank %d: thread %d line %d%n", &context, &thread, &number, &end), 3);
        CHECK_EQ_I64(thread, context);
        CHECK(thread >= 0 && thread < N_THREADS);
        CHECK_EQ_I64(number, n_lines[thread]++);
        CHECK(after[end] == '\n');
        line = after + end + 1;
    }
    CHECK_EQ_STR(line, "");
}

static mccl_result fails(void)
{
    return error_set(MCCL_ERR_CONNECT, "port %d", 29600);
}

static mccl_result passes_on(void)
{
    TRY(MCCL_OK);
    TRY(fails());
    return error_set(MCCL_ERR_INTERNAL, "not reached");
}

static void test_error_text(void)
{
    static char text[3000];
    CHECK_EQ_I64(passes_on(), MCCL_ERR_CONNECT);
    CHECK_EQ_STR(error_text(), "port 29600");
    error_set(MCCL_ERR_CONNECT, "rank 1: %s", error_text()); /* its own text as an argument */
    CHECK_EQ_STR(error_text(), "rank 1: port 29600");
    memset(text, 'y', sizeof(text) - 1);
    error_set(MCCL_ERR_SYSTEM, "%s", text);
    CHECK_EQ_U64(strlen(error_text()), ERROR_TEXT_BYTES - 1);
}

static void test_assert(void)
{
    catch_stderr();
    const pid_t child = fork();
    if (child == 0) {
        MCCL_ASSERT(child == 0);
        MCCL_ASSERT(child > 0);
        _exit(0);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    const char *const line = caught();
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK_HAS(line, "mccl FATAL ");
    CHECK_HAS(line, "test_log.c:");
    CHECK_HAS(line, "'child > 0' does not hold");
}

static void test_names(void)
{
    CHECK_EQ_STR(mccl_result_name(MCCL_OK), "MCCL_OK");
    CHECK_EQ_STR(mccl_result_name(MCCL_ERR_PEER_LOST), "MCCL_ERR_PEER_LOST");
    CHECK_EQ_STR(mccl_result_text(MCCL_ERR_TIMEOUT), "deadline passed");
    CHECK_EQ_STR(mccl_result_name((mccl_result)99), "MCCL_ERR_UNKNOWN");
    CHECK_EQ_STR(mccl_result_text((mccl_result)-1), "unknown result");
    CHECK_EQ_STR(mccl_dtype_name(MCCL_FLOAT8_E8M0FNU), "float8_e8m0fnu");
    CHECK_EQ_STR(mccl_dtype_name(MCCL_N_DTYPES), "?");
    CHECK_EQ_STR(mccl_dtype_name((mccl_dtype)-1), "?");
    CHECK_EQ_STR(mccl_op_name(MCCL_PREMUL_SUM), "premul_sum");
    CHECK_EQ_STR(mccl_op_name(MCCL_N_OPS), "?");
    static const size_t sizes[MCCL_N_DTYPES] = {4, 8, 2, 2, 1,  1, 2, 2, 4, 4,
                                                8, 8, 1, 8, 16, 1, 1, 1, 1, 1};
    for (mccl_dtype dtype = 0; dtype < MCCL_N_DTYPES; dtype++)
        CHECK_EQ_U64(mccl_dtype_size(dtype), sizes[dtype]);
    CHECK_EQ_U64(mccl_dtype_size(MCCL_N_DTYPES), 0);
}

int main(void)
{
    CHECK_EQ_STR(error_text(), "");
    test_lines();
    test_levels();
    test_long_line();
    test_threads();
    test_error_text();
    test_assert();
    test_names();
    return 0;
}

/* SPDX-License-Identifier: MIT
 *
 * See harness.h. Each rank's stderr goes to an unlinked file of its own, so that no pipe can fill
 * up. Waiting is polling with short sleeps: simple, and good to a few milliseconds.
 */
#include "support/harness.h"

#include "support/check.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Sanitizers slow programs down, by these factors at most. */
#if defined(__SANITIZE_THREAD__)
#define LIMIT_FACTOR 8
#elif defined(__SANITIZE_ADDRESS__)
#define LIMIT_FACTOR 4
#else
#define LIMIT_FACTOR 1
#endif

struct team {
    int n;
    int64_t end_ms;
    struct board *board;
    pid_t pids[TEAM_MAX];
    bool joined[TEAM_MAX];
    int status[TEAM_MAX]; /* of a joined rank */
    FILE *errors[TEAM_MAX];
    char *error_text[TEAM_MAX];
};

int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void sleep_ms(int ms)
{
    struct timespec left = {ms / 1000, (long)(ms % 1000) * 1000000L};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
}

/* ---- ranks ---- */

void rank_next_id(struct rank *self, mccl_unique_id *id)
{
    const uint32_t group = ++self->n_groups;
    const uint32_t slot = group % BOARD_IDS;
    char *text = self->board->id_text[slot];
    if (self->rank == 0) {
        CHECK_OK(mccl_get_unique_id(id));
        CHECK_OK(mccl_unique_id_to_text(id, text));
        atomic_store(&self->board->id_group[slot], group);
        return;
    }
    while (atomic_load(&self->board->id_group[slot]) != group)
        sleep_ms(1);
    CHECK_OK(mccl_unique_id_from_text(text, id));
}

mccl_comm *rank_connect(struct rank *self, const mccl_config *config)
{
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    rank_next_id(self, &id);
    CHECK_OK(mccl_comm_init_rank(&comm, self->n, &id, self->rank, config));
    return comm;
}

mccl_comm *rank_connect_with(struct rank *self, const char *settings, int64_t timeout_ms)
{
    mccl_config config = MCCL_CONFIG_INIT;
    config.settings = settings;
    config.timeout_ms = timeout_ms;
    return rank_connect(self, &config);
}

void rank_mark(struct rank *self, int mark)
{
    atomic_store(&self->board->mark[self->rank], mark);
}

void rank_wait_go(struct rank *self, int step)
{
    while (atomic_load(&self->board->go) < step)
        sleep_ms(1);
}

/* ---- processes ---- */

static _Noreturn void child_run(struct team *team, int rank, int limit_s, rank_body *body,
                                const void *arg)
{
    dup2(fileno(team->errors[rank]), STDERR_FILENO);
    /* All ranks are here; a test that wants something else sets it before its first MCCL call. */
    setenv("MCCL_LISTEN_ADDR", "loopback", 0);
    /* Should the parent be killed, nothing stays behind. */
    alarm((unsigned)limit_s + 10);
    struct rank self = {.rank = rank, .n = team->n, .arg = arg, .board = team->board};
    body(&self);
    exit(0);
}

struct team *team_start(int n, int limit_s, rank_body *body, const void *arg)
{
    struct team *team = calloc(1, sizeof *team);
    CHECK(team != NULL && n >= 1 && n <= TEAM_MAX);
    limit_s *= LIMIT_FACTOR;
    team->n = n;
    team->end_ms = now_ms() + (int64_t)limit_s * 1000;
    team->board =
        mmap(NULL, sizeof *team->board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(team->board != MAP_FAILED);
    fflush(NULL);
    for (int rank = 0; rank < n; rank++) {
        team->errors[rank] = tmpfile();
        CHECK(team->errors[rank] != NULL);
        team->pids[rank] = fork();
        CHECK(team->pids[rank] >= 0);
        if (team->pids[rank] == 0)
            child_run(team, rank, limit_s, body, arg);
    }
    return team;
}

struct board *team_board(struct team *team)
{
    return team->board;
}

pid_t team_pid(const struct team *team, int rank)
{
    return team->pids[rank];
}

static void kill_all(struct team *team)
{
    for (int rank = 0; rank < team->n; rank++) {
        if (team->joined[rank])
            continue;
        kill(team->pids[rank], SIGKILL);
        waitpid(team->pids[rank], NULL, 0);
        team->joined[rank] = true;
    }
}

static void show_errors(struct team *team, int rank)
{
    const char *text = team_stderr(team, rank);
    if (text[0] != '\0')
        fprintf(stderr, "---- stderr of rank %d of %d:\n%s----\n", rank, team->n, text);
}

static _Noreturn void team_fail(struct team *team, const char *what, int rank)
{
    kill_all(team);
    for (int other = 0; other < team->n; other++)
        show_errors(team, other);
    CHECK_FAIL("rank %d of %d %s", rank, team->n, what);
}

static void check_limit(struct team *team, int rank, const char *what)
{
    if (now_ms() > team->end_ms)
        team_fail(team, what, rank);
}

/* True once the rank has ended. */
static bool reap(struct team *team, int rank)
{
    int status = 0;
    if (team->joined[rank])
        return true;
    const pid_t got = waitpid(team->pids[rank], &status, WNOHANG);
    CHECK(got >= 0);
    if (got == 0)
        return false;
    team->joined[rank] = true;
    team->status[rank] = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    return true;
}

void team_wait_mark(struct team *team, int rank, int mark)
{
    while (atomic_load(&team->board->mark[rank]) < mark) {
        if (reap(team, rank) && atomic_load(&team->board->mark[rank]) < mark)
            team_fail(team, "ended before its mark", rank);
        check_limit(team, rank, "did not reach its mark in time");
        sleep_ms(1);
    }
}

void team_wait_marks(struct team *team, int mark)
{
    for (int rank = 0; rank < team->n; rank++)
        team_wait_mark(team, rank, mark);
}

void team_go(struct team *team, int step)
{
    atomic_store(&team->board->go, step);
}

void team_signal(struct team *team, int rank, int signal_number)
{
    CHECK(kill(team->pids[rank], signal_number) == 0);
}

int team_join(struct team *team, int rank)
{
    while (!reap(team, rank)) {
        check_limit(team, rank, "did not end in time");
        sleep_ms(1);
    }
    return team->status[rank];
}

const char *team_stderr(struct team *team, int rank)
{
    if (team->error_text[rank])
        return team->error_text[rank];
    FILE *file = team->errors[rank];
    fseek(file, 0, SEEK_END);
    const long size = ftell(file);
    CHECK(size >= 0);
    char *text = calloc(1, (size_t)size + 1);
    CHECK(text != NULL);
    rewind(file);
    text[fread(text, 1, (size_t)size, file)] = '\0';
    team->error_text[rank] = text;
    return text;
}

void team_expect_ok(struct team *team, int rank)
{
    const int status = team_join(team, rank);
    if (status == 0)
        return;
    /* Others may have failed first and explain it: give them a moment before they are killed. */
    sleep_ms(200);
    fprintf(stderr, "rank %d ended with %d\n", rank, status);
    team_fail(team, "failed", rank);
}

void team_end(struct team *team)
{
    kill_all(team);
    for (int rank = 0; rank < team->n; rank++) {
        fclose(team->errors[rank]);
        free(team->error_text[rank]);
    }
    munmap(team->board, sizeof *team->board);
    free(team);
}

void team_run(int n, int limit_s, rank_body *body, const void *arg)
{
    struct team *team = team_start(n, limit_s, body, arg);
    /* In order of ending, so that the first failure shows at once and not behind a rank that
     * waits for it. */
    for (int left = n; left > 0;) {
        left = 0;
        for (int rank = 0; rank < n; rank++) {
            if (reap(team, rank))
                team_expect_ok(team, rank);
            else
                left++;
            check_limit(team, rank, "was not done in time");
        }
        sleep_ms(1);
    }
    team_end(team);
}

/* ---- threads ---- */

struct thread_rank {
    pthread_t thread;
    struct rank self;
    rank_body *body;
};

static void *thread_main(void *arg)
{
    struct thread_rank *thread = arg;
    thread->body(&thread->self);
    return NULL;
}

void threads_run(int n, rank_body *body, const void *arg)
{
    struct board *board = calloc(1, sizeof *board);
    struct thread_rank *threads = calloc((size_t)n, sizeof *threads);
    CHECK(board != NULL && threads != NULL && n <= TEAM_MAX);
    setenv("MCCL_LISTEN_ADDR", "loopback", 0);
    for (int rank = 0; rank < n; rank++) {
        threads[rank].self = (struct rank){.rank = rank, .n = n, .arg = arg, .board = board};
        threads[rank].body = body;
        CHECK(pthread_create(&threads[rank].thread, NULL, thread_main, &threads[rank]) == 0);
    }
    for (int rank = 0; rank < n; rank++)
        pthread_join(threads[rank].thread, NULL);
    free(threads);
    free(board);
}

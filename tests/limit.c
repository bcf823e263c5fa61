/* SPDX-License-Identifier: MIT
 *
 * limit SECONDS COMMAND [ARGUMENT...]: runs COMMAND in a process group of its own under a
 * wall-clock limit.
 *
 * Ends with the command's exit code, 128 + N if signal N ended it, 124 when the limit passed.
 * Whatever the way out, every process left in the group is killed, so that a failed test leaves no
 * ranks behind to disturb the next one. Standard input is /dev/null.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

enum { EXIT_TIMED_OUT = 124, EXIT_USAGE = 125, EXIT_NOT_FOUND = 127 };

static volatile sig_atomic_t group;      /* the command's process group; 0 before there is one */
static volatile sig_atomic_t stopped_by; /* the signal that made us kill it; 0 if none did */

static void kill_group(int signal_number)
{
    const int saved_errno = errno;
    stopped_by = signal_number;
    if (group > 0)
        kill(-(pid_t)group, SIGKILL);
    errno = saved_errno;
}

static void run_command(char **command)
{
    setpgid(0, 0);
    const int null = open("/dev/null", O_RDONLY);
    if (null >= 0)
        dup2(null, STDIN_FILENO);
    execvp(command[0], command);
    fprintf(stderr, "limit: cannot run %s: %s\n", command[0], strerror(errno));
    _exit(EXIT_NOT_FOUND);
}

static int exit_code(int status, const char *command, const char *seconds)
{
    if (stopped_by == SIGALRM) {
        fprintf(stderr, "limit: %s ran longer than %s s and was killed\n", command, seconds);
        return EXIT_TIMED_OUT;
    }
    if (stopped_by != 0)
        return 128 + (int)stopped_by;
    if (WIFSIGNALED(status)) {
        fprintf(stderr, "limit: %s was ended by signal %d (%s)\n", command, WTERMSIG(status),
                strsignal(WTERMSIG(status)));
        return 128 + WTERMSIG(status);
    }
    return WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
    char *end = NULL;
    const unsigned long seconds = argc > 2 ? strtoul(argv[1], &end, 10) : 0;
    if (seconds == 0 || seconds > 86400 || *end != '\0') {
        fprintf(stderr, "usage: limit SECONDS COMMAND [ARGUMENT...]\n");
        return EXIT_USAGE;
    }

    /* The signals stay blocked until the group is known, else one that comes early would find
     * nobody to kill. */
    static const int signals[] = {SIGALRM, SIGINT, SIGTERM, SIGHUP};
    sigset_t blocked, before;
    sigemptyset(&blocked);
    struct sigaction action = {.sa_handler = kill_group};
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
        sigaddset(&blocked, signals[i]);
        sigaction(signals[i], &action, NULL);
    }
    sigprocmask(SIG_BLOCK, &blocked, &before);

    const pid_t child = fork();
    if (child < 0) {
        perror("limit: fork");
        return EXIT_USAGE;
    }
    if (child == 0) {
        sigprocmask(SIG_SETMASK, &before, NULL);
        run_command(argv + 2);
    }
    setpgid(child, child); /* here too: whichever of the two processes runs first makes the group */
    group = (sig_atomic_t)child;
    alarm((unsigned)seconds);
    sigprocmask(SIG_SETMASK, &before, NULL);

    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    alarm(0);
    kill(-child, SIGKILL); /* stragglers; ESRCH in the good case */
    return exit_code(status, argv[2], argv[1]);
}

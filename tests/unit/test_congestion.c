/* SPDX-License-Identifier: MIT
 *
 * Which congestion control a socket gets, with a system that is played here: setsockopt and
 * getsockopt stand in for libc's.
 */
#include "base/log.h"
#include "net/link.h"
#include "os/os.h"
#include "support/check.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef TCP_CONGESTION

static char in_force[16];
static const char *allowed; /* names with spaces around; NULL: the system offers no choice */

int setsockopt(int fd, int level, int option, const void *value, socklen_t size)
{
    char name[32];
    (void)fd;
    if (level != IPPROTO_TCP || option != TCP_CONGESTION)
        return 0;
    snprintf(name, sizeof name, " %.*s ", (int)size, (const char *)value);
    if (!allowed || !strstr(allowed, name)) {
        errno = allowed ? EPERM : ENOPROTOOPT;
        return -1;
    }
    snprintf(in_force, sizeof in_force, "%.*s", (int)size, (const char *)value);
    return 0;
}

int getsockopt(int fd, int level, int option, void *value, socklen_t *size)
{
    (void)fd;
    if (level != IPPROTO_TCP || option != TCP_CONGESTION || !allowed) {
        errno = ENOPROTOOPT;
        return -1;
    }
    memset(value, 0, *size); /* as Linux does it: the whole field, padded with zeros */
    memcpy(value, in_force, strlen(in_force));
    return 0;
}

/* A socket of a system whose default is `by_default`. In a process of its own, since the log says
 * it once; the child's stderr. */
static const char *prepare(const char *by_default, const char *may, const char *expected)
{
    static char text[4096];
    int ends[2], status;
    size_t used = 0;
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        const struct link_tcp_options options = {0};
        CHECK(dup2(ends[1], STDERR_FILENO) >= 0);
        log_set_level(LOG_INFO);
        for (int i = 0; i < 3; i++) {
            char name[16];
            snprintf(in_force, sizeof in_force, "%s", by_default);
            allowed = may;
            link_tcp_prepare(7, &options);
            os_socket_congestion_name(7, name, sizeof name);
            CHECK_EQ_STR(name, expected);
        }
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t n; (n = read(ends[0], text + used, sizeof text - 1 - used)) > 0;)
        used += (size_t)n;
    text[used] = '\0';
    close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    return text;
}

static int lines(const char *text)
{
    int n = 0;
    for (; *text; text++)
        n += *text == '\n';
    return n;
}

int main(void)
{
    const char *log = prepare("bbr", " reno bbr cubic ", "cubic");
    CHECK_HAS(log, "congestion control: cubic instead of the system's bbr");
    CHECK_EQ_I64(lines(log), 1); /* for three sockets */
    CHECK_HAS(prepare("bbr", " reno bbr ", "reno"), "reno instead of the system's bbr");
    CHECK_HAS(prepare("bbr", " bbr ", "bbr"), "bbr stays");
    CHECK_HAS(prepare("bbr2", " cubic ", "cubic"), "cubic instead of the system's bbr2");
    /* Whoever has chosen another one, for a data centre say, keeps it. */
    CHECK_EQ_STR(prepare("dctcp", " cubic reno dctcp ", "dctcp"), "");
    CHECK_EQ_STR(prepare("reno", " cubic reno ", "reno"), "");
    CHECK_EQ_STR(prepare("", NULL, ""), "");
    return 0;
}

#else

int main(void)
{
    return 77; /* this system has one only */
}

#endif

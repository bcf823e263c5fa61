/* SPDX-License-Identifier: MIT
 *
 * Names of this process and this host for messages. Any thread.
 */
#include "os/os_internal.h"

#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

int os_pid(void)
{
    return (int)getpid();
}

void os_host_name(char *text, size_t size)
{
    struct utsname names;

    /* uname and no resolver: looking the own name up takes half a minute on some Macs. */
    if (uname(&names) != 0 || names.nodename[0] == '\0') {
        snprintf(text, size, "localhost");
        return;
    }
    names.nodename[strcspn(names.nodename, ".")] = '\0';
    snprintf(text, size, "%s", names.nodename);
}

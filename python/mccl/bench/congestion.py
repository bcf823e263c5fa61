"""One congestion control for the sockets of every library of a comparison."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

# bbr, the default of many Linux hosts, paces even loopback and halves the rate of large messages. MCCL asks
# for cubic on its own sockets, so other libraries' get it too; macOS has nothing else.
CONGESTION_CONTROL = "cubic"


def use_common_congestion_control() -> list[str]:
    """Sets it on all TCP connections of this process, whoever made them; what they have afterwards."""
    found = set()
    for connection in _tcp_connections():
        with contextlib.suppress(OSError):  # not allowed here: what is found below tells
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL.encode())
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        found.add(name.rstrip(b"\0").decode())
    return sorted(found)


def _tcp_connections() -> Iterator[socket.socket]:
    """This process's connected TCP sockets; none where the system does not list descriptors."""
    if not os.path.isdir("/proc/self/fd") or not hasattr(socket, "TCP_CONGESTION"):
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself, listening sockets
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        copy.getpeername()
                        yield copy

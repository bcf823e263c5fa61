# SPDX-License-Identifier: MIT
"""One rank of a team: a process that makes its group and then does what the pipe asks for."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from lineup import LineUp

GROUP_TIMEOUT = timedelta(seconds=120)
# bbr, the default of many Linux hosts, paces even loopback and halves the rate of large messages. MCCL asks
# for cubic on its own sockets, so gloo's get it too; macOS has nothing else.
CONGESTION_CONTROL = "cubic"


class Job(NamedTuple):
    """What a rank needs to know."""

    library: str
    rank: int
    n: int
    largest: int
    store: str
    page: str


class Rank:
    """The group, the data, and the requests that team.Team makes."""

    def __init__(self, job: Job) -> None:
        import torch
        import torch.distributed as dist

        if job.library == "mccl":
            import mccl  # noqa: F401  (registers the backend)
        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        dist.init_process_group(
            job.library,
            init_method=f"file://{job.store}",
            rank=job.rank,
            world_size=job.n,
            timeout=GROUP_TIMEOUT,
        )
        self.line_up = LineUp(job.page, job.rank, job.n)
        # Small integers: their sums are exact in float32, in whatever order.
        position = torch.arange(job.largest // 4)
        self.expected = torch.zeros(job.largest // 4)
        for rank in range(job.n):
            operand = ((position + 17 * rank) % 61 - 30 + rank).float()
            self.expected += operand
            if rank == job.rank:
                self.source = operand
        self.buffer = torch.empty_like(self.source)

    def run(self, n_bytes: int, calls: int) -> tuple[list[int], int]:
        """Times in ns of `calls` all-reduces of `n_bytes` on this rank, and the number of wrong elements."""
        source, expected, buffer = (
            tensor[: n_bytes // 4] for tensor in (self.source, self.expected, self.buffer)
        )
        equal, all_reduce, now = self.torch.equal, self.dist.all_reduce, time.perf_counter_ns
        times, wrong = [], 0
        gc.disable()
        for _ in range(calls):
            buffer.copy_(source)
            self.line_up.wait()
            begin = now()
            all_reduce(buffer)
            times.append(now() - begin)
            if not equal(buffer, expected):
                wrong += int((buffer != expected).sum())
        gc.enable()
        return times, wrong

    def use_common_congestion_control(self) -> list[str]:
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


def _set_environment(job: Job) -> None:
    """What a launcher on one host would set."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.n),
        LOCAL_RANK=str(job.rank),
        LOCAL_WORLD_SIZE=str(job.n),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME=loopback,
    )


def main(pipe: Connection, job: Job) -> None:
    """The process. Answers None when the group is there, then each request until the pipe closes."""
    _set_environment(job)
    rank: Any = Rank(job)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(rank, method)(*arguments))
    rank.dist.destroy_process_group()

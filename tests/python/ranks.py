"""Runs functions on several ranks: one process each, kept for many calls: importing torch costs seconds.

    pool.run(3, function, argument)   # function(rank, 3, argument) on ranks 0..2 inside a new group

returns the results by rank. A rank that raises makes run() raise RankFailed with all tracebacks; one that
does not answer in time is killed with its process group, like all the others, and the pool starts afresh.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Callable

import torch.distributed as dist

WORKER = Path(__file__).with_name("worker.py")
GROUP_TIMEOUT = timedelta(seconds=30)


class RankFailed(AssertionError):
    """At least one rank raised or did not answer; the text has every rank's part."""


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Ends a process that was started with start_new_session, and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class Rank:
    """One worker process."""

    def __init__(self, store_port: int, env: dict[str, str]) -> None:
        self.connection, child = Pipe()
        self.stderr = tempfile.TemporaryFile("w+")
        command = [sys.executable, str(WORKER), str(child.fileno()), str(store_port)]
        self.process = subprocess.Popen(
            command,
            pass_fds=[child.fileno()],
            start_new_session=True,
            stderr=self.stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **env},
        )
        child.close()

    def kill(self) -> None:
        """Ends the process and whatever it started."""
        kill_session(self.process)
        self.connection.close()

    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        self.stderr.seek(0)
        return self.stderr.read()[-3000:]


class Pool:
    """Worker processes, started as they are needed."""

    def __init__(self, **env: str) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[Rank] = []
        self.env = env
        self._jobs = itertools.count()

    @classmethod
    def with_modules(cls, folder: Path) -> Pool:
        """Ranks look for a function's module in the folder of worker.py, which is tests/python, and here."""
        return cls(PYTHONPATH=os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))

    def run(
        self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, group: bool = True
    ) -> list[Any]:
        """Calls `function(rank, n, *args)` on n ranks; with `group` inside an initialised default group."""
        self.start(n, function, *args, group=group)
        return self.results(n, timeout)

    def start(self, n: int, function: Callable[..., Any], *args: Any, group: bool = True) -> None:
        """The first half of run()."""
        while len(self.ranks) < n:
            self.ranks.append(Rank(self.store.port, self.env))
        job = f"job{next(self._jobs)}"
        for rank in range(n):
            call = (job, rank, n, function.__module__, function.__qualname__, args, group)
            self.ranks[rank].connection.send(call)

    def results(self, n: int, timeout: float, lost: tuple[int, ...] = ()) -> list[Any]:
        """The second half. Ranks in `lost` are not expected to answer and are replaced by new processes."""
        deadline = time.monotonic() + timeout
        answers: list[Any] = [None] * n
        problems = []
        silent = False
        for rank in range(n):
            if rank in lost:
                continue
            try:
                ok, answer = _receive(self.ranks[rank].connection, deadline)
            except (EOFError, OSError) as error:
                silent = True
                status = self.ranks[rank].process.poll()
                ok, answer = False, f"{type(error).__name__}: {error} (exit status {status})"
                answer += f"\n--- its standard error ---\n{self.ranks[rank].errors()}"
            if ok:
                answers[rank] = answer
            else:
                problems.append(f"===== rank {rank}/{n} =====\n{answer}")
        if silent:  # whatever the others are doing, they may never end
            self.close()
        else:
            for rank in lost:
                self.ranks[rank].kill()
                self.ranks[rank] = Rank(self.store.port, self.env)
        if problems:
            raise RankFailed("\n".join(problems))
        return answers

    def close(self) -> None:
        """Ends all workers."""
        for rank in self.ranks:
            rank.kill()
        self.ranks = []


def _receive(connection: Connection, deadline: float) -> tuple[bool, Any]:
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError("no answer within the time limit")
    answer: tuple[bool, Any] = connection.recv()
    return answer

"""The ranks of one library: n processes, started once, that run calls on request."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from mccl.bench import lineup
from mccl.bench.libraries import Library, Setup

_ANSWER_S = 300.0  # the longest that a round may take; libraries give up before
_START_S = 120.0
_LEAVE_S = 5.0
_WORDS = 1000  # characters of the begin and of the end of what a process wrote


class BenchError(Exception):
    """A library could not be started, or a rank of it failed."""


class Result(NamedTuple):
    """Of a round: the time of each call in ns, and how many elements of all ranks were wrong."""

    times_ns: list[int]
    wrong: int


class Team:
    """Starts the ranks and joins them into a group. `folder` is for this team alone."""

    def __init__(self, library: Library, setup: Setup, folder: Path) -> None:
        self.library, self.setup, self._folder = library, setup, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: dict[int, socket.socket] = {}
        self._unread: dict[int, bytes] = {}
        folder.mkdir()
        lineup.create(folder / "page")
        try:
            self._start()
            token = self._ask("id", [0])[0]["id"]
            self.version: str = self._ask(f"join {token}")[0]["version"]
        except BaseException:
            self.close()
            raise

    def run(self, op: str, dtype: str, n_bytes: int, warm_up: int, calls: int) -> Result:
        """`calls` calls after some that do not count; each takes as long as on its slowest rank."""
        answers = self._ask(f"run {op} {dtype} {n_bytes} {warm_up} {calls}")
        times_ns = [max(times) for times in zip(*(answer["ns"] for answer in answers))]
        return Result(times_ns, sum(answer["wrong"] for answer in answers))

    def use_common_congestion_control(self) -> set[str]:
        """What the TCP sockets of all ranks use, after the ranks have asked for the common one."""
        return {name for answer in self._ask("congestion") for name in answer["congestion"]}

    def close(self, leave_s: float = _LEAVE_S) -> None:
        """Ends the processes: asks them to leave, then kills whoever is left."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
        deadline = time.monotonic() + leave_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
        for process in self._processes:
            if process.poll() is None:
                process.terminate()  # a launcher ends its ranks then
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # each has a session, and so a group, of its own
            process.wait()
        self._processes = []

    # ---- how it talks to them ----

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._folder / "socket"))
            listening.listen(self.setup.n)
            for rank, command in enumerate(self.library.commands(self.setup, self._folder)):
                with (self._folder / f"stderr-{rank}").open("wb") as words:
                    process = subprocess.Popen(
                        command,
                        env=self._environment(rank),
                        stdin=subprocess.DEVNULL,
                        stdout=words,
                        stderr=words,
                        start_new_session=True,
                    )
                self._processes.append(process)
            deadline = time.monotonic() + _START_S
            listening.settimeout(0.2)
            while len(self._connections) < self.setup.n:
                with contextlib.suppress(TimeoutError, socket.timeout):
                    connection = listening.accept()[0]
                    connection.settimeout(_START_S)
                    hello = connection.makefile("rb").readline()
                    if hello:
                        self._connections[json.loads(hello)["rank"]] = connection
                        continue
                if any(process.poll() is not None for process in self._processes):
                    self._give_up("a rank ended at its start")
                if time.monotonic() > deadline:
                    self._give_up(f"its ranks did not start within {_START_S:g} s")

    def _environment(self, rank: int) -> dict[str, str]:
        """What a launcher on one host would set. With one command for all ranks it is that launcher's."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OMPI_", "PMIX_", "TORCHELASTIC_"))
        }
        environment.update(
            RANK=str(rank),
            WORLD_SIZE=str(self.setup.n),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(self.setup.n),
            OMP_NUM_THREADS="1",
        )
        environment.update(self.library.environment(self.setup))
        return environment

    def _ask(self, request: str, ranks: list[int] | None = None) -> list[dict[str, Any]]:
        """Answers in the order of ranks."""
        asked = sorted(self._connections) if ranks is None else ranks
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _ANSWER_S
        with selectors.DefaultSelector() as selector:
            for rank in asked:
                selector.register(self._connections[rank], selectors.EVENT_READ, rank)
                with contextlib.suppress(OSError):  # it has ended: that is noticed below
                    self._connections[rank].sendall(request.encode() + b"\n")
            while len(answers) < len(asked):
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    self._give_up(f"no answer within {_ANSWER_S:g} s")
                for key, _ in ready:
                    answer = self._read(key.data)
                    if answer is not None:
                        answers[key.data] = answer
        return [answers[rank] for rank in asked]

    def _read(self, rank: int) -> dict[str, Any] | None:
        """The answer of a rank if it is complete."""
        try:
            part = self._connections[rank].recv(1 << 16)
        except OSError:
            part = b""
        if not part:
            self._give_up(f"rank {rank} ended")
        line = self._unread.pop(rank, b"") + part
        if not line.endswith(b"\n"):
            self._unread[rank] = line
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _give_up(self, why: str) -> None:
        self.close(leave_s=0.5)  # the others wait for the one that failed; its words may be on their way
        words = []
        for path in sorted(self._folder.glob("stderr-*")):
            text = path.read_text(errors="replace").strip()
            words += (
                [text if len(text) < 2 * _WORDS else f"{text[:_WORDS]} ... {text[-_WORDS:]}"] if text else []
            )
        raise BenchError("\n".join([f"{self.library.name}: {why}", *words]))

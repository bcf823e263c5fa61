"""Processes that begin and end as scripts do, at the price of a fork: importing torch costs seconds.

    zygote.run(2, function, argument)   # function(rank, 2, port, argument) in processes of their own

`port` is of a TCPStore for this run. What the function raises goes where a script's exception goes: through
the end of the interpreter, with its atexit functions, module teardown and exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

from ranks import kill_session

LEAVING = "-- leaving at "


def leaving() -> None:
    """The script is at its end: from here on the time to the end of the process counts."""
    os.write(1, f"{LEAVING}{time.monotonic()}\n".encode())


class End(NamedTuple):
    """Of one process."""

    status: int  # exit code, or minus the signal that killed it; -9 also when the limit passed
    seconds: float  # since leaving(), or since the start without it
    output: str  # standard output and error


class Zygote:
    """A process that has imported torch and mccl, has one thread, and forks on demand."""

    def __init__(self, **env: str) -> None:
        import torch.distributed as dist

        self._dist = dist
        here = Path(__file__)
        paths = [str(here.parent), str(here.parents[1] / "python"), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its children go with it
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONFAULTHANDLER": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # its store warns when a busy system is slow to name a host
                **env,
            },
        )
        self.threads = self._answer()["threads"]  # after `import mccl, torch`

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def run(self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[End]:
        """The ends of n processes. Those that take longer than `timeout` are killed."""
        store = self._dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory() as folder:
            call = {
                "n": n,
                "module": function.__module__,
                "function": function.__qualname__,
                "args": [store.port, *args],
                "folder": folder,
                "timeout": timeout,
            }
            assert self._process.stdin is not None
            print(json.dumps(call), file=self._process.stdin, flush=True)
            ends = []
            for rank, (status, began_at, ended_at) in enumerate(self._answer()):
                output = Path(folder, str(rank)).read_text(errors="replace")
                if LEAVING in output:
                    output, _, rest = output.partition(LEAVING)
                    began_at, rest = float(rest.partition("\n")[0]), rest.partition("\n")[2]
                    output += rest
                ends.append(End(status, ended_at - began_at, output))
            return ends

    def close(self) -> None:
        """Ends it and whatever it forked."""
        kill_session(self._process)


def main() -> None:
    """Of the zygote. Returns in the children, which have become ranks, after their function."""
    import torch

    import mccl

    assert mccl.version()
    torch.set_num_threads(1)
    gc.freeze()  # or the last collection of each child would copy all pages
    print(json.dumps({"threads": len(os.listdir("/proc/self/task"))}), flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        function = getattr(importlib.import_module(call["module"]), call["function"])
        began_at = time.monotonic()
        children = []
        for rank in range(call["n"]):
            child = os.fork()
            if child == 0:
                redirect(os.path.join(call["folder"], str(rank)))
                function(rank, call["n"], *call["args"])
                return
            children.append(child)
        rows = [(status, began_at, at) for status, at in reap(children, began_at + call["timeout"])]
        print(json.dumps(rows), flush=True)


def redirect(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (file, 1), (file, 2)):
        os.dup2(old, new)


def reap(children: list[int], deadline: float) -> list[tuple[int, float]]:
    ends: dict[int, tuple[int, float]] = {}
    while len(ends) < len(children):
        for child in children:
            if child in ends:
                continue
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                ends[child] = os.waitstatus_to_exitcode(status), time.monotonic()
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                ends[child] = -signal.SIGKILL, time.monotonic()
        time.sleep(0.002)
    return [ends[child] for child in children]


if __name__ == "__main__":
    main()

"""Runs commands as a user types them, and leaves none of the processes that they started."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36
_LEAVE_S = 20  # how long daemons may take to end after the command that started them


@dataclass(frozen=True)
class Command:
    line: str
    env: dict[str, str] = field(default_factory=dict)


def run(*commands: Command, timeout: float) -> str:
    """What the commands printed, which run side by side in the root of the repository.

    AssertionError if one fails or if a process that they started outlives them; subprocess.TimeoutExpired
    after `timeout` seconds. In any case nothing of theirs runs any more.
    """
    if sys.platform == "linux":
        # Daemons in sessions of their own stay descendants of this process when their parents end.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    deadline = time.monotonic() + timeout
    before = set(_descendants())
    # A file, since a daemon would hold the end of a pipe open. Short names, since Ray makes sockets there.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory(prefix="mccl") as folder:
        try:
            processes = [
                subprocess.Popen(
                    command.line.split(),
                    cwd=ROOT,
                    env={**_environment(folder), **command.env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for command in commands
            ]
            codes = [process.wait(max(0, deadline - time.monotonic())) for process in processes]
            left = _wait_for_end(before)
        except subprocess.TimeoutExpired as late:
            output.seek(0)
            late.output = output.read()
            print(late.output)
            raise
        finally:
            _kill(before)
        output.seek(0)
        text = output.read()
    assert codes == [0] * len(commands), f"exit status {codes}\n{text}"
    assert not left, f"still running: {left}\n{text}"
    return text


def _environment(folder: str) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HOME": folder,
        "HF_HUB_OFFLINE": "1",
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        # mpirun wants to be asked twice to run as root, and as many cores as ranks.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _wait_for_end(before: set[psutil.Process]) -> list[str]:
    """Command lines of the processes that do not end by themselves."""
    deadline = time.monotonic() + _LEAVE_S
    while True:
        _, alive = psutil.wait_procs([child for child in _descendants() if child not in before], 0.2)
        if not alive or time.monotonic() > deadline:
            return [" ".join(child.cmdline()) for child in alive if child.is_running()]


def _kill(before: set[psutil.Process]) -> None:
    """Repeats, since a process may start another one while it is being killed."""
    while children := [child for child in _descendants() if child not in before]:
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(children, 5)

"""Runs a script as users do, under torchrun on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def torchrun(script: Path, n: int, timeout: float, **env: str) -> str:
    """What `n` ranks of `script` printed, standard error included. AssertionError with it if one fails.

    After `timeout` seconds everything that was started is killed, and TimeoutExpired raised.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    process = subprocess.Popen(
        [*command, str(script)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output

"""The runner of these tests: what a command leaves behind is reported and killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import Command, run

DAEMON = """
import pathlib, subprocess, sys, time
daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(daemon.pid))
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("seconds", "code", "error", "says"),
    [
        (0, 0, AssertionError, "sleep 600"),
        (0, 3, AssertionError, r"exit status \[3\]"),
        (600, 0, subprocess.TimeoutExpired, "timed out"),
    ],
)
def test_daemons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: int, code: int, error: type, says: str
) -> None:
    monkeypatch.setattr("commands._LEAVE_S", 1)
    script, pid = tmp_path / "daemon.py", tmp_path / "pid"
    script.write_text(DAEMON)
    with pytest.raises(error, match=says):
        run(Command(f"{sys.executable} {script} {pid} {seconds} {code}"), timeout=10)
    assert not psutil.pid_exists(int(pid.read_text()))

"""``mccl bench ddp`` on a small model: everything is measured, and both libraries train the same weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mccl.cli.bench_ddp import can_hide

SMALL = ("--layers=3", "--width=256", "--bucket-mb=0.3", "--batch=8", "--rounds=1", "--steps=2")
LIMIT_S = 120
TIMES = ("step", "compute", "backward", "comm", "exposed", "wire")


def start(*options: str) -> subprocess.Popen[str]:
    """The command, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "mccl.cli.bench_ddp", *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """What it printed; it must succeed within the limit."""
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks end with their input
        raise
    assert process.returncode == 0, output
    return output


def check(path: Path, output: str) -> None:
    """The file holds all that the table shows."""
    result = json.loads(path.read_text())
    assert result["right"] and "bit-identical on all ranks of mccl and gloo" in result["weights"]
    assert result["weights"] in output
    # Two layers of 256 KiB + 1 KiB fill a bucket of 0.3 MiB; the third has one of its own.
    layer = 4 * (256 * 256 + 256)
    assert sum(result["model"]["buckets"]) == 3 * layer and len(result["model"]["buckets"]) == 2
    assert [row["lib"] for row in result["rows"]] == ["mccl", "gloo"]
    for row in result["rows"]:
        assert (row["op"], row["n"], row["bytes"], row["batch"], row["steps"]) == ("ddp", 2, 3 * layer, 8, 2)
        for name in TIMES:
            assert name == "exposed" or 0 < row[f"{name}_min_ms"] <= row[f"{name}_p50_ms"], name
        for which in ("p50", "min"):
            exposed = row[f"step_{which}_ms"] - row[f"compute_{which}_ms"]
            assert row[f"exposed_{which}_ms"] == pytest.approx(exposed, abs=0.01)
            assert row[f"hidden_{which}"] == pytest.approx(1 - exposed / row[f"wire_{which}_ms"], abs=0.01)
        assert row["samples_per_s"] == pytest.approx(2 * 8 / row["step_p50_ms"] * 1e3, rel=0.01)
        assert sum(row["cpu_ms"].values()) > 0


def test_bound() -> None:
    assert can_hide([1, 1, 1, 1], 4.0, 4.0) == pytest.approx(0.75)  # the last one is alone after backward
    assert can_hide([2, 2], 1.0, 4.0) == pytest.approx(
        1 - 3.5 / 4
    )  # the link is the limit: idle for half of it
    assert can_hide([3, 1], 8.0, 4.0) == pytest.approx(0.5)  # free 9, then 1 more: 2 after the end


def test_small_model(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    check(path, output_of(start(f"--json={path}")))


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _group_members(group: int) -> list[int]:
    """Processes whose ancestor in the table of processes is `group`, itself included."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it has just ended
            continue
    found = [group]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


@pytest.mark.net
def test_shaped_link(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("tc"):
        pytest.skip("needs root and iproute2 for network namespaces")
    path = tmp_path / "result.json"
    output = output_of(start("--shape=200mbit", f"--json={path}"))
    assert "two hosts joined at 200mbit" in output
    check(path, output)
    for row in json.loads(path.read_text())["rows"]:
        assert row["wire_min_ms"] == pytest.approx(row["bytes"] * 8 / 200e6 * 1e3, rel=0.001)


@pytest.mark.net
def test_nothing_is_left_when_killed() -> None:
    if os.geteuid() != 0 or not shutil.which("tc"):
        pytest.skip("needs root and iproute2 for network namespaces")
    process = start("--shape=200mbit", "--rounds=100000")
    try:
        _wait_until(lambda: len(_group_members(process.pid)) >= 7 or process.poll() is not None)
        members = _group_members(process.pid)  # two hosts' keepers and four ranks
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert process.stdout
    process.stdout.close()
    _wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in members))

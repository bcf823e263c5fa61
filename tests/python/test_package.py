"""What installing the wheel gives: one file for every Python, and a backend that torch finds by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

WORKER = """
import os, torch, torch.distributed as dist
dist.init_process_group("mccl")
sums = torch.arange(5, dtype=torch.int64) + dist.get_rank()
dist.all_reduce(sums)
assert sums.tolist() == [2 * i + 1 for i in range(5)], sums
os.write(1, f"backend {dist.get_backend()} {type(dist.group.WORLD).__name__} ".encode())
dist.destroy_process_group()
"""


def test_wheel_is_for_every_python_and_this_platform() -> None:
    distribution = metadata.distribution("mccl")
    text = distribution.read_text("WHEEL") or ""
    tags = [line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag: ")]
    assert tags and all(tag.startswith("py3-none-") and tag != "py3-none-any" for tag in tags), text
    wanted = [line for line in distribution.requires or [] if line.startswith("torch")]
    assert wanted == ["torch>=2.5"], distribution.requires


def test_workers_need_no_import(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    assert output.count("backend mccl ProcessGroupMCCL") == 2, output

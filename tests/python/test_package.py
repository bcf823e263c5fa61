"""What installing the wheel gives: one file for every Python, and a backend that torch finds by itself."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from launch import torchrun

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
    output = torchrun(script, 2, timeout=60, OMP_NUM_THREADS="1")
    assert output.count("backend mccl ProcessGroupMCCL") == 2, output


@pytest.mark.parametrize("module", ["core", "pg", "work", "completer", "functional", "split"])
def test_modules_can_be_imported_before_torch(module: str) -> None:
    code = f"from mccl.torch import {module}; import torch.distributed as dist; print(dist.Backend.MCCL)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("mccl\n", ""), done

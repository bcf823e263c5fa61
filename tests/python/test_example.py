"""The example trains, under torchrun, over mccl."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_example(n: int) -> None:
    pytest.importorskip("sklearn")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={n}",
        str(EXAMPLE),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    accuracy = re.search(r"held-out accuracy ([\d.]+) %", output)
    assert accuracy and float(accuracy[1]) >= 95, output
    assert f"weights bit-identical on all {n} ranks" in output

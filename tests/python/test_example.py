"""The example trains, under torchrun, over mccl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_example(n: int) -> None:
    pytest.importorskip("sklearn")
    output = torchrun(EXAMPLE, n, timeout=180)
    accuracy = re.search(r"held-out accuracy ([\d.]+) %", output)
    assert accuracy and float(accuracy[1]) >= 95, output
    assert f"weights bit-identical on all {n} ranks" in output

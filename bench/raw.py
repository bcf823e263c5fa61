# SPDX-License-Identifier: MIT
"""A bare socket exchange between two processes (raw_exchange.c), as a contestant beside the libraries."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from team import Result

SOURCE = Path(__file__).with_name("raw_exchange.c")
CALL_S = 60.0  # the longest that a round may take


class Raw:
    """Runs the compiled program, once per round."""

    name = "raw"

    def __init__(self, program: Path) -> None:
        self._program = program

    @classmethod
    def build(cls, folder: Path) -> Raw | None:
        """Compiles it into `folder`; None, and a line that says so, without a C compiler."""
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "raw_exchange"
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-std=c11", "-D_DEFAULT_SOURCE", "-O2", "-o", str(program), str(SOURCE)]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no comparison with a bare exchange: {error}")
            return None
        return cls(program)

    def run(self, n_bytes: int, calls: int) -> Result:
        """`calls` exchanges of `n_bytes` in each direction."""
        command = [str(self._program), str(n_bytes), str(calls)]
        done = subprocess.run(command, check=True, capture_output=True, timeout=CALL_S)
        answer = json.loads(done.stdout)
        return Result(answer["times_ns"], answer["wrong"])

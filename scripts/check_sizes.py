#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks that files stay below 800 lines and C functions below 60, and that C files say whose they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("include", "src", "python", "tests", "bench", "examples", "scripts", "cmake")
SUFFIXES = {".c", ".h", ".py", ".sh", ".cmake", ".m"}
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60


def source_files() -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in found if path.suffix in SUFFIXES)


def functions(lines: list[str]) -> Iterator[tuple[int, int]]:
    """(first line, number of lines) of each function body. Functions alone open with a { in column 0."""
    start = 0
    for number, line in enumerate(lines, 1):
        if line == "{":
            start = number
        elif line == "}" and start:
            yield start, number - start + 1
            start = 0


def check(path: Path) -> list[str]:
    name = path.relative_to(ROOT)
    lines = path.read_text().splitlines()
    complaints = []
    if len(lines) > MAX_FILE_LINES:
        complaints.append(f"{name}: {len(lines)} lines, at most {MAX_FILE_LINES}: split it by concept")
    if path.suffix in {".c", ".h"}:
        if not lines or lines[0] != "/* SPDX-License-Identifier: MIT":
            complaints.append(f"{name}:1: must start with the line '/* SPDX-License-Identifier: MIT'")
        complaints += [
            f"{name}:{start}: function of {length} lines, at most {MAX_FUNCTION_LINES}"
            for start, length in functions(lines)
            if length > MAX_FUNCTION_LINES
        ]
    return complaints


def main() -> int:
    complaints = [text for path in source_files() for text in check(path)]
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks that dependencies between the layers of the library point down only, and getenv stays in one file.

A file may include headers of its own row and of the rows below it; tests/comm, bench and the examples, which
stand for users, see include/mccl.h alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

ROWS = [{"base", "os"}, {"reduce"}, {"device"}, {"net", "shm", "rdma"}, {"comm"}, {"coll"}, {"api"}]
RANK = {layer: rank for rank, row in enumerate(ROWS) for layer in row}
GETENV_FILE = SOURCE / "base/config.c"

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)  # <net/if.h> is the system's
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def c_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in {".c", ".h"})


def check_includes(path: Path) -> list[str]:
    """Complaints about what one file of src includes."""
    layer = path.relative_to(SOURCE).parts[0]
    if layer not in RANK:
        return [f"src/{layer} is no layer: {', '.join(sorted(RANK))}"]
    complaints = []
    for name in INCLUDE.findall(path.read_text()):
        target = name.split("/")[0]
        if target in RANK and RANK[target] > RANK[layer]:
            complaints.append(f"includes {name}: {layer} lies below {target}")
        elif ".." in name.split("/"):
            complaints.append(f"includes {name}: write the path from src, as in comm/comm.h")
        elif target not in RANK and (SOURCE / layer / name).exists():
            complaints.append(f"includes {name}: write {layer}/{name}")
    return complaints


def check_user(path: Path) -> list[str]:
    """Complaints about a file that must live on the public header."""
    return [
        f"includes {name}: only mccl.h is for users"
        for name in INCLUDE.findall(path.read_text())
        if name.split("/")[0] in RANK and (SOURCE / name).exists()
    ]


def check_getenv(path: Path) -> list[str]:
    text = COMMENT.sub("", path.read_text())
    found = path != GETENV_FILE and re.search(r"\b(secure_)?(getenv|setenv|putenv)\s*\(|\benviron\b", text)
    where = GETENV_FILE.relative_to(ROOT)
    return [f"reads the environment: only {where} does; take a row of its table"] if found else []


def main() -> int:
    complaints = []
    for path in c_files(SOURCE):
        complaints += [(path, text) for text in check_includes(path) + check_getenv(path)]
    for folder in ("tests/comm", "tests/support", "examples", "bench"):
        complaints += [(path, text) for path in c_files(ROOT / folder) for text in check_user(path)]
    for path, text in complaints:
        print(f"{path.relative_to(ROOT)}: {text}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

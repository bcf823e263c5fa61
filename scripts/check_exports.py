#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks that include/mccl.h, tests/exports.txt and, if given, a built library name the same functions.

The list is committed so that a symbol which appears or vanishes shows in review as what it is: a change of
the binary interface. `--write` makes the list anew from the header.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include/mccl.h"
LIST = ROOT / "tests/exports.txt"


def declared() -> set[str]:
    """Functions that the header declares with MCCL_API."""
    return set(re.findall(r"^MCCL_API\s[^;(]*?\b(mccl_\w+)\(", HEADER.read_text(), re.MULTILINE))


def exported(library: str, nm: str) -> set[str]:
    """Symbols that the library defines for others, without their version; Darwin's leading _ is cut."""
    darwin = library.endswith(".dylib")
    command = [nm, "-gU", library] if darwin else [nm, "-D", "--defined-only", library]
    symbols = set()
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        kind, name = line.split()[-2:]
        if kind != "A":  # the version node itself
            symbols.add(name[1:] if darwin else name.split("@")[0])
    return symbols


def compare(what: str, found: set[str], wanted: set[str]) -> int:
    for name in sorted(found - wanted):
        print(f"{what}: {name} is not in {LIST.relative_to(ROOT)}")
    for name in sorted(wanted - found):
        print(f"{what}: {name} of {LIST.relative_to(ROOT)} is missing")
    return len(found ^ wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="the built library to check as well")
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--write", action="store_true", help="write the list from the header")
    args = parser.parse_args()

    if args.write:
        LIST.write_text("".join(f"{name}\n" for name in sorted(declared())))
    listed = LIST.read_text().split()
    wrong = compare(str(HEADER.relative_to(ROOT)), declared(), set(listed))
    if listed != sorted(set(listed)):
        print(f"{LIST.relative_to(ROOT)}: not sorted, or names twice")
        wrong += 1
    if args.library:
        wrong += compare(Path(args.library).name, exported(args.library, args.nm), set(listed))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes docs/settings.md from the table of settings inside a built library; with --check, compares only.

The table is asked for through the public call mccl_setting_get_info, as any other program would do it.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/settings.md"

HEAD = """\
# Settings

<!-- Made by scripts/gen_settings_doc.py from the library's own table: change the table, then `make docs`. -->

Each setting can be given in five ways; the first that names it wins:

1. for one group: `pg_options` in Python, `mccl_config.settings` in C;
2. for the process: keyword arguments of `mccl.init(...)`, `mccl_set_defaults` in C;
3. the environment variable;
4. a link profile (`MCCL_LINK_PROFILE=thunderbolt`);
5. the default below.

Values are read when a group is made. Sizes take `K`, `M`, `G` (powers of 1024); switches take `on`, `off`,
`1`, `0`, `true`, `false`, `yes`, `no`. A bad value is an error that names variable, value and range; an
unknown `MCCL_*` variable is a warning that suggests the nearest name. `mccl env` shows the values in force
and where each comes from.

Defaults are those of Linux; where macOS differs, the help text says so.

"""


class SettingInfo(ctypes.Structure):
    """mccl_setting_info of include/mccl.h."""

    _fields_ = [
        (name, ctypes.c_char_p)
        for name in ("name", "variable", "type", "default_value", "range", "help", "available")
    ]


def rows(library: str) -> list[dict[str, str]]:
    call = ctypes.CDLL(library).mccl_setting_get_info
    call.argtypes = [ctypes.c_size_t, ctypes.POINTER(SettingInfo)]
    found: list[dict[str, str]] = []
    info = SettingInfo()
    while call(len(found), ctypes.byref(info)) == 0:
        found.append({name: (getattr(info, name) or b"").decode() for name, _ in SettingInfo._fields_})
    return found


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def code(text: str) -> str:
    return f"`{cell(text)}`" if text else ""


def page(table: list[dict[str, str]]) -> str:
    lines = [
        "| variable | keyword | type | default | range | meaning |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in table:
        meaning = row["help"] + (f" Not available yet: {row['available']}" if row["available"] else "")
        columns = (
            code(row["variable"]),
            code(row["name"]),
            row["type"],
            code(row["default_value"]) or "unset",
            cell(row["range"]),
            cell(meaning),
        )
        lines.append("| " + " | ".join(columns) + " |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default=str(ROOT / "build/release/libmccl.so"))
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date; write nothing")
    args = parser.parse_args()

    table = rows(args.library)
    if not table:
        print(f"{args.library}: the table of settings is empty")
        return 1
    text = page(table)
    if not args.check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

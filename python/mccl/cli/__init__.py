"""The command ``mccl``. Imports no torch."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

import mccl
from mccl import _config

_COLUMNS = ("setting", "value", "source", "range", "what it does")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="mccl", description="MCCL: collective communication for training.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "bench", add_help=False, help="collectives of MCCL and of other libraries, side by side"
    )
    commands.add_parser("env", help="all settings: variable, value now in force, where it comes from, range")
    commands.add_parser("version", help="version of the library")
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["bench"]:  # it has arguments of its own
        return int(importlib.import_module("mccl.cli.bench").main(words[1:]))
    command = parser.parse_args(words).command
    try:
        if command == "env":
            _print_table([_row(setting) for setting in _config.table().values()])
        else:
            print(mccl.version())
        sys.stdout.flush()
    except BrokenPipeError:  # `mccl env | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (mccl.MCCLError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _row(setting: _config.Setting) -> tuple[str, ...]:
    value, source = _config.current(setting.name)
    what = f"{setting.help} ({setting.available})" if setting.available else setting.help
    return setting.variable, value or '""', source, setting.range, what


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """With rich if it is installed and a person looks on, else as plain columns."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        table = importlib.import_module("rich.table").Table(*_COLUMNS)
        for row in rows:
            table.add_row(*row, style=None if row[2] in ("default", "profile") else "bold")
        importlib.import_module("rich.console").Console().print(table)
        return
    widths = [max(len(row[i]) for row in [_COLUMNS, *rows]) for i in range(len(_COLUMNS) - 1)]
    for row in [_COLUMNS, *rows]:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip())

"""``mccl bench``: arguments, and one run of them."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mccl.bench import report, suite
from mccl.bench.libraries import LIBRARIES, Setup
from mccl.bench.lineup import MAX_RANKS
from mccl.bench.machine import About, describe
from mccl.bench.measure import Plan, Row
from mccl.bench.operations import ELEMENT_BYTES, OPERATIONS
from mccl.bench.plot import save_plot
from mccl.bench.session import run, session, work_folder
from mccl.bench.team import BenchError

_PEERS = ("mccl-torch", "gloo", "openmpi", "raw")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str]) -> int:
    """Runs it; 0, or 1 if a value is wrong or a library fails, 2 for arguments that cannot be."""
    if arguments and arguments[0] == "ddp":
        if not importlib.util.find_spec("mccl.cli.bench_ddp"):
            print("mccl bench ddp: not part of this version", file=sys.stderr)
            return 2
        return int(importlib.import_module("mccl.cli.bench_ddp").main(list(arguments[1:])))
    try:
        if arguments and arguments[0] == "suite":
            options = _suite_arguments(arguments[1:])
            return suite.main(options.quick, options.out, _can_use_realtime())
        return _run(_arguments(arguments))
    except BenchError as error:
        print(f"mccl bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    rows: list[Row] = []
    about = About()
    with work_folder() as folder:
        for n in options.n:
            setup = Setup(n, options.transport, options.sched)
            plan = Plan(setup, options.op, options.sizes, options.dtype, options.rounds)
            with session(["mccl", *options.against], setup, Path(folder), about) as teams:
                rows += run(teams, plan)
    if options.json:
        report.save_json(options.json, describe(about), rows)
        print(f"written: {options.json}")
    if options.plot:
        print(save_plot(options.plot, rows, describe(about)))
    return report.last_line(rows)


def _can_use_realtime() -> bool:
    return hasattr(os, "SCHED_RR") and os.geteuid() == 0


# ---- arguments ----


def _size(text: str) -> int:
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    digits = text[:-1] if unit else text
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes such as 4, 64K or 16M")
    return int(digits) << unit


def _ranks(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 2 <= int(part) <= MAX_RANKS for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 2 to {MAX_RANKS}, such as 2,4")
    return [int(part) for part in parts]


def _ops(text: str) -> list[str]:
    names = list(OPERATIONS) if text == "all" else text.split(",")
    for name in names:
        if name not in OPERATIONS:
            raise argparse.ArgumentTypeError(f"no operation {name!r}; there are {', '.join(OPERATIONS)}, all")
    return names


def _libraries(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in LIBRARIES:
            raise argparse.ArgumentTypeError(f"no library {name!r}; there are {', '.join(LIBRARIES)}")
    return names


def _from(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {least} on")
        return int(text)

    return number


def _suite_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="mccl bench suite", description="The table of verdicts, as `make bench` prints it.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, rounds and operations")
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), metavar="FOLDER", help="(build/bench)"
    )
    return parser.parse_args(arguments)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="mccl bench",
        description="Collectives of MCCL and of other libraries, side by side on this machine.",
        epilog="`mccl bench suite` measures and judges a table of comparisons, `mccl bench ddp` training.",
    )
    add = parser.add_argument
    add("op", type=_ops, metavar="OP", help=f"{', '.join(OPERATIONS)}, several with commas, or all")
    add("-n", type=_ranks, default=[2], metavar="RANKS", help="numbers of ranks, such as 2,4 (2)")
    add("-b", type=_size, default=4, metavar="MIN", help="smallest size (4)")
    add("-e", type=_size, default=64 << 20, metavar="MAX", help="largest size (64M)")
    add("-f", type=_from(2), default=4, metavar="FACTOR", help="from one size to the next (4)")
    add("--dtype", choices=list(ELEMENT_BYTES), default="float32", help="element type (float32)")
    add("--transport", choices=["tcp", "shm"], default="tcp", help="of MCCL and Open MPI (tcp)")
    add(
        "--against",
        type=_libraries,
        default=list(_PEERS),
        metavar="LIB,...",
        help=f"of {', '.join(LIBRARIES)}; raw is the limit of the machine ({','.join(_PEERS)})",
    )
    add("--rounds", type=_from(1), default=5, help="turns of each library per size (5)")
    add("--sched", choices=["default", "rr"], default="default", help="rr: every rank under SCHED_RR (root)")
    add("--json", type=Path, metavar="FILE", help="rows and machine")
    add("--plot", type=Path, metavar="FILE", help="PNG of time and bandwidth against size")
    options = parser.parse_args(arguments)
    if options.e < options.b:
        parser.error("-e is below -b")
    if options.sched == "rr" and not _can_use_realtime():
        parser.error("--sched rr needs Linux and root")
    options.sizes = [options.b]
    while options.sizes[-1] * options.f <= options.e:
        options.sizes.append(options.sizes[-1] * options.f)
    return options

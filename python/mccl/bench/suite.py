"""``make bench``: what the table of verdicts needs, measured and judged; JSON, pictures and a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mccl.bench import report
from mccl.bench.document import print_verdicts, save_document
from mccl.bench.libraries import Setup
from mccl.bench.machine import About, describe
from mccl.bench.measure import Plan, Row
from mccl.bench.operations import OPERATIONS
from mccl.bench.plot import save_plot
from mccl.bench.session import run, session, work_folder
from mccl.bench.verdicts import OTHERS, OTHERS_LINE, elsewhere, judge

_K, _M = 1 << 10, 1 << 20
_NAMES = ("mccl", "mccl-torch", "gloo", "openmpi", "raw")
_WITHOUT_LIMIT = _NAMES[:-1]


class Part(NamedTuple):
    """Operations, sizes and effort of one plan; `names` are the libraries that take part."""

    ops: Sequence[str]
    sizes: Sequence[int]
    rounds: int
    round_s: float
    names: Sequence[str] = _NAMES
    phase: str = "compare"


def _powers(low: int, high: int) -> list[int]:
    return [1 << exponent for exponent in range(low, high + 1)]


_SIZES = (4, _K, 64 * _K, _M, 16 * _M, 64 * _M)  # those that the table names
_LARGE = (64 * _K, _M, 16 * _M)

# Chosen so that a run on 2 cores takes less than 20 minutes, a quick one less than 3.
_REDUCE = Part(["all_reduce"], _SIZES, 7, 0.25)
_REST = Part(OTHERS, (_K, *_LARGE), 5, 0.08, _WITHOUT_LIMIT)
_CLIFF = Part(list(OPERATIONS), _powers(6, 24), 3, 0.02, ["mccl"], "cliff")
_REALTIME = Part(["all_reduce"], _SIZES, 5, 0.2)
FULL = {
    Setup(2, "tcp"): [_REDUCE, _REST, _CLIFF],
    Setup(2, "shm"): [_REDUCE, _REST, _CLIFF],
    Setup(4, "tcp"): [_REDUCE, _REST, _CLIFF],
    Setup(4, "shm"): [_REDUCE, _REST, _CLIFF],
    Setup(2, "tcp", "rr"): [_REALTIME],
    Setup(2, "shm", "rr"): [_REALTIME],
    Setup(4, "tcp", "rr"): [_REALTIME],
}
_QUICK_REDUCE = Part(["all_reduce"], (4, _K, 64 * _K, _M, 16 * _M), 3, 0.05)
_QUICK_REST = Part(OTHERS, (_K, _M), 2, 0.02, _WITHOUT_LIMIT)
_QUICK_CLIFF = Part(["all_reduce", "all_gather"], _powers(6, 20), 2, 0.01, ["mccl"], "cliff")
QUICK = {
    Setup(2, "tcp"): [_QUICK_REDUCE, _QUICK_REST, _QUICK_CLIFF],
    Setup(2, "shm"): [_QUICK_REDUCE, _QUICK_REST],
    Setup(4, "tcp"): [_QUICK_REDUCE],
}


def main(is_quick: bool, folder: Path, can_use_realtime: bool) -> int:
    """Runs it; 0, or 1 if a value is wrong. Lines that do not hold are not an error: they are the result."""
    begin = time.monotonic()
    rows: list[Row] = []
    about = About()
    with work_folder() as sockets:
        for setup, parts in (QUICK if is_quick else FULL).items():
            if setup.sched == "rr" and not can_use_realtime:
                about.notes.append("no run under SCHED_RR: it needs Linux and root")
                continue
            with session(_NAMES, setup, Path(sockets), about) as teams:
                for part in parts:
                    wanted = [team for team in teams if team.library.is_meant_by(part.names)]
                    rows += run(wanted, Plan(setup, part.ops, part.sizes, "float32", *part[2:4], part.phase))
    machine = describe(about)
    machine["kind"] = "quick" if is_quick else "full"
    machine["minutes"] = round((time.monotonic() - begin) / 60, 1)
    report.save_json(folder / "bench.json", machine, rows)
    verdicts = {"default": judge(rows)}
    if any(row["sched"] == "rr" for row in rows):  # all-reduce alone is run that way
        verdicts["rr"] = [found for found in judge(rows, "rr") if not found.line.startswith(OTHERS_LINE)]
    verdicts["default"] += elsewhere(folder)
    print_verdicts(verdicts)
    print(f"\nwritten: {folder / 'bench.json'}")
    compared = [row for row in rows if row["phase"] == "compare"]
    for name, ops in (("all_reduce", ["all_reduce"]), ("others", OTHERS)):
        print(save_plot(folder / f"{name}.png", [row for row in compared if row["op"] in ops], machine))
    save_document(folder / "report.md", machine, verdicts, rows)
    print(f"written: {folder / 'report.md'}, after {machine['minutes']} minutes")
    return report.last_line(rows)

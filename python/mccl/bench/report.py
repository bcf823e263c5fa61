"""What is printed and written: tables with nccl-tests' columns, JSON."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mccl.bench.measure import Plan, Row
from mccl.bench.operations import ELEMENT_BYTES, OPERATIONS
from mccl.bench.team import Team

Say = Callable[[str], None]


_COLUMNS = "{:>10} {:>10} {:>8} {:>5} {:>10} {:>10} {:>10} {:>10} {:>7} {:>7} {:>6}"
_HEAD = (
    ("size", "count", "type", "redop", "lib", "time", "min", "p90", "algbw", "busbw", "#wrong"),
    ("(B)", "(elements)", "", "", "", "p50 (us)", "(us)", "(us)", "(GB/s)", "(GB/s)", ""),
)


def heading(plan: Plan, op: str, teams: Sequence[Team]) -> str:
    """Head of the table for one operation."""
    operation = OPERATIONS[op]
    what = f"{op}, n = {plan.setup.n}, {plan.setup.transport}, {plan.dtype}"
    what += " sum" if operation.reduces else ""
    what += ", root 0" if operation.has_root else ""
    what += ", every rank under SCHED_RR" if plan.setup.sched == "rr" else ""
    libraries = "; ".join(f"{team.library.name}: {team.library.label}, {team.version}" for team in teams)
    first, second = (f"#{_COLUMNS.format(*line)}" for line in _HEAD)
    return f"\n# {what}\n# {libraries}\n{first}  mccl, times as fast\n{second}  at p50, at min"


def line(measured: Row, rows: Sequence[Row]) -> str:
    """One line of the table; `rows` are all of the same size."""
    operation = OPERATIONS[measured["op"]]
    blocks = measured["n"] if operation.is_split else 1
    text = " " + _COLUMNS.format(
        measured["bytes"],
        measured["bytes"] // ELEMENT_BYTES[measured["dtype"]] // blocks,
        measured["dtype"],
        "sum" if operation.reduces else "-",
        measured["lib"],
        *(f"{measured[key]:.2f}" for key in ("p50_us", "min_us", "p90_us", "algbw_GBps", "busbw_GBps")),
        measured["wrong"],
    )
    if measured["wrong"]:
        return f"{text}  WRONG VALUES"
    own = [row for row in rows if row["lib"] == like(measured["lib"])]
    if own and not measured["lib"].startswith("mccl"):
        text += f"  {measured['p50_us'] / own[0]['p50_us']:.2f}, {measured['min_us'] / own[0]['min_us']:.2f}"
    return text


def like(library: str) -> str:
    """The way in which MCCL is called when it is compared with `library`: through torch, or in C."""
    return "mccl-torch" if library == "gloo" else "mccl"


def last_line(rows: Sequence[Row]) -> int:
    """Says whether all values are right; the exit status."""
    wrong = sum(row["wrong"] for row in rows)
    print(f"WRONG VALUES: {wrong}" if wrong else "Every value is exact.")
    return 1 if wrong else 0


def save_json(path: Path, about: dict[str, Any], rows: Sequence[Row]) -> None:
    """An object of the machine's description and the rows, one to a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"machine": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n')


@contextmanager
def progress(total: int, what: str) -> Iterator[tuple[Say, Callable[[], None]]]:
    """(print a line, one step further): a bar on standard error with rich, if a person looks on."""
    if not sys.stderr.isatty() or not importlib.util.find_spec("rich"):
        yield lambda text: print(text, flush=True), lambda: None
        return
    console = importlib.import_module("rich.console").Console(stderr=True)
    # No thread that redraws it while calls are timed: it moves between the rounds.
    bar = importlib.import_module("rich.progress").Progress(
        console=console, transient=True, auto_refresh=False
    )

    def say(text: str) -> None:
        if sys.stdout.isatty():  # the same screen: the bar makes room
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def step() -> None:
        bar.advance(task)
        bar.refresh()

    with bar:
        task = bar.add_task(what, total=total)
        yield say, step

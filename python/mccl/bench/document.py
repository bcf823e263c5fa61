"""The table of verdicts on the screen, and the report in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mccl.bench.libraries import LIBRARIES
from mccl.bench.measure import Row
from mccl.bench.verdicts import Verdict

_SCHEDULING = {"default": "default scheduling", "rr": "every rank under SCHED_RR"}
_COLUMNS = ("line", "must", "bound", "worst p50", "worst min", "verdict")


def print_verdicts(verdicts: Mapping[str, Sequence[Verdict]]) -> None:
    """A line for each check; ratios are MCCL's time over the other one's."""
    for sched, table in verdicts.items():
        print(f"\n# verdicts, {_SCHEDULING[sched]}")
        print("# ratios: MCCL's time over the other one's, the worst of the line")
        cells = [_COLUMNS, *(_cells(verdict) for verdict in table)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
        for row in cells:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())
        print(_sum_up(table))


def _cells(verdict: Verdict) -> tuple[str, ...]:
    text = f"aim: {verdict.text}" if verdict.is_aim else verdict.text
    return verdict.line, text, verdict.bound, verdict.p50, verdict.minimum, verdict.answer


def _sum_up(table: Sequence[Verdict]) -> str:
    answers = [verdict.answer for verdict in table]
    kinds = ("holds", "DOES NOT HOLD", "not measured here", "reached", "not reached")
    return ", ".join(f"{answers.count(kind)} {kind}" for kind in kinds if kind in answers)


def save_document(
    path: Path, machine: Mapping[str, Any], verdicts: Mapping[str, Sequence[Verdict]], rows: Sequence[Row]
) -> None:
    """All of it: machine, verdicts, and a table for each operation, number of ranks and transport."""
    versions = "; ".join(f"{name}: {version}" for name, version in machine["versions"].items())
    congestion = "; ".join(
        f"{name}: {', '.join(used)}" for name, used in machine["congestion_control"].items() if used
    )
    lines = [
        f"# Benchmark, {machine['date'].split()[0]}",
        "",
        f"- {machine['processor']}, {machine['cpus']} processors, {machine['system']}",
        f"- {versions}; Python {machine['python']}",
        f"- congestion control of the sockets: {congestion}",
        f"- {machine['kind']} run of `make bench`, {machine['minutes']} minutes, load average at its end "
        f"{machine['load_average']}",
        *(f"- {note}" for note in machine["notes"]),
        f"- wrong values: {sum(row['wrong'] for row in rows)}",
    ]
    for sched, table in verdicts.items():
        lines += ["", f"## Verdicts, {_SCHEDULING[sched]}", ""]
        lines += [
            "A ratio is MCCL's time over the other one's; the worst of each line is shown, and where.",
            "",
        ]
        lines += _table([_COLUMNS, *(_cells(verdict) for verdict in table)])
        lines += ["", _sum_up(table) + "."]
    lines += ["", "## Times", "", "p50 / min in µs.", ""]
    for key in dict.fromkeys(
        (row["op"], row["n"], row["beside"], row["sched"], row["phase"]) for row in rows
    ):
        lines += _times(key, [row for row in rows if key == _key(row)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _key(row: Row) -> tuple[Any, ...]:
    return row["op"], row["n"], row["beside"], row["sched"], row["phase"]


def _times(key: tuple[Any, ...], rows: Sequence[Row]) -> list[str]:
    op, n, beside, sched, phase = key
    names = [name for name in LIBRARIES if any(row["lib"] == name for row in rows)]
    title = f"### {op}, n = {n}, {beside}" + (", SCHED_RR" if sched == "rr" else "")
    title += ", sizes by 2" if phase == "cliff" else ""
    cells = [("bytes", *names)]
    for size in sorted({row["bytes"] for row in rows}):
        times = {
            row["lib"]: f"{row['p50_us']:.4g} / {row['min_us']:.4g}" for row in rows if row["bytes"] == size
        }
        cells.append((str(size), *(times.get(name, "") for name in names)))
    return [title, "", *_table(cells), ""]


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    head, *body = [f"| {' | '.join(row)} |" for row in cells]
    return [head, "|" + " --- |" * len(cells[0]), *body]

"""The table that MCCL is built against: what each line compares, and the bound that it has to hold.

A ratio is MCCL's time over the other one's. Against gloo MCCL is called through torch as gloo is, against C
libraries in C. A line holds if the worst of its ratios, p50 and min, are within their bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mccl.bench.measure import Row
from mccl.bench.operations import OPERATIONS

_K, _M = 1 << 10, 1 << 20
OTHERS_LINE = "every other collective"
OTHERS = tuple(name for name in OPERATIONS if name != "all_reduce")
_TWICE = "itself at half the size"


class Check(NamedTuple):
    """One comparison of a line."""

    line: str
    text: str
    lib: str
    peer: str  # a library, _TWICE, or "" where `p50` and `minimum` are times in us
    p50: float
    minimum: float | None  # None: shown, not judged
    sizes: tuple[int, int]  # bytes, from and to
    n: tuple[int, ...] = (2,)
    transport: str = "tcp"
    ops: tuple[str, ...] = ("all_reduce",)
    plus_us: float = 0.0  # on top of the peer's time
    is_aim: bool = False


class Verdict(NamedTuple):
    """What a check found; `p50` and `minimum` are the worst values, each with where it was met."""

    line: str
    text: str
    bound: str
    p50: str
    minimum: str
    answer: str  # "holds", "DOES NOT HOLD", "not measured here"; for an aim "reached", "not reached"
    is_aim: bool


_C4 = "TCP n=2, 4 B, in C"
_TORCH = "TCP n=2, 4 B … 1 KiB through torch"
_MIDDLE = "TCP n=2, 64 KiB, 1 MiB"
_LARGE = "TCP n=2, 16 MiB, 64 MiB"
_FOUR = "TCP n=4 on 2 cores"
_SHM4 = "shm n=2, 4 B in C"
_SHM = "shm n=2, 64 KiB, 1 MiB, 16 MiB"


def _others(transport: str) -> list[Check]:
    """Of the other collectives, and the one that looks at all of them. Sizes that cut into equal blocks lie a
    little below those that are asked for."""
    line, where = f"{OTHERS_LINE}, {transport}", ((2, 4), transport)
    large = (64 * _K - 64, 64 * _M)
    return [
        Check(line, "p50 ≤ gloo / 2 up to 1 MiB", "mccl-torch", "gloo", 1 / 2, None, (0, _M), *where, OTHERS),
        Check(line, "p50 ≤ gloo above", "mccl-torch", "gloo", 1.0, None, (_M + 1, 64 * _M), *where, OTHERS),
        Check(line, "≤ Open MPI from 64 KiB", "mccl", "openmpi", 1.0, 1.0, large, *where, OTHERS),
        Check(
            line,
            "no cliff: twice the bytes ≤ 2.6 × the time",
            "mccl",
            _TWICE,
            2.6,
            2.6,
            (8, 64 * _M),
            *where,
            tuple(OPERATIONS),
        ),
    ]


CHECKS = [
    Check(_C4, "≤ 1.1 × Open MPI", "mccl", "openmpi", 1.1, 1.1, (4, 4)),
    Check(_C4, "≤ gloo / 10", "mccl", "gloo", 1 / 10, 1 / 10, (4, 4)),
    Check(_C4, "raw exchange + 2 µs", "mccl", "raw", 1.0, 1.0, (4, 4), plus_us=2.0, is_aim=True),
    Check(_TORCH, "≤ gloo / 6", "mccl-torch", "gloo", 1 / 6, 1 / 6, (4, _K)),
    Check(_TORCH, "≤ 15 µs", "mccl-torch", "", 15, 15, (4, _K), is_aim=True),
    Check(_MIDDLE, "p50 ≤ gloo / 3, min ≤ gloo / 1.6", "mccl-torch", "gloo", 1 / 3, 1 / 1.6, (64 * _K, _M)),
    Check(_MIDDLE, "≤ Open MPI", "mccl", "openmpi", 1.0, 1.0, (64 * _K, _M)),
    Check(_MIDDLE, "≤ 1.25 × raw exchange", "mccl", "raw", 1.25, 1.25, (64 * _K, _M), is_aim=True),
    Check(_LARGE, "p50 ≤ gloo / 1.5, min ≤ gloo", "mccl-torch", "gloo", 1 / 1.5, 1.0, (16 * _M, 64 * _M)),
    Check(_LARGE, "≤ Open MPI / 1.5", "mccl", "openmpi", 1 / 1.5, 1 / 1.5, (16 * _M, 64 * _M)),
    Check(_LARGE, "≥ 75 % of the raw rate", "mccl", "raw", 1 / 0.75, 1 / 0.75, (16 * _M, 64 * _M)),
    Check(_LARGE, "85 % of the raw rate", "mccl", "raw", 1 / 0.85, 1 / 0.85, (16 * _M, 64 * _M), is_aim=True),
    Check(_FOUR, "≤ gloo / 4 up to 1 MiB", "mccl-torch", "gloo", 1 / 4, 1 / 4, (4, _M), (4,)),
    Check(_FOUR, "≤ gloo / 1.5 above", "mccl-torch", "gloo", 1 / 1.5, 1 / 1.5, (_M + 1, 64 * _M), (4,)),
    Check(_FOUR, "≤ Open MPI, which yields", "mccl", "openmpi", 1.0, 1.0, (4, 64 * _M), (4,)),
    Check(
        _FOUR, "1.3 × Open MPI's speed", "mccl", "openmpi", 1 / 1.3, 1 / 1.3, (4, 64 * _M), (4,), is_aim=True
    ),
    Check(_SHM4, "≤ 1.2 × Open MPI", "mccl", "openmpi", 1.2, 1.2, (4, 4), transport="shm"),
    Check(_SHM4, "0.4 µs", "mccl", "", 0.4, 0.4, (4, 4), transport="shm", is_aim=True),
    Check(_SHM, "≤ 0.8 × Open MPI", "mccl", "openmpi", 0.8, 0.8, (64 * _K, 16 * _M), transport="shm"),
    Check(
        _SHM,
        "≤ 1.3 × two copies",
        "mccl",
        "memcpy",
        1.3,
        1.3,
        (64 * _K, 16 * _M),
        transport="shm",
        is_aim=True,
    ),
    *(check for transport in ("tcp", "shm") for check in _others(transport)),
]

# Lines that other programs measure. Each may leave its verdicts in a file `verdict-*.json` in the folder of
# the report: a list of {"line", "text", "bound", "p50", "min", "answer"}, texts.
ELSEWHERE = {
    "growth": "time ≤ 1.3 × the cost model; memory ≤ 8 MiB + 2 MiB × peers",
    "DDP, shaped link": "≥ 80 % of the wire time hidden behind the backward pass",
    "DDP, unshaped, 2 ranks on 2 cores": "step time ≤ 0.95 × gloo's",
}


def judge(rows: Sequence[Row], sched: str = "default") -> list[Verdict]:
    """A verdict for each check, from the rows of one scheduling."""
    chosen = [row for row in rows if row["sched"] == sched and row["dtype"] == "float32"]
    return [_judge(check, chosen) for check in CHECKS]


def _judge(check: Check, rows: Sequence[Row]) -> Verdict:
    bounds = [("p50_us", check.p50), ("min_us", check.minimum)]
    shown, within = [], True
    for key, bound in bounds:
        values = [(_value(check, key, mine, other), mine) for mine, other in _pairs(check, rows)]
        if not values:
            bound_text = _bound(check)
            return Verdict(check.line, check.text, bound_text, "-", "-", "not measured here", check.is_aim)
        worst, where = max(values, key=lambda pair: pair[0])
        shown.append(f"{worst:.3g} at {_where(check, where)}")
        within = within and (bound is None or worst <= bound)
    words = ("reached", "not reached") if check.is_aim else ("holds", "DOES NOT HOLD")
    answer = words[0] if within else words[1]
    return Verdict(check.line, check.text, _bound(check), shown[0], shown[1], answer, check.is_aim)


def _bound(check: Check) -> str:
    unit = "" if check.peer else " µs"
    if check.minimum is None:
        return f"p50 {check.p50:.3g}{unit}"
    if check.minimum == check.p50:
        return f"{check.p50:.3g}{unit}"
    return f"p50 {check.p50:.3g}{unit}, min {check.minimum:.3g}{unit}"


def _value(check: Check, key: str, mine: Row, other: Row | None) -> float:
    return float(mine[key] / (other[key] + check.plus_us) if other else mine[key])


def _where(check: Check, row: Row) -> str:
    size = row["bytes"]
    text = f"{size >> 20} MiB" if size >= _M else f"{size >> 10} KiB" if size >= _K else f"{size} B"
    if len(check.ops) > 1:
        text = row["op"] if row["op"] == "barrier" else f"{row['op']} {text}"
    return f"{text}, n={row['n']}" if len(check.n) > 1 else text


def _pairs(check: Check, rows: Sequence[Row]) -> Iterable[tuple[Row, Row | None]]:
    """MCCL's rows of a check, each with the one that it is compared with."""
    found = {
        (row["lib"], row["op"], row["n"], row["bytes"], row["phase"]): row
        for row in rows
        if row["beside"] == check.transport and row["op"] in check.ops and row["n"] in check.n
    }
    for (lib, op, n, size, phase), row in found.items():
        if lib != check.lib or not check.sizes[0] <= size <= check.sizes[1]:
            continue
        if not check.peer:
            yield row, None
        elif check.peer == _TWICE:
            half = found.get((lib, op, n, size // 2, phase))
            if half and phase == "cliff" and size % 2 == 0:
                yield row, half
        elif (check.peer, op, n, size, phase) in found:
            yield row, found[check.peer, op, n, size, phase]


def elsewhere(folder: Path) -> list[Verdict]:
    """Verdicts that other programs have left in `folder`, and the lines that have none."""
    found = []
    for path in sorted(folder.glob("verdict-*.json")):
        for item in json.loads(path.read_text()):
            texts = [str(item.get(key, "-")) for key in ("line", "text", "bound", "p50", "min", "answer")]
            found.append(Verdict(*texts, is_aim=False))  # type: ignore[misc, arg-type]
    known = {verdict.line for verdict in found}
    found += [
        Verdict(line, text, "-", "-", "-", "not measured here", False)
        for line, text in ELSEWHERE.items()
        if line not in known
    ]
    return found

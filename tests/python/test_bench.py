"""The arithmetic of `mccl bench`: percentiles, bandwidths, sizes, expected values, verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mccl.bench import suite
from mccl.bench.libraries import LIBRARIES, Setup
from mccl.bench.measure import Plan, Row, percentile, row
from mccl.bench.operations import ELEMENT_BYTES, OPERATIONS
from mccl.bench.rank import Data
from mccl.bench.verdicts import CHECKS, ELSEWHERE, Verdict, elsewhere, judge


def test_percentile_is_the_nearest_rank() -> None:
    times = list(range(1, 11))
    assert [percentile(times, percent) for percent in (1, 10, 11, 50, 90, 91, 100)] == [1, 1, 2, 5, 9, 10, 10]
    assert percentile([7], 90) == 7


def test_row() -> None:
    plan = Plan(Setup(4, "tcp"), ["all_reduce"], [1 << 20])
    made = row(LIBRARIES["mccl"], plan, "all_reduce", 1 << 20, [[1000, 5000], [2000, 4000, 3000]], 2)
    assert (made["p50_us"], made["min_us"], made["p90_us"], made["calls"]) == (3.0, 1.0, 5.0, 5)
    assert made["algbw_GBps"] == round((1 << 20) / 3000, 4)
    assert made["busbw_GBps"] == round((1 << 20) / 3000 * 1.5, 4)
    assert (made["wrong"], made["rounds_p50_us"]) == (2, [3.0, 3.0])


def test_a_library_without_shared_memory_says_what_it_used() -> None:
    assert LIBRARIES["gloo"].transport(Setup(2, "shm")) == "tcp"
    assert LIBRARIES["mccl"].transport(Setup(2, "shm")) == "shm"


@pytest.mark.parametrize(
    ("op", "n", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("gather", 2, 0.5),
        ("scatter", 2, 0.5),
        ("broadcast", 4, 1.0),
        ("reduce", 4, 1.0),
        ("send_recv", 4, 1.0),
    ],
)
def test_bus_factor(op: str, n: int, factor: float) -> None:
    assert OPERATIONS[op].bus_factor(n) == factor


@pytest.mark.parametrize(
    ("op", "wanted", "n", "element", "actual"),
    [
        ("all_reduce", 4, 3, 4, 4),
        ("all_reduce", 6, 3, 4, 4),
        ("all_gather", 4, 3, 4, 12),
        ("all_gather", 100, 3, 4, 96),
        ("barrier", 100, 3, 4, 0),
    ],
)
def test_actual_bytes(op: str, wanted: int, n: int, element: int, actual: int) -> None:
    assert OPERATIONS[op].actual_bytes(wanted, n, element) == actual


def _results(op: str, sends: list[Any], n: int) -> list[Any]:
    """What each rank has to receive, written down a second time; None where nothing arrives."""
    blocks = [list(send.chunk(n)) for send in sends]
    ways: dict[str, Callable[[], list[Any]]] = {
        "all_reduce": lambda: [sum(sends)] * n,
        "reduce": lambda: [sum(sends)] + [None] * (n - 1),
        "broadcast": lambda: [sends[0]] * n,
        "all_gather": lambda: [torch.cat(sends)] * n,
        "reduce_scatter": lambda: [sum(blocks[rank][own] for rank in range(n)) for own in range(n)],
        "gather": lambda: [torch.cat(sends)] + [None] * (n - 1),
        "scatter": lambda: blocks[0],
        "all_to_all": lambda: [torch.cat([blocks[rank][own] for rank in range(n)]) for own in range(n)],
        "send_recv": lambda: [sends[rank - 1] for rank in range(n)],
    }
    return ways[op]()


@pytest.mark.parametrize("dtype", list(ELEMENT_BYTES))
@pytest.mark.parametrize("op", [name for name in OPERATIONS if name != "barrier"])
def test_expected_values_and_that_wrong_ones_are_counted(op: str, dtype: str) -> None:
    n, size = 3, 3 * 70 * ELEMENT_BYTES[dtype]
    ranks = [Data(torch, rank, n, op, dtype, size) for rank in range(n)]
    results = _results(op, [data.source for data in ranks], n)
    for data, result in zip(ranks, results):
        data.fill()
        if result is None:
            assert not data.is_checked and data.count_wrong() == 0
            continue
        assert data.count_wrong() > 0 or (data.in_place and torch.equal(data.source, result))
        data.target.copy_(result)
        assert data.count_wrong() == 0
        data.target[-1] += 1
        data.target[0] += 1
        assert data.count_wrong() == 2


# ---- verdicts ----


def _row(lib: str, p50: float, least: float, **more: Any) -> Row:
    usual = {"op": "all_reduce", "n": 2, "bytes": 4, "dtype": "float32", "beside": "tcp"}
    return {
        "lib": lib,
        "p50_us": p50,
        "min_us": least,
        "sched": "default",
        "phase": "compare",
        **usual,
        **more,
    }


def _answer(rows: list[Row], line: str, text: str) -> Verdict:
    (found,) = [found for found in judge(rows) if found.line == line and text in found.text]
    return found


def test_a_line_holds_if_p50_and_min_are_within_the_bound() -> None:
    line, text = "TCP n=2, 4 B, in C", "Open MPI"
    other = _row("openmpi", 10, 10)
    assert _answer([_row("mccl", 11, 11), other], line, text).answer == "holds"
    assert _answer([_row("mccl", 11.2, 11), other], line, text).answer == "DOES NOT HOLD"
    found = _answer([_row("mccl", 11, 11.2), other], line, text)
    assert (found.answer, found.p50, found.minimum) == ("DOES NOT HOLD", "1.1 at 4 B", "1.12 at 4 B")
    assert _answer([_row("mccl", 11, 11)], line, text).answer == "not measured here"
    assert _answer([_row("mccl", 11, 11, sched="rr"), other], line, text).answer == "not measured here"


def test_the_worst_size_decides() -> None:
    line, text = "TCP n=2, 64 KiB, 1 MiB", "Open MPI"
    rows = [
        _row(lib, p50, 1, bytes=size)
        for lib, p50, size in [
            ("mccl", 1, 65536),
            ("openmpi", 2, 65536),
            ("mccl", 3, 1 << 20),
            ("openmpi", 2, 1 << 20),
            ("mccl", 9, 4),
            ("openmpi", 2, 4),
        ]
    ]
    found = _answer(rows, line, text)
    assert (found.answer, found.p50) == ("DOES NOT HOLD", "1.5 at 1 MiB")


def test_aims_are_told_apart_and_may_add_time() -> None:
    rows = [_row("mccl", 7, 7), _row("raw", 5, 5)]
    assert _answer(rows, "TCP n=2, 4 B, in C", "raw").answer == "reached"
    rows = [_row("mccl", 7.1, 7), _row("raw", 5, 5)]
    assert _answer(rows, "TCP n=2, 4 B, in C", "raw").answer == "not reached"
    assert (
        _answer([_row("mccl-torch", 15, 14)], "TCP n=2, 4 B … 1 KiB through torch", "15 µs").answer
        == "reached"
    )


@pytest.mark.parametrize(("second", "answer"), [(2.6, "holds"), (2.7, "DOES NOT HOLD")])
def test_cliff(second: float, answer: str) -> None:
    rows = [
        _row("mccl", t, t, op="gather", bytes=size, phase="cliff") for t, size in [(1, 64), (second, 128)]
    ]
    rows.append(_row("mccl", 100, 100, op="gather", bytes=256))  # of another phase
    assert _answer(rows, "every other collective, tcp", "cliff").answer == answer


def test_against_gloo_other_collectives_are_judged_by_p50_alone() -> None:
    rows = [_row("mccl-torch", 1, 9, op="scatter"), _row("gloo", 2, 1, op="scatter")]
    found = _answer(rows, "every other collective, tcp", "gloo / 2")
    assert (found.answer, found.minimum) == ("holds", "9 at scatter 4 B, n=2")


def test_every_check_can_be_measured_by_a_full_run() -> None:
    rows: list[Row] = []
    for setup, parts in suite.FULL.items():
        for part in parts:
            plan = Plan(setup, part.ops, part.sizes, "float32", part.rounds, part.round_s, part.phase)
            limit = "raw" if setup.transport == "tcp" else "memcpy"
            names = [limit if name == "raw" else name for name in part.names]
            for op, size in plan.cases():
                more = {"n": setup.n, "bytes": size, "beside": setup.transport, "phase": part.phase, "op": op}
                rows += [_row(name, 1, 1, sched=setup.sched, **more) for name in names]
    assert set(suite._NAMES) <= {row["lib"] for row in rows}
    assert {found.answer for found in judge(rows)} <= {"holds", "DOES NOT HOLD", "reached", "not reached"}
    assert len(judge(rows)) == len(CHECKS)


def test_lines_that_others_measure(tmp_path: Any) -> None:
    (tmp_path / "verdict-x.json").write_text('[{"line": "growth", "p50": "1.2", "answer": "holds"}]')
    found = {verdict.line: verdict.answer for verdict in elsewhere(tmp_path)}
    assert found == {**dict.fromkeys(ELSEWHERE, "not measured here"), "growth": "holds"}

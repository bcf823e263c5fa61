"""Rounds of calls, library after library, and the rows that come out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mccl.bench.libraries import Library, Setup
from mccl.bench.operations import ELEMENT_BYTES, OPERATIONS
from mccl.bench.team import Team

Row = dict[str, Any]

# The first calls after another library's turn find cold caches and, on TCP, a congestion window that starts
# over. They are not timed.
_WARM_UP_CALLS = 2
_FIRST_CALLS = (
    3  # before the rounds: buffers are made, connections too; they tell how many calls fit at first
)
_MIN_CALLS, _MAX_CALLS = 3, 1000  # in a round


class Plan(NamedTuple):
    """What to measure with one set of teams."""

    setup: Setup
    ops: Sequence[str]
    sizes: Sequence[int]
    dtype: str = "float32"
    rounds: int = 5
    round_s: float = 0.25  # of calls, for each library, size and round
    phase: str = "compare"  # kept in the rows: what the sizes were measured for

    def cases(self) -> list[tuple[str, int]]:
        """(operation, bytes), each once."""
        element = ELEMENT_BYTES[self.dtype]
        found = {
            (op, OPERATIONS[op].actual_bytes(size, self.setup.n, element)): None
            for op in self.ops
            for size in self.sizes
        }
        return list(found)


def percentile(ordered: Sequence[int], percent: int) -> int:
    """Nearest rank: the least of the times that at least `percent` of 100 do not exceed."""
    return ordered[max(-(-percent * len(ordered) // 100), 1) - 1]


def row(
    library: Library, plan: Plan, op: str, n_bytes: int, rounds_ns: Sequence[Sequence[int]], wrong: int
) -> Row:
    """One line of the result. Rates are of p50."""
    times = sorted(time for times in rounds_ns for time in times)
    p50_us = statistics.median(times) / 1e3
    algbw = n_bytes / p50_us / 1e3
    return {
        "lib": library.name,
        "op": op,
        "n": plan.setup.n,
        "bytes": n_bytes,
        "dtype": plan.dtype,
        "transport": library.transport(plan.setup),
        "p50_us": round(p50_us, 3),
        "min_us": round(times[0] / 1e3, 3),
        "p90_us": round(percentile(times, 90) / 1e3, 3),
        "algbw_GBps": round(algbw, 4),
        "busbw_GBps": round(algbw * OPERATIONS[op].bus_factor(plan.setup.n), 4),
        "wrong": wrong,
        "beside": plan.setup.transport,
        "sched": plan.setup.sched,
        "phase": plan.phase,
        "calls": len(times),
        "rounds_p50_us": [round(statistics.median(times) / 1e3, 3) for times in rounds_ns],
    }


def measure(teams: Sequence[Team], plan: Plan, op: str, n_bytes: int, step: Callable[[], None]) -> list[Row]:
    """A row for each team. `step` is called after each round of each team."""
    times: dict[str, list[list[int]]] = {team.library.name: [] for team in teams}
    wrong = dict.fromkeys(times, 0)
    slowest_ns = 1.0
    for team in teams:
        first = team.run(op, plan.dtype, n_bytes, 0, _FIRST_CALLS)
        slowest_ns = max(slowest_ns, statistics.median(first.times_ns))
        team.use_common_congestion_control()  # of connections that the operation has made
    for _ in range(plan.rounds):
        # As many calls for everybody: a minimum over more calls is a lower one.
        calls = int(min(max(plan.round_s * 1e9 / slowest_ns, _MIN_CALLS), _MAX_CALLS))
        slowest_ns = 1.0
        for team in teams:
            result = team.run(op, plan.dtype, n_bytes, _WARM_UP_CALLS, calls)
            times[team.library.name].append(result.times_ns)
            wrong[team.library.name] += result.wrong
            slowest_ns = max(slowest_ns, statistics.mean(result.times_ns))
            step()
    return [
        row(team.library, plan, op, n_bytes, times[team.library.name], wrong[team.library.name])
        for team in teams
    ]

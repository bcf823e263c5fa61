#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""All-reduce of MCCL and gloo through torch, side by side on this machine, with a verdict per line.

    python bench/all_reduce.py [-n 2,4] [-b 4] [-e 64M] [-f 4] [--rounds 5] [--json FILE] [--plot FILE]

How it measures:

* Each library has processes of its own, n each. They take turns, a round of calls each (A B A B ...), so that
  what else the machine does meets both. Who is not measured sleeps.
* All ranks begin a call together: they line up at counters in a shared page, not at a library's barrier.
  The time of a call is that of its slowest rank.
* Both use TCP over loopback with the same congestion control, float32, SUM, in place, one torch thread.
* Before each call the buffer is filled, after it every element is compared: `wrong` counts what differs.
* For n = 2 a bare socket exchange of the same sizes (raw_exchange.c) shows what the machine can do.

The exit status is 1 if any value is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from raw import Raw
from team import Team

BUILD = Path(__file__).resolve().parent.parent / "build" / "bench"
LIBRARIES = ("mccl", "gloo")
ROUND_S = 0.3  # of calls, for each library and size
CALLS_MIN, CALLS_MAX = 5, 200  # in a round
WARM_UP_CALLS = 3


def size(text: str) -> int:
    """Bytes from '4', '64K', '1M' or '1G'."""
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    try:
        value = int(text[:-1] if unit else text) << unit
    except ValueError:
        value = 0
    if value <= 0 or value % 4:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive multiple of 4 such as 4, 64K or 16M")
    return value


def group_sizes(text: str) -> list[int]:
    """Numbers of ranks from '2,4'."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of ranks from 2 on, such as 2,4")
    return values


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", type=group_sizes, default=[2, 4], metavar="N,...", help="ranks (2,4)")
    parser.add_argument("-b", type=size, default=4, metavar="BYTES", help="smallest size (4)")
    parser.add_argument("-e", type=size, default=64 << 20, metavar="BYTES", help="largest size (64M)")
    parser.add_argument("-f", type=int, default=4, metavar="FACTOR", help="from one size to the next (4)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each library per size (5)")
    parser.add_argument("--json", type=Path, default=BUILD / "all_reduce.json", metavar="FILE")
    parser.add_argument("--plot", type=Path, default=BUILD / "all_reduce.png", metavar="FILE")
    options = parser.parse_args()
    if options.f < 2 or options.rounds < 1 or options.e < options.b:
        parser.error("needs -f of at least 2, --rounds of at least 1, and -e not below -b")
    return options


def sizes(options: argparse.Namespace) -> list[int]:
    found = [options.b]
    while found[-1] * options.f <= options.e:
        found.append(found[-1] * options.f)
    return found


def measure(contestants: list[Any], n: int, n_bytes: int, rounds: int) -> list[report.Row]:
    """One row per contestant for one size."""
    # As many calls for everybody: a minimum over more calls is a lower one.
    slowest_ns = max(min(contestant.run(n_bytes, WARM_UP_CALLS).times_ns) for contestant in contestants)
    calls = int(min(max(ROUND_S * 1e9 / slowest_ns, CALLS_MIN), CALLS_MAX))
    times: dict[str, list[int]] = {contestant.name: [] for contestant in contestants}
    wrong = dict.fromkeys(times, 0)
    for _ in range(rounds):
        for contestant in contestants:
            result = contestant.run(n_bytes, calls)
            times[contestant.name] += result.times_ns
            wrong[contestant.name] += result.wrong
    return [report.row(name, n, n_bytes, times[name], wrong[name]) for name in times]


def machine(congestion: dict[str, list[str]]) -> dict[str, Any]:
    import torch

    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "congestion_control": congestion,
    }


def main() -> int:
    options = arguments()
    rows: list[report.Row] = []
    congestion: dict[str, list[str]] = {}
    for n in options.n:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mccl-bench-")))
            contestants: list[Any] = [
                stack.enter_context(contextlib.closing(Team(name, n, options.e, folder)))
                for name in LIBRARIES
            ]
            congestion.update((team.name, team.congestion_control()) for team in contestants)
            if n == 2 and (raw := Raw.build(BUILD)):
                contestants.append(raw)
            report.print_head(n, congestion)
            for n_bytes in sizes(options):
                measured = measure(contestants, n, n_bytes, options.rounds)
                report.print_size(measured)
                rows += measured
    report.print_summary(rows)
    report.save_json(options.json, machine(congestion), rows)
    report.save_plot(options.plot, rows)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

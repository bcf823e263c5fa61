# SPDX-License-Identifier: MIT
"""What a benchmark shows: nccl-tests' columns with a verdict per line, JSON, a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]

COLORS = {"mccl": "tab:blue", "gloo": "tab:orange", "raw": "tab:gray"}


def row(library: str, n: int, n_bytes: int, times_ns: list[int], wrong: int) -> Row:
    """One line of the result. Rates are of p50; bus bandwidth is what an optimal algorithm moves per rank."""
    times = sorted(times_ns)
    p50_us = statistics.median(times) / 1e3
    algbw = n_bytes / p50_us / 1e3
    return {
        "lib": library,
        "op": "exchange" if library == "raw" else "all_reduce",
        "n": n,
        "bytes": n_bytes,
        "dtype": "float32",
        "transport": "tcp",
        "p50_us": round(p50_us, 2),
        "min_us": round(times[0] / 1e3, 2),
        "p90_us": round(times[(9 * len(times) - 1) // 10] / 1e3, 2),
        "algbw_GBps": round(algbw, 4),
        "busbw_GBps": round(algbw * 2 * (n - 1) / n, 4),
        "wrong": wrong,
    }


def print_head(n: int, congestion: dict[str, list[str]]) -> None:
    """Head of the table for `n` ranks."""
    used = ", ".join(f"{library} {'/'.join(names) or '?'}" for library, names in congestion.items())
    print(f"\n# all-reduce, n = {n}, float32 sum, in place, TCP on one host; congestion control: {used}")
    print(
        f"#{'size':>9} {'lib':>5} {'p50':>10} {'min':>10} {'p90':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>6}"
        "  verdict"
    )
    print(f"#{'(B)':>9} {'':>5} {'(us)':>10} {'(us)':>10} {'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8}")


def print_size(rows: list[Row]) -> None:
    """The lines of one size."""
    for line in rows:
        print(
            f"{line['bytes']:>10} {line['lib']:>5} {line['p50_us']:>10.1f} {line['min_us']:>10.1f} "
            f"{line['p90_us']:>10.1f} {line['algbw_GBps']:>8.3f} {line['busbw_GBps']:>8.3f} "
            f"{line['wrong']:>6}  {_verdict(line, rows)}".rstrip(),
            flush=True,
        )


def print_summary(rows: list[Row]) -> None:
    """The last lines: does MCCL ever lose, and is every value right?"""
    pairs = list(_pairs(rows))
    slower = [pair for pair in pairs if min(_speedups(*pair)) < 1]
    print()
    if pairs:
        p50, least = zip(*(_speedups(*pair) for pair in pairs))
        print(
            f"MCCL is not slower than gloo in {len(pairs) - len(slower)} of {len(pairs)} lines; "
            f"times as fast at p50: {min(p50):.2f} to {max(p50):.2f}, at min: {min(least):.2f} to "
            f"{max(least):.2f}."
        )
    for mccl, gloo in slower:
        p50, least = _speedups(mccl, gloo)
        print(f"  slower: n = {mccl['n']}, {mccl['bytes']} bytes: {p50:.2f} at p50, {least:.2f} at min")
    wrong = sum(line["wrong"] for line in rows)
    print("Every value is exact." if not wrong else f"WRONG VALUES: {wrong}")


def _pairs(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    gloo = {(line["n"], line["bytes"]): line for line in rows if line["lib"] == "gloo"}
    for line in rows:
        if line["lib"] == "mccl" and (line["n"], line["bytes"]) in gloo:
            yield line, gloo[line["n"], line["bytes"]]


def _speedups(mccl: Row, other: Row) -> tuple[float, float]:
    return other["p50_us"] / mccl["p50_us"], other["min_us"] / mccl["min_us"]


def _verdict(line: Row, rows: list[Row]) -> str:
    if line["wrong"]:
        return "WRONG VALUES"
    if line["lib"] != "mccl":
        return ""
    parts = []
    for mccl, gloo in _pairs(rows):
        p50, least = _speedups(mccl, gloo)
        word = "ok" if min(p50, least) >= 1 else "SLOWER"
        parts.append(f"{word}: {p50:.2f} x gloo at p50, {least:.2f} x at min")
    parts += [f"{_speedups(line, raw)[0]:.0%} of raw" for raw in rows if raw["lib"] == "raw"]
    return "; ".join(parts)


def save_json(path: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """An object of the machine's description and the rows, one to a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(line) for line in rows)
    path.write_text(f'{{"machine": {json.dumps(machine)},\n"rows": [\n{lines}\n]}}\n')
    print(f"Written: {path}")


def save_plot(path: Path, rows: list[Row]) -> None:
    """Time over size for each number of ranks; a band from the minimum to the 90th percentile."""
    try:
        import matplotlib
    except ImportError:
        print("No plot: matplotlib is not installed.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = sorted({line["n"] for line in rows})
    figure, axes = pyplot.subplots(1, len(numbers), figsize=(6 * len(numbers), 5), squeeze=False)
    for axis, n in zip(axes[0], numbers):
        for library, color in COLORS.items():
            lines = [line for line in rows if line["lib"] == library and line["n"] == n]
            if not lines:
                continue
            x = [line["bytes"] for line in lines]
            axis.plot(x, [line["p50_us"] for line in lines], "o-", color=color, label=library, markersize=3)
            low, high = ([line[key] for line in lines] for key in ("min_us", "p90_us"))
            axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="µs: p50, band min to p90")
        axis.set_title(f"all-reduce, n = {n}, float32, TCP on one host")
        axis.grid(True, which="major", alpha=0.3)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"Written: {path}")

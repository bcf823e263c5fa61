"""Time and bus bandwidth against size, all libraries in one picture."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mccl.bench.measure import Row
from mccl.bench.operations import OPERATIONS

_COLORS = {
    "mccl": "tab:blue",
    "mccl-torch": "tab:cyan",
    "gloo": "tab:orange",
    "openmpi": "tab:green",
    "raw": "tab:gray",
    "memcpy": "tab:gray",
}


def save_plot(path: Path, rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Two panels for each operation, number of ranks and transport. Returns what to tell the user."""
    if not importlib.util.find_spec("matplotlib"):
        return "no plot: install matplotlib"
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    panels = sorted(
        {(row["op"], row["n"], row["beside"], row["sched"]) for row in rows if row["bytes"] > 0},
        key=lambda panel: (list(OPERATIONS).index(panel[0]), *panel[1:]),
    )
    if not panels:
        return "no plot: a barrier has no size"
    figure, axes = pyplot.subplots(
        len(panels), 2, figsize=(12, 3.8 * len(panels)), squeeze=False, layout="constrained"
    )
    for (latency, bandwidth), (op, n, beside, sched) in zip(axes, panels):
        for library, color in _COLORS.items():
            lines = sorted(
                (
                    row
                    for row in rows
                    if (row["op"], row["n"], row["beside"], row["sched"]) == (op, n, beside, sched)
                    and row["lib"] == library
                ),
                key=lambda row: int(row["bytes"]),
            )
            if not lines:
                continue
            x = [row["bytes"] for row in lines]
            label = library if lines[0]["transport"] == beside else f"{library} ({lines[0]['transport']})"
            style = {"color": color, "label": label, "marker": "o", "markersize": 3}
            latency.plot(x, [row["p50_us"] for row in lines], **style)
            low, high = ([row[key] for row in lines] for key in ("min_us", "p90_us"))
            latency.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            bandwidth.plot(x, [row["busbw_GBps"] for row in lines], **style)
        where = f"{op}, n = {n}, {beside}" + (", SCHED_RR" if sched == "rr" else "")
        latency.set(xscale="log", yscale="log", xlabel="bytes", ylabel="µs: p50, band from min to p90")
        bandwidth.set(xscale="log", xlabel="bytes", ylabel="bus bandwidth at p50, GB/s")
        for axis in (latency, bandwidth):
            axis.set_title(where, fontsize=10)
            axis.grid(True, which="major", alpha=0.3)
            axis.legend(fontsize=8)
    figure.suptitle(f"{machine['processor']}, {machine['cpus']} cpus, {machine['date']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return f"written: {path}"

"""Counters over all live groups of this process. Imports no torch."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass

from mccl import _comm


@dataclass(frozen=True)
class MetricsSummary:
    """Sums over the live groups since they were made or since :func:`reset_metrics`; bytes are payload."""

    groups: int
    total_ops: int
    total_errors: int
    total_bytes_sent: int
    total_bytes_recv: int
    heartbeats_sent: int
    heartbeats_recv: int


_baseline: weakref.WeakKeyDictionary[_comm.Communicator, _comm.CommStats] = weakref.WeakKeyDictionary()


def get_metrics() -> MetricsSummary:
    """Counters of all live groups. Does not block."""
    groups = _comm.live()
    total = [0] * len(_comm.CommStats._fields)
    for comm in groups:
        base = _baseline.get(comm, (0,) * len(total))
        total = [sum_ + now - before for sum_, now, before in zip(total, comm.stats(), base)]
    operations, errors, sent, received, heartbeats_sent, heartbeats_received = total
    return MetricsSummary(
        len(groups), operations, errors, sent, received, heartbeats_sent, heartbeats_received
    )


def log_metrics() -> None:
    """Writes the counters to standard error, in one line."""
    fields = " ".join(f"{name}={value}" for name, value in vars(get_metrics()).items())
    sys.stderr.write(f"mccl metrics: {fields}\n")


def reset_metrics() -> None:
    """Counts from zero again."""
    for comm in _comm.live():
        _baseline[comm] = comm.stats()

# SPDX-License-Identifier: MIT
"""Lets the ranks of one team begin a call together, without any library: a page that all of them map."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

_SLOT = 16  # counters of 8 bytes from one rank's to the next: a cache line of 128 bytes each
_SPIN_S = 0.002  # then the core is offered to others: a rank that is late may need it


class LineUp:
    """One rank's place in the page; each rank counts its own arrivals and reads those of the others."""

    def __init__(self, path: str, rank: int, n: int) -> None:
        with open(path, "r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._own = rank * _SLOT
        self._all = [i * _SLOT for i in range(n)]
        self._spins = n <= (os.cpu_count() or 1)

    @staticmethod
    def create(path: Path, n: int) -> None:
        """Makes the page."""
        path.write_bytes(bytes(8 * _SLOT * n))

    def wait(self) -> None:
        """Returns when every rank has called it as often as this one."""
        counters = self._counters
        arrivals = counters[self._own] = counters[self._own] + 1
        spin_until = time.perf_counter() + _SPIN_S if self._spins else 0.0
        for other in self._all:
            while counters[other] < arrivals:
                if time.perf_counter() > spin_until:
                    os.sched_yield()

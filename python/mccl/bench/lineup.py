"""Lets the ranks of one team begin a call together, without any library: a page that all of them map.

bench/lineup.c is the same for ranks in C.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

MAX_RANKS = 16
_LINE = 128  # bytes from one rank's counter to the next: a cache line each
_PAGE_BYTES = 4 << 20  # with room for the rings of bench/lib_memcpy.c
_SPIN_S = 0.002  # then the core is offered to others: a rank that is late may need it
_DEADLINE_S = 120.0


def create(path: Path) -> None:
    """Makes the page."""
    path.write_bytes(bytes(_PAGE_BYTES))


class LineUp:
    """One rank's place in the page; each rank counts its own arrivals and reads those of the others."""

    def __init__(self, path: Path, rank: int, n: int, spins: bool) -> None:
        with path.open("r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._own = rank * _LINE // 8
        self._all = [i * _LINE // 8 for i in range(n)]
        self._spin_s = _SPIN_S if spins else 0.0

    def wait(self) -> None:
        """Returns when every rank has called it as often as this one. TimeoutError after two minutes."""
        counters = self._counters
        arrivals = counters[self._own] = counters[self._own] + 1
        begin = time.perf_counter()
        for other in self._all:
            while counters[other] < arrivals:
                waited = time.perf_counter() - begin
                if waited > _DEADLINE_S:
                    raise TimeoutError("another rank did not line up")
                if waited > self._spin_s:
                    os.sched_yield()

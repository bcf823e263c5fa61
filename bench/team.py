# SPDX-License-Identifier: MIT
"""The ranks of one library: n processes, started once, that run calls on request."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import rank as rank_module
from lineup import LineUp

ANSWER_S = 300.0  # the longest that a round may take; the groups' own time-out is shorter


class Result(NamedTuple):
    """Of a round: the time of each call, and how many elements of how many ranks were wrong."""

    times_ns: list[int]
    wrong: int


class Team:
    """Starts the ranks and joins them into a group. `largest` is the most bytes of a call."""

    def __init__(self, name: str, n: int, largest: int, folder: Path) -> None:
        self.name = name
        page = folder / f"page-{name}"
        LineUp.create(page, n)
        self._ranks: list[tuple[Any, Connection]] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(n):
            ours, theirs = context.Pipe()
            job = rank_module.Job(name, rank, n, largest, str(folder / f"store-{name}"), str(page))
            process = context.Process(target=rank_module.main, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._answers()

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        for _, connection in self._ranks:
            connection.send((method, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, (_, connection) in enumerate(self._ranks):
            try:
                if not connection.poll(ANSWER_S):
                    self._give_up(f"rank {rank} did not answer within {ANSWER_S:g} s")
                answers.append(connection.recv())
            except EOFError:
                self._give_up(f"rank {rank} ended; its last words are above")
        return answers

    def _give_up(self, why: str) -> None:
        self.close()
        sys.exit(f"{os.path.basename(sys.argv[0])}: {self.name}: {why}")

    def run(self, n_bytes: int, calls: int) -> Result:
        """`calls` all-reduces of `n_bytes`; each counts as long as on its slowest rank."""
        answers = self._ask("run", n_bytes, calls)
        times_ns = [max(times) for times in zip(*(times for times, _ in answers))]
        return Result(times_ns, sum(wrong for _, wrong in answers))

    def congestion_control(self) -> list[str]:
        """What the sockets of its ranks use, after the ranks have asked for the common one."""
        return sorted({name for names in self._ask("use_common_congestion_control") for name in names})

    def close(self) -> None:
        """Ends the processes."""
        for process, connection in self._ranks:
            connection.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []

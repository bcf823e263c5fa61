"""Teams of several libraries for one number of ranks and transport, and what is printed while they run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mccl.bench import report
from mccl.bench.libraries import Setup, chosen
from mccl.bench.machine import About
from mccl.bench.measure import Plan, Row, measure
from mccl.bench.team import BenchError, Team


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """Where teams have their sockets and pages: in memory if the system offers that, since ranks that write
    to a page of a file have to wait while it is written back to a disk."""
    memory = "/dev/shm"
    return tempfile.TemporaryDirectory(
        prefix="mccl-bench-", dir=memory if os.access(memory, os.W_OK | os.X_OK) else None
    )


@contextlib.contextmanager
def session(names: Sequence[str], setup: Setup, folder: Path, about: About) -> Iterator[list[Team]]:
    """A team for each library that can be measured, for as long as the context lasts."""
    libraries, notes = chosen(names, setup)
    with contextlib.ExitStack() as stack:
        teams = []
        for library in libraries:
            own = folder / f"{library.name}-{setup.transport}-{setup.n}-{setup.sched}"
            try:
                teams.append(stack.enter_context(contextlib.closing(Team(library, setup, own))))
            except BenchError as error:
                if library.name == "mccl":
                    raise
                notes.append(f"without {library.name}, which does not start: {' '.join(str(error).split())}")
        if not teams:
            raise BenchError("; ".join(["nothing can be measured", *notes]))
        for note in notes:
            line = f"n = {setup.n}, {setup.transport}: {note}"
            print(f"# {line}", flush=True)
            if line not in about.notes:
                about.notes.append(line)
        yield teams
        for team in teams:
            about.add(team)


def run(teams: Sequence[Team], plan: Plan) -> list[Row]:
    """Measures what is planned, and prints it line by line."""
    rows: list[Row] = []
    cases = plan.cases()
    what = f"n = {plan.setup.n}, {plan.setup.transport}"
    with report.progress(len(cases) * plan.rounds * len(teams), what) as (say, step):
        op_before = ""
        for op, n_bytes in cases:
            taking_part = [team for team in teams if not team.library.lacks(op, plan.dtype)]
            if op != op_before:
                _head(teams, plan, op, say)
                op_before = op
            measured = measure(taking_part, plan, op, n_bytes, step)
            for row in measured:
                say(report.line(row, measured))
            rows += measured
    return rows


def _head(teams: Sequence[Team], plan: Plan, op: str, say: Callable[[str], None]) -> None:
    say(report.heading(plan, op, teams))
    for team in teams:
        lacks = team.library.lacks(op, plan.dtype)
        if lacks:
            say(f"# without {team.library.name}: it has {lacks}")

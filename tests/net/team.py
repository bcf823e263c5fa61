"""Ranks of rank.py, spread over hosts: starting them, hearing what they say, letting them go."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hosts import Host

RANK = Path(__file__).with_name("rank.py")
LEAVE_LIMIT_S = 10
# A group is there in milliseconds if nothing has to be waited for; a name server or a lost packet costs more
# than this, a busy test machine less.
QUICK_S = 2.0


class Seat(NamedTuple):
    """Where a rank runs, and what is in its environment."""

    host: Host
    env: Mapping[str, str]
    hostname: str = ""


class Rank:
    """One process of rank.py."""

    def __init__(self, seat: Seat, rank: int, size: int, timeout_s: float, big: int) -> None:
        self.process = seat.host.start(
            sys.executable, str(RANK), str(rank), str(size), str(int(timeout_s * 1000)), str(big),
            env=seat.env, hostname=seat.hostname, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.said: dict[str, Any] = {}

    def listen(self) -> dict[str, Any]:
        """The next thing it says. The test's own limit bounds the wait."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, (
            f"{self.process.label} ended with status {self.process.wait()}: {self.process.stderr_text()}"
        )
        self.said = json.loads(line)
        return self.said

    def tell(self, line: str) -> None:
        """Answers it."""
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


class Team:
    """A group in the making: rank 0's id has been handed to the others."""

    def __init__(self, *seats: Seat, timeout_s: float = 20, big: int = 0) -> None:
        self.ranks = [Rank(seat, rank, len(seats), timeout_s, big) for rank, seat in enumerate(seats)]
        first = self.ranks[0].listen()
        for rank in self.ranks[1:]:
            rank.tell(first.get("id", "rank 0 has no id"))

    def join(self, within_s: float = QUICK_S) -> Team:
        """Waits until all have joined and found every result right; each had to join `within_s`."""
        said = [rank.listen() for rank in self.ranks]
        assert not any("error" in answer for answer in said), said
        assert all(answer["seconds"] <= within_s for answer in said), said
        return self

    def leave(self) -> None:
        """Lets all go, and checks that they went in peace."""
        for rank in self.ranks:
            rank.tell("leave")
        codes = [rank.process.wait(LEAVE_LIMIT_S) for rank in self.ranks]
        assert codes == [0] * len(codes)

    def logs(self) -> str:
        """Everything that ranks have logged."""
        return "".join(rank.process.stderr_text() for rank in self.ranks)


def seats(hosts: Sequence[Host], **env: str) -> list[Seat]:
    """One rank on each host, all with the same environment."""
    return [Seat(host, env) for host in hosts]


def fail_alone(host: Host, **env: str) -> str:
    """The error of a process that cannot even make an id; it must come at once."""
    rank = Rank(Seat(host, env), 0, 1, timeout_s=5, big=0)
    said = rank.listen()
    assert "error" in said, f"no error with {env}; it listens on {host.listeners()}"
    assert said["seconds"] < QUICK_S
    assert rank.process.wait(LEAVE_LIMIT_S) == 1
    return f"{said['type']}: {said['error']}"


def listens_on(host: Host, **env: str) -> set[str]:
    """Where a process that makes a group of its own listens on `host`."""
    others = host.listeners()
    team = Team(Seat(host, env)).join()
    found = host.listeners() - others
    team.leave()
    assert host.listeners() == others
    return found

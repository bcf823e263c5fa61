"""Notices that ranks mean different groups by one name, before they meet.

torch numbers groups in each process, and the number is where ranks look for each other in the store. Ranks
that do not make the same groups in the same order would wait for each other for ever, or join a stranger's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from mccl import _lib
from mccl._errors import MCCLConnectError, MCCLError, error_from
from mccl.torch.store import Answer, PatientStore

_LOOK_S = 0.2
_ANSWER_S = 0.4  # how long an error waits for the store's explanation


class Members(NamedTuple):
    """Of a group that is about to be made: their ranks in the world, and the world they belong to.

    Names are given once in the life of a world, but again in the next one, which may have the same store.
    """

    ranks: Sequence[int]
    world: str


class Roll:
    """The members as this rank knows them, against what other ranks have written into the store.

    The first one's entry stays there: who comes late, and means another group, must find it.
    """

    def __init__(self, store: PatientStore, members: Members) -> None:
        self._store = store
        self._mine = str(list(members.ranks))
        self._first_key = f"mccl/members/{members.world}"
        self._other_key = f"mccl/others/{members.world}"
        self._answer: Answer | None = None
        self._looked = time.monotonic()
        self.clashed = False

    def enter(self) -> None:
        """MCCLMismatchError if a rank with other members was here before, which is told."""
        what = "compare the group's members"
        try:
            first = _text(self._store.call(what, "compare_set", self._first_key, "", self._mine))
        except MCCLConnectError:  # not every store can; one that is gone fails the next call
            return
        if first != self._mine:
            self._store.call(what, "set", self._other_key, self._mine)
            raise self._clash(first)

    def look(self) -> None:
        """MCCLMismatchError if one has come since. Does not wait for the store."""
        now = time.monotonic()
        if self._answer is None:
            if now >= self._looked + _LOOK_S:
                self._looked = now
                self._answer = self._store.post("check", [self._other_key])
        elif self._answer.is_there():
            found, self._answer = self._answer.value, None
            if found:
                raise self._clash(self._other())

    def explain(self, error: MCCLError) -> MCCLError:
        """`error`, or the clash that is behind it: another rank may have noticed first and given up."""
        if self.clashed:
            return error
        answer = self._store.post("check", [self._other_key])
        return self._clash(self._other()) if answer.wait(_ANSWER_S) and answer.value else error

    def _other(self) -> str:
        return _text(self._store.call("compare the group's members", "get", self._other_key))

    def _clash(self, other: str) -> MCCLError:
        self.clashed = True
        return error_from(
            _lib.ERR_MISMATCH,
            f"mccl: {self._store.who}: this rank makes it with the members {self._mine}, another rank with "
            f"{_shown(other)}. All ranks must call new_group for the same groups in the same order, those "
            "that are no members too; or members only, with use_local_synchronization=True",
        )


def _text(value: bytes) -> str:
    return bytes(value).decode("ascii", "replace")


def _shown(text: str) -> str:
    """A list of ranks as it is. Anything may be in a store: the beginning of everything else, escaped."""
    return text if re.fullmatch(r"\[[\d, ]{0,8000}\]", text) else f"what is no list of ranks, {text[:40]!a}"

"""How the ranks of a group find each other: rank 0 publishes a unique id through torch's store.

Every wait returns to the interpreter at least every 0.2 s, so that Ctrl-C works, and none outlasts the
group's time-out, whatever becomes of the store: see store.py. The store is not used after check-in; the id
is deleted then, and what sub-groups leave there is in members.py.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from mccl import _lib
from mccl._comm import Communicator
from mccl._config import current, opening
from mccl._errors import MCCLConnectError, MCCLError, error_from
from mccl.torch.members import Members, Roll
from mccl.torch.store import Answer, PatientStore
from mccl.torch.work import WAIT_SLICE_MS

KEY = "mccl/id"
_SAY_AFTER_S = 5.0  # how long a wait is silent
_REREAD_S = 1.0  # how often a rank that is not connected yet looks whether its id has been replaced
_LONGEST_POLL_S = 0.05
_FORGET_S = 0.4  # how long a group that is ready waits for the store to delete its key

DEFAULT_TIMEOUT_MS = 30 * 60 * 1000  # as in src/comm/comm.c

Join = Callable[[_lib.UniqueId], Communicator]


def meet(
    store: Store,
    rank: int,
    size: int,
    name: str,
    timeout_ms: int,
    settings: str,
    members: Members | None = None,
) -> Communicator:
    """Joins the group, blocking until all ranks are connected.

    Raises MCCLError that names group, rank and what is missing: MCCLTimeoutError after `timeout_ms`,
    MCCLConnectError if the store fails, MCCLMismatchError if another rank names other `members`. `timeout_ms`
    of 0 stands for the library's default.
    """

    def join(unique_id: _lib.UniqueId) -> Communicator:
        return Communicator(unique_id, rank, size, name, timeout_ms, settings)

    if size == 1:
        return _lead(None, settings, join)
    who = f"rank {rank}/{size} of group '{name}'"
    patient = PatientStore(store, who, (timeout_ms or DEFAULT_TIMEOUT_MS) / 1000)
    roll = None if members is None else Roll(patient, members)
    try:
        if roll is not None:
            roll.enter()
        return _lead(patient, settings, join, roll) if rank == 0 else _follow(patient, join, roll)
    except MCCLError as error:
        if roll is not None and (clash := roll.explain(error)) is not error:
            raise clash from error
        raise
    finally:
        patient.close()


def _lead(store: PatientStore | None, settings: str, join: Join, roll: Roll | None = None) -> Communicator:
    with opening(settings):
        unique_id = _lib.new_unique_id()
    comm = join(unique_id)  # checks in before anybody can read the id
    publication = None if store is None else _Publication(store, unique_id)
    try:
        if publication is not None:
            publication.publish()
        while not comm.wait_ready(WAIT_SLICE_MS):
            if roll is not None:
                roll.look()
            if publication is not None:
                publication.look()
    except BaseException as error:
        comm.destroy()
        if publication is None:
            raise
        publication.withdraw()
        if isinstance(error, MCCLError) and (explained := publication.explain(error)) is not error:
            raise explained from error
        raise
    if publication is not None and (deletion := publication.withdraw()) is not None:
        # An id that stays there is recognised by those who dial it. So a store that cannot delete, or is gone
        # or stopped, is no failure of a group that is ready.
        deletion.wait(_FORGET_S)
    return comm


class _Publication:
    """Rank 0's id in the store, with its maker's name, and what becomes of it.

    Two processes that were started as rank 0 replace each other's id. So may the next life of a job that was
    started before this one has ended, and then it is this one that is wrong. Nobody tells which, so the older
    one gives up, and the newer one mentions the older one if it fails.
    """

    def __init__(self, store: PatientStore, unique_id: _lib.UniqueId) -> None:
        self._store = store
        self._mine = f"{_lib.unique_id_to_text(unique_id)} {socket.gethostname()}:{os.getpid()}"
        self._before = ""  # what was there
        self._watch = _Watch(store, self._mine)
        self._is_there = False

    def publish(self) -> None:
        what = "publish the group's id"
        self._is_there = True
        try:
            found = _decode(self._store.call(what, "compare_set", KEY, "", self._mine))
        except MCCLConnectError:  # not every store can
            found = ""
        if found != self._mine:
            self._before = found
            self._store.call(what, "set", KEY, self._mine)

    def look(self) -> None:
        """MCCLMismatchError if another id has taken the place of ours. Does not wait for the store."""
        if other := self._watch.other():
            self._is_there = False
            raise error_from(
                _lib.ERR_MISMATCH,
                f"mccl: {self._store.who} ({_maker(self._mine)}) waits for the others, but {_maker(other)} "
                "has become rank 0 of this group since: rank 0 is there twice. Check how RANK is set; or is "
                "this process left from an earlier start of the job?",
            )

    def explain(self, error: MCCLError) -> MCCLError:
        """`error`, with what may be behind it."""
        if not self._before:
            return error
        return error_from(
            error.code,
            f"{error}. When this rank ({_maker(self._mine)}) came, the store held the id of another rank 0, "
            f"{_maker(self._before)}: if that one is running, rank 0 is there twice",
        )

    def withdraw(self) -> Answer | None:
        """None if there is nothing to delete."""
        return self._store.post("delete_key", KEY) if self._is_there else None


def _maker(text: str) -> str:
    return text.partition(" ")[2] or "an unknown process"


def _follow(store: PatientStore, join: Join, roll: Roll | None) -> Communicator:
    warned = False
    while True:
        text = _read_id(store, roll)
        comm = join(_parse(store, text))
        try:
            if _wait_ready(comm, store, text, roll):
                return comm
            comm.destroy()  # the id was of an earlier life of the group, and a new one is there
        except MCCLError as error:
            comm.destroy()
            if roll is not None and roll.clashed:
                raise
            # Nobody listens behind an id that outlived its maker. Other errors are final if it is the newest.
            if not isinstance(error, MCCLConnectError) and not _is_replaced(_look(store, text), text):
                raise
            if store.is_late():
                raise
            if not warned:
                warned = True
                _say(f"{store.who}: {error}; reading the group's id again")
            time.sleep(_LONGEST_POLL_S)
        except BaseException:
            comm.destroy()
            raise


def _parse(store: PatientStore, text: str) -> _lib.UniqueId:
    try:
        return _lib.unique_id_from_text(text.partition(" ")[0])
    except MCCLError as error:
        raise error_from(
            error.code, f"mccl: {store.who} read the group's id from store key {KEY!r}: {error}"
        ) from None


def _wait_ready(comm: Communicator, store: PatientStore, text: str, roll: Roll | None) -> bool:
    """True when connected, False when another id has taken the place of `text`."""
    watch = _Watch(store, text)
    while not comm.wait_ready(WAIT_SLICE_MS):
        if roll is not None:
            roll.look()
        if watch.other():
            return False
        # The library's own deadline, which began when the id was there, has the better text: let it win.
        if store.is_late(2 * WAIT_SLICE_MS / 1000):
            comm.abort()
            raise error_from(
                _lib.ERR_TIMEOUT, f"mccl: {store.who} was not connected when the group's time-out passed"
            )
    return True


class _Watch:
    """Looks now and then whether another id has taken the place of `text`. Does not wait for the store."""

    def __init__(self, store: PatientStore, text: str) -> None:
        self._store = store
        self._text = text
        self._look_at = time.monotonic() + _REREAD_S
        self._newest: Answer | None = None  # asked for

    def other(self) -> str:
        """That id, or ""."""
        now = time.monotonic()
        newest = self._newest
        if newest is not None and newest.is_there():
            self._newest = None
            if _is_replaced(newest, self._text):
                return _decode(newest.value)
        if self._newest is None and now >= self._look_at:
            self._look_at = now + _REREAD_S
            self._newest = _ask(self._store, self._text)
        return ""


def _ask(store: PatientStore, text: str) -> Answer:
    """For the id now in the store; `text` if there is none. get() would block for a deleted key."""
    return store.post("compare_set", KEY, text, text)


def _look(store: PatientStore, text: str) -> Answer:
    newest = _ask(store, text)
    newest.wait(_FORGET_S)
    return newest


def _is_replaced(newest: Answer, text: str) -> bool:
    """False also if the store did not say."""
    return newest.is_there() and newest.error is None and _decode(newest.value) != text


def _read_id(store: PatientStore, roll: Roll | None) -> str:
    what = "wait for rank 0 to publish the group's id"
    started = time.monotonic()
    said = False
    poll_s = 0.001
    while not store.call(what, "check", [KEY]):
        if roll is not None:
            roll.look()
        if store.is_late():
            raise error_from(
                _lib.ERR_TIMEOUT,
                f"mccl: {store.who} waited {store.limit_s:g} s for rank 0 to publish the group's id (store "
                f"key {KEY!r}). Is rank 0 running, and does it make the same groups in the same order?",
            )
        if not said and time.monotonic() - started >= _SAY_AFTER_S:
            said = True
            _say(f"{store.who} waits for rank 0 to publish the group's id, for at most {store.limit_s:g} s")
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
    return _decode(store.call(what, "get", KEY))


def _decode(value: bytes) -> str:
    return bytes(value).decode("ascii", "replace")


def _say(text: str) -> None:
    if current("log_level")[0].upper() not in ("OFF", "FATAL", "ERROR", "0", "1", "2"):
        sys.stderr.write(f"mccl: {text}\n")

"""One rank's membership in a group: the C communicator and what it needs. Imports no torch.

Any thread may use a communicator. A forked child may not: its sockets belong to the parent.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
import weakref
from ctypes import byref, c_void_p, create_string_buffer, sizeof
from typing import NamedTuple, Protocol

from mccl import _lib
from mccl._errors import MCCLError, check, error_from

# How long an exit without destroy lets operations in flight finish before it aborts them.
_EXIT_GRACE_S = 0.5
_ROOM_SLICE_MS = 20
_SLICE_S = 0.1  # of other waits, so that Ctrl-C works


class Pending(Protocol):
    """An operation whose buffers must live until it is done."""

    def advance(self) -> bool:
        """Looks, without blocking, whether it is done; if so cleans up after it."""

    @property
    def is_watched(self) -> bool:
        """True if another thread looks after it."""

    def count_unfinished(self) -> int:
        """How many of its operations are not done. Does not block."""

    def rest(self, timeout_ms: int) -> None:
        """Waits at most this long for one of its operations."""

    def disown(self, text: str) -> None:
        """In a forked child: it failed, and its C object must not be touched."""


class CommStats(NamedTuple):
    """Counters of one communicator since it was made; bytes are payload."""

    operations: int
    errors: int
    bytes_sent: int
    bytes_received: int
    heartbeats_sent: int
    heartbeats_received: int


class _Handle:
    """The C object, destroyed once. Apart from Communicator so that a finalizer can hold it."""

    def __init__(self, value: int) -> None:
        self.value: int | None = value
        self._lock = threading.Lock()

    def destroy(self) -> None:
        if self.value is None:  # also in a forked child, where the lock may be held for ever
            return
        with self._lock:
            value, self.value = self.value, None
        if value is not None:
            _lib.lib().mccl_comm_destroy(value)


class Communicator:
    """Starts joining the group named by `unique_id`; :meth:`wait_ready` says when that is finished.

    `settings` is the text of mccl_config.settings; `timeout_ms` limits check-in and, later, every operation.
    """

    def __init__(
        self, unique_id: _lib.UniqueId, rank: int, size: int, name: str, timeout_ms: int, settings: str
    ) -> None:
        config = _lib.Config(
            sizeof(_lib.Config), timeout_ms, settings.encode() or None, name.encode(), _lib.CONFIG_NONBLOCKING
        )
        value = c_void_p()
        check(_lib.lib().mccl_comm_init_rank(byref(value), size, byref(unique_id), rank, byref(config)))
        assert value.value is not None
        self.name = name
        self.rank = rank
        self.size = size
        self.digest = hashlib.sha256(bytes(unique_id)).hexdigest()[:16]  # the same on all ranks
        self._handle = _Handle(value.value)
        # Operations that are not known to be done. They keep their buffers alive, whoever holds them.
        self.pending: dict[Pending, None] = {}
        self.batches: dict[Pending, int] = {}  # those of several operations: how many more than one
        self.queue_depth = int(self._setting("max_queue_depth"))
        self._closed_because = "was destroyed"
        weakref.finalize(self, self._handle.destroy).atexit = False
        _live.add(self)

    @property
    def handle(self) -> int:
        """The ``mccl_comm *``. MCCLError if the communicator is gone."""
        value = self._handle.value
        if value is None:
            raise error_from(_lib.ERR_INVALID_USAGE, self._why_closed())
        return value

    def _why_closed(self) -> str:
        who = f"group '{self.name}' (rank {self.rank}/{self.size})"
        return f"mccl: {who} {self._closed_because}; make a new group"

    @property
    def is_open(self) -> bool:
        """False after destroy, and in a forked child."""
        return self._handle.value is not None

    def wait_ready(self, timeout_ms: int) -> bool:
        """True once all ranks are connected, False after `timeout_ms`. MCCLError if they cannot be."""
        code = _lib.lib().mccl_comm_wait_ready(self.handle, timeout_ms)
        if code == _lib.IN_PROGRESS:
            return False
        check(code)
        return True

    def sweep(self, at_most: int) -> None:
        """Forgets those of the `at_most` oldest pending operations that are done. Does not block."""
        for _ in range(min(at_most, len(self.pending))):
            try:
                work = next(iter(self.pending))
            except (StopIteration, RuntimeError):  # another thread emptied or changed it
                return
            # One that takes long must not hide the others: to the end of the line.
            unfinished = work.is_watched or not work.advance()
            if self.pending.pop(work, work) is None and unfinished:
                self.pending[work] = None

    def make_room(self) -> None:
        """Waits until submitting does not block: here, since C would not return to the interpreter."""
        while self._is_full and (work := self._first_in_the_way()) is not None:
            work.rest(_ROOM_SLICE_MS)

    @property
    def _is_full(self) -> bool:
        n = len(self.pending)
        return (n + sum(list(self.batches.values())) if self.batches else n) >= self.queue_depth

    def _first_in_the_way(self) -> Pending | None:
        """The oldest operation that has to end before another can be submitted without waiting."""
        works = list(self.pending)
        n = len(works) + sum(list(self.batches.values()))
        oldest = None
        for work in works:
            taken = 1 + self.batches.get(work, 0)
            unfinished = work.count_unfinished() if work.is_watched or not work.advance() else 0
            n -= taken - unfinished
            if n < self.queue_depth:
                return None
            if unfinished and oldest is None:
                oldest = work
        return oldest

    def _setting(self, name: str) -> str:
        value = create_string_buffer(64)
        check(_lib.lib().mccl_setting_get(self._handle.value, name.encode(), value, len(value), None, 0))
        return value.value.decode()

    def stats(self) -> CommStats:
        """Counters so far."""
        stats = _lib.Stats(sizeof(_lib.Stats))
        check(_lib.lib().mccl_comm_get_stats(self.handle, byref(stats)))
        return CommStats(*(getattr(stats, field) for field in CommStats._fields))

    def abort(self) -> None:
        """Fails all operations in flight, here and on the other ranks. Does not block."""
        if self.is_open:
            check(_lib.lib().mccl_comm_abort(self.handle))

    def destroy(self) -> None:
        """Leaves the group; operations in flight get at most 2 s. Repeated calls do nothing.

        Ctrl-C ends the wait for them; they keep what is left of their 2 s, and their buffers.
        """
        _live.discard(self)
        if not self.pending:
            self._handle.destroy()
            return
        leaver = threading.Thread(target=self._leave, name="mccl-leave", daemon=True)
        try:
            leaver.start()
        except RuntimeError:  # the interpreter is about to end
            self._leave()
        while leaver.is_alive():
            leaver.join(_SLICE_S)

    def _leave(self) -> None:
        self._handle.destroy()

    def _disown(self) -> None:
        """In a forked child: the parent goes on using the C object, this process must not touch it."""
        self._closed_because = "was made before fork() and cannot be used in the child process"
        self._handle.value = None
        pending, self.pending, self.batches = self.pending, {}, {}
        for work in pending:
            work.disown(self._why_closed())


# Counts forks: C objects made in an earlier generation belong to the parent process.
generation = 0
_live: weakref.WeakSet[Communicator] = weakref.WeakSet()


def live() -> list[Communicator]:
    """All communicators of this process that are not destroyed."""
    return [comm for comm in list(_live) if comm.is_open]


def _after_fork_in_child() -> None:
    global generation
    generation += 1
    for comm in list(_live):
        comm._disown()
    _live.clear()


def _leave_all() -> None:
    """At exit without destroy: what is in flight may finish for a moment, what cannot is aborted."""
    deadline = time.monotonic() + _EXIT_GRACE_S
    for comm in live():
        try:
            while not all(work.advance() for work in list(comm.pending)) and time.monotonic() < deadline:
                time.sleep(0.001)
            if comm.pending:
                comm.abort()
        except MCCLError:
            pass  # a failed group is left all the same
        comm.destroy()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_leave_all)

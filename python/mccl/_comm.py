"""One rank's membership in a group: the C communicator and what it needs. Imports no torch.

Any thread may use a communicator. A forked child may not: its sockets belong to the parent.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from ctypes import byref, c_void_p, sizeof
from typing import NamedTuple, Protocol

from mccl import _lib
from mccl._errors import MCCLError, check, error_from

# How long an exit without destroy lets operations in flight finish before it aborts them.
_EXIT_GRACE_S = 0.5


class Pending(Protocol):
    """An operation whose buffers must live until it is done."""

    def advance(self) -> bool:
        """Looks, without blocking, whether it is done; if so cleans up after it."""

    @property
    def is_watched(self) -> bool:
        """True if another thread looks after it."""

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
        # Operations that are not known to be done. They keep their buffers alive, whoever holds them.
        self.pending: dict[Pending, None] = {}
        self._handle = _Handle(value.value)
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
            if work.is_watched or not work.advance():
                self.pending.pop(work, None)
                self.pending[work] = None

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
        """Leaves the group; operations in flight get at most 2 s. Repeated calls do nothing."""
        self._handle.destroy()
        _live.discard(self)

    def _disown(self) -> None:
        """In a forked child: the parent goes on using the C object, this process must not touch it."""
        self._closed_because = "was made before fork() and cannot be used in the child process"
        self._handle.value = None
        pending, self.pending = self.pending, {}
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

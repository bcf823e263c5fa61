"""Threads that complete futures of operations nobody waits for. Imports no torch."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_uint64, c_void_p
from queue import SimpleQueue
from typing import Any, Protocol

from mccl import _comm, _lib
from mccl._errors import check

# Callbacks run one after the other. One that takes longer may wait for another, which then runs beside it.
_TURN_S = 0.1
_CLOSE_S = 1.0  # how long the end of the process waits for the threads


class Request:
    """Owns the ``mccl_request *`` that a call stores at :attr:`slot`: given up with it.

    Made before the call, so that an exception after it, such as Ctrl-C, cannot lose the request.
    """

    __slots__ = ("_free", "_generation", "slot")

    def __init__(self, free: Callable[[c_void_p], int]) -> None:
        self._free = free  # mccl_request_free
        self._generation = _comm.generation
        self.slot = c_void_p()

    def __del__(self, comm: Any = _comm) -> None:
        # At the interpreter's end the globals of modules, this one's included, may already be None.
        if self.slot.value and self._generation == comm.generation:
            self._free(self.slot)


class Watched(Protocol):
    """An operation, or a batch of them."""

    @property
    def requests(self) -> Sequence[Request]:
        """What has to be done first."""

    def advance(self) -> bool:
        """If all of it is done, hands the result over, which may call back, and says True."""


class Completer:
    """Sleeps in C until an operation is done, then completes its future.

    Of the daemon threads one at a time, the leader, listens to the queue. Completing a future runs callbacks,
    and these may wait for other futures. So the leader offers the lead before it calls back, or, if nothing
    else is watched, as soon as something is.

    add() takes no lock: a signal handler may interrupt it and call it again, then wait for what it added.
    """

    def __init__(self) -> None:
        queue = c_void_p()
        check(_lib.lib().mccl_queue_create(byref(queue)))
        self._queue = queue.value
        self._works: dict[int, Watched] = {}
        self._keys = itertools.count(1)
        self._lock = threading.Lock()  # of the fields below; only the threads take it
        self._turn = threading.Lock()  # held by the thread that calls back
        self._calls = 1  # how often a leader has begun to call back
        self._open_lead = 1  # number of the call during which the lead can be taken, or 0
        self._offers: SimpleQueue[int] = SimpleQueue()  # of such numbers; 0: the end
        self._standby = 0  # threads that wait for an offer, or will when they have started
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._offers.put(self._open_lead)
        self._ensure_standby()

    def add(self, work: Watched) -> None:
        """From now on the threads look after `work`. After close() they are gone: who waits has to look."""
        if self._closed:
            work.advance()
            return
        key = next(self._keys)
        self._works[key] = work
        # The leader opens the lead, then counts the works: if it has not seen this one, its number is here.
        if open_lead := self._open_lead:
            self._offers.put(open_lead)
        for request in work.requests:
            check(_lib.lib().mccl_queue_add(self._queue, request.slot, key))
        if work.advance():  # a waiter may have finished it before it was in the queue
            self._works.pop(key, None)

    def _ensure_standby(self) -> None:
        if self._standby or self._closed:
            return
        thread = threading.Thread(target=self._run, name="mccl-futures", daemon=True)
        self._standby += 1
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to end
            self._standby -= 1
            self._threads.discard(thread)

    def _run(self) -> None:
        _of_this_thread.completes = True
        key, result = c_uint64(), c_int()
        wait = _lib.lib().mccl_queue_wait
        leads = False
        while leads or self._take_lead():
            if wait(self._queue, -1, byref(key), byref(result)) == _lib.ERR_ABORTED:
                self._offers.put(0)
                return
            leads = self._complete(key.value)
            if leads:
                continue
            with self._lock:
                if self._standby:  # another thread is in line: enough
                    self._threads.discard(threading.current_thread())
                    return
                self._standby += 1

    def _take_lead(self) -> bool:
        """Waits for an offer that still holds. False at the end."""
        while offer := self._offers.get():
            with self._lock:
                if offer == self._open_lead:
                    self._open_lead = 0
                    self._standby -= 1
                    return True
        self._offers.put(0)  # for the next one
        return False

    def _complete(self, key: int) -> bool:
        """Something of the work `key` is done. True if this thread still leads afterwards."""
        my_turn = self._turn.acquire(timeout=_TURN_S)
        with self._lock:
            self._ensure_standby()
            self._calls += 1
            mine = self._open_lead = self._calls
            work = self._works.get(key)
            if len(self._works) > (work is not None):
                self._offers.put(mine)
        done = True
        try:
            done = work is None or work.advance()
        except Exception:  # a mistake in this package; the other futures must not suffer
            sys.stderr.write(f"mccl: completing a future failed\n{traceback.format_exc()}")
        finally:
            if my_turn:
                self._turn.release()
        if done:
            self._works.pop(key, None)
        with self._lock:
            leads = self._open_lead == mine
            if leads:
                self._open_lead = 0
        return leads

    def close(self) -> None:
        """Ends the threads. The queue stays: others may still add to it, later at the exit too."""
        self._closed = True
        _lib.lib().mccl_queue_close(self._queue)
        deadline = time.monotonic() + _CLOSE_S
        threads = list(self._threads)
        for thread in threads:
            if thread.is_alive():  # not one that another is just about to start
                thread.join(timeout=max(0.0, deadline - time.monotonic()))


class _OfThisThread(threading.local):
    completes = False


_of_this_thread = _OfThisThread()
_making = threading.RLock()
_completers: list[Completer] = []  # one; another if a signal handler interrupts the making of the first


def completer() -> Completer:
    """The one of this process, started by the first call."""
    with _making:
        if not _completers:
            _completers.append(Completer())
        return _completers[0]


def is_completing() -> bool:
    """True on the threads of a completer, that is, in callbacks."""
    return _of_this_thread.completes


@atexit.register
def _close() -> None:
    for each in _completers:
        each.close()


def _after_fork_in_child() -> None:
    """The threads exist in the parent only."""
    global _making
    _completers.clear()
    _making = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

"""Threads that complete futures of operations nobody waits for. Imports no torch."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_uint64, c_void_p
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
    and these may wait for other futures. So the leader hands the queue over before it calls back, or, if
    nothing else is watched, as soon as something is.
    """

    def __init__(self) -> None:
        queue = c_void_p()
        check(_lib.lib().mccl_queue_create(byref(queue)))
        self._queue = queue.value
        self._works: dict[int, Watched] = {}
        self._next = 1
        self._lock = threading.Lock()  # of all fields
        self._lead = threading.Lock()  # held by the leader
        self._turn = threading.Lock()  # held by the thread that calls back
        self._keeper: threading.Thread | None = None  # the leader, if it calls back and still holds the lead
        self._standby = 0  # threads that wait for the lead, or will when they have started
        self._threads: set[threading.Thread] = set()
        self._closed = False
        with self._lock:
            self._ensure_standby()

    def add(self, work: Watched) -> None:
        """From now on the threads look after `work`."""
        with self._lock:
            key = self._next
            self._next += 1
            self._works[key] = work
            if self._keeper is not None:
                self._hand_over()
        for request in work.requests:
            check(_lib.lib().mccl_queue_add(self._queue, request.slot, key))
        if work.advance():  # a waiter may have finished it before it was in the queue
            with self._lock:
                self._works.pop(key, None)

    def _hand_over(self) -> None:
        self._keeper = None
        self._ensure_standby()
        self._lead.release()

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
        key, result = c_uint64(), c_int()
        wait = _lib.lib().mccl_queue_wait
        leads = False
        while True:
            if not leads:
                self._lead.acquire()
                with self._lock:
                    self._standby -= 1
            if wait(self._queue, -1, byref(key), byref(result)) == _lib.ERR_ABORTED:
                self._lead.release()
                return
            leads = self._complete(key.value)
            if leads:
                continue
            with self._lock:
                if self._standby:  # another thread is in line: enough
                    self._threads.discard(threading.current_thread())
                    return
                self._standby += 1

    def _complete(self, key: int) -> bool:
        """Something of the work `key` is done. True if this thread still leads afterwards."""
        me = threading.current_thread()
        my_turn = self._turn.acquire(timeout=_TURN_S)
        with self._lock:
            work = self._works.get(key)
            self._keeper = me
            if len(self._works) > (work is not None):
                self._hand_over()
        done = True
        try:
            done = work is None or work.advance()
        except Exception:  # a mistake in this package; the other futures must not suffer
            sys.stderr.write(f"mccl: completing a future failed\n{traceback.format_exc()}")
        finally:
            if my_turn:
                self._turn.release()
        with self._lock:
            if done:
                self._works.pop(key, None)
            leads = self._keeper is me
            if leads:
                self._keeper = None
        return leads

    def owns(self, thread: threading.Thread) -> bool:
        """True for threads that complete futures."""
        return thread in self._threads

    def close(self) -> None:
        """Ends the threads."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        _lib.lib().mccl_queue_close(self._queue)
        deadline = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):
            _lib.lib().mccl_queue_destroy(self._queue)


_singleton_lock = threading.Lock()
_singleton: Completer | None = None


def completer() -> Completer:
    """The one of this process, started by the first call."""
    global _singleton
    with _singleton_lock:
        if _singleton is None:
            _singleton = Completer()
            atexit.register(_singleton.close)
        return _singleton


def is_completing() -> bool:
    """True on the threads of the completer, that is, in callbacks."""
    return _singleton is not None and _singleton.owns(threading.current_thread())


def _after_fork_in_child() -> None:
    """The threads exist in the parent only."""
    global _singleton, _singleton_lock
    if _singleton is not None:
        atexit.unregister(_singleton.close)
    _singleton = None
    _singleton_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

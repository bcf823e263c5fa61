"""The handle of an operation in flight, and the thread that completes futures."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_uint64, c_void_p, sizeof
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from mccl import _comm, _lib
from mccl._comm import Communicator
from mccl._errors import MCCLError, error_from, last_error

# A wait returns to the interpreter this often, so that Ctrl-C works.
WAIT_SLICE_MS = 200


def milliseconds(timeout: timedelta | float | None) -> int:
    """A time-out in whole milliseconds, at least 1; 0 if it is unset, for which torch passes values <= 0."""
    if timeout is None:
        return 0
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


class Request:
    """Owns one ``mccl_request *``: given up when the last thread has let go of it."""

    __slots__ = ("_free", "_generation", "value")

    def __init__(self, value: int, free: Callable[[int], int]) -> None:
        self.value = value
        self._free = free
        self._generation = _comm.generation

    def __del__(self) -> None:
        if self._generation == _comm.generation:
            self._free(self.value)


class WorkMCCL(Work):
    """One operation in flight, or a batch that was submitted together. Any thread may use it.

    Inputs and outputs stay referenced until it is done, also if nobody keeps the Work.
    """

    # No __init__ and defaults in the class: this halves the cost of making one, which every operation pays.
    _comm: Communicator
    _lib: ctypes.CDLL
    _outputs: list[torch.Tensor]
    _lock: threading.Lock
    _requests: list[Request] | None = None  # None: in an open coalescing block, not submitted yet
    _keep: Any = None
    _copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    _done = False
    _failure: tuple[int, str] | None = None
    _future: Future[Any] | None = None

    @classmethod
    def make(cls, comm: Communicator, library: ctypes.CDLL, outputs: list[torch.Tensor]) -> WorkMCCL:
        """For operations with these outputs, not submitted yet."""
        work = cls()
        work._comm = comm
        work._lib = library
        work._outputs = outputs
        work._lock = threading.Lock()
        return work

    def start(
        self, requests: list[int | None], keep: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Called once, when the operations are submitted."""
        self._keep = keep
        self._copies = copies
        free = self._lib.mccl_request_free
        with self._lock:
            self._requests = [Request(value, free) for value in requests if value]
            watched = self._future is not None
        self._comm.pending[self] = None
        if watched:
            _completer().add(self)

    def run(self, request: int, keep: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """start() and the wait that follows it anyway, without what concurrent use of the Work costs.

        An error is raised by wait(), as always.
        """
        self._requests = [Request(request, self._lib.mccl_request_free)]
        wait = self._lib.mccl_request_wait
        try:
            while (code := wait(request, WAIT_SLICE_MS)) == _lib.IN_PROGRESS:
                pass
        except BaseException:  # Ctrl-C: the operation goes on, and its buffers have to live as long
            self._keep = keep
            self._copies = copies
            self._comm.pending[self] = None
            raise
        if code:
            self._failure = (code, str(last_error(code)))
        elif copies:
            _copy_back(copies)
        self._done = True

    # -- waiting ------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the result is in the outputs; True.

        Raises the operation's error. MCCLTimeoutError when `timeout` passes first; the operation goes on.
        Inside an open coalescing block there is nothing to wait for yet: returns at once.
        """
        if not self._done and self._requests is not None:
            self._wait(milliseconds(timeout))
        self._raise_failure()
        return True

    def _wait(self, timeout_ms: int) -> None:
        deadline = time.monotonic() + timeout_ms / 1000 if timeout_ms else float("inf")
        failure: tuple[int, str] | None = None
        wait = self._lib.mccl_request_wait
        for request in self._requests or ():
            slice_ms = min(WAIT_SLICE_MS, timeout_ms or WAIT_SLICE_MS)
            while (code := wait(request.value, slice_ms)) == _lib.IN_PROGRESS:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise error_from(
                        _lib.ERR_TIMEOUT,
                        f"mccl: wait({timeout_ms / 1000:g} s) ended before the operation of group "
                        f"'{self._comm.name}' (rank {self._comm.rank}/{self._comm.size}) did; it goes on",
                    )
                slice_ms = max(1, min(WAIT_SLICE_MS, int(min(left, 1.0) * 1000)))
            if code and failure is None:
                failure = (code, str(last_error(code)))
        self._finish(failure)

    def advance(self) -> bool:
        """True if done, after one non-blocking step of progress."""
        if self._done:
            return True
        if self._requests is None:
            return False
        failure: tuple[int, str] | None = None
        for request in self._requests:
            code = self._lib.mccl_request_test(request.value)
            if code == _lib.IN_PROGRESS:
                return False
            if code and failure is None:
                failure = (code, str(last_error(code)))
        self._finish(failure)
        return True

    def _finish(self, failure: tuple[int, str] | None) -> None:
        """Whoever comes first, a waiter or the completion thread, hands the result over."""
        with self._lock:
            if self._done:
                return
            if failure is None and self._copies:
                _copy_back(self._copies)
            self._failure = failure
            self._keep = None
            self._copies = ()
            self._done = True
            future = self._future
        self._comm.pending.pop(self, None)
        if future is not None:
            self._complete(future)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise error_from(*self._failure)

    # -- futures ------------------------------------------------------------------------------------------

    def get_future(self) -> Future[Any]:
        """A future of the list of output tensors. Returns at once; completed by a background thread."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = Future()
            done = self._done
            started = self._requests is not None
        if done:
            self._complete(future)
        elif started:
            _completer().add(self)
        return future

    def get_future_result(self) -> Future[Any]:
        """The same future: it fails if the operation does."""
        return self.get_future()

    def _complete(self, future: Future[Any]) -> None:
        if self._failure is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(error_from(*self._failure))

    # -- state --------------------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """True once the operation is done, also if it failed. Does not block."""
        return self.advance()

    def is_success(self) -> bool:
        """True once the operation is done without error."""
        return self.advance() and self._failure is None

    def exception(self) -> MCCLError | None:
        """The error, or None."""
        return None if self._failure is None else error_from(*self._failure)

    def synchronize(self) -> None:
        """The same as wait()."""
        self.wait()

    def block_current_stream(self) -> None:
        """The host is the only stream: the same as wait()."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def source_rank(self) -> int:
        """recv: rank inside the group that sent. Blocks until that is known."""
        self.wait()
        status = _lib.Status(sizeof(_lib.Status))
        requests = self._requests
        if (
            not requests
            or self._lib.mccl_request_get_status(requests[0].value, byref(status))
            or status.source < 0
        ):
            raise error_from(_lib.ERR_INVALID_ARGUMENT, "mccl: source_rank() is for operations that receive")
        return int(status.source)

    _source_rank = source_rank

    def disown(self, text: str) -> None:
        """In a forked child: it failed. No lock is taken, since a thread of the parent may have held it."""
        self._failure = (_lib.ERR_INVALID_USAGE, text)
        self._requests = []
        self._done = True

    @property
    def is_watched(self) -> bool:
        """True if the completion thread looks after it."""
        return self._future is not None

    @property
    def requests(self) -> Sequence[Request]:
        """Requests of the operations, for the completion thread."""
        return self._requests or ()


def _copy_back(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for output, staged in copies:
            output.copy_(staged)


class _Completer:
    """Completes futures: one daemon thread, which sleeps in C until an operation is done."""

    def __init__(self) -> None:
        queue = c_void_p()
        code = _lib.lib().mccl_queue_create(byref(queue))
        if code:
            raise last_error(code)
        self._queue = queue.value
        self._lock = threading.Lock()
        self._works: dict[int, WorkMCCL] = {}
        self._next = 1
        self._thread = threading.Thread(target=self._run, name="mccl-futures", daemon=True)
        self._thread.start()

    def add(self, work: WorkMCCL) -> None:
        """From now on the thread looks after `work`."""
        with self._lock:
            key = self._next
            self._next += 1
            self._works[key] = work
        for request in work.requests:
            code = _lib.lib().mccl_queue_add(self._queue, request.value, key)
            if code:
                raise last_error(code)
        if work.advance():  # a waiter may have finished it before it was in the queue
            with self._lock:
                self._works.pop(key, None)

    def _run(self) -> None:
        wait = _lib.lib().mccl_queue_wait
        key, result = c_uint64(), c_int()
        while wait(self._queue, -1, byref(key), byref(result)) != _lib.ERR_ABORTED:
            with self._lock:
                work = self._works.get(key.value)
            if work is not None and work.advance():
                with self._lock:
                    self._works.pop(key.value, None)
            work = None  # do not keep tensors alive while asleep

    def close(self) -> None:
        """Ends the thread."""
        _lib.lib().mccl_queue_close(self._queue)
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            _lib.lib().mccl_queue_destroy(self._queue)


_completer_lock = threading.Lock()
_the_completer: _Completer | None = None


def _completer() -> _Completer:
    global _the_completer
    with _completer_lock:
        if _the_completer is None:
            _the_completer = _Completer()
            atexit.register(_the_completer.close)
        return _the_completer


def _after_fork_in_child() -> None:
    """The thread exists in the parent only."""
    global _the_completer, _completer_lock
    if _the_completer is not None:
        atexit.unregister(_the_completer.close)
    _the_completer = None
    _completer_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

"""The handle of an operation in flight, and its future."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from ctypes import byref, sizeof
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.futures import Future

from mccl import _lib
from mccl._comm import Communicator
from mccl._errors import MCCLError, error_from, last_error
from mccl.torch.completer import Request, completer, is_completing

# A wait returns to the interpreter this often, so that Ctrl-C works.
WAIT_SLICE_MS = 200


def milliseconds(timeout: timedelta | float | None) -> int:
    """A time-out in whole milliseconds, at least 1; 0 if it is unset, for which torch passes values <= 0."""
    if timeout is None:
        return 0
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


class WorkMCCL(Work):
    """One operation in flight, or a batch that was submitted together. Any thread may use it.

    Inputs and outputs stay referenced until it is done, also if nobody keeps the Work.
    """

    # No __init__ and defaults in the class: this halves the cost of making one, which every operation pays.
    _comm: Communicator
    _lib: ctypes.CDLL
    _outputs: list[torch.Tensor]
    _lock: threading.RLock  # a signal handler may come back to what it has interrupted
    _requests: Sequence[Request] | None = None  # None: not submitted yet
    _submitting: Sequence[Request] = ()  # what becomes _requests
    _keep: Any = None
    _copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    _done = False
    _failure: tuple[int, str] | None = None
    _future: WorkFuture | None = None

    @classmethod
    def make(cls, comm: Communicator, library: ctypes.CDLL, outputs: list[torch.Tensor]) -> WorkMCCL:
        """For operations with these outputs, not submitted yet."""
        work = cls()
        work._comm = comm
        work._lib = library
        work._outputs = outputs
        work._lock = threading.RLock()
        return work

    @classmethod
    def make_finished(cls, outputs: list[torch.Tensor]) -> WorkMCCL:
        """Of an operation that was waited for already."""
        work = cls()
        work._outputs = outputs
        work._lock = threading.RLock()
        work._done = True
        return work

    # -- submitting: prepare, call the library, then published or dropped, also after an exception ---------

    def prepare(
        self, requests: Sequence[Request], keep: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Before the library is called: whatever interrupts the call, from here on the buffers stay alive."""
        self._submitting = requests
        self._keep = keep
        self._copies = copies
        if len(requests) > 1:
            self._comm.batches[self] = len(requests) - 1
        self._comm.pending[self] = None

    def drop(self) -> None:
        """The library took nothing."""
        self._comm.batches.pop(self, None)
        self._comm.pending.pop(self, None)
        self._submitting = ()

    def publish(self, taken: Sequence[Request] | None = None) -> None:
        """The library has taken the operations, or only those of `taken`: the requests are there."""
        with self._lock:
            if self._requests is not None:
                return
            self._requests = self._submitting if taken is None else taken
            watched = self._future is not None
        if watched:
            completer().add(self)

    # -- waiting ------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the result is in the outputs; True.

        Raises the operation's error. MCCLTimeoutError when `timeout` passes first; the operation goes on.
        Inside an open coalescing block there is nothing to wait for yet: returns at once.
        """
        if not self._done and self._requests is not None:
            if profiler._is_profiler_enabled:
                with _RecordFunctionFast("mccl:wait"):
                    self._wait(milliseconds(timeout))
            else:
                self._wait(milliseconds(timeout))
        if self._failure is not None:
            raise error_from(*self._failure)
        return True

    def _wait(self, timeout_ms: int) -> None:
        deadline = time.monotonic() + timeout_ms / 1000 if timeout_ms else float("inf")
        failure: tuple[int, str] | None = None
        wait = self._lib.mccl_request_wait
        for request in self._requests or ():
            slice_ms = min(WAIT_SLICE_MS, timeout_ms or WAIT_SLICE_MS)
            while (code := wait(request.slot, slice_ms)) == _lib.IN_PROGRESS:
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
            code = self._lib.mccl_request_test(request.slot)
            if code == _lib.IN_PROGRESS:
                return False
            if code and failure is None:
                failure = (code, str(last_error(code)))
        self._finish(failure)
        return True

    def count_unfinished(self) -> int:
        """How many of the operations the library has not done. Does not block, does not call back."""
        if self._done or self._requests is None:
            return 0
        test = self._lib.mccl_request_test
        return sum(test(request.slot) == _lib.IN_PROGRESS for request in self._requests)

    def rest(self, timeout_ms: int) -> None:
        """Waits a moment for the first of the operations. Does not call back."""
        if self._requests:
            self._lib.mccl_request_wait(self._requests[0].slot, timeout_ms)

    def _finish(self, failure: tuple[int, str] | None) -> None:
        """Whoever comes first, a waiter or a completion thread, hands the result over."""
        with self._lock:
            if self._done:
                return
            if failure is None and self._copies:
                failure = copy_back(self._copies)
                if self._done:  # a signal handler came in between
                    return
            self._failure = failure
            self._keep = None
            self._copies = ()
            self._done = True
            future = self._future
        self._comm.pending.pop(self, None)
        if self._comm.batches:
            self._comm.batches.pop(self, None)
        if future is not None:
            future.set(self._outputs, self._failure)

    # -- futures ------------------------------------------------------------------------------------------

    def get_future(self) -> Future[Any]:
        """A future of the list of output tensors. Returns at once; completed by a background thread."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = WorkFuture(self)
            done = self._done
            started = self._requests is not None
        if profiler._is_profiler_enabled and not done:
            _record_until_done(future)
        if done:
            future.set(self._outputs, self._failure)
        elif started:
            completer().add(self)
        return future

    def get_future_result(self) -> Future[Any]:
        """The same future: it fails if the operation does."""
        return self.get_future()

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
            or self._lib.mccl_request_get_status(requests[0].slot, byref(status))
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
    def is_disowned(self) -> bool:
        """True in a forked child, for operations of its parent."""
        return self._done and not self._requests

    @property
    def is_watched(self) -> bool:
        """True if a completion thread looks after it."""
        return self._future is not None

    @property
    def requests(self) -> Sequence[Request]:
        """Requests of the operations, for the completion threads."""
        return self._requests or ()


class WorkFuture(Future[Any]):
    """Its wait() returns to the interpreter often, so that Ctrl-C works, and may be called in callbacks.

    Futures that torch derives from it, by then(), wait in C++.
    """

    def __init__(self, work: WorkMCCL) -> None:
        super().__init__()
        self._work: WorkMCCL | None = work  # until it is done
        self._claims = [None]  # whoever pops it may set the result
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self, outputs: list[torch.Tensor], failure: tuple[int, str] | None) -> None:
        """Completes it, once. Calls back."""
        try:
            self._claims.pop()
        except IndexError:
            return
        self._work = None  # no cycle: it would keep the tensors until the garbage collector comes
        self._unset.release()
        if failure is None:
            self.set_result(outputs)
        else:
            self.set_exception(error_from(*failure))

    def wait(self) -> Any:
        """The list of output tensors, or the operation's error."""
        if is_completing() and (work := self._work) is not None:
            try:
                work.wait()  # nobody else may be there to complete it
            except MCCLError:
                pass  # raised below
        while not self._unset.acquire(timeout=WAIT_SLICE_MS / 1000):
            if (work := self._work) is None:
                continue
            if work.is_disowned:
                work.wait()
            work.advance()  # there may be no thread: the system had none left, or the process is ending
        self._unset.release()  # for the next one who waits
        return super().wait()


def _record_until_done(future: WorkFuture) -> None:
    """A row that begins here, and ends on the thread that completes the future."""
    ops: Any = torch.ops.profiler
    row = ops._record_function_enter_new("mccl:future", None)
    ops._call_end_callbacks_on_jit_fut._RecordFunction(row, future)


def copy_back(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[int, str] | None:
    """From the dense copies to the outputs. Returns what went wrong: this may be a thread that must go on."""
    for output, staged in copies:
        try:
            with torch.inference_mode() if output.is_inference() else torch.no_grad():
                output.copy_(staged)
        except Exception as error:
            return _lib.ERR_INVALID_USAGE, (
                f"mccl: the operation is done, but its result, of shape {tuple(staged.shape)}, cannot be "
                f"copied into the output, now of shape {tuple(output.shape)}: {error}. Do not change an "
                "output's shape before the operation is done"
            )
    return None

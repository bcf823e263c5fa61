"""torch's store with a deadline: its own calls can block for ever in C++, out of reach of Ctrl-C."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from mccl import _lib
from mccl._errors import MCCLError, error_from

_SLICE_S = 0.2
_CLOSE_S = 0.2


class Answer:
    """Of one call, once :meth:`is_there`."""

    def __init__(self, method: str, arguments: Sequence[Any]) -> None:
        self.method = method
        self.arguments = arguments
        self.value: Any = None
        self.error: Exception | None = None
        self._there = threading.Event()

    def fill(self, store: Store) -> None:
        """Calls the store."""
        try:
            self.value = getattr(store, self.method)(*self.arguments)
        except Exception as error:
            self.error = error
        self._there.set()

    def is_there(self) -> bool:
        """True if the call has returned, also if it failed."""
        return self._there.is_set()

    def wait(self, seconds: float) -> bool:
        """The same, after waiting for it. Ctrl-C works."""
        return self._there.wait(seconds)


class PatientStore:
    """Calls a store in a daemon thread of its own, for one rank that wants to meet others.

    `who` names the rank and its group in errors. Everything has to be over `limit_s` from now.
    """

    def __init__(self, store: Store, who: str, limit_s: float) -> None:
        self.who = who
        self.limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        # None ends the thread. It holds the queue and the store only, should a call never return.
        self._calls: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(store, self._calls), name="mccl-store", daemon=True
        )
        self._thread.start()

    def is_late(self, by_s: float = 0.0) -> bool:
        """True if the deadline has passed, `by_s` ago."""
        return time.monotonic() >= self._deadline + by_s

    def post(self, method: str, *arguments: Any) -> Answer:
        """Calls when the calls before have returned. Does not block."""
        answer = Answer(method, arguments)
        self._calls.put(answer)
        return answer

    def call(self, what: str, method: str, *arguments: Any) -> Any:
        """Calls and waits for the result. `what` says in errors what the rank was about to do.

        MCCLTimeoutError if the store does not answer before the deadline, nor within 0.2 s; MCCLConnectError
        if it fails.
        """
        answer = self.post(method, *arguments)
        # A store that is asked just before the deadline is not to blame for it.
        until = max(self._deadline, time.monotonic() + _SLICE_S)
        while not answer.wait(min(_SLICE_S, max(0.001, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise error_from(
                    _lib.ERR_TIMEOUT,
                    f"mccl: {self.who} wanted to {what}, but torch's store did not answer within the group's "
                    f"time-out of {self.limit_s:g} s. Is the process that hosts the store (rank 0 or the "
                    "launcher) running, and can its MASTER_ADDR be reached from here?",
                )
        if answer.error is not None:
            raise self._failed(what, method, answer.error) from answer.error
        return answer.value

    def _failed(self, what: str, method: str, error: Exception) -> MCCLError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return error_from(
            _lib.ERR_CONNECT,
            f"mccl: {self.who} wanted to {what}, but torch's store failed in {method}(): {reason}. Has the "
            "process that hosts the store (rank 0 or the launcher) ended? Start all ranks again",
        )

    def close(self) -> None:
        """Ends the thread, unless a call hangs: then it stays, as a daemon."""
        self._calls.put(None)
        # Not for long after an exception, such as Ctrl-C, with a store that does not answer.
        self._thread.join(_CLOSE_S)


def _serve(store: Store, calls: queue.SimpleQueue[Answer | None]) -> None:
    while (answer := calls.get()) is not None:
        answer.fill(store)

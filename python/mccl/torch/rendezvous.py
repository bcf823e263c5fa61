"""How the ranks of a group find each other: rank 0 publishes a unique id through torch's store.

Every wait returns to the interpreter at least every 0.2 s, so that Ctrl-C works, and none outlasts the
group's time-out. The store is not used after check-in; the key is deleted then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from mccl import _lib
from mccl._comm import Communicator
from mccl._config import current
from mccl._errors import MCCLConnectError, MCCLError, error_from
from mccl.torch.work import WAIT_SLICE_MS

KEY = "mccl/id"
_SAY_AFTER_S = 5.0  # how long a wait is silent
_REREAD_S = 1.0  # how often a rank that is not connected yet looks whether its id has been replaced
_LONGEST_POLL_S = 0.05

DEFAULT_TIMEOUT_MS = 30 * 60 * 1000  # as in src/comm/comm.c

Join = Callable[[_lib.UniqueId], Communicator]


def meet(store: Store, rank: int, size: int, name: str, timeout_ms: int, settings: str) -> Communicator:
    """Joins the group, blocking until all ranks are connected.

    Raises MCCLError (MCCLTimeoutError after `timeout_ms`) that names group, rank and what is missing.
    `timeout_ms` of 0 stands for the library's default.
    """
    limit_ms = timeout_ms or DEFAULT_TIMEOUT_MS
    deadline = time.monotonic() + limit_ms / 1000

    def join(unique_id: _lib.UniqueId) -> Communicator:
        return Communicator(unique_id, rank, size, name, timeout_ms, settings)

    if rank == 0:
        return _lead(store, size, join)
    return _follow(store, f"rank {rank}/{size} of group '{name}'", deadline, limit_ms, join)


def _lead(store: Store, size: int, join: Join) -> Communicator:
    unique_id = _lib.new_unique_id()
    comm = join(unique_id)  # checks in before anybody can read the id
    published = size > 1
    if published:
        store.set(KEY, _lib.unique_id_to_text(unique_id))
    try:
        while not comm.wait_ready(WAIT_SLICE_MS):
            pass
    except BaseException:
        comm.destroy()
        raise
    finally:
        if published:
            _forget_key(store)
    return comm


def _forget_key(store: Store) -> None:
    try:
        store.delete_key(KEY)
    except RuntimeError:
        pass  # a store that cannot delete, or is gone: an old id is recognised by those who dial it


def _follow(store: Store, who: str, deadline: float, timeout_ms: int, join: Join) -> Communicator:
    warned = False
    while True:
        text = _read_id(store, who, deadline, timeout_ms)
        comm = join(_lib.unique_id_from_text(text))
        try:
            if _wait_ready(comm, store, text, who, deadline):
                return comm
            comm.destroy()  # the id was of an earlier life of the group, and a new one is there
        except MCCLError as error:
            comm.destroy()
            # Nobody listens behind an id that outlived its maker. Other errors are final if it is the newest.
            if not isinstance(error, MCCLConnectError) and _newest_id(store, text) == text:
                raise
            if time.monotonic() >= deadline:
                raise
            if not warned:
                warned = True
                _say(f"{who}: {error}; reading the group's id again")
            time.sleep(_LONGEST_POLL_S)
        except BaseException:
            comm.destroy()
            raise


def _wait_ready(comm: Communicator, store: Store, text: str, who: str, deadline: float) -> bool:
    """True when connected, False when another id has taken the place of `text`."""
    reread = time.monotonic() + _REREAD_S
    while not comm.wait_ready(WAIT_SLICE_MS):
        now = time.monotonic()
        if now >= reread:
            reread = now + _REREAD_S
            if _newest_id(store, text) != text:
                return False
        # The library's own deadline, which began when the id was there, has the better text: let it win.
        if now >= deadline + 2 * WAIT_SLICE_MS / 1000:
            comm.abort()
            raise error_from(
                _lib.ERR_TIMEOUT, f"mccl: {who} was not connected when the group's time-out passed"
            )
    return True


def _newest_id(store: Store, text: str) -> str:
    """The id now in the store, or `text` if there is none. Does not block: get() would, for a deleted key."""
    return bytes(store.compare_set(KEY, text, text)).decode("ascii", "replace")


def _read_id(store: Store, who: str, deadline: float, timeout_ms: int) -> str:
    started = time.monotonic()
    said = False
    poll_s = 0.001
    while not store.check([KEY]):
        now = time.monotonic()
        if now >= deadline:
            raise error_from(
                _lib.ERR_TIMEOUT,
                f"mccl: {who} waited {timeout_ms / 1000:g} s for rank 0 to publish the group's id (store key "
                f"{KEY!r}). Is rank 0 running, and does it make the same groups in the same order?",
            )
        if not said and now - started >= _SAY_AFTER_S:
            said = True
            _say(f"{who} waits for rank 0 to publish the group's id, for at most {timeout_ms / 1000:g} s")
        time.sleep(min(poll_s, max(0.0, deadline - now)))
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
    return bytes(store.get(KEY)).decode("ascii", "replace")


def _say(text: str) -> None:
    if current("log_level")[0].upper() not in ("OFF", "FATAL", "ERROR", "0", "1", "2"):
        sys.stderr.write(f"mccl: {text}\n")

"""A barrier that names the ranks that are missing, and leaves the group as it was.

It goes through torch's store, not through the group: the group's own operations may be what hangs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from mccl import _lib
from mccl._errors import MCCLError, error_from
from mccl.torch.store import PatientStore

_STORE_S = 10.0  # for the store to answer, on top of the time-out
_POLL_FIRST_S, _POLL_LAST_S = 0.001, 0.05
_OVER = "mccl/monitored/over"  # how many of these barriers of the group are over, passed or failed
_PASSED = b"passed"


def monitored_barrier(
    store: Store, rank: int, size: int, name: str, timeout_s: float, wait_all_ranks: bool
) -> None:
    """Returns when all ranks have called it.

    After `timeout_s` rank 0 raises MCCLTimeoutError with the first rank that is missing, or with all of them;
    the others learn from it that it has failed. The words are those of gloo, which scripts look for.

    The store counts the barriers, not the ranks: one that missed a barrier takes part in the next.
    """
    who = f"rank {rank}/{size} of group '{name}'"
    wait_s = timeout_s if rank == 0 else 2 * timeout_s  # rank 0 may begin later, and says what came out of it
    patient = PatientStore(store, f"{who} in monitored_barrier", wait_s + _STORE_S)
    try:
        turn = patient.call("learn the number of the barrier", "add", _OVER, 0) + 1
        if rank == 0:
            _lead(patient, turn, size, who, timeout_s, wait_all_ranks)
        else:
            _follow(patient, turn, rank, who, wait_s)
    finally:
        patient.close()


def _lead(
    store: PatientStore, turn: int, size: int, who: str, timeout_s: float, wait_all_ranks: bool
) -> None:
    missing = _missing(store, turn, range(1, size), timeout_s)
    if not missing:
        text = ""
    elif timeout_s <= 0:
        text = "Rank 0 timed out in monitoredBarrier after 0 ms."
    elif wait_all_ranks and len(missing) > 1:
        text = (
            f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier in {timeout_s * 1000:g} ms"
        )
    else:
        text = f"Rank {missing[0]} failed to pass monitoredBarrier in {timeout_s * 1000:g} ms"
    # Counted first: whoever has read the outcome and comes again belongs to the next one.
    store.call("count the barrier", "add", _OVER, 1)
    store.call("tell the others the outcome", "set", _key(turn, "end"), text or _PASSED)
    if not missing:
        store.post("delete_key", _key(turn - 1, "end"))  # whoever is here has read it
    for rank in range(1, size):
        store.post("delete_key", _key(turn, str(rank)))
    if missing:
        raise _failed(who, f"[Rank 0]: {text}")


def _missing(store: PatientStore, turn: int, ranks: Sequence[int], timeout_s: float) -> list[int]:
    """The ranks that are not there when the time is over. They may also leave before the others come."""
    deadline = time.monotonic() + timeout_s
    poll_s = _POLL_FIRST_S
    while not _are_there(store, [_key(turn, str(rank)) for rank in ranks]):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return [rank for rank in ranks if not _are_there(store, [_key(turn, str(rank))])]
        time.sleep(min(poll_s, left_s))
        poll_s = min(2 * poll_s, _POLL_LAST_S)
    return []


def _follow(store: PatientStore, turn: int, rank: int, who: str, wait_s: float) -> None:
    here, end = _key(turn, str(rank)), _key(turn, "end")
    deadline = time.monotonic() + wait_s
    poll_s = _POLL_FIRST_S
    try:
        store.call("say that it is here", "set", here, b"")
        while not (over := _are_there(store, [end])) and time.monotonic() < deadline:
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _POLL_LAST_S)
    except BaseException:
        store.post("delete_key", here)
        raise
    if not over:
        store.call("say that it no longer waits", "delete_key", here)
        over = _are_there(store, [end])  # now rank 0 counts it as missing, or has let it pass before
    if not over:
        raise _failed(who, _reached(rank, f"it did not answer within {wait_s * 1000:g} ms"))
    outcome = bytes(store.call("read the outcome", "get", end))
    if outcome != _PASSED:
        raise _failed(who, _reached(rank, outcome.decode("utf-8", "replace")))


def _reached(rank: int, what: str) -> str:
    return (
        f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while "
        f"waiting for send/recv from rank 0: {what}. Please check rank 0 logs for faulty rank."
    )


def _failed(who: str, text: str) -> MCCLError:
    return error_from(_lib.ERR_TIMEOUT, f"mccl monitored_barrier: {who}: {text}")


def _are_there(store: PatientStore, keys: list[str]) -> bool:
    return not keys or bool(store.call("look for the other ranks", "check", keys))


def _key(turn: int, what: str) -> str:
    return f"mccl/monitored/{turn}/{what}"

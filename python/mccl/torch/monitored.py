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
_PASSED = b"passed"


def monitored_barrier(
    store: Store, turn: int, rank: int, size: int, name: str, timeout_s: float, wait_all_ranks: bool
) -> None:
    """Returns when all ranks have called it with the same `turn`, the number of such calls in this group.

    After `timeout_s` rank 0 raises MCCLTimeoutError with the first rank that is missing, or with all of them;
    the others learn from it that it has failed. The words are those of gloo, which scripts look for.
    """
    who = f"rank {rank}/{size} of group '{name}'"
    patient = PatientStore(store, f"{who} in monitored_barrier", timeout_s + _STORE_S)
    try:
        if rank == 0:
            _lead(patient, turn, size, who, timeout_s, wait_all_ranks)
        else:
            _follow(patient, turn, rank, who, timeout_s)
    finally:
        patient.close()


def _lead(
    store: PatientStore, turn: int, size: int, who: str, timeout_s: float, wait_all_ranks: bool
) -> None:
    missing = _missing(store, turn, range(1, size), timeout_s)
    if not missing:
        store.call("let the others pass", "set", _key(turn, "end"), _PASSED)
        store.post("delete_key", _key(turn - 1, "end"))  # whoever is here has read it
        for rank in range(1, size):
            store.post("delete_key", _key(turn, str(rank)))
        return
    if timeout_s <= 0:
        text = "Rank 0 timed out in monitoredBarrier after 0 ms."
    elif wait_all_ranks and len(missing) > 1:
        text = (
            f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier in {timeout_s * 1000:g} ms"
        )
    else:
        text = f"Rank {missing[0]} failed to pass monitoredBarrier in {timeout_s * 1000:g} ms"
    store.post("set", _key(turn, "end"), text).wait(_STORE_S)
    raise _failed(who, f"[Rank 0]: {text}")


def _missing(store: PatientStore, turn: int, ranks: Sequence[int], timeout_s: float) -> list[int]:
    """The ranks that have not arrived when the time is over."""
    deadline = time.monotonic() + timeout_s
    missing, poll_s = list(ranks), _POLL_FIRST_S
    while True:
        late = time.monotonic() >= deadline
        while missing and _is_there(store, _key(turn, str(missing[0]))):
            del missing[0]
        if not missing or late:
            return [rank for rank in missing if not _is_there(store, _key(turn, str(rank)))]
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
        poll_s = min(2 * poll_s, _POLL_LAST_S)


def _follow(store: PatientStore, turn: int, rank: int, who: str, timeout_s: float) -> None:
    store.call("say that it is here", "set", _key(turn, str(rank)), b"")
    # Rank 0 may have begun later, and says what came out of it.
    deadline = time.monotonic() + 2 * timeout_s
    poll_s = _POLL_FIRST_S
    while not _is_there(store, _key(turn, "end")):
        if time.monotonic() >= deadline:
            raise _failed(who, _reached(rank, f"it did not answer within {2 * timeout_s * 1000:g} ms"))
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _POLL_LAST_S)
    end = bytes(store.call("read the outcome", "get", _key(turn, "end")))
    if end != _PASSED:
        raise _failed(who, _reached(rank, end.decode("utf-8", "replace")))


def _reached(rank: int, what: str) -> str:
    return (
        f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while "
        f"waiting for send/recv from rank 0: {what}. Please check rank 0 logs for faulty rank."
    )


def _failed(who: str, text: str) -> MCCLError:
    return error_from(_lib.ERR_TIMEOUT, f"mccl monitored_barrier: {who}: {text}")


def _is_there(store: PatientStore, key: str) -> bool:
    return bool(store.call("look for the other ranks", "check", [key]))


def _key(turn: int, what: str) -> str:
    return f"mccl/monitored/{turn}/{what}"

"""One rank without torch: joins a group, checks what the operations return, stays until it is told to go.

    rank.py RANK SIZE TIMEOUT_MS BIG

BIG is the number of elements of a last all-reduce that is timed, or 0.

Says JSON, a line each: rank 0 first {"id": text}; every rank {"seconds": time to join, "big_seconds": time of
the last all-reduce} after all checks, or {"error": text, "type": exception, "seconds": time to fail} instead
of either. Ranks other than 0 first read the id's text from standard input; a further line there, or its end,
means leave.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from mccl import _lib
from mccl._comm import Communicator
from mccl._errors import MCCLError, check

INT64, SUM, MAX = 10, 0, 3  # of include/mccl.h
COUNTS = (0, 1, 3, 17, 4097, 131075)  # the last is 1 MiB and a bit: several pieces

Array = np.ndarray[Any, np.dtype[np.int64]]


def values(rank: int, count: int, start: int = 0) -> Array:
    """A rank's input from element `start` on: tells ranks and positions apart."""
    index = np.arange(start, start + count, dtype=np.int64)
    return (rank + 1) * 1_000_003 + (index * 7919 + rank * 31) % 10_007


def expect(what: str, got: Array, wanted: Array) -> None:
    wrong = np.flatnonzero(got != wanted)
    if len(wrong):
        i = wrong[0]
        raise AssertionError(f"{what}: element {i} of {len(got)} is {got[i]}, expected {wanted[i]}")


def check_operations(comm: Communicator, count: int) -> None:
    """Every kind of traffic once: all-reduce, from one to all, all to all, and along a ring of pairs."""
    rank, size, last, ranks = comm.rank, comm.size, comm.size - 1, range(comm.size)
    tail = (comm.handle, None, None)
    lib: Any = _lib.lib()

    own, got = values(rank, count), np.zeros(count, np.int64)
    check(lib.mccl_all_reduce(own.ctypes.data, got.ctypes.data, count, INT64, SUM, *tail))
    expect("all_reduce sum", got, sum(values(r, count) for r in ranks))
    check(lib.mccl_all_reduce(own.ctypes.data, own.ctypes.data, count, INT64, MAX, *tail))
    expect("all_reduce max in place", own, np.max([values(r, count) for r in ranks], axis=0))

    own = values(rank, count)
    check(lib.mccl_broadcast(own.ctypes.data, own.ctypes.data, count, INT64, last, *tail))
    expect("broadcast", own, values(last, count))

    own, got = values(rank, count), np.zeros(count * size, np.int64)
    check(lib.mccl_all_gather(own.ctypes.data, got.ctypes.data, count, INT64, *tail))
    expect("all_gather", got, np.concatenate([values(r, count) for r in ranks]))

    own, got = values(rank, count * size), np.zeros(count, np.int64)
    check(lib.mccl_reduce_scatter(own.ctypes.data, got.ctypes.data, count, INT64, SUM, *tail))
    expect("reduce_scatter", got, sum(values(r, count, rank * count) for r in ranks))

    got = np.zeros(count * size, np.int64)
    check(lib.mccl_all_to_all(own.ctypes.data, got.ctypes.data, count, INT64, *tail))
    expect("all_to_all", got, np.concatenate([values(r, count, rank * count) for r in ranks]))

    got = np.zeros(count, np.int64)
    before, after = (rank - 1) % size, (rank + 1) % size
    check(lib.mccl_group_start())
    check(lib.mccl_send(own.ctypes.data, count, INT64, after, *tail))
    check(lib.mccl_recv(got.ctypes.data, count, INT64, before, *tail))
    check(lib.mccl_group_end())
    expect("send and recv", got, values(before, count))
    check(lib.mccl_barrier(*tail))


def big_all_reduce(comm: Communicator, count: int) -> float:
    """All-reduces `count` elements and checks them; returns the time in seconds."""
    got = values(comm.rank, count)
    wanted = sum(values(rank, count) for rank in range(comm.size))
    lib: Any = _lib.lib()
    check(lib.mccl_barrier(comm.handle, None, None))
    started = time.monotonic()
    check(lib.mccl_all_reduce(got.ctypes.data, got.ctypes.data, count, INT64, SUM, comm.handle, None, None))
    seconds = time.monotonic() - started
    expect("big all_reduce", got, wanted)
    return seconds


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> int:
    rank, size, timeout_ms, big = (int(argument) for argument in sys.argv[1:])
    text = sys.stdin.readline().strip() if rank else ""
    started = time.monotonic()
    try:
        if rank:
            unique_id = _lib.unique_id_from_text(text)
        else:
            unique_id = _lib.new_unique_id()
            say(id=_lib.unique_id_to_text(unique_id))
        comm = Communicator(unique_id, rank, size, "net", timeout_ms, "")
        comm.wait_ready(-1)
        seconds = time.monotonic() - started
        for count in COUNTS:
            check_operations(comm, count)
        big_seconds = big_all_reduce(comm, big) if big else 0.0
    except (MCCLError, AssertionError) as error:
        say(error=str(error), type=type(error).__name__, seconds=time.monotonic() - started)
        return 1
    say(seconds=seconds, big_seconds=big_seconds)
    sys.stdin.readline()
    comm.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main())

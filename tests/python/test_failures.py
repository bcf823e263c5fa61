"""What a user sees when ranks disagree, are late, die or are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist

import mccl
from ranks import Pool

Outcome = tuple[str, str, float]  # class of the exception, its text, seconds


def outcome(function: Callable[[], Any]) -> Outcome:
    started = time.perf_counter()
    try:
        function()
    except Exception as error:
        assert isinstance(error, dist.DistBackendError) and isinstance(error, mccl.MCCLError), type(error)
        return type(error).__name__, str(error), time.perf_counter() - started
    return "", "", time.perf_counter() - started


def disagree(rank: int, n: int, what: str) -> list[Outcome]:
    odd = rank == n - 1
    t = torch.ones(
        5 if odd and what == "count" else 4, dtype=torch.int32 if odd and what == "dtype" else None
    )
    op = dist.ReduceOp.MAX if odd and what == "op" else dist.ReduceOp.SUM
    if what == "root":
        call = lambda: dist.broadcast(t, 1 if odd else 0)  # noqa: E731
    elif what == "kind" and odd:
        call = lambda: dist.barrier()  # noqa: E731
    else:
        call = lambda: dist.all_reduce(t, op=op)  # noqa: E731
    first = outcome(call)
    return [first, outcome(lambda: dist.all_reduce(torch.ones(1)))]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("count", ["count=4", "count=5"]),
        ("dtype", ["float32", "int32"]),
        ("op", ["op=sum", "op=max"]),
        ("root", ["root=0", "root=1"]),
        ("kind", ["all_reduce", "barrier"]),
    ],
)
def test_ranks_that_disagree_get_both_sides_values(pool: Pool, what: str, words: list[str]) -> None:
    rows = pool.run(3, disagree, what)
    for rank, (first, second) in enumerate(rows):
        # a rank that only sends may learn it at its next call
        kind, text, seconds = first if first[0] or what != "root" else second
        assert kind == "MCCLMismatchError", (rank, first, second)
        assert all(word in text for word in words), (rank, text)
        assert seconds < 10
        assert second[0] == "MCCLMismatchError", (
            rank,
            second,
        )  # the group stays failed, with the first cause


def miss(rank: int, n: int) -> Outcome:
    group = dist.new_group(timeout=timedelta(seconds=1))
    result = ("", "", 0.0)
    if rank != 1:
        result = outcome(lambda: dist.all_reduce(torch.ones(4), group=group))
    dist.barrier()  # the other group is not affected
    return result


def test_a_missing_rank_is_named_when_the_groups_timeout_passes(pool: Pool) -> None:
    rows = pool.run(3, miss)
    for rank in (0, 2):
        kind, text, seconds = rows[rank]
        assert kind == "MCCLTimeoutError" and 0.9 < seconds < 3, rows[rank]
        assert "all_reduce" in text and "1" in text, text


def per_call_timeout(rank: int, n: int) -> Outcome:
    group: Any = dist.new_group()
    if rank == 0:
        return outcome(lambda: group.barrier(timeout=timedelta(seconds=0.5)).wait())
    time.sleep(1.5)
    return ("", "", 0.0)


def test_a_calls_own_timeout(pool: Pool) -> None:
    kind, _, seconds = pool.run(2, per_call_timeout)[0]
    assert kind == "MCCLTimeoutError" and 0.4 < seconds < 2


def chosen_watchdog(rank: int, n: int, store: dist.Store, chosen: str) -> Outcome:
    os.environ["MCCL_WATCHDOG_TIMEOUT_MS"] = chosen
    try:
        dist.init_process_group("mccl", store=store, rank=rank, world_size=n)
        if rank == 0:
            return outcome(lambda: dist.barrier())
        time.sleep(1.5)
        return ("", "", 0.0)
    finally:
        del os.environ["MCCL_WATCHDOG_TIMEOUT_MS"]


def test_a_chosen_watchdog_value_ends_an_operation_of_a_group_without_timeout(pool: Pool) -> None:
    kind, text, seconds = pool.run(2, chosen_watchdog, "400", group=False)[0]
    assert kind == "MCCLTimeoutError" and 0.3 < seconds < 1.4, (kind, text, seconds)
    assert "barrier" in text and "rank 1" in text, text
    kind, text, seconds = pool.run(2, chosen_watchdog, "10000", group=False)[0]
    assert kind == "MCCLPeerLostError" and seconds > 1, (kind, text, seconds)  # rank 1 left after 1.5 s


def wait_for_a_dead_rank(rank: int, n: int, count: int) -> Outcome:
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.time()
    kind, text, _ = outcome(lambda: dist.all_reduce(torch.ones(count)))
    return kind, text, time.time() - started - 0.5


@pytest.mark.parametrize("count", [4, 16 * 2**20 // 4])
@pytest.mark.parametrize("n", [2, 3])
def test_a_killed_rank_is_noticed_and_named(own_pool: Pool, n: int, count: int) -> None:
    own_pool.start(n, wait_for_a_dead_rank, count)
    rows = own_pool.results(n, timeout=60, lost=(1,))
    for rank in range(n):
        if rank != 1:
            kind, text, seconds = rows[rank]
            assert kind == "MCCLPeerLostError" and seconds < 2, rows[rank]
            for word in ("all_reduce", "seq", f"rank {rank}", "rank 1"):
                assert word in text, (word, text)


def interrupt(rank: int, n: int) -> float | None:
    if rank:
        time.sleep(1.5)
        dist.all_reduce(torch.ones(1))
        return None
    sent_at = [0.0]

    def press() -> None:
        sent_at[0] = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.4, press).start()
    value = torch.ones(1)
    work = dist.all_reduce(value, async_op=True)
    try:
        work.wait()
    except KeyboardInterrupt:
        late = time.perf_counter() - sent_at[0]
        work.wait()  # nothing was lost
        assert value.item() == n
        return late
    raise AssertionError("not interrupted")


def test_ctrl_c_interrupts_a_wait(pool: Pool) -> None:
    late = pool.run(2, interrupt)[0]
    assert late is not None and late < 0.5


def interrupt_creation(rank: int, n: int, store: dist.Store) -> float:
    """A group whose other rank never comes: rank 0 waits for check-in, rank 1 for the id."""
    sent_at = [0.0]

    def press() -> None:
        sent_at[0] = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.5, press).start()
    try:
        own = dist.PrefixStore(f"alone{rank}", store)
        dist.init_process_group("mccl", store=own, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    except KeyboardInterrupt:
        return time.perf_counter() - sent_at[0]
    raise AssertionError("not interrupted")


def test_ctrl_c_interrupts_the_creation_of_a_group(pool: Pool) -> None:
    assert max(pool.run(2, interrupt_creation, group=False)) < 0.5


def create_alone(rank: int, n: int, store: dist.Store) -> Outcome:
    own = dist.PrefixStore(f"alone{rank}", store)
    return outcome(
        lambda: dist.init_process_group(
            "mccl", store=own, rank=rank, world_size=3, timeout=timedelta(seconds=1)
        )
    )


def test_a_group_that_never_meets_names_who_is_missing(pool: Pool) -> None:
    rows = pool.run(2, create_alone, group=False)
    for kind, _, seconds in rows:
        assert kind == "MCCLTimeoutError" and 0.8 < seconds < 3, rows
    assert "1" in rows[0][1] and "2" in rows[0][1], rows[0][1]
    assert "rank 1/3" in rows[1][1] and "rank 0" in rows[1][1], rows[1][1]


SCRIPT = """
import sys, time, torch, torch.distributed as dist, mccl
store = dist.FileStore(sys.argv[2])
dist.init_process_group("mccl", store=store, rank=int(sys.argv[1]), world_size=2)
dist.all_reduce(torch.ones(1))
if sys.argv[3] == "future":
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
if sys.argv[3] == "pending" and sys.argv[1] == "0":
    kept = dist.group.WORLD.recv([torch.ones(1)], 1, 5)   # never comes
    kept.get_future()
print(time.time(), flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("state", ["idle", "future", "pending"])
def test_exit_without_destroy_keeps_the_exit_code(tmp_path: Any, state: str) -> None:
    command = [sys.executable, "-c", SCRIPT]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), state], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 7
            assert time.time() - float(output) < 2.5
    finally:
        for process in processes:
            process.kill()

"""Field reports on exit and destroy: FR-113, FR-114, FR-116. The scripts end as scripts do, see zygote.py."""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from zygote import End, Zygote, leaving

import mccl
from mccl.torch import completer
from patterns import assert_same, reduced, tensor
from ranks import Pool

F32 = torch.float32
# A hang would last as long as the time-out of an operation, 30 s here. Operations in flight get 0.5 s, and
# unloading torch takes seconds on a busy machine.
EXIT_S = 10.0


def begin(rank: int, n: int, port: int) -> None:
    init(rank, n, dist.TCPStore("127.0.0.1", port, is_master=False))


def init(rank: int, n: int, store: dist.Store) -> None:
    dist.init_process_group("mccl", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=30))


KEPT: list[Any] = []  # a module's global: torn down with the interpreter


class UsesTheGroupWhenItGoes:
    """As a logger or a cache may; the interpreter is half gone by then."""

    def __del__(self) -> None:
        try:
            dist.all_reduce(torch.ones(1), async_op=True)
        except Exception:
            pass


def wait_in_a_thread(group: Any) -> None:
    def wait() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except mccl.MCCLError:
            pass

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.1)


# What rank 0 leaves behind; nobody else takes part in any of it.
STATES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda group: None,
    "all_reduce": lambda group: dist.all_reduce(torch.ones(7), async_op=True, group=group) and None,
    "kept work": lambda group: KEPT.append(dist.all_reduce(torch.ones(7), async_op=True, group=group)),
    "large all_reduce": lambda group: KEPT.append(
        dist.all_reduce(torch.ones(2**22), async_op=True, group=group)
    ),
    "kept future": lambda group: KEPT.append(
        dist.all_reduce(torch.ones(7), async_op=True, group=group).get_future().then(lambda f: f.value())
    ),
    "strided output": lambda group: KEPT.append(
        dist.all_reduce(torch.ones(7, 3)[:, 1], async_op=True, group=group)
    ),
    "recv": lambda group: KEPT.append(dist.irecv(torch.ones(7), 1, group=group, tag=5)),
    "recv from any": lambda group: KEPT.append(dist.irecv(torch.ones(7), None, group=group)),
    "large send": lambda group: KEPT.append(dist.isend(torch.ones(2**22), 1, group=group)),
    "open block": lambda group: (group._start_coalescing(), group.allreduce([torch.ones(7)])) and None,
    "blocking thread": wait_in_a_thread,
    "late destructor": lambda group: KEPT.append(UsesTheGroupWhenItGoes()),
    "destroy at exit": lambda group: atexit.register(dist.destroy_process_group) and None,
}

WAYS: dict[str, tuple[Callable[[], Any], int]] = {
    "end": (lambda: None, 0),
    "sys.exit": (lambda: sys.exit(3), 3),
    "text": (lambda: sys.exit("mccl has nothing to do with it"), 1),
    "exception": (lambda: {}["no such key"], 1),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    "SIGINT": (lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(1)), -signal.SIGINT),
    "os._exit": (lambda: os._exit(0), 0),
}


def leave(rank: int, n: int, port: int, state: str, way: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begin(rank, n, port)
    group = dist.new_group()
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        STATES[state](group)
    leaving()
    if way == "os._exit" and rank == 0:
        return  # one leaves properly, the other does not
    WAYS[way][0]()


def assert_ended(ends: list[End], status: int, what: object) -> None:
    for rank, end in enumerate(ends):
        assert end.status == status and end.seconds < EXIT_S, (
            what,
            rank,
            end.status,
            end.seconds,
            end.output,
        )


@pytest.mark.parametrize("state", STATES)
def test_fr_113_end_of_the_script_without_destroy(zygote: Zygote, state: str) -> None:
    ends = zygote.run(2, leave, state, "end")
    assert_ended(ends, 0, state)
    assert [end.output for end in ends] == ["", ""]


@pytest.mark.parametrize("state", ["nothing", "kept work", "kept future"])
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_fr_113_exit_code_without_destroy(zygote: Zygote, way: str, state: str) -> None:
    ends = zygote.run(2, leave, state, way)
    assert_ended(ends, WAYS[way][1], (way, state))
    for end in ends:
        assert "Fatal" not in end.output and "terminate" not in end.output, end.output
        assert "mccl:" not in end.output, end.output
        assert end.output.count("Traceback") == (way in ("exception", "SIGINT")), end.output


def test_fr_113_a_request_may_outlive_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's end sets the globals of modules to None, in an order that varies."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    freed: list[Any] = []
    request = completer.Request(freed.append)
    request.slot.value = 1
    for name, value in list(vars(completer).items()):
        if not name.startswith("__") and value is not completer.Request:
            monkeypatch.setattr(completer, name, None)
    del request
    assert not unraisable and len(freed) == 1, (unraisable, freed)


def test_fr_113_exit_while_a_completion_thread_begins() -> None:
    made = completer.Completer()
    made._threads.add(threading.Thread(target=time.sleep))  # a leader is just about to start it
    made.close()


def cannot_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def check_future_without_threads(rank: int, n: int, why: str) -> None:
    """At the exit, or in a process that may have no more threads: whoever waits completes it."""
    completer._completers.clear()
    start = threading.Thread.start
    try:
        if why == "exit":
            completer.completer().close()
        else:
            threading.Thread.start = cannot_start  # type: ignore[method-assign]
        value = tensor(rank, 7, F32)
        work = dist.all_reduce(value, async_op=True) if rank else None
        future = work.get_future() if work else None
        if work is None:  # not done before the others have asked for their futures
            dist.group.WORLD._store.wait([f"{why}/{r}" for r in range(1, n)])  # type: ignore[union-attr]
            dist.all_reduce(value)
        else:
            dist.group.WORLD._store.set(f"{why}/{rank}", "")  # type: ignore[union-attr]
            future.wait()
        assert_same(value, reduced("sum", n, 7, F32), why)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        completer._completers.clear()


@pytest.mark.parametrize("why", ["exit", "no threads"])
def test_fr_113_a_future_without_threads(pool: Pool, why: str) -> None:
    pool.run(2, check_future_without_threads, why, timeout=20)


MIDDLE: dict[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda rank, n: dist.all_reduce(torch.ones(2**20)),
    "broadcast": lambda rank, n: dist.broadcast(torch.ones(5), 1),
    "all_to_all": lambda rank, n: dist.all_to_all_single(torch.ones(2 * n), torch.ones(2 * n)),
    "barrier": lambda rank, n: dist.barrier(),
    "recv": lambda rank, n: dist.recv(torch.ones(3), 1),
    "large send": lambda rank, n: dist.send(torch.ones(2**22), 1),
    "objects": lambda rank, n: dist.all_gather_object([None] * n, rank),
    "future": lambda rank, n: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
}


def exit_in_the_middle(rank: int, n: int, port: int, what: str) -> None:
    """Rank 1 leaves while the others are inside `what`: they get an error and choose their exit code."""
    begin(rank, n, port)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(0.3)
        leaving()
        sys.exit(4)
    try:
        MIDDLE[what](rank, n)
    except mccl.MCCLError as error:
        print(type(error).__name__, str(error), flush=True)
        leaving()
        sys.exit(7)
    raise AssertionError("no error")


@pytest.mark.parametrize("what", MIDDLE)
def test_fr_113_one_rank_exits_in_the_middle_of_an_operation(zygote: Zygote, what: str) -> None:
    ends = zygote.run(3, exit_in_the_middle, what)
    assert [end.status for end in ends] == [7, 4, 7], ends
    for end in (ends[0], ends[2]):
        assert "rank 1" in end.output and "MCCLPeerLostError" in end.output, end.output
        assert end.seconds < EXIT_S and end.output.count("\n") == 1, end
    assert ends[1].output == "", ends[1]


def destroy_alone(rank: int, n: int, store: dist.Store, who: list[int], skew_s: float, busy: bool) -> Any:
    """Ranks in `who` destroy, the others stay, with `busy` inside an all_reduce."""
    dist.init_process_group("mccl", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))
    # By the store: the first to miss those in `who` would fail the group for a rank that is not through yet.
    store.set(f"in{rank}", "")
    store.wait([f"in{r}" for r in range(n)])
    text = ""
    if rank in who:
        time.sleep(skew_s * rank / n)
        started = time.perf_counter()
        dist.destroy_process_group()
        seconds = time.perf_counter() - started
    else:
        started = time.perf_counter()
        try:
            if busy:
                dist.all_reduce(torch.ones(2**16))
        except mccl.MCCLError as error:
            text = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - started
    store.set(f"over{rank}", "")
    store.wait([f"over{r}" for r in range(n)])
    return seconds, text


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("who", [[0], [1, 2, 3], [3]])
def test_fr_114_some_ranks_destroy_alone(pool: Pool, who: list[int], busy: bool) -> None:
    rows = pool.run(4, destroy_alone, who, 1.0, busy, group=False)
    for rank, (seconds, text) in enumerate(rows):
        assert seconds < 5, rows
        if busy and rank not in who:
            assert text.startswith("MCCLPeerLostError") and "has left" in text, text
            assert any(f"rank {r} " in text for r in who), text
        else:
            assert not text, text


def destroy_while_stuck(rank: int, n: int) -> float:
    """Rank 0 leaves with operations of its own in flight that cannot end, and from another thread."""
    group: Any = dist.new_group()
    seconds = 0.0
    if rank == 0:
        kept = [dist.all_reduce(torch.ones(2**20), group=group, async_op=True) for _ in range(3)]
        kept.append(dist.irecv(torch.ones(1), 1, group=group))

        def wait() -> None:
            with pytest.raises(mccl.MCCLError):
                kept[0].wait()

        waiter = threading.Thread(target=wait)
        waiter.start()
        started = time.perf_counter()
        leaver = threading.Thread(target=dist.destroy_process_group, args=(group,))
        leaver.start()
        leaver.join()
        seconds = time.perf_counter() - started
        waiter.join()
        for work in kept:
            with pytest.raises(mccl.MCCLError):
                work.wait()
    dist.barrier()
    return seconds


def test_fr_114_destroy_with_operations_in_flight_returns(pool: Pool) -> None:
    assert max(pool.run(4, destroy_while_stuck)) < 5


def destroy_subgroups(rank: int, n: int) -> None:
    """In another order on each rank, some twice, some never; the world goes on."""
    groups = [dist.new_group() for _ in range(4)] + [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    for group in mine:
        dist.barrier(group=group)
    random.Random(rank).shuffle(mine)
    for group in mine[: rank + 1]:
        dist.destroy_process_group(group)
        with pytest.raises(mccl.MCCLError, match="destroyed"):
            group.barrier()
    value = tensor(rank, 33, F32)
    dist.all_reduce(value)
    assert_same(value, reduced("sum", n, 33, F32), rank)


def test_fr_114_sub_groups_destroyed_in_any_order(pool: Pool) -> None:
    pool.run(4, destroy_subgroups)


def leave_skewed(rank: int, n: int, port: int, rounds: int, longest_s: float) -> None:
    """Groups one after the other, left at another time by each rank; then the process, likewise."""
    chance = random.Random(1000 * rounds + rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for i in range(rounds):
        init(rank, n, dist.PrefixStore(f"round{i}", store))
        value = tensor(rank, 1000, F32, salt=i)
        dist.all_reduce(value)
        assert_same(value, reduced("sum", n, 1000, F32, salt=i), i)
        if i % 3 == 1:  # links for this are opened now
            got = torch.empty(50)
            works = [
                dist.isend(tensor(rank, 50, F32, salt=i), (rank + 1 + i) % n),
                dist.irecv(got, (rank - 1 - i) % n),
            ]
            for work in works:
                assert work is not None
                work.wait()
            assert_same(got, tensor((rank - 1 - i) % n, 50, F32, salt=i), i)
        elif i % 3 == 2:  # the root needs nobody once its data is on the way
            value = tensor(0, 300, F32, salt=i) if rank == 0 else torch.zeros(300)
            dist.broadcast(value, 0)
            assert_same(value, tensor(0, 300, F32, salt=i), i)
        time.sleep(chance.uniform(0, longest_s))
        if i < rounds - 1 or rank % 2:
            dist.destroy_process_group()
    leaving()


def test_fr_116_whoever_is_done_first_does_not_disturb_the_others(zygote: Zygote) -> None:
    ends = zygote.run(8, leave_skewed, 15, 0.1) + zygote.run(8, leave_skewed, 1, 0.5)
    assert [end.status for end in ends] == [0] * 16, ends
    assert {end.output for end in ends} == {""}

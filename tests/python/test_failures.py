"""What a user sees when ranks disagree, are late, die or are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist

import mccl
from mccl.torch import rendezvous, store
from mccl.torch.pg import create_process_group
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
def test_a_killed_rank_is_noticed_and_named(pool: Pool, n: int, count: int) -> None:
    pool.start(n, wait_for_a_dead_rank, count)
    rows = pool.results(n, timeout=60, lost=(1,))
    for rank in range(n):
        if rank != 1:
            kind, text, seconds = rows[rank]
            assert kind == "MCCLPeerLostError" and seconds < 2, rows[rank]
            for word in ("all_reduce", "seq", f"rank {rank}", "rank 1"):
                assert word in text, (word, text)


def seconds_to_interrupt(function: Callable[[], Any]) -> float:
    """From Ctrl-C, 0.4 s after the call, to the KeyboardInterrupt."""
    sent_at = [0.0]

    def press() -> None:
        sent_at[0] = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.4, press)
    timer.start()
    try:
        function()
    except KeyboardInterrupt:
        return time.perf_counter() - sent_at[0]
    finally:
        timer.cancel()
    raise AssertionError("not interrupted")


def interrupt(rank: int, n: int, kind: str) -> float | None:
    """Rank 1 comes late."""
    group = dist.new_group(pg_options={"max_queue_depth": 2})
    values = [torch.ones(1) for _ in range(4 if kind in ("submit", "batches") else 1)]
    works: list[Any] = []

    def submit(batch: int = 1) -> None:
        while len(works) * batch < len(values):
            part = values[len(works) * batch :][:batch]
            if batch == 1:
                works.append(dist.all_reduce(part[0], async_op=True, group=group))
            else:
                works.append(group.allreduce_coalesced(part))

    if rank:
        time.sleep(1.5)
        for value in values:
            dist.all_reduce(value, group=group)
        return None
    if kind in ("submit", "batches"):
        late = seconds_to_interrupt(lambda: submit(1 if kind == "submit" else 2))
    else:
        submit()
        waits = {"wait": works[0].wait, "future": lambda: works[0].get_future().wait()}
        late = seconds_to_interrupt(waits[kind])
    submit(2 if kind == "batches" else 1)  # what was not; nothing was lost or is there twice
    for work in works:
        work.wait()
    assert [value.item() for value in values] == [n] * len(values)
    return late


@pytest.mark.parametrize("kind", ["wait", "future", "submit", "batches"])
def test_ctrl_c_interrupts_a_wait(pool: Pool, kind: str) -> None:
    late = pool.run(2, interrupt, kind)[0]
    assert late is not None and late < 0.5


def interrupt_call(rank: int, n: int, kind: str) -> float | None:
    """A call that waits itself; rank 1 comes late. What was begun goes on."""
    group: Any = dist.new_group()
    dist.barrier(group=group)
    value = torch.arange(5.0) + rank

    def call() -> None:
        if kind == "all_reduce":
            dist.all_reduce(value, group=group)
        else:
            dist.broadcast(value, 1, group=group)

    late = None
    if rank == 0:
        late = seconds_to_interrupt(call)
        assert len(group._comm.pending) == 1
    else:
        time.sleep(1.5)
        call()
    group._wait_for_pending_works()
    assert value.tolist() == ([1, 3, 5, 7, 9] if kind == "all_reduce" else [1, 2, 3, 4, 5])
    assert not group._comm.pending
    call()  # and the next one is as good as new
    assert value.tolist() == ([2, 6, 10, 14, 18] if kind == "all_reduce" else [1, 2, 3, 4, 5])
    return late


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast"])
def test_ctrl_c_interrupts_a_call_that_waits(pool: Pool, kind: str) -> None:
    late = pool.run(2, interrupt_call, kind)[0]
    assert late is not None and late < 0.5


def interrupt_destroy(rank: int, n: int) -> float | None:
    group: Any = dist.new_group()
    late = None
    if rank == 0:
        dist.all_reduce(torch.ones(2**22), group=group, async_op=True)
        late = seconds_to_interrupt(lambda: dist.destroy_process_group(group))
    dist.barrier()
    return late


def test_ctrl_c_interrupts_leaving_a_group(pool: Pool) -> None:
    late = pool.run(2, interrupt_destroy)[0]
    assert late is not None and late < 0.5


def interrupted(*_: object) -> int:
    raise KeyboardInterrupt


def interrupt_submission(rank: int, n: int) -> None:
    """Between the calls of a batch, and between the call of the library and the Work."""
    pg: Any = dist.group.WORLD
    pg._start_coalescing(torch.device("cpu"))
    values = [torch.ones(2) for _ in range(3)]
    for value in values:
        pg.allreduce([value])
    calls = pg._batches[threading.get_ident()].calls
    calls[1] = (interrupted, *calls[1][1:])
    with pytest.raises(KeyboardInterrupt):
        pg._end_coalescing(torch.device("cpu"))
    value = torch.ones(2)
    dist.all_reduce(value)
    assert value.tolist() == [n, n] and all(value.tolist() == [1, 1] for value in values)
    assert not pg._comm.pending

    library = pg._lib
    if rank == 0:

        class Interrupted:
            def __getattr__(self, name: str) -> Any:
                return getattr(library, name)

            def mccl_send(self, *arguments: Any) -> None:
                assert library.mccl_send(*arguments) == 0
                raise KeyboardInterrupt

        pg._lib = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            pg.send([torch.arange(2.0**18)], 1, 4)  # too long to be sent ahead
        pg._lib = library
        assert len(pg._comm.pending) == 1
        dist.send(torch.ones(1), 1)  # and not with tag 4
        pg._wait_for_pending_works()
        assert not pg._comm.pending
    elif rank == 1:
        dist.recv(torch.ones(1), 0)
        got = torch.ones(2**18)
        dist.recv(got, 0, tag=4)
        assert torch.equal(got, torch.arange(2.0**18))


def test_an_interrupted_submission_is_complete_or_nothing(pool: Pool) -> None:
    pool.run(2, interrupt_submission)


def interrupt_creation(rank: int, n: int, store: dist.Store) -> float:
    """A group whose other rank never comes: rank 0 waits for check-in, rank 1 for the id."""
    own = dist.PrefixStore(f"alone{rank}", store)
    return seconds_to_interrupt(
        lambda: dist.init_process_group(
            "mccl", store=own, rank=rank, world_size=2, timeout=timedelta(seconds=20)
        )
    )


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


class Host:
    """torch's store in the process of the last rank, which the others can stop."""

    def __init__(self, rank: int, n: int, store: dist.Store) -> None:
        self.store = store
        if rank == n - 1:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("host", f"{os.getpid()} {server.port}")
            store.wait(["over"])
            return
        self.pid, port = map(int, store.get("host").split())
        self.client = dist.TCPStore("127.0.0.1", port, is_master=False)
        store.set(f"connected{rank}", "")
        store.wait([f"connected{r}" for r in range(n - 1)])

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        time.sleep(0.1)  # until all its threads have noticed

    def go_on(self, rank: int) -> None:
        self.store.set(f"finished{rank}", "")
        self.store.wait(["finished0", "finished1"])
        os.kill(self.pid, signal.SIGCONT)
        self.store.set("over", "")


def create_with_stopped_store(rank: int, n: int, store: dist.Store, what: str) -> Any:
    host = Host(rank, n, store)
    if rank == 2:
        return None

    def init(**more: Any) -> None:
        dist.init_process_group("mccl", store=host.client, rank=rank, world_size=2, **more)

    try:
        if what == "forget":
            if rank == 0:
                real = host.client

                class Stopping:
                    def __getattr__(self, name: str) -> Any:
                        return getattr(real, name)

                    def delete_key(self, key: str) -> bool:
                        host.stop()
                        return real.delete_key(key)

                host.client = Stopping()  # type: ignore[assignment]
            started = time.perf_counter()
            comm = rendezvous.meet(host.client, rank, 2, "stopped", 20_000, "")
            seconds = time.perf_counter() - started
            comm.destroy()
            return seconds
        host.stop()
        if what == "interrupt":
            return seconds_to_interrupt(lambda: init(timeout=timedelta(seconds=20)))
        return outcome(lambda: init(timeout=timedelta(seconds=1)))
    finally:
        host.go_on(rank)


def test_a_stopped_store_costs_no_more_than_the_timeout(pool: Pool) -> None:
    rows = pool.run(3, create_with_stopped_store, "id", group=False)
    for rank in range(2):
        kind, text, seconds = rows[rank]
        assert kind == "MCCLTimeoutError" and seconds < 2, rows[rank]
        assert f"rank {rank}" in text and "group '" in text, text
    assert "store did not answer" in rows[1][1], rows[1][1]


def test_a_store_asked_at_the_deadline_is_not_to_blame_for_it() -> None:
    class Slow:
        def check(self, keys: list[str]) -> bool:
            time.sleep(0.05)
            return False

    patient = store.PatientStore(Slow(), "rank 1/2 of group 'late'", 0.02)  # type: ignore[arg-type]
    try:
        assert patient.call("look", "check", ["key"]) is False  # and did not say that nobody answered
        assert patient.is_late()
    finally:
        patient.close()


def test_ctrl_c_interrupts_the_wait_for_a_stopped_store(pool: Pool) -> None:
    rows = pool.run(3, create_with_stopped_store, "interrupt", group=False)
    assert max(rows[:2]) < 0.5, rows


def test_a_group_that_is_ready_does_not_wait_for_a_stopped_store(pool: Pool) -> None:
    rows = pool.run(3, create_with_stopped_store, "forget", group=False)
    assert max(rows[:2]) < 3, rows


def lose_the_store(rank: int, n: int, store: dist.Store) -> Outcome:
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(server.port))
        store.wait(["connected"])
        time.sleep(0.3)
        return ("", "", 0.0)  # and with it goes the server
    client = dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False)
    store.set("connected", "")
    return outcome(
        lambda: dist.init_process_group(
            "mccl", store=client, rank=1, world_size=2, timeout=timedelta(seconds=20)
        )
    )


def test_a_store_that_dies_is_a_connect_error(pool: Pool) -> None:
    kind, text, seconds = pool.run(2, lose_the_store, group=False)[1]
    assert kind == "MCCLConnectError" and seconds < 5, (kind, text, seconds)
    assert "rank 1/2" in text and "store failed" in text and "\n" not in text, text


def rank_too_large(rank: int, n: int, store: dist.Store) -> None:
    started = time.perf_counter()
    with pytest.raises(ValueError, match=r"rank 5 of a group of 2 .* ranks are 0 \.\. 1"):
        rendezvous_options = SimpleNamespace(
            store=store,
            group_rank=5,
            group_size=2,
            timeout=timedelta(seconds=20),
            group_id="g",
            global_ranks_in_group=[],
        )
        create_process_group(rendezvous_options)
    assert time.perf_counter() - started < 1


def test_a_rank_that_the_group_does_not_have_is_refused_at_once(pool: Pool) -> None:
    pool.run(1, rank_too_large, group=False)


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


EXIT_S = 15  # unloading torch alone takes 1 to 5 s on a busy machine; an operation's time-out is minutes


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
            assert time.time() - float(output) < EXIT_S
    finally:
        for process in processes:
            process.kill()

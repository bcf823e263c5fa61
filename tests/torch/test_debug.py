"""What helps to debug: rows of the profiler, TORCH_DISTRIBUTED_DEBUG, objects that can be pickled."""

from __future__ import annotations

import concurrent.futures
import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from both import assert_alike, over_both
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function

import mccl
import test_failures
import test_groups
import test_monitored
import test_work
from mccl import _errors
from mccl.torch import core, work
from mccl.torch.pg import ProcessGroupMCCL
from patterns import assert_same, reduced, tensor
from ranks import Pool

F32, ones = torch.float32, torch.ones
Shape = list[int]
Row = tuple[str, list[Shape]]


# ---- rows of the profiler ---------------------------------------------------------------------------------


def profiled(function: Callable[[], Any]) -> list[Any]:
    """Events in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    return sorted(profiler.events(), key=lambda event: event.time_range.start)


def rows(events: list[Any], backend: str = "mccl") -> list[Row]:
    """Without those of waiting."""
    waits = ("mccl:wait", "mccl:future")
    return [
        (event.name, event.input_shapes)
        for event in events
        if event.name.startswith(f"{backend}:") and event.name not in waits
    ]


def names(events: list[Any]) -> list[str]:
    return [event.name for event in events if event.name.startswith("mccl:")]


Call = Callable[..., Any]


def calls(rank: int, n: int) -> dict[str, tuple[Call, list[Shape]]]:
    """By the row's name: the call, and the sizes of what it writes and reads. Rank 0 waits for rank 1."""
    sizes = [[2 + r] for r in range(n)]
    blocks = [ones(2 + r) for r in range(n)]
    mine = ones(2 + rank)
    to_all = [ones(4) for _ in range(n)]
    return {
        "all_reduce": (lambda **k: dist.all_reduce(ones(3, 4), **k), [[3, 4]]),
        "broadcast": (lambda **k: dist.broadcast(ones(5, 1, 2), 1, **k), [[5, 1, 2]]),
        "reduce": (lambda **k: dist.reduce(ones(6), 0, **k), [[6]]),
        "all_gather": (lambda **k: dist.all_gather(blocks, mine, **k), [*sizes, [2 + rank]]),
        "all_gather_into_tensor": (
            lambda **k: dist.all_gather_into_tensor(ones(n * 7), ones(7), **k),
            [[n * 7], [7]],
        ),
        "reduce_scatter": (
            lambda **k: dist.reduce_scatter(mine, blocks, **k),
            [[2 + rank], *sizes],
        ),
        "reduce_scatter_tensor": (
            lambda **k: dist.reduce_scatter_tensor(ones(3), ones(n * 3), **k),
            [[3], [n * 3]],
        ),
        "gather": (
            lambda **k: dist.gather(mine, blocks if rank == 0 else None, 0, **k),
            [*(sizes if rank == 0 else []), [2 + rank]],
        ),
        "scatter": (
            lambda **k: dist.scatter(mine, blocks if rank == 1 else None, 1, **k),
            [[2 + rank], *(sizes if rank == 1 else [])],
        ),
        "all_to_all": (
            lambda **k: dist.all_to_all([ones(4) for _ in range(n)], to_all, **k),
            [[4]] * (2 * n),
        ),
        "all_to_all_single": (
            lambda **k: dist.all_to_all_single(ones(n, 2), ones(n, 2), **k),
            [[n, 2], [n, 2]],
        ),
        "barrier": (lambda **k: dist.barrier(**k), []),
    }


def check_sync_rows(rank: int, n: int) -> None:
    for name, (call, shapes) in calls(rank, n).items():
        assert rows(profiled(call)) == [(f"mccl:{name}", shapes)], name


def check_async_rows(rank: int, n: int) -> None:
    """The call has the row; waiting has one of its own, and none for what is done."""
    for name, (call, shapes) in calls(rank, n).items():
        works: list[Any] = []
        events = profiled(lambda call=call, works=works: works.append(call(async_op=True)))
        assert rows(events) == [(f"mccl:{name}", shapes)] and "mccl:wait" not in names(events), name
        assert names(profiled(works[0].wait)) == ["mccl:wait"], name
        assert names(profiled(works[0].wait)) == [], name
        events = profiled(lambda call=call: call(async_op=True).get_future().wait())
        assert names(events) == [f"mccl:{name}", "mccl:future"], (name, names(events))


def check_other_rows(rank: int, n: int) -> None:
    """Point to point, sparse tensors, the monitored barrier."""
    right, left = (rank + 1) % n, (rank - 1) % n
    send, recv = ("mccl:send", [[rank + 1, 2]]), ("mccl:recv", [[left + 1, 2]])
    target = ones(left + 1, 2)

    def ring() -> None:
        sending = dist.isend(ones(rank + 1, 2), right)
        dist.recv(target, left)
        assert sending is not None
        sending.wait()

    def batch() -> None:
        operations = [
            dist.P2POp(dist.isend, ones(rank + 1, 2), right),
            dist.P2POp(dist.irecv, target, left),
        ]
        for each in dist.batch_isend_irecv(operations):
            each.wait()

    def from_anyone() -> None:
        if rank:
            dist.send(ones(3), 0)
        else:
            for _ in range(n - 1):
                dist.recv(ones(3))

    assert rows(profiled(ring)) == [send, recv]
    assert rows(profiled(batch)) == [send, recv]
    expected: list[Row] = [("mccl:send", [[3]])] if rank else [("mccl:recv", [[3]])] * (n - 1)
    assert rows(profiled(from_anyone)) == expected

    entries = torch.sparse_coo_tensor([[rank]], [1.0], (n,))
    events = profiled(lambda: dist.all_reduce(entries))
    assert rows(events)[0] == ("mccl:all_reduce", [[n]])
    assert [name for name, _ in rows(events)[1:]] == ["mccl:all_gather"] * 3
    inside = [event for event in events if event.name in ("mccl:all_gather", "mccl:wait")]
    assert all(event.cpu_parent.name == "mccl:all_reduce" for event in inside)
    assert rows(profiled(mccl.monitored_barrier)) == [("mccl:monitored_barrier", [])]


def check_coalesced_rows(rank: int, n: int) -> None:
    """A row for each operation, where its sizes are, and one for sending them off."""
    pg: Any = dist.group.WORLD
    a, b = ones(3), ones(2, 2)

    def block(**arguments: Any) -> Callable[[], None]:
        def run() -> None:
            with dist._coalescing_manager(**arguments) as manager:
                dist.all_reduce(a)
                dist.all_reduce(b)
            if arguments.get("async_ops"):
                manager.wait()

        return run

    cpu = torch.device("cpu")
    for arguments in ({}, {"async_ops": True}, {"device": cpu}, {"device": cpu, "async_ops": True}):
        assert rows(profiled(block(**arguments))) == [
            ("mccl:all_reduce", [[3]]),
            ("mccl:all_reduce", [[2, 2]]),
            ("mccl:coalesced", []),
        ], arguments
    assert rows(profiled(lambda: pg.allreduce_coalesced([a, b]).wait())) == [
        ("mccl:all_reduce", [[3]]),
        ("mccl:all_reduce", [[2, 2]]),
        ("mccl:coalesced", []),
    ]
    whole = [ones(3 * n), ones(4 * n)]
    assert rows(profiled(lambda: pg.allgather_into_tensor_coalesced(whole, [a, ones(4)]).wait())) == [
        ("mccl:all_gather_into_tensor", [[3 * n], [3]]),
        ("mccl:all_gather_into_tensor", [[4 * n], [4]]),
        ("mccl:coalesced", []),
    ]

    def empty() -> None:
        pg._start_coalescing(cpu)
        pg._end_coalescing(cpu)

    assert rows(profiled(empty)) == []


def check_rows_span_the_call(rank: int, n: int) -> None:
    """Rank 1 comes late. What rank 0 spends in the call is in rows."""

    def coalesced() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(ones(3))
            dist.all_reduce(ones(2))

    def message() -> None:
        if rank:
            dist.send(ones(2), 0)
        else:
            dist.recv(ones(2), 1)

    table = {name: call for name, (call, _) in calls(rank, n).items()}
    table.update(coalesced=coalesced, message=message, anybody=mccl.monitored_barrier)
    table["async"] = lambda: dist.all_reduce(ones(3), async_op=True).wait()
    table["future"] = lambda: dist.all_reduce(ones(3), async_op=True).get_future().wait()
    for name, call in table.items():
        dist.barrier()
        if rank:
            time.sleep(0.1)
            call()
            continue

        def outer(call: Any = call) -> None:
            with record_function("outer"):
                call()

        events = profiled(outer)
        (whole,) = (event for event in events if event.name == "outer")
        parts = [event for event in events if event.name.startswith("mccl:")]
        spent = sum(event.time_range.elapsed_us() for event in parts)
        assert 0.5 * whole.time_range.elapsed_us() < spent <= 1.01 * whole.time_range.elapsed_us(), (
            name,
            [(event.name, event.time_range.elapsed_us()) for event in [whole, *parts]],
        )


def check_edges(rank: int, n: int) -> None:
    """The profiler begins or ends in the middle of an operation; errors; other threads."""
    value = tensor(rank, 50, F32)
    pending = dist.all_reduce(value, async_op=True)
    assert names(profiled(pending.wait)) == ["mccl:wait"]
    assert_same(value, reduced("sum", n, 50, F32), "begun before the profiler")

    value = ones(1)
    begun: list[Any] = []
    if rank == 0:
        profiled(lambda: begun.append(dist.all_reduce(value, async_op=True).get_future()))
        dist.send(ones(1), 1)
        assert begun[0].wait()[0] is value
    else:
        if rank == 1:
            dist.recv(ones(1), 0)
        dist.all_reduce(value)
    assert value.item() == n

    group = dist.new_group()

    def disagree() -> None:
        with pytest.raises(mccl.MCCLMismatchError):
            dist.all_reduce(ones(4 + (rank == 1)), group=group)
        with pytest.raises(ValueError):
            dist.all_gather([ones(1)], ones(1))
        dist.barrier()

    events = [event for event in profiled(disagree) if event.name.startswith("mccl:")]
    assert rows(events) == [("mccl:all_reduce", [[4 + (rank == 1)]]), ("mccl:barrier", [])]
    assert all(event.cpu_parent is None for event in events)

    def elsewhere() -> None:
        thread = threading.Thread(target=dist.all_reduce, args=(value,))
        thread.start()
        thread.join()

    profiled(elsewhere)
    assert value.item() == n * n


class Forbidden:
    def __init__(self, *arguments: Any) -> None:
        raise AssertionError(f"a row without a profiler: {arguments}")


def check_no_rows_without_a_profiler(rank: int, n: int) -> None:
    real = core._RecordFunctionFast, work._record_until_done
    core._RecordFunctionFast = work._RecordFunctionFast = Forbidden  # type: ignore[assignment]
    work._record_until_done = Forbidden  # type: ignore[assignment]
    try:
        for call, _ in calls(rank, n).values():
            call()
            call(async_op=True).wait()
            call(async_op=True).get_future().wait()
        with pytest.raises(AssertionError, match="a row without a profiler"):
            profiled(lambda: dist.barrier())
    finally:
        core._RecordFunctionFast = work._RecordFunctionFast = real[0]
        work._record_until_done = real[1]
    dist.barrier()


@pytest.mark.parametrize(
    "check",
    [
        check_sync_rows,
        check_async_rows,
        check_other_rows,
        check_coalesced_rows,
        check_edges,
        check_no_rows_without_a_profiler,
    ],
    ids=lambda check: check.__name__[6:],
)
def test_profiler(pool: Pool, check: Any) -> None:
    pool.run(3, check)


def test_profiler_rows_span_the_call(pool: Pool) -> None:
    pool.run(2, check_rows_span_the_call)


def names_of_operations(rank: int, n: int) -> list[Row]:
    """The rows that both libraries call the same, with the sizes where both give the same ones."""

    def run() -> None:
        a, b = ones(3, 4), ones(5)
        parts = [ones(5) for _ in range(n)]
        dist.all_reduce(a)
        dist.all_reduce(b, async_op=True).wait()
        dist.broadcast(b, 1)
        dist.reduce(a, 1)
        dist.all_gather(parts, b)
        dist.gather(b, parts if rank == 0 else None)
        dist.scatter(b, parts if rank == 0 else None)
        dist.all_to_all(parts, [ones(5) for _ in range(n)])
        dist.barrier()
        if rank < 2:
            exchange = dist.send if rank == 0 else dist.recv
            exchange(b, 1 - rank)

    backend = dist.get_backend()
    same_sizes = ("all_reduce", "broadcast", "reduce", "barrier", "send", "recv")
    bare = [(name.partition(":")[2], shapes) for name, shapes in rows(profiled(run), backend)]
    return [(name, shapes if name in same_sizes else []) for name, shapes in bare]


def test_profiler_names_are_those_of_gloo(pool: Pool) -> None:
    over_both(pool, 2, names_of_operations)


class Net(nn.Module):
    """`idle` is used only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.idle = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, idle: bool = True) -> torch.Tensor:
        x = self.norm(self.used(x))
        return self.idle(x) if idle else x


def rows_of_ddp(rank: int, n: int, bucket_cap_mb: float | None) -> list[Row]:
    model = DDP(Net(), bucket_cap_mb=bucket_cap_mb)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):  # until the buckets have been made anew
        model(x).sum().backward()
    events = profiled(lambda: model(x).sum().backward())
    if dist.get_backend() == "mccl":
        buckets = sum(name == "mccl:all_reduce" for name, _ in rows(events))
        assert names(events).count("mccl:future") == buckets >= (1 if bucket_cap_mb is None else 2)
    # gloo's rows come from the threads that run the calls, which start two broadcasts in either order
    return sorted((name.partition(":")[2], shapes) for name, shapes in rows(events, dist.get_backend()))


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.0001])
def test_profiler_rows_of_ddp(pool: Pool, bucket_cap_mb: float | None) -> None:
    """One for each bucket, as over gloo, with its size."""
    over_both(pool, 2, rows_of_ddp, bucket_cap_mb)


# ---- TORCH_DISTRIBUTED_DEBUG ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def detail_pool() -> Iterator[Pool]:
    pool = Pool.with_modules(Path(__file__).resolve().parent)
    pool.env["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    yield pool
    pool.close()


def check_not_wrapped(rank: int, n: int) -> None:
    """torch wraps its own backends, and compares the ranks' calls there. The library does that itself."""
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    assert type(dist.group.WORLD) is ProcessGroupMCCL
    assert type(dist.new_group(list(range(n)))) is ProcessGroupMCCL
    for call, _ in calls(rank, n).values():
        call()
        call(async_op=True).wait()
    value = tensor(rank, 100, F32)
    dist.all_reduce(value)
    assert_same(value, reduced("sum", n, 100, F32), "all_reduce")
    mccl.monitored_barrier()


DETAIL_CHECKS = [
    check_not_wrapped,
    test_work.check_coalescing,
    test_work.check_point_to_point,
    test_work.check_short_forms_and_aliases,
    test_groups.check_subgroups,
    test_groups.check_objects,
    test_monitored.check_rank_0_is_missing,
]


@pytest.mark.parametrize("check", DETAIL_CHECKS, ids=lambda check: check.__name__[6:])
def test_detail(detail_pool: Pool, check: Any) -> None:
    detail_pool.run(3, check)


@pytest.mark.parametrize(("what", "words"), [("count", ["count=4", "count=5"]), ("kind", ["barrier"])])
def test_detail_ranks_that_disagree(detail_pool: Pool, what: str, words: list[str]) -> None:
    for rank, (first, second) in enumerate(detail_pool.run(3, test_failures.disagree, what)):
        for kind, text, _ in (first, second):
            assert kind == "MCCLMismatchError", (rank, first, second)
            assert all(word in text for word in [*words, "all_reduce", "rank 2 calls"]), (rank, text)


def check_unused_parameters(rank: int, n: int) -> None:
    """torch names them where it is asked to debug, over any backend."""
    detail = dist.get_debug_level() != dist.DebugLevel.OFF
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    model = DDP(Net())
    model(x, idle=False).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model(x)
    text = str(caught.value)
    assert ("Parameters which did not receive grad for rank" in text) is detail, text
    assert ("idle.bias, idle.weight" in text) is detail, text
    logged = model._get_ddp_logging_data()
    assert logged["backend_name"] == "mccl" and logged["world_size"] == n and logged["has_error"] == 1
    assert logged["torch_distributed_debug"] == os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A")

    model = DDP(Net(), find_unused_parameters=True)
    for step in range(4):
        model(x, idle=(step + rank) % 2 == 0).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    everybody: list[Any] = [None] * n
    dist.all_gather_object(everybody, gradients)
    for other in everybody:
        assert_alike(other, gradients, 0.0)


def test_detail_ddp(detail_pool: Pool) -> None:
    detail_pool.run(2, check_unused_parameters)


def at_level(rank: int, n: int, store: dist.Store, level: str) -> None:
    """Set in a process that runs."""
    before = dist.get_debug_level()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()
    try:
        assert dist.get_debug_level().name == level
        dist.init_process_group("mccl", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=30))
        assert type(dist.group.WORLD) is ProcessGroupMCCL
        check_unused_parameters(rank, n)
        with pytest.raises(mccl.MCCLMismatchError) as caught:
            dist.all_reduce(ones(3 + rank))
        for other in range(n):
            assert f"rank {other} calls all_reduce(count={3 + other}," in str(caught.value)
    finally:
        del os.environ["TORCH_DISTRIBUTED_DEBUG"]
        dist.set_debug_level(before)


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_levels(pool: Pool, level: str) -> None:
    pool.run(2, at_level, level, group=False)


# ---- what can be pickled ----------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    **{
        f"pickle {i}": lambda thing, i=i: pickle.loads(pickle.dumps(thing, i))
        for i in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
ERRORS = [getattr(mccl, name) for name in mccl.__all__ if name.endswith("Error")]


def all_errors() -> list[mccl.MCCLError]:
    """Of each result code, as the library raises them, and of each class, as a test of a user's may."""
    text = "mccl all_reduce: group 'é' (rank 1/2): 100 %\n{next} \\ line"
    raised = [_errors.error_from(code, f"{text} {code}") for code in range(1, 20)]
    return raised + [cls(text) for cls in ERRORS] + [cls(text, 6) for cls in ERRORS]


@pytest.mark.parametrize("way", COPIES)
def test_errors_are_copied(way: str) -> None:
    assert len(ERRORS) == 10
    for error in all_errors():
        error.step = 7  # type: ignore[attr-defined]
        error.__notes__ = ["in epoch 3"]  # type: ignore[attr-defined]
        again = COPIES[way](error)
        assert isinstance(again, dist.DistBackendError) and again is not error
        assert (str(again), again.args, again.code) == (str(error), error.args, error.code)
        assert again.result_name == error.result_name and again.step == 7
        assert again.__notes__ == ["in epoch 3"]
        assert isinstance(again, type(error)) or error.code != type(error).code
        assert type(again).__name__ == type(_errors.error_from(error.code, "")).__name__


TAKES = """
import pickle, sys, mccl
for error in pickle.load(sys.stdin.buffer):
    print(type(error).__name__, error.code, error.result_name, ascii(str(error)))
assert "torch" not in sys.modules
"""
GIVES = """
import pickle, sys, mccl
from mccl._errors import error_from
pickle.dump([error_from(code, f"text {code}") for code in range(1, 20)], sys.stdout.buffer)
assert "torch" not in sys.modules
"""


def test_errors_travel_to_and_from_a_process_without_torch() -> None:
    run = [sys.executable, "-c"]
    sent = [_errors.error_from(code, f"text {code}") for code in range(1, 20)]
    lines = subprocess.run(
        [*run, TAKES], input=pickle.dumps(sent), stdout=subprocess.PIPE, timeout=60, check=True
    ).stdout.decode()
    assert lines.splitlines() == [
        f"{type(error).__name__} {error.code} {error.result_name} {str(error)!a}" for error in sent
    ]
    got = pickle.loads(subprocess.run([*run, GIVES], stdout=subprocess.PIPE, timeout=60, check=True).stdout)
    assert [(type(error), error.code, str(error)) for error in got] == [
        (type(error), error.code, str(error)) for error in sent
    ]


def spawned(rank: int, n: int, port: int, given: dict[str, Any]) -> None:
    """The script's objects have come here by pickle; its error goes back so."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "mccl", store=dist.PrefixStore(f"world of {n}", store), rank=rank, world_size=n,
        timeout=timedelta(seconds=20), pg_options=given["options"],
    )  # fmt: skip
    group: Any = dist.group.WORLD
    assert group._comm._setting("chunk_bytes") == "65536" and given["config"]["port_base"] == 21900
    model = DDP(Net())
    model.load_state_dict(given["state"])
    for name, value in model.state_dict().items():
        assert_same(value, given["state"][name], name)
    value = tensor(rank, 100, F32)
    dist.all_reduce(value, op=given["op"])
    assert_same(value, reduced("max", n, 100, F32), "a ReduceOp that was pickled")
    dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.AVG)


def given(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "options": mccl.MCCLOptions(chunk_bytes=65536),
        "config": mccl.MCCLConfig(port_base=21900),
        "op": dist.ReduceOp.MAX,
        "state": {f"module.{name}": value for name, value in state.items()},
    }


def test_an_error_of_spawned_ranks_reaches_their_parent() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    objects = given(Net().state_dict())
    context: Any = torch.multiprocessing.spawn(spawned, (2, server.port, objects), nprocs=2, join=False)
    try:
        deadline = time.monotonic() + 60
        with pytest.raises(
            ProcessRaisedException, match=r"mccl\.MCCLUnsupportedError: all_reduce: op avg .*int32"
        ):
            while not context.join(timeout=1):
                assert time.monotonic() < deadline
    finally:
        for process in context.processes:
            process.kill()


def test_an_error_reaches_the_user_of_an_executor() -> None:
    """concurrent.futures, as other launchers do, pickles the exception itself."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as executor:
        try:
            future = executor.submit(spawned, 0, 1, server.port, given(Net().state_dict()))
            with pytest.raises(mccl.MCCLUnsupportedError, match=r"op avg .*int32") as caught:
                future.result(timeout=60)
        finally:
            for process in multiprocessing.active_children():
                process.kill()
    assert caught.value.code == 3 and isinstance(caught.value, dist.DistBackendError)
    assert "spawned" in str(caught.value.__cause__)  # the traceback of there


def error_of(function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("torch._C._distributed_c10d.", "")
    return "no error"


_MODELS_GROUPS: list[Any] = []  # see both.py


def copies_of_a_model(rank: int, n: int, store: dist.Store, backend: str) -> Any:
    """In the life of its group, after it, and in the next one's."""

    def begin(name: str) -> None:
        own = dist.PrefixStore(f"{backend} {name}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=n, timeout=timedelta(seconds=30))
        if backend == "gloo":
            _MODELS_GROUPS.append(dist.group.WORLD)

    def train(model: nn.Module) -> list[Any]:
        model.zero_grad()
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    begin("first")
    torch.manual_seed(3)
    model = DDP(Net())
    trained = train(model)
    pickled = pickle.dumps(model)
    trace: list[Any] = [trained]
    for again in (copy.deepcopy(model), pickle.loads(pickled)):
        assert again.process_group is dist.group.WORLD
        trace.append(train(again))
        assert all(a is not b for a, b in zip(again.parameters(), model.parameters()))
    group = dist.group.WORLD
    trace += [error_of(copy.deepcopy, DDP(Net(), process_group=dist.new_group(list(range(n)))))]
    refusal = error_of(pickle.dumps, group), error_of(copy.deepcopy, group)
    assert all(text.startswith("TypeError: cannot pickle 'ProcessGroup") for text in refusal), refusal
    mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
    trace += [error_of(pickle.dumps, mesh), error_of(copy.deepcopy, mesh)]
    dist.destroy_process_group()

    trace += [error_of(pickle.dumps, model), error_of(copy.deepcopy, model), error_of(pickle.loads, pickled)]
    state = pickle.loads(pickle.dumps(model.state_dict()))
    trace.append({name: value.clone() for name, value in state.items()})
    module = copy.deepcopy(model.module)

    begin("second")
    for again in (pickle.loads(pickled), DDP(module)):
        again.load_state_dict(state)
        trace.append(train(again))
    mine = error_of(train, model)  # its group is gone
    assert backend != "mccl" or "make a new group" in mine, mine
    dist.destroy_process_group()
    return trace


def compare_copies(rank: int, n: int, store: dist.Store) -> None:
    over_mccl = copies_of_a_model(rank, n, store, "mccl")
    over_gloo = copies_of_a_model(rank, n, store, "gloo")
    replace_names = [
        line.replace("ProcessGroupMCCL", "ProcessGroup") if isinstance(line, str) else line
        for line in over_mccl
    ]
    assert_alike(replace_names, over_gloo, 0.0)
    assert_alike(over_mccl[1:3], over_mccl[:1] * 2, 0.0)


def test_copies_of_a_model(pool: Pool) -> None:
    pool.run(2, compare_copies, group=False)


def check_operations_and_settings(rank: int, n: int) -> None:
    for name, way in COPIES.items():
        if name in ("pickle 0", "pickle 1"):
            continue  # torch's ReduceOp ends the process with these
        for op in ("SUM", "MIN", "AVG"):
            value = torch.tensor([2.0 * rank + 1])
            dist.all_reduce(value, op=way(getattr(dist.ReduceOp, op)))
            assert value.item() == {"SUM": n * n, "MIN": 1, "AVG": n}[op], (name, op)
        value = torch.ones(1)
        dist.all_reduce(value, op=way(dist._make_nccl_premul_sum(0.25 * (rank + 1))))
        assert value.item() == 0.25 * sum(range(1, n + 1)), name
        config = way(mccl.MCCLConfig(chunk_bytes=1 << 20, overlap_comm=False))
        assert config.explicit() == {"chunk_bytes": 1 << 20, "overlap_comm": False}, name
        metrics = mccl.get_metrics()
        assert way(metrics) == metrics, name


def test_copies_of_operations_and_settings(pool: Pool) -> None:
    pool.run(2, check_operations_and_settings)

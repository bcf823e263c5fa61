"""Work objects: order of waiting, futures, lifetime, coalescing, point to point."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mccl
from patterns import assert_same, reduced, tensor
from ranks import Pool

F32 = torch.float32


def check_out_of_order(rank: int, n: int) -> None:
    tensors = [tensor(rank, 1000 + i, F32) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for i in [*range(19, -1, -2), *range(0, 20, 2)]:
        assert works[i].wait() and works[i].is_completed() and works[i].is_success()
        assert_same(tensors[i], reduced("sum", n, 1000 + i, F32), i)
        works[i].wait()  # again: nothing happens


def check_futures(rank: int, n: int) -> None:
    seen: list[str] = []
    value = tensor(rank, 100, F32)
    work = dist.all_reduce(value, async_op=True)
    future = work.get_future()
    assert work.get_future() is future
    doubled = future.then(lambda done: (seen.append(threading.current_thread().name), done.value()[0] * 2)[1])
    assert_same(doubled.wait(), reduced("sum", n, 100, F32) * 2, "then")
    assert len(seen) == 1 and future.value()[0] is value

    # a strided output is copied back once and before the future completes
    strided = torch.full((100, 2), -1.0)
    strided[:, 0] = tensor(rank, 100, F32)
    work = dist.all_reduce(strided[:, 0], async_op=True)
    future = work.get_future()
    future.wait()
    assert_same(strided[:, 0], reduced("sum", n, 100, F32), "strided future")
    strided[:, 0] = 5.0
    work.wait()
    assert bool((strided[:, 0] == 5).all()), "copied back twice"

    # get_future() returns before the operation can be done
    late = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(late, async_op=True)
        started = time.perf_counter()
        future = work.get_future()
        assert time.perf_counter() - started < 0.1 and not future.done()
        dist.group.WORLD.send([torch.ones(1)], 1, 7).wait()
        future.wait()
    else:
        if rank == 1:
            dist.group.WORLD.recv([torch.ones(1)], 0, 7).wait()
        dist.all_reduce(late)
    assert late.item() == n

    lists = [torch.empty(2) for _ in range(n)]
    assert len(dist.all_gather(lists, torch.ones(2), async_op=True).get_future().wait()) == n
    assert dist.barrier(async_op=True).get_future().wait() == []
    finished = dist.all_reduce(torch.ones(1), async_op=True)
    finished.wait()
    assert finished.get_future().done()


def check_callbacks_that_wait(rank: int, n: int) -> None:
    """For futures of operations that they begin themselves, and for others."""

    def reduce() -> Any:
        return dist.all_reduce(torch.ones(3000), async_op=True).get_future()

    def total(future: Any) -> float:
        return float(future.wait()[0][-1])

    for _ in range(20):
        assert reduce().then(lambda _: total(reduce())).wait() == n
        nested = reduce().then(lambda _: reduce().then(lambda _: total(reduce())).wait())
    assert nested.wait() == n  # derived futures wait in C++

    earlier = [reduce() for _ in range(3)]  # done in any order
    waiting = reduce().then(lambda _: sum(map(total, earlier)))
    later = [reduce() for _ in range(3)]
    assert waiting.then(lambda f: f.value() + sum(map(total, later))).wait() == 6 * n

    both = torch.futures.collect_all([reduce().then(lambda _: torch.futures.wait_all([reduce(), reduce()]))])
    assert len(both.wait()) == 1
    time.sleep(0.2)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("mccl-futures") <= 2, names


def check_copying_back_fails(rank: int, n: int) -> None:
    """The operation is done, its output has changed in the meantime: an error of that Work alone."""
    for use in ("future", "wait", "sweep"):
        output = torch.ones(4, 2)[:, 0]
        work: Any = dist.all_reduce(output, async_op=True)
        output.resize_(3, 7)
        text = ""
        try:
            if use == "future":
                work.get_future().wait()
            elif use == "wait":
                work.wait()
            else:
                dist.barrier()
                assert work.is_completed() and not work.is_success()
                raise work.exception()
        except mccl.MCCLError as error:
            text = str(error)
        assert "cannot be copied into the output" in text, (use, text)
        assert work.is_completed() and not dist.group.WORLD._comm.pending
    value = torch.ones(1)
    dist.all_reduce(value, async_op=True).get_future().wait()
    assert value.item() == n


def check_inference_mode(rank: int, n: int) -> None:
    with torch.inference_mode():
        matrix = torch.ones(2, 4)
    future = dist.all_reduce(matrix[:, ::2], async_op=True).get_future()
    future.wait()
    with torch.inference_mode():
        dist.all_reduce(matrix[:, 1::2])
        dist.all_reduce(matrix)
    assert matrix.tolist() == [[float(n * n)] * 4] * 2


def check_ranges(rank: int, n: int) -> None:
    """Numbers that do not fit into 32 bits would arrive as others."""
    pg: Any = dist.group.WORLD
    t = torch.ones(1)
    for tag in (-1, -5, 2**31, 2**32, 2**64):
        for name, call in [
            ("send", lambda tag=tag: dist.send(t, (rank + 1) % n, tag=tag)),
            ("recv", lambda tag=tag: dist.recv(t, (rank + 1) % n, tag=tag)),
            ("recv", lambda tag=tag: dist.recv(t, tag=tag)),
        ]:
            with pytest.raises(
                ValueError, match=rf"mccl {name}: .*rank {rank}/{n}.* tag is {tag}; .*2147483647"
            ):
                call()
    with pytest.raises(TypeError):
        pg.send([t], (rank + 1) % n, "1")
    for bad in (n, -1, 2**32):
        for name, call in [
            ("broadcast", lambda bad=bad: pg.broadcast([t], root=bad)),
            ("reduce", lambda bad=bad: pg.reduce([t], root=bad)),
            ("gather", lambda bad=bad: pg.gather([], [t], bad)),
            ("gather_into_tensor", lambda bad=bad: pg.gather_single(t, t, bad)),
            ("scatter", lambda bad=bad: pg.scatter([t], [], bad)),
            ("send", lambda bad=bad: pg.send([t], bad)),
            ("recv", lambda bad=bad: pg.recv([t], bad)),
        ]:
            with pytest.raises(ValueError, match=rf"mccl {name}: .* is {bad}; the ranks .*0 \.\. {n - 1}"):
                call()
    last = 2**31 - 1
    works = [dist.isend(t, (rank + 1) % n, tag=last), dist.irecv(t.clone(), (rank - 1) % n, tag=last)]
    for work in works:
        work.wait()


def check_full_queue(rank: int, n: int) -> None:
    """More operations than fit; some that take long do not hold up the others."""
    group: Any = dist.new_group(pg_options={"max_queue_depth": 8})
    late = [group.recv([torch.empty(1)], (rank + 1) % n, tag) for tag in range(6)]
    values = [torch.ones(i % 5) for i in range(100)]
    started = time.perf_counter()
    for i, value in enumerate(values):
        work = dist.all_reduce(value, group=group, async_op=True)
        if i % 3 == 0:
            work.get_future().then(lambda _: None)
    work.wait()
    assert time.perf_counter() - started < 5
    for tag in range(6):
        group.send([torch.ones(1)], (rank - 1) % n, tag)
    for work in late:
        work.wait()
    assert all(value.tolist() == [n] * len(value) for value in values)
    assert not group._comm.batches


def check_dropped_works(rank: int, n: int) -> None:
    """Buffers stay alive although nobody holds the Work or the input."""
    pg = dist.group.WORLD
    results = []
    for i in range(200):
        out = [torch.empty(501) for _ in range(n)]
        results.append(out)
        dist.all_gather(out, tensor(rank, 501, F32, salt=i) * 1, async_op=True)
        if i % 50 == 0:
            gc.collect()
    dist.barrier()
    pg._wait_for_pending_works()
    for i, out in enumerate(results):
        for r in range(n):
            assert_same(out[r], tensor(r, 501, F32, salt=i), (i, r))
    assert not pg._comm.pending
    for _ in range(300):  # finished works are forgotten while others are submitted
        dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier()
    assert len(pg._comm.pending) < 10


def check_coalescing(rank: int, n: int) -> None:
    tensors = [tensor(rank, 10 * i, F32) for i in range(5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    for i, t in enumerate(tensors):
        assert_same(t, reduced("sum", n, 10 * i, F32), ("coalesced", i))

    tensors = [tensor(rank, 10, F32, salt=i) for i in range(3)]
    outputs = [torch.empty(10 * n) for _ in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for t, out in zip(tensors, outputs):
            dist.all_gather_into_tensor(out, t)
    manager.wait()
    for i, out in enumerate(outputs):
        assert_same(out, torch.cat([tensor(r, 10, F32, salt=i) for r in range(n)]), ("block", i))

    pg: Any = dist.group.WORLD  # different operations in one block
    total, copied = tensor(rank, 10, F32), tensor(rank, 10, F32)
    pg._start_coalescing(torch.device("cpu"))
    inside = pg.allreduce([total])
    pg.broadcast(copied, 1)
    assert inside.wait() and torch.equal(total, tensor(rank, 10, F32)), (
        "submitted before the end of the block"
    )
    future = inside.get_future()
    pg._end_coalescing(torch.device("cpu")).wait()
    assert future.wait()[0] is total
    assert_same(total, reduced("sum", n, 10, F32), "all_reduce in a block")
    assert_same(copied, tensor(1, 10, F32), "broadcast in a block")

    out = [torch.empty(3) for _ in range(2)]
    with dist._coalescing_manager():
        for i in range(2):
            dist.reduce_scatter_tensor(
                out[i], torch.cat([tensor(rank, 3, F32, salt=r + i) for r in range(n)])
            )
    for i in range(2):
        assert_same(out[i], reduced("sum", n, 3, F32, salt=rank + i), ("reduce_scatter", i))

    lists = [[torch.empty(4), torch.empty(2)] for _ in range(n)]
    dist.group.WORLD.allgather_coalesced(lists, [tensor(rank, 4, F32), tensor(rank, 2, F32)]).wait()
    for r in range(n):
        assert_same(lists[r][1], tensor(r, 2, F32), "allgather_coalesced")


def check_point_to_point(rank: int, n: int) -> None:
    right, left = (rank + 1) % n, (rank - 1) % n
    for count in [
        0,
        1,
        16384,
        16385,
        1_000_003,
    ]:  # around 64 KiB, where messages begin to wait for the receiver
        got = torch.empty(count)
        operations = [
            dist.P2POp(dist.irecv, got, left, tag=1),
            dist.P2POp(dist.isend, tensor(rank, count, F32), right, tag=1),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert_same(got, tensor(left, count, F32), ("ring", count))

    # tags out of order
    got = {tag: torch.empty(50) for tag in (3, 1, 2)}
    sends = [dist.isend(tensor(rank, 50, F32, salt=tag), right, tag=tag) for tag in (1, 2, 3)]
    for tag, buffer in got.items():
        dist.recv(buffer, left, tag=tag)
        assert_same(buffer, tensor(left, 50, F32, salt=tag), ("tag", tag))
    for work in sends:
        work.wait()

    # any source
    if rank == 0:
        sources = set()
        for _ in range(n - 1):
            buffer = torch.empty(9)
            source = dist.recv(buffer)
            assert_same(buffer, tensor(source, 9, F32), ("any source", source))
            sources.add(source)
        assert sources == set(range(1, n))
    else:
        dist.send(tensor(rank, 9, F32), 0)


def check_wait_timeout(rank: int, n: int) -> None:
    value = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)
        started = time.perf_counter()
        try:
            work.wait(timedelta(seconds=0.3))
            raise AssertionError("did not time out")
        except mccl.MCCLTimeoutError as error:
            assert "0.3 s" in str(error) and isinstance(error, dist.DistBackendError)
        assert 0.2 < time.perf_counter() - started < 2
        dist.group.WORLD.send([value], 1, 9).wait()
        work.wait()  # it goes on
    else:
        if rank == 1:
            dist.group.WORLD.recv([torch.empty(3)], 0, 9).wait()
        dist.all_reduce(value)
    assert value.tolist() == [float(n)] * 3


def check_short_forms_and_aliases(rank: int, n: int) -> None:
    pg: Any = dist.group.WORLD
    t = torch.full((2,), float(rank))
    pg.allreduce(t, dist.ReduceOp.MAX).wait()
    pg.allreduce([t], op=dist.ReduceOp.MIN, timeout=timedelta(seconds=5)).wait()
    assert t.tolist() == [n - 1.0] * 2
    t = torch.full((2,), float(rank))
    pg.broadcast(t, root=1).wait()
    assert t.tolist() == [1.0, 1.0]
    pg.reduce(t, 0, dist.ReduceOp.SUM).wait()
    outputs = [torch.empty(1) for _ in range(n)]
    pg.gather(outputs if rank == 1 else [], torch.tensor([float(rank)]), 1).wait()
    assert rank != 1 or [o.item() for o in outputs] == list(range(n))
    got = torch.empty(1)
    pg.scatter(got, [torch.tensor([10.0 + r]) for r in range(n)] if rank == 2 else [], 2).wait()
    assert got.item() == 10 + rank
    pg.reduce_scatter(got, [torch.tensor([float(r)]) for r in range(n)], dist.ReduceOp.SUM).wait()
    assert got.item() == n * rank
    pg.barrier(timeout=timedelta(seconds=5)).wait()
    whole = torch.empty(n)
    pg.gather_single(whole, torch.tensor([float(rank)]), root=0).wait()
    assert rank or whole.tolist() == list(range(n))
    for old, new in [
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("alltoall_base", "all_to_all_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        ("recv_anysource", "recvAnysource"),
        ("_start_coalescing", "start_coalescing"),
        ("_end_coalescing", "end_coalescing"),
    ]:
        assert getattr(type(pg), old) is getattr(type(pg), new)
    assert (pg.rank(), pg.size(), pg.name(), pg.getBackendName()) == (rank, n, "mccl", "mccl")


def check_threads(rank: int, n: int) -> None:
    """Two groups, each used by a thread of its own."""
    groups = [dist.new_group() for _ in range(2)]
    failures: list[BaseException] = []

    def use(index: int) -> None:
        try:
            for i in range(100):
                t = tensor(rank, 100 + i, F32, salt=index)
                dist.all_reduce(t, group=groups[index])
                assert_same(t, reduced("sum", n, 100 + i, F32, salt=index), (index, i))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


CHECKS = [
    check_out_of_order,
    check_futures,
    check_callbacks_that_wait,
    check_copying_back_fails,
    check_inference_mode,
    check_ranges,
    check_full_queue,
    check_dropped_works,
    check_coalescing,
    check_point_to_point,
    check_wait_timeout,
    check_short_forms_and_aliases,
    check_threads,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_work(pool: Pool, check: object) -> None:
    pool.run(3, check)

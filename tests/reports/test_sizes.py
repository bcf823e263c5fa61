"""Field reports: block boundaries, tails, messages beyond 2 GiB and 4 GiB, and many rounds back to back."""

from __future__ import annotations

import os
import random
import resource
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mccl
from patterns import assert_same, reduced, tensor
from ranks import Pool

GIB = 1 << 30

# ---- block boundaries ------------------------------------------------------------------------------------

CUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "4 KiB messages": {"chunk_bytes": 4096, "small_msg_threshold": 0},
    "ring, basic": {"allreduce_algo": "ring", "ring_algo": "basic"},
    "ring, chunked": {"allreduce_algo": "ring", "ring_algo": "chunked", "chunk_bytes": 8192},
    "ring, fast": {"allreduce_algo": "ring", "ring_algo": "fast", "chunk_bytes": 8192},
}


def check_boundaries(rank: int, n: int) -> None:
    counts = [1, 2, 3, n - 1, n, n + 1, 2 * n + 1, 1023, 1024, 1025]
    for name, settings in CUTS.items():
        group = dist.new_group(pg_options=mccl.MCCLOptions(**settings))
        dtypes = (
            [torch.float32, torch.int8, torch.bfloat16] if name != "default" else [torch.float32, torch.int16]
        )
        for dtype in dtypes:
            for count in [*counts, 1000003 if (name, dtype) == ("default", torch.float32) else 70001]:
                what = (name, dtype, count)
                mine = tensor(rank, count, dtype)
                got = mine.clone()
                dist.all_reduce(got, group=group)
                assert_same(got, reduced("sum", n, count, dtype), ("all_reduce", *what))
                if "ring" in name and count < 70000:
                    continue  # only all_reduce takes rings

                outputs = [tensor(99, count, dtype) for _ in range(n)]
                dist.all_gather(outputs, mine, group=group)
                whole = tensor(99, n * count, dtype)
                dist.all_gather_into_tensor(whole, mine, group=group)
                for r in range(n):
                    assert_same(outputs[r], tensor(r, count, dtype), ("all_gather", r, *what))
                    block = whole[r * count : (r + 1) * count]
                    assert_same(block, tensor(r, count, dtype), ("all_gather_into_tensor", r, *what))

                got = tensor(99, count, dtype)
                inputs = torch.cat([tensor(rank, count, dtype, salt=r) for r in range(n)])
                dist.reduce_scatter_tensor(got, inputs, group=group)
                assert_same(got, reduced("sum", n, count, dtype, salt=rank), ("reduce_scatter_tensor", *what))

                root = count % n
                got = mine.clone()
                dist.broadcast(got, root, group=group)
                assert_same(got, tensor(root, count, dtype), ("broadcast", root, *what))
                got = mine.clone()
                dist.reduce(got, root, group=group)
                expected = reduced("sum", n, count, dtype) if rank == root else mine
                assert_same(got, expected, ("reduce", root, *what))
        dist.destroy_process_group(group)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_fr_032_sizes_around_block_boundaries(pool: Pool, n: int) -> None:
    pool.run(n, check_boundaries, timeout=100)


# ---- many rounds -----------------------------------------------------------------------------------------

SHAPES = [(4096, 512), (512,), (512, 2048), (2048,), (1,)]  # the report's


def check_rounds(rank: int, n: int, rounds: int, shrink: int) -> int:
    """All operations of a round are begun before any is waited for; one rank dawdles now and then."""
    counts = [max(1, int(np.prod(shape)) // shrink) for shape in SHAPES]
    inputs = [tensor(rank, count, torch.float32, salt=i) for i, count in enumerate(counts)]
    totals = [reduced("sum", n, count, torch.float32, salt=i) for i, count in enumerate(counts)]
    buffers = [torch.empty_like(t) for t in inputs]
    dawdle = random.Random(rank)
    for round_ in range(rounds):
        shift = round_ % 97
        for buffer, input_ in zip(buffers, inputs):
            torch.add(input_, shift, out=buffer)
        works = []
        for buffer in buffers:
            if rank == n - 1 and dawdle.random() < 0.2:
                time.sleep(dawdle.random() * 0.002)
            works.append(dist.all_reduce(buffer, async_op=True))
        order = works if round_ % 2 else works[::-1]
        for work in order:
            work.wait()
        for i, (buffer, total) in enumerate(zip(buffers, totals)):
            if shrink > 1 or round_ % 10 == 0:
                assert torch.equal(buffer, total + n * shift), (round_, SHAPES[i])
            else:  # the ends and some places between
                step = max(1, buffer.numel() // 1000)
                assert torch.equal(buffer[::step], total[::step] + n * shift), (round_, SHAPES[i])
    return rounds


@pytest.mark.parametrize("n", [2, 4])
def test_fr_033_thousands_of_rounds_back_to_back(pool: Pool, n: int) -> None:
    """5000 rounds: a few with the report's shapes, the others with a 512th of them, for time's sake."""
    pool.run(n, check_rounds, 25, 1, timeout=120)
    pool.run(n, check_rounds, 4975, 512, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_fr_033_long(pool: Pool, n: int) -> None:
    """The report's shapes, for as many rounds as its cap of 120 s allows on two cores."""
    pool.run(n, check_rounds, {2: 1000, 4: 300}[n], 1, timeout=120)


# ---- beyond 2**31 ----------------------------------------------------------------------------------------

PERIOD = 1_000_003  # of the data; a prime, so that what lies 2**31 or 2**32 bytes away differs


def period(rank: int, salt: int) -> torch.Tensor:
    generator = np.random.default_rng(10 * rank + salt)
    return torch.from_numpy(generator.integers(-128, 128, PERIOD, dtype=np.int8))


def fill(tensor_: torch.Tensor, rank: int, salt: int = 0) -> torch.Tensor:
    """With period(), again and again; without a second tensor of that size."""
    flat = tensor_.view(torch.int8)
    flat[:PERIOD] = period(rank, salt)
    done = PERIOD
    while done < flat.numel():
        more = min(done, flat.numel() - done)
        flat[done : done + more] = flat[:more]
        done += more
    return tensor_


def check_places(got: torch.Tensor, one_period: torch.Tensor, what: object) -> None:
    """First, last, those around 2**31 and 2**32 bytes, and 1000 random ones."""
    flat = got.view(torch.int8)
    size = flat.numel()
    edges = [edge + d for edge in (0, 2**31, 2**32, size) for d in range(-20, 20) if 0 <= edge + d < size]
    generator = torch.Generator().manual_seed(size % 1000)
    places = torch.cat([torch.tensor(edges), torch.randint(0, size, (1000,), generator=generator)])
    bad = places[flat[places] != one_period[places % PERIOD]]
    assert not bad.numel(), (what, f"wrong at byte {bad[:5].tolist()} of {size}")


def check_collective(rank: int, n: int, op: str, count: int) -> None:
    """int8, `count` elements in a rank's block."""
    total = sum(period(r, 0) for r in range(n))
    if op.startswith("all_reduce"):
        group = None
        if "ring" in op:
            group = dist.new_group(pg_options=mccl.MCCLOptions(allreduce_algo="ring"))
        data = fill(torch.empty(count, dtype=torch.int8), rank)
        dist.all_reduce(data, group=group)
        check_places(data, total, op)
    elif op == "reduce_scatter_tensor":
        data = torch.empty(n * count, dtype=torch.int8)
        for r in range(n):
            fill(data[r * count : (r + 1) * count], rank, salt=r)
        got = torch.empty(count, dtype=torch.int8)
        dist.reduce_scatter_tensor(got, data)
        check_places(got, sum(period(r, rank) for r in range(n)), op)
    elif op == "all_gather_into_tensor":
        got = torch.empty(n * count, dtype=torch.int8)
        block = fill(got[rank * count : (rank + 1) * count], rank)  # in place: a tensor less
        dist.all_gather_into_tensor(got, block)
        for r in range(n):
            check_places(got[r * count : (r + 1) * count], period(r, 0), (op, r))
    else:
        assert op == "all_to_all_single"
        sizes = [count // n, count - count // n]  # to rank 0 and to rank 1
        data = torch.empty(count, dtype=torch.int8)
        for r, block in enumerate(data.split(sizes)):
            fill(block, rank, salt=r)
        got = torch.empty(n * sizes[rank], dtype=torch.int8)
        dist.all_to_all_single(got, data, [sizes[rank]] * n, sizes)
        for r, block in enumerate(got.split(sizes[rank])):
            check_places(block, period(r, rank), (op, r))


def check_move(rank: int, n: int, op: str, count: int, dtype: torch.dtype) -> None:
    data = torch.empty(count, dtype=dtype)
    flat = data.view(torch.int8)
    if rank == 0:
        fill(flat, 7)
    else:
        flat[:: 1 << 12] = 0  # so that its memory exists: running out of it shows here
    if op == "broadcast":
        dist.broadcast(data, 0)
    elif rank == 0:
        dist.send(data, 1)
    else:
        dist.recv(data, 0)
    check_places(flat, period(7, 0), (op, count, dtype))


def need(total_bytes: int) -> None:
    """Fails with words where the test would be killed for lack of memory."""
    with open("/proc/meminfo") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    wanted = total_bytes + GIB
    if sizes["MemAvailable"] < wanted:
        pytest.fail(
            f"this test needs {wanted / GIB:.1f} GiB of free memory, the system has "
            f"{sizes['MemAvailable'] / GIB:.1f} GiB of {sizes['MemTotal'] / GIB:.1f} GiB"
        )


@pytest.fixture
def own_pool() -> Any:
    """Processes that give their memory back at the end of the test."""
    pool = Pool(PYTHONPATH=os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    yield pool
    pool.close()


COUNTS = [2**31 - 1, 2**31, 2**31 + 17]
TENSORS = {  # of `count` elements, on each of two ranks
    "all_reduce": 1,
    "all_reduce, ring": 1,
    "reduce_scatter_tensor": 3,
    "all_gather_into_tensor": 2,
    "all_to_all_single": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("op", TENSORS)
def test_fr_029_more_than_2_to_the_31_elements(own_pool: Pool, op: str) -> None:
    for count in COUNTS if op != "all_reduce, ring" else COUNTS[-1:]:
        need(2 * TENSORS[op] * count)
        own_pool.run(2, check_collective, op, count, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["broadcast", "send"])
@pytest.mark.parametrize(
    "count, dtype",
    [(4 * GIB + 3, torch.int8), (6 * GIB + 1, torch.int8), (2**29 + 5, torch.float64)],
    ids=["4 GiB + 3", "6 GiB + 1", "2**29 + 5 float64"],
)
def test_fr_030_messages_above_4_gib(own_pool: Pool, op: str, count: int, dtype: torch.dtype) -> None:
    need(2 * count * dtype.itemsize)
    own_pool.run(2, check_move, op, count, dtype, timeout=100)


def run_short_of_memory(rank: int, n: int) -> None:
    """A transposed tensor has to be packed, for which the last rank has no memory."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    mine = tensor(rank, 1 << 24, torch.float32).reshape(1 << 12, -1).t()
    before = mine.clone()
    if rank < n - 1:
        with pytest.raises(mccl.MCCLTimeoutError, match=rf"all_reduce.*Timed out .* ranks? (\d, )*{n - 1};"):
            dist.all_reduce(mine, group=group)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20), hard))
        try:
            with pytest.raises(RuntimeError, match=r"can't allocate memory: you tried to allocate 67108864"):
                dist.all_reduce(mine, group=group)
            assert torch.equal(mine, before)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    got = tensor(rank, 9, torch.float32)
    dist.all_reduce(got)  # the processes live, and so does the other group
    assert_same(got, reduced("sum", n, 9, torch.float32), "afterwards")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the limit is set from Linux's figures")
def test_fr_030_a_rank_short_of_memory(own_pool: Pool) -> None:
    own_pool.run(3, run_short_of_memory)

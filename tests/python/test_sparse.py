"""all_reduce of sparse COO tensors: values, dtypes, shapes, refusals, ranks that disagree or fail."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist

import mccl
from patterns import AVG, MAX, PRODUCT, SUM, assert_same, tensor, to_tensor
from ranks import Pool

F32 = torch.float32
SHAPE = (7, 5, 3)
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


def sparse(
    rank: int, dtype: torch.dtype = F32, depth: int = 2, entries: int | None = None, shape: Any = SHAPE
) -> torch.Tensor:
    """Not coalesced: entries at one place follow each other and come again. Other places on each rank."""
    count = 4 * rank + 1 if entries is None else entries
    at = [[(i // 2 + rank + d * i) % shape[d] for i in range(count)] for d in range(depth)]
    row = shape[depth:]
    values = tensor(rank, count * torch.Size(row).numel(), dtype, salt=depth).view(count, *row)
    indices = torch.tensor(at, dtype=torch.int64).view(depth, count)
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=False, check_invariants=True)


def dense_of(sparse: torch.Tensor) -> torch.Tensor:
    return sparse.to(torch.int64 if sparse.dtype is torch.bool else sparse.dtype).to_dense()


def expected(n: int, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """The sum of all ranks' tensors, exact: values are small integers."""
    total = sum(dense_of(sparse(r, dtype, **options)) for r in range(n))
    assert isinstance(total, torch.Tensor)
    return total != 0 if dtype is torch.bool else total.to(dtype)


def check_result(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert got.layout is torch.sparse_coo and got.is_coalesced(), what
    assert_same(got.to_dense(), wanted, what)


def check_dtypes(rank: int, n: int) -> None:
    for dtype in DTYPES:
        value = sparse(rank, dtype)
        dist.all_reduce(value)
        check_result(value, expected(n, dtype), dtype)
        if dtype.is_floating_point or dtype.is_complex:
            value = sparse(rank, dtype)
            dist.all_reduce(value, op=AVG)
            total = expected(n, torch.complex128 if dtype.is_complex else torch.float64)
            parts = total.view(torch.float64) / n  # complex division rounds otherwise
            check_result(value, parts.view(total.dtype).to(dtype), ("avg", dtype))


def check_shapes(rank: int, n: int) -> None:
    """Sparse and dense dimensions, sizes of 0, numbers of entries that differ by rank and may be 0."""
    for depth in (1, 2, 3):
        value = sparse(rank, depth=depth)
        dist.all_reduce(value)
        check_result(value, expected(n, F32, depth=depth), depth)
        assert value.sparse_dim() == depth and value.dense_dim() == 3 - depth
    for empty in [*range(n), None]:
        counts = [0 if empty in (r, None) else 3 + r for r in range(n)]
        value = sparse(rank, entries=counts[rank])
        dist.all_reduce(value)
        total = sum(sparse(r, entries=counts[r]).to_dense() for r in range(n))
        check_result(value, total, ("empty", empty))  # type: ignore[arg-type]
        assert empty is not None or value._nnz() == 0
    for shape, depth in [((4, 0), 1), ((4, 0, 3), 1), ((6,), 1), ((100_003, 2), 1)]:
        value = sparse(rank, depth=depth, shape=shape)
        dist.all_reduce(value)
        check_result(value, expected(n, F32, depth=depth, shape=shape), shape)
    value = torch.sparse_coo_tensor(
        torch.empty(0, 1, dtype=torch.int64), tensor(rank, 2, F32).view(1, 2), (2,)
    )
    dist.all_reduce(value)  # no sparse dimension at all
    check_result(value, sum(tensor(r, 2, F32) for r in range(n)), "depth 0")  # type: ignore[arg-type]


def check_rounding(rank: int, n: int) -> None:
    """16-bit sums are rounded once, and every rank gets the same bits."""
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        mine = large if rank == 0 else 1.0  # large + 1 is no number of this dtype, large + 2 is
        value = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([mine], dtype=dtype), (3,))
        dist.all_reduce(value)
        assert value.to_dense().tolist() == [0.0, large + n - 1, 0.0], (dtype, value)
    noise = torch.randn(50, generator=torch.Generator().manual_seed(rank))
    value = torch.sparse_coo_tensor(torch.arange(50).view(1, 50) % 11, noise, (11,), is_coalesced=False)
    dist.all_reduce(value)
    others = [torch.empty(11) for _ in range(n)]
    dist.all_gather(others, value.to_dense())
    for other in others:
        assert_same(other, others[0], "bits")


def check_forms(rank: int, n: int) -> None:
    """async_op, futures, a group's own method, gradients, inference tensors, time-outs."""
    pg: Any = dist.group.WORLD
    wanted = expected(n, F32)
    values = [sparse(rank) for _ in range(3)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    assert works[0].is_completed() and works[0].is_success() and works[1].wait()
    assert works[2].get_future().wait()[0] is values[2] and works[2].result()[0] is values[2]
    values.append(sparse(rank).requires_grad_())
    pg.allreduce([values[-1]], timeout=timedelta(seconds=20)).wait()
    with torch.inference_mode():
        values.append(sparse(rank))
    dist.all_reduce(values[-1])
    values.append(sparse(rank).coalesce())
    pg.allreduce(values[-1], SUM).wait()
    for i, value in enumerate(values):
        check_result(value.detach(), wanted, i)

    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([rank, rank, 9])).sum().backward()
    assert embedding.weight.grad is not None
    dist.all_reduce(embedding.weight.grad)
    rows = [2 * (r < n) + n * (r == 9) for r in range(10)]
    assert embedding.weight.grad.to_dense()[:, 1].tolist() == rows

    group = dist.new_group(list(range(n))[::-1], sort_ranks=False)
    value = sparse(rank)
    dist.all_reduce(value, group=group)
    check_result(value, wanted, "another group")
    before = pg._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    assert pg._get_sequence_number_for_group() == before + 1 and not pg._comm.pending


def check_refused(rank: int, n: int) -> None:
    """On all ranks alike, before anything is sent."""

    def refuse(words: str, call: Callable[[], Any], kind: type[Exception] = TypeError) -> None:
        with pytest.raises(kind, match=words):
            call()

    for op in (MAX, PRODUCT):
        refuse("SUM and AVG only, not with", lambda op=op: dist.all_reduce(sparse(rank), op=op))
    for dtype in (torch.int32, torch.bool):
        refuse(
            "AVG of sparse .*(int32|bool)", lambda dtype=dtype: dist.all_reduce(sparse(rank, dtype), op=AVG)
        )
    for dtype in (torch.uint16, torch.uint64, torch.float8_e5m2):
        value = torch.sparse_coo_tensor(
            torch.tensor([[0]]), to_tensor(tensor(0, 1, F32).numpy(), F32).to(dtype), (2,)
        )
        refuse(f"dtype {str(dtype)[6:]}", lambda value=value: dist.all_reduce(value))
    csr = torch.eye(3).to_sparse_csr()
    refuse("sparse_csr tensors are not supported", lambda: dist.all_reduce(csr))
    refuse("on 'meta' are not", lambda: dist.all_reduce(sparse(rank).to("meta")))
    coo = sparse(rank)
    for name, call in [
        ("broadcast", lambda: dist.broadcast(coo, 0)),
        ("reduce", lambda: dist.reduce(coo, 0)),
        ("all_gather", lambda: dist.all_gather([coo] * n, coo)),
        ("send", lambda: dist.send(coo, (rank + 1) % n)),
        ("recv", lambda: dist.recv(coo, (rank + 1) % n)),
        ("all_to_all", lambda: dist.all_to_all([coo] * n, [coo] * n)),
    ]:
        refuse(f"mccl {name}.*: sparse_coo tensors are not supported", call)

    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == n


def check_coalescing(rank: int, n: int) -> None:
    """Not as part of a block, which a refused call ends: later operations are not swallowed."""
    pg: Any = dist.group.WORLD
    for device in (None, torch.device("cpu")):
        with pytest.raises((ValueError, TypeError), match=r"mccl all_reduce.*sparse"):
            with dist._coalescing_manager(device=device):
                dist.all_reduce(torch.ones(1))
                dist.all_reduce(sparse(rank))
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == n, device
    with pytest.raises((ValueError, TypeError), match="sparse"):
        pg.allreduce_coalesced([sparse(rank), sparse(rank)])
    pg._start_coalescing(torch.device("cpu"))
    with pytest.raises(ValueError, match="coalescing block"):
        pg.allreduce([sparse(rank)])
    pg._end_coalescing(torch.device("cpu"))
    value = sparse(rank)
    dist.all_reduce(value)
    check_result(value, expected(n, F32), "afterwards")


def differ(rank: int, n: int, what: str) -> str:
    """The last rank passes something else."""
    odd = rank == n - 1
    other: dict[str, Any] = {
        "shape": {"shape": (8, 5, 3)},
        "dims": {"shape": (7, 5, 3, 2)},
        "sparse dims": {"depth": 1},
        "dtype": {"dtype": torch.float64},
    }.get(what, {})
    value = sparse(rank, **(other if odd else {}))
    if what == "dense":
        value = value.to_dense() if odd else value
    before = value.clone()
    try:
        dist.all_reduce(value, op=AVG if odd and what == "op" else SUM)
    except mccl.MCCLMismatchError as error:
        assert torch.equal(value.to_dense(), before.to_dense()), "a partial result"
        return str(error)
    return "no error"


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["[7, 5, 3]", "[8, 5, 3]"]),
        ("dims", ["[7, 5, 3]", "[7, 5, 3, 2]"]),
        ("sparse dims", ["2 sparse", "1 sparse"]),
        ("dtype", ["float32", "float64"]),
        ("op", ["op SUM", "op AVG"]),
        ("dense", ["all_gather", "all_reduce"]),
    ],
)
def test_ranks_that_disagree_about_a_sparse_tensor(pool: Pool, n: int, what: str, words: list[str]) -> None:
    for rank, text in enumerate(pool.run(n, differ, what, timeout=20)):
        assert all(word in text for word in words), (rank, text)
        assert what == "dense" or f"rank {n - 1} a sparse" in text, text


def fail_midway(rank: int, n: int) -> tuple[str, str, float]:
    """Rank 1 runs out of memory when it makes room for the entries of all."""
    if rank == 1:
        from mccl.torch import sparse as module

        real, calls = module._gather, []

        def gather(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 2:
                raise MemoryError("no room")
            return real(*arguments)

        module._gather = gather
    started = time.monotonic()
    texts = []
    try:
        for _ in range(2):
            try:
                dist.all_reduce(sparse(rank))
                texts.append("no error")
            except (MemoryError, mccl.MCCLError) as error:
                texts.append(f"{type(error).__name__}: {error}")
    finally:
        if rank == 1:
            module._gather = real
    return texts[0], texts[1], time.monotonic() - started


def test_a_rank_that_fails_midway_does_not_hang_the_others(pool: Pool) -> None:
    for rank, (first, second, seconds) in enumerate(pool.run(3, fail_midway, timeout=25)):
        assert first.startswith("MemoryError" if rank == 1 else "MCCLAbortedError"), (rank, first)
        assert second.startswith("MCCLAbortedError"), (rank, second)
        assert "rank 1" in second and seconds < 5, (rank, second, seconds)


def miss(rank: int, n: int) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank != 1:
        for _ in range(2):  # the second time the first cause
            with pytest.raises(mccl.MCCLTimeoutError, match="rank 1"):
                dist.all_reduce(sparse(rank), group=group)
    dist.barrier()


def test_a_missing_rank_is_named(pool: Pool) -> None:
    pool.run(3, miss, timeout=20)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_values(pool: Pool, n: int) -> None:
    for check in (check_dtypes, check_shapes):
        pool.run(n, check)


@pytest.mark.parametrize(
    "check",
    [check_rounding, check_forms, check_refused, check_coalescing],
    ids=lambda check: check.__name__[6:],
)
def test_sparse(pool: Pool, check: object) -> None:
    pool.run(3, check)

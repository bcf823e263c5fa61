"""Tensors that are not plain: strided, empty, 0-dim, overlapping, conjugated, not sendable."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from patterns import assert_same, reduced, tensor
from ranks import Pool

F32 = torch.float32


def matrix(rank: int, rows: int = 6, columns: int = 4) -> torch.Tensor:
    return tensor(rank, rows * columns, F32).reshape(rows, columns)


def check_strided(rank: int, n: int) -> None:
    expected = reduced("sum", n, 24, F32).reshape(6, 4)

    transposed = matrix(rank).t().contiguous().t()  # 6 x 4, column-major
    work = dist.all_reduce(transposed, async_op=True)
    work.wait()
    assert_same(transposed, expected, "column-major")

    big = torch.full((6, 8), -1.0)
    big[:, 1::2] = matrix(rank)
    dist.all_reduce(big[:, 1::2])
    assert_same(big[:, 1::2], expected, "every second column")
    assert bool((big[:, ::2] == -1).all()), "the columns between were touched"

    image = tensor(rank, 120, F32).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    assert_same(image, reduced("sum", n, 120, F32).reshape(2, 3, 4, 5), "channels_last")

    columns = torch.full((24, n), -1.0)  # outputs interleaved in one storage
    dist.all_gather(list(columns.unbind(1)), tensor(rank, 48, F32)[::2])
    for r in range(n):
        assert_same(columns[:, r], tensor(r, 48, F32)[::2], ("columns", r))

    out = torch.full((n * 3, 4), -1.0).t().contiguous().t()
    dist.all_gather_into_tensor(out, matrix(rank, 3, 4).t().contiguous().t())
    assert_same(out, torch.cat([matrix(r, 3, 4) for r in range(n)]), "column-major all_gather_into_tensor")

    out = torch.full((3, 4), -1.0).t().contiguous().t()
    dist.reduce_scatter_tensor(
        out, torch.cat([matrix(rank + r, 3, 4) for r in range(n)]).t().contiguous().t()
    )
    assert_same(out, sum(matrix(s + rank, 3, 4) for s in range(n)), "column-major reduce_scatter_tensor")

    out = torch.full((n, 4), -1.0)[:, ::2]
    dist.all_to_all_single(out, (matrix(rank, n, 4))[:, 1::2])
    assert_same(
        out, torch.stack([matrix(r, n, 4)[rank, 1::2] for r in range(n)]), "strided all_to_all_single"
    )

    expanded = torch.tensor([float(rank)]).expand(5)  # as an input it is fine
    outputs = [torch.empty(5) for _ in range(n)]
    dist.all_gather(outputs, expanded)
    assert [t.tolist() for t in outputs] == [[float(r)] * 5 for r in range(n)]

    strided = torch.full((2, 10), -1.0)
    if rank == 0:
        dist.send(tensor(7, 20, F32)[::2], 1, tag=5)
    elif rank == 1:
        dist.recv(strided.t()[:, 1], 0, tag=5)
        assert_same(strided[1], tensor(7, 20, F32)[::2], "strided send and recv")


def check_small_shapes(rank: int, n: int) -> None:
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    assert_same(scalar, torch.tensor(n * (n + 1) / 2), "0-dim")

    for shape in [(0,), (3, 0), (0, 5)]:
        empty = torch.empty(shape)
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        dist.all_gather([torch.empty(shape) for _ in range(n)], empty)
        dist.all_to_all_single(torch.empty(0), torch.empty(0))
        assert empty.shape == shape

    leaf = torch.full((3,), float(rank), requires_grad=True)
    dist.all_reduce(leaf.detach())
    dist.broadcast(leaf, 0)  # leaves of autograd may be overwritten by communication
    assert leaf.requires_grad and leaf.tolist() == [float(n * (n - 1) // 2)] * 3
    column = torch.full((3, 2), float(rank), requires_grad=True)
    dist.broadcast(column.detach()[:, 0], 0)


def check_lazy_conjugates(rank: int, n: int) -> None:
    plain = tensor(rank, 6, torch.complex64)
    outputs = [torch.zeros(6, dtype=torch.complex64) for _ in range(n)]
    pg = dist.group.WORLD
    pg.allgather(outputs, plain.conj()).wait()
    for r in range(n):
        assert_same(outputs[r], tensor(r, 6, torch.complex64).conj().resolve_conj(), "conjugate input")
    view = torch.zeros(6, dtype=torch.complex64)
    pg.broadcast(plain.conj() if rank == 0 else view.conj(), 0).wait()
    if rank:
        assert_same(view, tensor(0, 6, torch.complex64), "conjugate output")


def check_inputs_that_overlap_outputs(rank: int, n: int) -> None:
    whole = torch.full((4 * n,), -1.0)
    whole[:4] = tensor(rank, 4, F32)  # in the place of rank 0's block
    dist.all_gather_into_tensor(whole, whole[:4])
    assert_same(whole, torch.cat([tensor(r, 4, F32) for r in range(n)]), "input inside the output")

    whole = torch.full((4 * n,), -1.0)
    block = whole[4 * rank : 4 * rank + 4]
    block.copy_(tensor(rank, 4, F32))
    dist.all_gather_into_tensor(whole, block)
    assert_same(whole, torch.cat([tensor(r, 4, F32) for r in range(n)]), "all_gather in place")

    parts = [tensor(rank, 4, F32, salt=r) for r in range(n)]
    dist.reduce_scatter(parts[0], parts)
    assert_same(parts[0], reduced("sum", n, 4, F32, salt=rank), "reduce_scatter into an input")

    data = torch.cat([tensor(rank, 3, F32, salt=r) for r in range(n)])
    dist.all_to_all_single(data, data)
    assert_same(data, torch.cat([tensor(r, 3, F32, salt=rank) for r in range(n)]), "all_to_all in place")


CHECKS = [check_strided, check_small_shapes, check_lazy_conjugates, check_inputs_that_overlap_outputs]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_tensors(pool: Pool, check: Callable[..., None]) -> None:
    pool.run(3, check)


def expect(kind: type[Exception], words: str, function: Callable[..., object], *args: object) -> None:
    try:
        function(*args)
    except kind as error:
        assert re.search(words, str(error)), f"{error} has no {words!r}"
    else:
        raise AssertionError(f"{function} accepted {args}")


def check_refusals(rank: int, n: int) -> None:
    ones = torch.ones(4)
    reduce_avg = lambda t: dist.all_reduce(t, op=dist.ReduceOp.AVG)  # noqa: E731
    expect(ValueError, r"shape \(4,\) and strides \(0,\)", dist.all_reduce, torch.zeros(1).expand(4))
    expect(TypeError, "broadcast: sparse_coo", dist.broadcast, torch.eye(3).to_sparse(), 0)
    expect(TypeError, "all_reduce: sparse_csr", dist.all_reduce, torch.eye(3).to_sparse_csr())
    expect(TypeError, "device 'meta'", dist.all_reduce, torch.empty(3, device="meta"))
    expect(TypeError, "qint8 is not supported; supported: float32", dist.all_reduce,
           torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8))  # fmt: skip
    expect(RuntimeError, "avg", reduce_avg, torch.ones(3, dtype=torch.int32))
    expect(RuntimeError, "float8_e5m2", dist.all_reduce, ones.to(torch.float8_e5m2))
    matrix_ = torch.zeros(3, 8)
    expect(ValueError, "outputs 0 and 2 share memory", dist.all_gather,
           [matrix_[:, 0:4], matrix_[:, 4:8], matrix_[:, 2:6]], torch.zeros(3, 4))  # fmt: skip
    expect(
        ValueError, "outputs 1 and 2 share memory", dist.all_gather, [ones.clone(), ones, ones], ones.clone()
    )
    expect(ValueError, "3 tensors", dist.group.WORLD.allgather, [ones.clone(), ones], ones.clone())
    expect(TypeError, "one dtype", dist.group.WORLD._allgather_base, torch.zeros(12), torch.zeros(4).int())
    expect(ValueError, "expected 3 x 4 = 12", dist.all_gather_into_tensor, torch.zeros(11), ones)
    expect(
        ValueError, "3 numbers >= 0", dist.all_to_all_single, torch.zeros(6), torch.zeros(6), [1, 2], [3, 3]
    )
    expect(ValueError, "input has 4 rows", dist.all_to_all_single, torch.zeros(6), ones)
    dist.all_reduce(ones)  # nothing of this was sent or broke the group
    assert ones.tolist() == [float(n)] * 4


def test_refusals_name_the_problem_and_leave_the_group_usable(pool: Pool) -> None:
    pool.run(3, check_refusals)

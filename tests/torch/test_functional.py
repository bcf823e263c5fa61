"""Functional collectives (torch.ops._c10d_functional and torch.distributed._functional_collectives): every
operator of torch's list, by name, by group and by mesh, their gradients, and gloo beside mccl.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as differentiable
from both import over_both
from torch.distributed.device_mesh import init_device_mesh

from patterns import AVG, assert_same, reduced, tensor
from ranks import Pool

OPS: Any = torch.ops._c10d_functional
wait: Any = OPS.wait_tensor
F32 = torch.float32
COUNT = 105  # odd, and a multiple of every number of ranks that is used here

# What this file calls. A name that torch adds later is to be looked at.
COVERED = {
    "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out", "all_reduce",
    "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_to_all_single", "batch_p2p_ops",
    "broadcast", "broadcast_", "irecv", "isend", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_out", "wait_tensor", "wait_tensors", "_wrap_tensor_autograd",
}  # fmt: skip


def test_no_operator_is_forgotten() -> None:
    names = [schema.name for schema in torch._C._jit_get_all_schemas()]
    found = {name.split("::")[1] for name in names if name.startswith("_c10d_functional::")}
    assert found <= COVERED, found - COVERED
    assert "all_gather_into_tensor_out" in found


def gathered(n: int, count: int, dtype: torch.dtype = F32, salt: int = 0) -> torch.Tensor:
    return torch.cat([tensor(r, count, dtype, salt=salt) for r in range(n)])


def check_operators(rank: int, n: int) -> None:
    group = dist.group.WORLD.group_name
    for dtype in (F32, torch.bfloat16, torch.int64):
        x = tensor(rank, COUNT, dtype)
        y = tensor(rank, 2 * COUNT, dtype, salt=1)
        sums = [reduced("sum", n, COUNT, dtype), reduced("sum", n, 2 * COUNT, dtype, salt=1)]
        rows = [gathered(n, COUNT, dtype), gathered(n, 2 * COUNT, dtype, salt=1)]
        shards = [sums[0].chunk(n)[rank], sums[1].chunk(n)[rank]]

        for op in ("sum", "min", "max", "product"):
            z = tensor(rank, COUNT, dtype, op)
            assert_same(wait(OPS.all_reduce(z, op, group)), reduced(op, n, COUNT, dtype), op)
            assert_same(z, tensor(rank, COUNT, dtype, op), "input")
        assert_same(wait(OPS.all_reduce_(x.clone(), "sum", group)), sums[0], "all_reduce_")
        for name in ("all_reduce_coalesced", "all_reduce_coalesced_"):
            results = getattr(OPS, name)([x.clone(), y.clone()], "sum", group)
            assert_alike([wait(t) for t in results], sums, name)

        if hasattr(OPS, "wait_tensors"):  # torch 2.15
            results = OPS.wait_tensors([OPS.all_reduce(t, "sum", group) for t in (x, y)])
            assert_alike(results, sums, "wait_tensors")

        assert_same(wait(OPS.all_gather_into_tensor(x, n, group)), rows[0], "all_gather")
        results = OPS.all_gather_into_tensor_coalesced([x, y], n, group)
        assert_alike([wait(t) for t in results], rows, "all_gather_into_tensor_coalesced")
        out = torch.full((n * COUNT + 2,), 99, dtype=dtype)
        middle = out[1:-1]
        assert OPS.all_gather_into_tensor_out(x, n, group, out=middle) is middle
        assert_same(wait(middle), rows[0], "all_gather_into_tensor_out")
        assert out[0] == out[-1] == 99

        assert_same(wait(OPS.reduce_scatter_tensor(x, "sum", n, group)), shards[0], "reduce_scatter")
        results = OPS.reduce_scatter_tensor_coalesced([x, y], "sum", n, group)
        assert_alike([wait(t) for t in results], shards, "reduce_scatter_tensor_coalesced")
        if hasattr(OPS, "reduce_scatter_tensor_out"):
            out = torch.zeros(COUNT // n, dtype=dtype)
            wait(OPS.reduce_scatter_tensor_out(x, "sum", n, group, out=out))
            assert_same(out, shards[0], "reduce_scatter_tensor_out")

        # Rank r sends r + i + 1 elements to rank i.
        sends = [rank + i + 1 for i in range(n)]
        splits = [i + rank + 1 for i in range(n)]
        parts = [list(tensor(r, COUNT, dtype)[: sum(r + i + 1 for i in range(n))].split(
            [r + i + 1 for i in range(n)])) for r in range(n)]  # fmt: skip
        result = wait(OPS.all_to_all_single(x[: sum(sends)], splits, sends, group))
        assert_same(result, torch.cat([parts[r][rank] for r in range(n)]), "all_to_all_single")

        for root in range(n):
            assert_same(wait(OPS.broadcast(x, root, group)), tensor(root, COUNT, dtype), "broadcast")
            z = x.clone()
            wait(OPS.broadcast_(z, root, group))
            assert_same(z, tensor(root, COUNT, dtype), "broadcast_")
    for dtype in (F32, torch.float16):
        z = wait(OPS.all_reduce(tensor(rank, COUNT, dtype), "avg", group))
        assert_same(z, reduced("avg", n, COUNT, dtype), "avg")
    z = wait(OPS.all_reduce(tensor(rank, COUNT, torch.complex64), "sum", group))
    assert_same(z, reduced("sum", n, COUNT, torch.complex64), "complex")


def assert_alike(got: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    assert len(got) == len(expected), what
    for pair in zip(got, expected):
        assert_same(*pair, what)


def check_p2p(rank: int, n: int) -> None:
    group = dist.group.WORLD.group_name
    if not hasattr(OPS, "isend"):
        return
    right, left = (rank + 1) % n, (rank - 1) % n
    sent = OPS.isend(tensor(rank, COUNT, F32), right, 3, group)
    assert_same(wait(OPS.irecv(torch.zeros(COUNT), left, 3, group)), tensor(left, COUNT, F32), "irecv")
    wait(sent)
    ops, peers, tags = ["isend", "irecv", "isend", "irecv"], [right, left, left, right], [1, 1, 2, 2]
    buffers = [tensor(rank, COUNT, F32, salt=1), torch.zeros(COUNT), tensor(rank, 7, F32), torch.zeros(7)]
    results = OPS.batch_p2p_ops(ops, peers, tags, buffers, group)
    assert [result.numel() for result in results] == [0, COUNT, 0, 7]
    for result in results:
        wait(result)
    assert_same(buffers[1], tensor(left, COUNT, F32, salt=1), "from the left")
    assert_same(buffers[3], tensor(right, 7, F32), "from the right")
    with pytest.raises(ValueError, match=r"'bcast'.*expected 'isend' or 'irecv'"):
        OPS.batch_p2p_ops(["bcast"], [right], [0], [torch.ones(1)], group)


def check_late_waits(rank: int, n: int) -> None:
    """Nobody keeps the Works but torch's table: done, swept and collected before the first wait."""
    group = dist.group.WORLD
    outs = [torch.empty(n * COUNT) for _ in range(20)]
    for i, out in enumerate(outs):
        OPS.all_gather_into_tensor_out(tensor(rank, COUNT, F32, salt=i), n, group.group_name, out=out)
    sums = [OPS.all_reduce(tensor(rank, COUNT, F32, salt=i), "sum", group.group_name) for i in range(20)]
    dist.barrier()
    while group._comm.pending:
        group._comm.sweep(64)
    gc.collect()
    for i in reversed(range(20)):
        assert_same(wait(outs[i]), gathered(n, COUNT, salt=i), i)
        assert_same(wait(sums[i]), reduced("sum", n, COUNT, F32, salt=i), i)


def check_errors(rank: int, n: int) -> None:
    group = dist.group.WORLD.group_name
    with pytest.raises(ValueError, match=f"{n} x 5 = {5 * n}"):
        OPS.all_gather_into_tensor_out(torch.ones(5), n, group, out=torch.empty(3))
    with pytest.raises(RuntimeError):
        OPS.all_gather_into_tensor_out(torch.ones(5), n, "no such group", out=torch.empty(5 * n))
    assert_same(wait(OPS.all_reduce(torch.ones(3), "sum", group)), torch.full((3,), float(n)), "goes on")


def check_gloo_beside(rank: int, n: int) -> None:
    """The kernels are for all groups of the process."""
    gloo = dist.new_group(backend="gloo")
    for group in (gloo, dist.group.WORLD, gloo):
        out = torch.empty(n * COUNT)
        wait(OPS.all_gather_into_tensor_out(tensor(rank, COUNT, F32), n, group.group_name, out=out))
        assert_same(out, gathered(n, COUNT), group)
        right, left = (rank + 1) % n, (rank - 1) % n
        buffers = [tensor(rank, COUNT, F32), torch.zeros(COUNT)]
        for t in OPS.batch_p2p_ops(["isend", "irecv"], [right, left], [0, 0], buffers, group.group_name):
            wait(t)
        dist.barrier(group)  # gloo forgets nothing that was not waited for
        assert_same(buffers[1], tensor(left, COUNT, F32), group)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_operators(pool: Pool, n: int) -> None:
    pool.run(n, check_operators)


@pytest.mark.parametrize("check", [check_p2p, check_late_waits, check_errors, check_gloo_beside])
def test_kernels(pool: Pool, check: Any) -> None:
    pool.run(3, check)


def check_lazy(rank: int, n: int, store: dist.Store) -> dict[str, tuple[bool, bool]]:
    """Whether torch's own kernels are in place, before and after the first group of mccl."""

    def replaced() -> bool:
        name = "_c10d_functional::all_gather_into_tensor_out"
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"))

    found = {}
    for backend in ("gloo", "mccl"):
        before = replaced()
        group_store = dist.PrefixStore(backend, store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=n)
        out = torch.empty(n * COUNT)
        wait(OPS.all_gather_into_tensor_out(tensor(rank, COUNT, F32), n, "0", out=out))
        assert_same(out, gathered(n, COUNT), backend)
        dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0
        found[backend] = before, replaced()
    return found


def test_processes_without_a_group_keep_the_kernels_of_torch(pool: Pool) -> None:
    fresh = Pool(**pool.env)
    try:
        for found in fresh.run(2, check_lazy, group=False):
            assert found["gloo"] == (False, False)
            assert found["mccl"][0] is False
    finally:
        fresh.close()


def wrapped(rank: int, n: int, by: str) -> Any:
    """torch.distributed._functional_collectives with everything that can stand for a group."""
    mesh = init_device_mesh("cpu", (n,))
    group: Any = {
        "name": dist.group.WORLD.group_name,
        "group": dist.group.WORLD,
        "mesh": mesh,
        "dimension": (mesh, 0),
        "ranks": list(range(n)),
    }[by]
    x = tensor(rank, 6 * n * n, F32).reshape(2 * n, 3 * n).requires_grad_()
    outs: list[Any] = [
        fc.all_reduce(x, "sum", group),
        fc.all_gather_tensor(x, 0, group),
        fc.all_gather_tensor(x, 1, group),
        fc.reduce_scatter_tensor(x, "sum", 0, group),
        fc.broadcast(x, n - 1, group),
        fc.all_to_all_single(x, None, None, group),
        *fc.all_reduce_coalesced([x, 2 * x], "sum", group),
        *fc.all_gather_into_tensor_coalesced([x, 3 * x], group),
        *fc.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 1], group),
    ]
    if by != "ranks":  # autograd variants
        outs += [
            fc.all_gather_tensor_autograd(x, 0, group),
            fc.reduce_scatter_tensor_autograd(x, "sum", 0, group),
            fc.all_to_all_single_autograd(x, [2] * n, [2] * n, group),
        ]
    if by != "name":
        outs.append(fc.permute_tensor(x.flatten(), [(i + 1) % n for i in range(n)], group))
    gradients = []
    for out in outs:
        out = out.wait() if isinstance(out, fc.AsyncCollectiveTensor) else out
        gradients.append(None)
        if out.requires_grad:
            weights = torch.arange(out.numel(), dtype=F32).reshape(out.shape) % 7 + rank
            (gradients[-1],) = torch.autograd.grad((out * weights).sum(), x, retain_graph=True)
    return [torch.as_tensor(fc.wait_tensor(out)).detach() for out in outs], gradients


@pytest.mark.parametrize("by", ["name", "group", "mesh", "dimension", "ranks"])
def test_wrappers(pool: Pool, by: str) -> None:
    over_both(pool, 3, wrapped, by, bound=0)  # whole numbers: exact also with three


def differentiable_collectives(rank: int, n: int) -> Any:
    """torch.distributed.nn.functional, the older autograd collectives."""
    x = tensor(rank, COUNT, F32).requires_grad_()
    parts = [tensor(rank, COUNT, F32, salt=i).requires_grad_() for i in range(n)]
    outs = {
        "all_reduce": differentiable.all_reduce(x.clone()),
        "broadcast": differentiable.broadcast(x.clone(), 0),
        "all_gather": torch.stack(differentiable.all_gather(x)),
        "reduce": differentiable.reduce(x.clone(), 0),
        "reduce_scatter": differentiable.reduce_scatter(torch.empty(COUNT), parts),
        "all_to_all": torch.stack(
            list(differentiable.all_to_all([torch.empty(COUNT) for _ in range(n)], parts))
        ),
        "all_to_all_single": differentiable.all_to_all_single(torch.empty(COUNT), x),
        "gather": torch.stack(list(differentiable.gather(x, 0))),
        "scatter": differentiable.scatter(parts, 0),
    }
    gradients = {}
    for name, out in outs.items():
        weights = torch.arange(out.numel(), dtype=F32).reshape(out.shape) % 5 + rank
        found = torch.autograd.grad((out * weights).sum(), [x, *parts], allow_unused=True)
        gradients[name] = list(found)
    if rank:  # what gather leaves there is undefined
        outs.pop("gather")
        outs.pop("reduce")
    return {name: out.detach() for name, out in outs.items()}, gradients


def test_differentiable_collectives(pool: Pool) -> None:
    over_both(pool, 3, differentiable_collectives, bound=0)


def check_average_of_a_submesh(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    x = tensor(rank, COUNT, F32)
    row = [rank // 2 * 2, rank // 2 * 2 + 1]
    expected = (tensor(row[0], COUNT, F32) + tensor(row[1], COUNT, F32)) / 2
    assert_same(fc.all_reduce(x, "avg", (mesh, 1)).wait(), expected, "a dimension of a mesh")
    assert_same(fc.all_reduce(x, "avg", mesh["inner"]).wait(), expected, "a part of a mesh")
    dist.all_reduce(x, AVG, group=mesh["inner"].get_group())
    assert_same(x, expected, "its group")


def test_average_of_a_submesh(pool: Pool) -> None:
    pool.run(4, check_average_of_a_submesh)

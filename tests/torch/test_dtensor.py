"""DeviceMesh of one to three dimensions and DTensor: every pair of placements, uneven sizes, modules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both import over_both
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    empty,
    ones,
    zeros,
)

from patterns import assert_same, tensor
from ranks import Pool

F32 = torch.float32
PLACEMENTS: dict[str, Any] = {
    "shard0": Shard(0),
    "shard1": Shard(1),
    "replicate": Replicate(),
    "sum": Partial("sum"),
    "avg": Partial("avg"),
    "max": Partial("max"),
    "min": Partial("min"),
}


def matrix(rank: int, rows: int, columns: int, salt: int = 0) -> torch.Tensor:
    """Multiples of 12, so that averages over 2, 3 and 4 ranks are whole."""
    return 12 * tensor(rank, rows * columns, F32, salt=salt).reshape(rows, columns)


def full(mesh: DeviceMesh, placements: list[Any], rank: int, shape: tuple[int, int]) -> DTensor:
    """A DTensor of that shape; each rank's part of a Partial differs."""
    start = distribute_tensor(
        matrix(0, *shape), mesh, [Replicate() if p.is_partial() else p for p in placements]
    )
    local = start.to_local().clone()
    for dimension, placement in enumerate(placements):
        if placement.is_partial():
            local += (
                12
                * mesh.get_local_rank(dimension)
                * (1 + torch.arange(local.numel()).reshape(local.shape) % 5)
            )
    return DTensor.from_local(
        local, mesh, placements, shape=torch.Size(shape), stride=start.stride(), run_check=False
    )


def redistribute(rank: int, n: int, sizes: tuple[int, ...], shape: tuple[int, int]) -> dict[str, Any]:
    """From all combinations of placements to all; the local parts."""
    mesh = init_device_mesh("cpu", sizes)
    partials = {"sum", "avg", "max", "min"}
    results: dict[str, Any] = {}
    for source in itertools.product(PLACEMENTS, repeat=len(sizes)):
        if len(partials & set(source)) > 1:  # torch does not mix them
            continue
        value = full(mesh, [PLACEMENTS[name] for name in source], rank, shape)
        whole = value.full_tensor()
        for target in itertools.product(["shard0", "shard1", "replicate"], repeat=len(sizes)):
            moved = value.redistribute(mesh, [PLACEMENTS[name] for name in target])
            key = f"{' '.join(source)} -> {' '.join(target)}"
            results[key] = moved.to_local().clone()
            assert_same(moved.full_tensor(), whole, key)
    assert len(results) == {1: 7 * 3, 2: (3 * 3 + 4 * (2 * 3 + 1)) * 9}[len(sizes)]
    return results


@pytest.mark.parametrize("shape", [(12, 12), (5, 7), (1, 3)])
@pytest.mark.parametrize("n", [2, 3])
def test_fr_140_redistribute_on_a_line(pool: Pool, n: int, shape: tuple[int, int]) -> None:
    over_both(pool, n, redistribute, (n,), shape, bound=0)


@pytest.mark.parametrize("shape", [(8, 4), (7, 5)])
def test_fr_140_redistribute_on_a_square(pool: Pool, shape: tuple[int, int]) -> None:
    over_both(pool, 4, redistribute, (2, 2), shape, bound=0, timeout=120)


def gradients(rank: int, n: int) -> Any:
    """Backward through redistribute, to_local, full_tensor and operations on shards."""
    mesh = init_device_mesh("cpu", (n,))
    results = []
    for source, target in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2):
        x = distribute_tensor(matrix(0, 7, 5), mesh, [source]).requires_grad_()
        y = x.redistribute(mesh, [target])
        loss = (y * y).sum().full_tensor() + (x @ x.t()).sum().full_tensor()
        loss = loss + y.full_tensor().square().sum() + y.to_local().sum()
        loss.backward()
        assert x.grad is not None
        results += [loss.detach(), x.grad.full_tensor()]
    return results


def test_gradients(pool: Pool) -> None:
    over_both(pool, 2, gradients)
    over_both(pool, 3, gradients, bound=0)  # whole numbers


def operations(rank: int, n: int) -> Any:
    """Operators that need communication of their own, and constant DTensors."""
    mesh = init_device_mesh("cpu", (n,))
    a = distribute_tensor(matrix(0, 9, 6), mesh, [Shard(0)])
    b = distribute_tensor(matrix(1, 6, 5), mesh, [Shard(0)])
    results = {
        "matmul": a @ b,
        "sum": a.sum(),
        "mean": a.mean(dim=0),
        "max": a.max(),
        "argmax": a.argmax(dim=1),
        "norm": torch.linalg.vector_norm(a.double()),
        "softmax": torch.softmax(a.double().redistribute(mesh, [Shard(1)]), dim=1),
        "cat": torch.cat([a, a], dim=0),
        "transpose": a.t() + 1,
        "zeros": zeros(5, 3, device_mesh=mesh, placements=[Shard(0)]),
        "ones": ones(5, 3, device_mesh=mesh, placements=[Shard(1)]),
    }
    assert empty(4, 4, device_mesh=mesh, placements=[Shard(0)]).shape == (4, 4)
    return {name: value.full_tensor() for name, value in results.items()}


def test_operations(pool: Pool) -> None:
    over_both(pool, 2, operations)
    over_both(pool, 3, operations)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, dtype=torch.float64)
        self.second = nn.Linear(10, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def modules(rank: int, n: int) -> Any:
    """distribute_module with functions for parameters, inputs and outputs; three steps of training."""
    mesh = init_device_mesh("cpu", (n,))

    def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            for key, parameter in list(module.named_parameters()):
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    torch.manual_seed(3 + rank)  # distribute_tensor takes what the first rank has
    model = distribute_module(
        Block(),
        mesh,
        shard,
        input_fn=lambda module, inputs, mesh: (DTensor.from_local(inputs[0], mesh, [Replicate()]),),
        output_fn=lambda module, outputs, mesh: outputs.full_tensor(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        torch.manual_seed(50 + step)
        loss = model(torch.randn(8, 6, dtype=torch.float64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_modules(pool: Pool) -> None:
    over_both(pool, 2, modules)
    over_both(pool, 3, modules)


def meshes(rank: int, n: int) -> Any:
    """2 x 2 x 2: parts, flattened dimensions, groups and their members, one collective on each."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    assert mesh.size() == n and list(mesh.get_coordinate()) == [rank >> 2, rank >> 1 & 1, rank & 1]
    results: dict[str, Any] = {"text": str(mesh)}
    parts = {name: mesh[name] for name in ("a", "b", "c", ("a", "b"), ("b", "c"), ("a", "c"))}
    parts["ab"] = mesh["a", "b"]._flatten("ab")
    parts["abc"] = mesh._flatten("abc")
    parts["ab of the mesh"] = mesh["ab"]
    for name, part in parts.items():
        results[f"{name} members"] = part.mesh.clone()
        for dimension in range(part.ndim):
            group = part.get_group(dimension)
            value = tensor(rank, 37, F32)
            dist.all_reduce(value, group=group)
            expected = sum(tensor(r, 37, F32) for r in dist.get_process_group_ranks(group))
            assert_same(value, expected, (name, dimension))
            results[f"{name} {dimension}"] = [value, dist.get_process_group_ranks(group)]
    other = DeviceMesh("cpu", torch.arange(8).reshape(2, 4).t())
    moved = distribute_tensor(matrix(0, 11, 6), other, [Shard(0), Shard(1)])
    results["other"] = moved.to_local().clone()
    assert_same(moved.full_tensor(), matrix(0, 11, 6), "other")
    line = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    results["world"] = distribute_tensor(matrix(0, 11, 6), line, [Shard(0)]).full_tensor()
    across = distribute_tensor(matrix(0, 9, 6), mesh, [Shard(0), Replicate(), Shard(1)])
    results["3-D"] = across.to_local().clone()
    assert_same(across.full_tensor(), matrix(0, 9, 6), "3-D")
    summed = DTensor.from_local(matrix(rank, 4, 3), mesh, [Partial(), Partial(), Partial()])
    assert_same(summed.full_tensor(), sum(matrix(r, 4, 3) for r in range(n)), "3-D sum")
    return results


def test_meshes(pool: Pool) -> None:
    over_both(pool, 8, meshes, bound=0, timeout=120)

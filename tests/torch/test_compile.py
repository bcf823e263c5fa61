"""torch.compile(fullgraph=True) of programs with collectives: by group, name and mesh, gradients, bucketed
and reordered by inductor, point to point, DDP, FSDP2 and tensor parallel modules.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from both import over_both, over_both_apart
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from patterns import tensor
from ranks import Pool

F32 = torch.float32


@pytest.fixture(scope="module")
def cache() -> Iterator[str]:
    """Of what inductor builds."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def start(cache: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    inductor_config.compile_threads = 1  # no processes of its own
    torch._dynamo.reset()


def compiled(function: Any, backend: str) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend)


def every_operation(rank: int, n: int, cache: str, backend: str, by: str) -> Any:
    start(cache)
    mesh = init_device_mesh("cpu", (n,))
    group: Any = {"group": dist.group.WORLD, "name": dist.group.WORLD.group_name, "mesh": (mesh, 0)}[by]

    def program(x: torch.Tensor) -> Any:
        y = x * 2 + 1
        outs = [
            fc.all_reduce(y, "sum", group) + 1,
            fc.all_gather_tensor(y, 0, group) * 2,
            fc.reduce_scatter_tensor(y, "sum", 0, group) - 1,
            fc.all_to_all_single(y, None, None, group) + x,
            fc.broadcast(y, 1, group) * 3,
            *fc.all_reduce_coalesced([y, x], "max", group),
            *fc.all_gather_into_tensor_coalesced([y, x], group),
            *fc.reduce_scatter_tensor_coalesced([y, x], "sum", [0, 0], group),
        ]
        return [out.relu() for out in outs]

    x = tensor(rank, 48, F32).reshape(8, 6)
    results = compiled(program, backend)(x)
    for got, expected in zip(results, program(x)):
        assert torch.equal(got, torch.as_tensor(expected))
    return results


@pytest.mark.parametrize("by", ["group", "name", "mesh"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_operation(pool: Pool, cache: str, backend: str, by: str) -> None:
    over_both(pool, 2, every_operation, cache, backend, by, timeout=120)


def plain_calls(rank: int, n: int, cache: str, backend: str) -> Any:
    """torch.distributed's own functions, in place, without a graph break."""
    start(cache)
    half = dist.new_group([0, 1])

    def program(x: torch.Tensor) -> Any:
        total = x * 2
        dist.all_reduce(total)
        largest = x + 1
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=half)
        rows = torch.empty(n * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(rows, x)
        share = torch.empty(x.shape[0] // n, x.shape[1])
        dist.reduce_scatter_tensor(share, x.sin())
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, x)
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        return total.cos(), largest, rows + 1, share, swapped, *parts

    results = compiled(program, backend)(tensor(rank, 48, F32).reshape(8, 6))
    for got, expected in zip(results, program(tensor(rank, 48, F32).reshape(8, 6))):
        torch.testing.assert_close(got, expected)
    return list(results)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_plain_calls(pool: Pool, cache: str, backend: str) -> None:
    over_both(pool, 2, plain_calls, cache, backend, timeout=120)


def point_to_point(rank: int, n: int, cache: str, backend: str) -> Any:
    start(cache)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return y * 2

    x, y = tensor(rank, 35, F32), torch.zeros(35)
    if not hasattr(torch._dynamo.config, "enable_p2p_compilation"):  # older torch: a graph break
        return torch.compile(program, backend=backend)(x, y)
    with torch._dynamo.config.patch(enable_p2p_compilation=True):
        result = compiled(program, backend)(x, y)
    assert torch.equal(result, 2 * tensor(1 - rank, 35, F32))
    return result


def test_point_to_point(pool: Pool, cache: str) -> None:
    over_both(pool, 2, point_to_point, cache, "aot_eager", timeout=120)


def bucketed(rank: int, n: int, cache: str) -> Any:
    """Inductor joins neighbouring collectives and moves them away from their waits."""
    start(cache)
    group = dist.group.WORLD.group_name

    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        gathered = [fc.all_gather_tensor(t, 0, group) for t in (a, b, a + 1)]
        product = gathered[0] @ gathered[1].t()
        shares = [fc.reduce_scatter_tensor(t, "sum", 0, group) for t in (product, product * 2)]
        sums = [fc.all_reduce(t, "sum", group) for t in (a * 3, b * 5)]
        return [*gathered, product, *shares, *sums]

    a, b = (tensor(rank, 24, F32, salt=salt).reshape(4, 6) for salt in (0, 1))
    settings = {
        "bucket_all_gathers_fx": "all",
        "bucket_reduce_scatters_fx": "all",
        "bucket_all_reduces_fx": "all",
        "reorder_for_compute_comm_overlap": True,
    }
    with inductor_config.patch({k: v for k, v in settings.items() if hasattr(inductor_config, k)}):
        results, code = run_and_get_code(compiled(program, "inductor"), a, b)
    if hasattr(inductor_config, "bucket_all_gathers_fx"):
        assert "all_gather_into_tensor_out" in code[0], code[0]
        assert code[0].count("all_gather_into_tensor_out.default(") == 1, code[0]
    for got, expected in zip(results, program(a, b)):
        assert torch.equal(got, torch.as_tensor(expected))
    return results


def test_bucketed(pool: Pool, cache: str) -> None:
    over_both(pool, 2, bucketed, cache, timeout=120)


def out_variant(rank: int, n: int, cache: str, backend: str) -> Any:
    start(cache)
    group = dist.group.WORLD.group_name

    def program(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(n * x.shape[0], x.shape[1])
        out = torch.ops._c10d_functional.all_gather_into_tensor_out(x * 2, n, group, out=out)
        return torch.ops._c10d_functional.wait_tensor(out) + 1

    try:
        return compiled(program, backend)(tensor(rank, 24, F32).reshape(4, 6))
    except RuntimeError as error:  # torch up to 2.12, whatever the backend of the group
        assert hasattr(dist.ProcessGroup, "all_gather_single") is False, error
        assert "only support functionalizing" in str(error), error
        return "not functionalized"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_out_variant(pool: Pool, cache: str, backend: str) -> None:
    over_both(pool, 2, out_variant, cache, backend, timeout=120)


def with_gradients(rank: int, n: int, cache: str, backend: str) -> Any:
    start(cache)
    group = dist.group.WORLD

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = fc.all_gather_tensor_autograd(x * 2, 0, group) @ w
        z = fc.reduce_scatter_tensor_autograd(y.square(), "sum", 0, group)
        return fc.all_to_all_single_autograd(z, [2] * n, [2] * n, group)

    x = tensor(rank, 24, F32).reshape(4, 6).requires_grad_()
    w = tensor(3, 18, F32).reshape(6, 3).requires_grad_()
    out = compiled(program, backend)(x, w)
    return [out.detach(), *torch.autograd.grad((out * (rank + 1)).sum(), [x, w])]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients(pool: Pool, cache: str, backend: str) -> None:
    over_both(pool, 2, with_gradients, cache, backend, timeout=120)


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def train(model: Any, rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(3):
        data = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 6, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return losses, [value.detach().clone() for value in whole]


def ddp(rank: int, n: int, cache: str, backend: str, mode: str) -> Any:
    start(cache)
    torch.manual_seed(4)
    with torch._dynamo.config.patch(optimize_ddp=mode):
        model = DDP(Net(60_000), bucket_cap_mb=1)  # two buckets
        return train(torch.compile(model, backend=backend), rank)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mode", ["ddp_optimizer", "python_reducer"])
def test_ddp(pool: Pool, cache: str, backend: str, mode: str) -> None:
    over_both(pool, 2, ddp, cache, backend, mode, timeout=120)


def fsdp2(rank: int, n: int, cache: str, backend: str) -> Any:
    start(cache)
    torch.manual_seed(4)
    model = nn.Sequential(Net(), Net())
    for part in model:
        fully_shard(part)
    fully_shard(model)
    for part in model:
        part.compile(backend=backend)
    return train(model, rank)


def tensor_parallel(rank: int, n: int, cache: str, backend: str) -> Any:
    start(cache)
    torch.manual_seed(4)
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Net(), init_device_mesh("cpu", (n,)), plan)
    model.compile(fullgraph=True, backend=backend)
    return train(model, 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", [fsdp2, tensor_parallel])
def test_parallel_modules(pool: Pool, cache: str, program: Any, backend: str) -> None:
    over_both(pool, 2, program, cache, backend, timeout=120)


def dtensors(rank: int, n: int, cache: str, backend: str) -> Any:
    # torch finds entries of its cache by the sizes of the whole: with uneven shards it would run rank 1's
    # code on rank 0's shard, and one backend's code for the other.
    start(os.path.join(cache, dist.get_backend(), str(rank)))
    mesh = init_device_mesh("cpu", (n,))

    def program(a: DTensor, b: DTensor) -> torch.Tensor:
        moved = (a + 1).redistribute(placements=[Shard(1)])
        return (moved @ b).redistribute(placements=[Replicate()]).to_local() + a.full_tensor().sum()

    a = distribute_tensor(tensor(0, 42, F32).reshape(7, 6), mesh, [Shard(0)])
    b = distribute_tensor(tensor(1, 18, F32).reshape(6, 3), mesh, [Shard(0)])
    result = compiled(program, backend)(a, b)
    torch.testing.assert_close(result, program(a, b))
    return result


# Apart, since torch keeps the mesh of the first program in memory, and with it a group that is gone.
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dtensors(cache: str, backend: str) -> None:
    over_both_apart(2, dtensors, cache, backend, timeout=120)

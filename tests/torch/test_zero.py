"""ZeroRedundancyOptimizer over mccl and over gloo: overlapped with DDP, uneven inputs, and its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from both import BOUND, assert_alike, dtype_for, over_both, run_over
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import Pool

STEPS = 6


def model_of(n: int) -> nn.Module:
    dtype = dtype_for(n)
    return nn.Sequential(nn.Linear(6, 11, dtype=dtype), nn.Tanh(), nn.Linear(11, 5, dtype=dtype))


def deep_model(n: int) -> nn.Module:
    """Several buckets."""
    return nn.Sequential(*(nn.Linear(6, 6, dtype=dtype_for(n)) for _ in range(6)))


def step(model: nn.Module, data: torch.Generator, n: int) -> float:
    x = torch.randn(4, 6, generator=data, dtype=dtype_for(n))
    loss = nn.functional.cross_entropy(model(x), torch.randint(5, (4,), generator=data))
    loss.backward()
    return loss.item()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(rank: int, n: int, kind: str, view: bool) -> Any:
    """Weights after each step, the state that rank 0 collects, and what continues from it."""
    model = DDP(model_of(n))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), getattr(torch.optim, kind), parameters_as_bucket_view=view, lr=0.05
    )
    data = torch.Generator().manual_seed(rank)
    trace = []
    for _ in range(STEPS):
        trace.append((step(model, data, n), weights(model)))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=n - 1)
    saved = [optimizer.state_dict() if rank == n - 1 else None]
    dist.broadcast_object_list(saved, src=n - 1)
    resumed = ZeroRedundancyOptimizer(model.parameters(), getattr(torch.optim, kind), lr=0.1)
    resumed.load_state_dict(saved[0])
    trace.append((step(model, data, n), weights(model)))
    resumed.step()
    return trace, saved, weights(model)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("n", [2, 3])
def test_training_and_state(pool: Pool, n: int, kind: str, view: bool) -> None:
    over_both(pool, n, train, kind, view)


def train_overlapped(rank: int, n: int, shard_buckets: bool) -> list[Any]:
    """The optimizer's part of a bucket steps in a callback of its all-reduce."""
    model = DDP(deep_model(n), bucket_cap_mb=0.0003, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    hook = ddp_zero_hook.hook_with_zero_step(
        default_hooks.allreduce_hook, model, optimizer, shard_buckets=shard_buckets
    )
    model.register_comm_hook(None, hook)
    data = torch.Generator().manual_seed(rank)
    trace = []
    for _ in range(STEPS):
        trace.append((step(model, data, n), weights(model)))
        model.zero_grad()
    return trace


def train_plainly(rank: int, n: int, idle: int) -> list[Any]:
    """The same without ZeRO and overlap; the first steps change nothing."""
    model = DDP(deep_model(n))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    trace = []
    for i in range(STEPS):
        loss = step(model, data, n)
        if i >= idle:
            optimizer.step()
        optimizer.zero_grad()
        trace.append((loss, weights(model)))
    return trace


def compare_overlapped(rank: int, n: int, store: dist.Store, shard_buckets: bool) -> None:
    over_mccl = run_over("mccl", rank, n, store, train_overlapped, shard_buckets)
    # torch builds the buckets anew after a step, and begins only then.
    idle = sum(torch.equal(over_mccl[0][1][0], now[0]) for _, now in over_mccl)
    assert 1 <= idle <= 3
    over_gloo = run_over("gloo", rank, n, store, train_plainly, idle)
    assert_alike(over_mccl, over_gloo, 0.0 if n == 2 else BOUND)


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_overlap_with_ddp(pool: Pool, n: int, shard_buckets: bool) -> None:
    """Not over gloo: there torch refuses it, as it may hang."""
    pool.run(n, compare_overlapped, shard_buckets, group=False)


def train_uneven(rank: int, n: int, counts: list[int], stop_early: bool) -> Any:
    model = DDP(model_of(n))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    trace = []
    error = ""
    try:
        with Join([model, optimizer], throw_on_early_termination=stop_early):
            for _ in range(counts[rank]):
                trace.append(step(model, data, n))
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as e:
        error = str(e)
    assert bool(error) == stop_early, error
    return trace, error, weights(model)


@pytest.mark.parametrize("counts", [[5, 7], [7, 5], [0, 3]])
@pytest.mark.parametrize("stop_early", [False, True])
def test_fr_136_join(pool: Pool, counts: list[int], stop_early: bool) -> None:
    """FR-136"""
    over_both(pool, 2, train_uneven, counts, stop_early)


def test_fr_136_join_of_three(pool: Pool) -> None:
    """FR-136"""
    over_both(pool, 3, train_uneven, [4, 0, 2], False)

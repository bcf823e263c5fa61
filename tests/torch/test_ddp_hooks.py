"""DDP's communication hooks over mccl and over gloo: torch's own, and hooks in Python that chain futures."""

# No `from __future__ import annotations`: DDP looks at those of a hook.

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both import dtype_for, over_both
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import Pool

STEPS = 8


def model_of(n: int) -> nn.Module:
    """One bucket: PowerSGD on several starts operations in an order that depends on timing."""
    dtype = dtype_for(n)
    return nn.Sequential(nn.Linear(7, 20, dtype=dtype), nn.Tanh(), nn.Linear(20, 5, dtype=dtype))


# ---- hooks in Python --------------------------------------------------------------------------------------


def chained(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """One operation, then arithmetic in two callbacks."""
    work = dist.all_reduce(bucket.buffer().mul_(3), async_op=True)
    return (
        work.get_future().then(lambda f: f.value()[0] / dist.get_world_size()).then(lambda f: f.value() / 3)
    )


def two_rounds(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """The callback of one operation begins another and waits for it."""

    def second(future: Future[list[Tensor]]) -> Tensor:
        total = future.value()[0]
        largest = total.abs().max().reshape(1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True).get_future().wait()
        return total.clamp_(-largest.item() / 2, largest.item() / 2) / dist.get_world_size()

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(second)


def gathered(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """All gradients to all ranks, added in rank order."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, bucket.buffer(), async_op=True)
    return work.get_future().then(lambda f: torch.stack(parts).mean(dim=0))


def scattered(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Reduce-scatter, then all-gather, of a padded copy. (gloo's reduce-scatter has no future.)"""
    n, size = dist.get_world_size(), bucket.buffer().numel()
    share = -(-size // n)
    padded = nn.functional.pad(bucket.buffer(), (0, n * share - size))
    mine = torch.empty(share, dtype=padded.dtype)
    dist.reduce_scatter_tensor(mine, padded)
    work = dist.all_gather_into_tensor(padded, mine / n, async_op=True)
    return work.get_future().then(lambda f: padded[:size])


def in_halves(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """A future of the user's own, collected from two operations."""
    half = bucket.buffer().numel() // 2
    parts = bucket.buffer()[:half], bucket.buffer()[half:]
    futures = [dist.all_reduce(part, async_op=True).get_future() for part in parts]
    return torch.futures.collect_all(futures).then(lambda f: bucket.buffer().div_(dist.get_world_size()))


HOOKS = [chained, two_rounds, gathered, scattered, in_halves]
# ---- torch's hooks ----------------------------------------------------------------------------------------

BUILT_IN = dist.BuiltinCommHookType


def power_sgd(model: DDP, rank: int, compress: bool) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
    )
    hook = powerSGD_hook.powerSGD_hook
    model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hook) if compress else hook)


WAYS: dict[str, Any] = {
    "allreduce": lambda model: register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, model),
    "fp16": lambda model: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model),
    # As a lambda: DDP refuses the hook by its name on a CPU, whatever the backend.
    "bf16": lambda model: model.register_comm_hook(
        None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
    ),
    "allreduce in C++": lambda model: model._register_builtin_comm_hook(BUILT_IN.ALLREDUCE),
    "PowerSGD, rank 1": lambda model: power_sgd(model, 1, False),
    "PowerSGD, rank 2": lambda model: power_sgd(model, 2, False),
    "PowerSGD in fp16": lambda model: power_sgd(model, 2, True),
    "no-op": lambda model: register_ddp_comm_hook(DDPCommHookType.NOOP, model),
    "optimizer in callbacks": lambda model: model._register_fused_optim(torch.optim.SGD, lr=0.05),
}
WAYS |= {hook.__name__: lambda model, hook=hook: model.register_comm_hook(None, hook) for hook in HOOKS}


def train(rank: int, n: int, way: str, several_buckets: bool) -> Any:
    torch.manual_seed(3)
    model = DDP(model_of(n), bucket_cap_mb=0.0005 if several_buckets else 25)
    WAYS[way](model)
    fused = way == "optimizer in callbacks"
    optimizer = None if fused else torch.optim.SGD(model.parameters(), lr=0.05)
    return run(rank, n, model, optimizer)


def run(rank: int, n: int, model: DDP, optimizer: Any) -> Any:
    data = torch.Generator().manual_seed(rank)
    trace = []
    for _ in range(STEPS):
        x = torch.randn(4, 7, generator=data, dtype=dtype_for(n))
        loss = nn.functional.cross_entropy(model(x), torch.randint(5, (4,), generator=data))
        loss.backward()
        trace.append((loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    return trace, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_one_bucket(pool: Pool, way: str) -> None:
    over_both(pool, 2, train, way, False)


@pytest.mark.parametrize(
    "way",
    ["allreduce", "fp16", "allreduce in C++", "no-op", "chained", "gathered", "in_halves"],
)
def test_several_buckets(pool: Pool, way: str) -> None:
    over_both(pool, 2, train, way, True)


@pytest.mark.parametrize(
    "way", ["allreduce", "allreduce in C++", "optimizer in callbacks", *(h.__name__ for h in HOOKS)]
)
@pytest.mark.parametrize("n", [3, 4])
def test_more_ranks(pool: Pool, n: int, way: str) -> None:
    over_both(pool, n, train, way, False)


def train_broken(rank: int, n: int, name: str) -> str:
    """The error's first line; the rest are places in files."""
    model = DDP(model_of(n))
    state = powerSGD_hook.PowerSGDState(None) if "powerSGD" in name else dist.group.WORLD
    module = powerSGD_hook if "powerSGD" in name else quantization_hooks
    model.register_comm_hook(state, getattr(module, name))
    if "powerSGD" in name:
        state.iter = state.start_powerSGD_iter
    try:
        run(rank, n, model, None)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"


@pytest.mark.parametrize(
    "name", ["batched_powerSGD_hook", "quantization_pertensor_hook", "quantization_perchannel_hook"]
)
def test_hooks_that_fail_on_cpu_fail_alike(pool: Pool, name: str) -> None:
    """torch 2.13 hands them tensors of shapes that they do not expect."""
    over_both(pool, 2, train_broken, name)


# ---- local SGD --------------------------------------------------------------------------------------------


def own_group(rank: int, n: int) -> Any:
    return [dist.new_group([r]) for r in range(n)][rank]


def train_locally(rank: int, n: int, hierarchical: bool) -> Any:
    """Each step over a subgroup (after two over all), every third an average of the weights over all."""
    torch.manual_seed(3)
    model = DDP(model_of(n))
    subgroup, _ = dist.new_subgroups(2) if hierarchical else (own_group(rank, n), None)
    state = post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    if hierarchical:
        averager = hierarchical_model_averager.HierarchicalModelAverager(
            period_group_size_dict=OrderedDict([(2, 2), (4, n)]), warmup_steps=2
        )
    else:
        averager = averagers.PeriodicModelAverager(period=3, warmup_steps=2)
    local = torch.optim.SGD(model.parameters(), lr=0.05)
    return run(rank, n, model, PostLocalSGDOptimizer(optim=local, averager=averager))


def test_post_local_sgd(pool: Pool) -> None:
    over_both(pool, 2, train_locally, False)


def test_hierarchical_averages(pool: Pool) -> None:
    over_both(pool, 4, train_locally, True)

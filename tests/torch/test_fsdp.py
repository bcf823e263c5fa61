"""FSDP1 and FSDP2 over mccl, over gloo and in one process: losses, gradients, weights, state (FR-140)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from both import BOUND, assert_alike, dtype_for, over_both, run_over
from fsdp_models import Block, Net, loss_of, plain, train_alone, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ranks import Pool

STEPS = 4
BF16 = torch.bfloat16
# Ranks add in another order than gloo's: what is added in float32 or bf16 differs by a few roundings.
FP32_BOUND, BF16_BOUND = 2.0**-18, 2.0**-6


# ---- FSDP2 ------------------------------------------------------------------------------------------------


def shard(rank: int, n: int, dtype: torch.dtype, **arguments: Any) -> nn.Module:
    model = Net(dtype)
    for block in model.blocks:
        fully_shard(block, **arguments)
    return fully_shard(model, **arguments)


def reduced_in(param: Any, reduce: Any) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}


def prepare(variant: str, rank: int, n: int, dtype: torch.dtype) -> nn.Module:
    if variant == "stays gathered":
        return shard(rank, n, dtype, reshard_after_forward=False)
    if variant == "reshards to pairs":
        return shard(rank, n, dtype, reshard_after_forward=2)
    if variant == "bf16, adds in fp32":
        return shard(rank, n, dtype, **reduced_in(BF16, torch.float32))
    if variant == "bf16":
        return shard(rank, n, dtype, **reduced_in(BF16, BF16))
    if variant == "adds in bf16":
        return shard(rank, n, dtype, **reduced_in(None, BF16))
    if variant == "fp16":  # divides before and after, and adds
        return shard(rank, n, dtype, **reduced_in(torch.float16, torch.float16))
    if variant == "offloads":
        return shard(rank, n, dtype, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if variant == "hsdp":
        return shard(
            rank, n, dtype, mesh=init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("copy", "share"))
        )
    if variant == "columns":  # all_gather and reduce_scatter of dimension 1, which has to be even
        return shard(rank, n, dtype, shard_placement_fn=by_columns)
    model = shard(rank, n, dtype)
    if variant == "divides by 3":  # PREMUL_SUM
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(3.0)
    elif variant == "divides by 3, sum only":
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)
    elif variant == "sum only":
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(True)
    elif variant == "prefetches":
        model.set_modules_to_forward_prefetch(list(model.blocks[:2]))
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    elif variant == "accumulates":
        model.set_requires_gradient_sync(False)
    else:
        assert variant == "plain", variant
    return model


def by_columns(parameter: nn.Parameter) -> Any:
    even = parameter.dim() == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return dist.tensor.Shard(1) if even else None


def optimizer_for(model: nn.Module, n: int, dtype: torch.dtype) -> torch.optim.Optimizer:
    """Adam, except where roundings differ: it makes a whole step out of a gradient near 0."""
    if n == 2 or dtype is torch.float64:
        return torch.optim.Adam(model.parameters(), lr=0.02)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(rank: int, n: int, variant: str, dtype: torch.dtype) -> Any:
    model = prepare(variant, rank, n, dtype)
    optimizer = optimizer_for(model, n, dtype)
    trace = []
    for step in range(STEPS):
        last = variant != "accumulates" or step % 2 == 1
        if variant == "accumulates":
            model.set_requires_gradient_sync(last)
        loss = loss_of(model, rank, step, dtype)
        loss.backward()
        trace.append(loss.item())
        if last:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            trace.append([whole(norm), {name: whole(p.grad) for name, p in model.named_parameters()}])
            optimizer.step()
            optimizer.zero_grad()
    full = StateDictOptions(full_state_dict=True)
    return {
        "trace": trace,
        "weights": {name: whole(p) for name, p in model.named_parameters()},
        "shards": plain(model.state_dict()),
        "optimizer's shards": plain(get_optimizer_state_dict(model, optimizer)),
        "full": get_model_state_dict(model, options=full),
        "optimizer's full": get_optimizer_state_dict(model, optimizer, options=full),
    }


VARIANTS = [
    "plain", "stays gathered", "bf16, adds in fp32", "bf16", "adds in bf16", "fp16", "offloads", "columns",
    "sum only", "prefetches", "accumulates",
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_fr_140_fully_shard(pool: Pool, variant: str) -> None:
    over_both(pool, 2, train, variant, torch.float32)


@pytest.mark.parametrize("variant", ["plain", "stays gathered", "bf16", "adds in bf16", "accumulates"])
@pytest.mark.parametrize("n", [3, 4])
def test_fr_140_fully_shard_of_more_ranks(pool: Pool, n: int, variant: str) -> None:
    bound = BF16_BOUND if "bf16" in variant else FP32_BOUND
    over_both(pool, n, train, variant, torch.float32, bound=bound)


@pytest.mark.parametrize("variant", ["hsdp", "reshards to pairs"])
def test_fr_140_fully_shard_of_two_by_two(pool: Pool, variant: str) -> None:
    over_both(pool, 4, train, variant, torch.float64)


def compare_premultiplied(rank: int, n: int, store: dist.Store) -> None:
    over_mccl = run_over("mccl", rank, n, store, train, "divides by 3", torch.float32)
    over_gloo = run_over("gloo", rank, n, store, train, "divides by 3, sum only", torch.float32)
    assert_alike(over_mccl, over_gloo, FP32_BOUND)


@pytest.mark.parametrize("n", [3, 4])
def test_a_divide_factor_is_what_dividing_the_sum_gives(pool: Pool, n: int) -> None:
    """PREMUL_SUM, which gloo lacks."""
    pool.run(n, compare_premultiplied, group=False)


def check_alone(rank: int, n: int, variant: str) -> None:
    got = train(rank, n, variant, torch.float64)
    losses, weights = train_alone(n, STEPS, torch.float64)
    mean = torch.tensor([loss for loss in got["trace"] if isinstance(loss, float)], dtype=torch.float64)
    dist.all_reduce(mean)
    assert_alike((mean / n).tolist(), losses, BOUND)
    assert_alike(got["weights"], weights, BOUND)
    assert_alike(got["full"], weights, BOUND)


@pytest.mark.parametrize(("n", "variant"), [(2, "plain"), (3, "plain"), (4, "plain"), (4, "hsdp")])
def test_fr_140_fully_shard_reaches_what_one_process_does(pool: Pool, n: int, variant: str) -> None:
    pool.run(n, check_alone, variant)


def use_hooks(rank: int, n: int) -> Any:
    """Hooks for HSDP's all-reduce, unshard by hand, weights of rank 0."""
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("copy", "share"))
    model = shard(rank, n, torch.float64, mesh=mesh)
    seen: list[torch.Tensor] = []
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(lambda gradient: seen.append(gradient.clone()))
    full = {name: p + 1 for name, p in Net(torch.float64).state_dict().items()} if rank == 0 else {}
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=everywhere)
    handle = model.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    gathered = [p.detach().clone() for p in model.parameters(recurse=False)]
    model.reshard()
    loss_of(model, rank, 0, torch.float64).backward()
    assert len(seen) == 4
    return (
        gathered,
        seen,
        {name: whole(p.grad) for name, p in model.named_parameters()},
        plain(model.state_dict()),
    )


def test_fully_shard_hooks(pool: Pool) -> None:
    over_both(pool, 4, use_hooks)


# ---- FSDP1 ------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def wrap(rank: int, n: int, strategy: str, dtype: torch.dtype, **arguments: Any) -> FullyShardedDataParallel:
    if "HYBRID" in strategy:
        arguments["device_mesh"] = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("copy", "share"))
    return FullyShardedDataParallel(
        Net(dtype),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=CPU,
        **arguments,
    )


PRECISIONS = {
    "": None,
    "bf16": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16),
    "adds in bf16": MixedPrecision(reduce_dtype=BF16),
    "bf16, adds in fp32": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
}


def train_1(rank: int, n: int, strategy: str, precision: str, original: bool, accumulate: bool) -> Any:
    dtype = torch.float32 if precision else dtype_for(n)
    model = wrap(
        rank, n, strategy, dtype, use_orig_params=original, mixed_precision=PRECISIONS[precision],
        forward_prefetch=True,
    )  # fmt: skip
    optimizer = optimizer_for(model, n, dtype)
    trace = []
    for step in range(STEPS):
        if accumulate and step % 2 == 0:
            with model.no_sync():
                loss_of(model, rank, step, dtype).backward()
            continue
        loss = loss_of(model, rank, step, dtype)
        loss.backward()
        # Of float64 it refuses to compute norms.
        trace.append((loss.item(), model.clip_grad_norm_(0.5) if dtype is torch.float32 else None))
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        weights = [p.detach().clone() for p in model.parameters()]
    return trace, weights, states_1(model, optimizer)


def states_1(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    """Full and sharded state, then the model after loading the latter, changed."""
    fsdp = FullyShardedDataParallel
    full = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT, *full):
        results = [plain(model.state_dict()), plain(fsdp.optim_state_dict(model, optimizer))]
    sharded = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with fsdp.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *sharded):
        state = model.state_dict()
        results += [plain(state), plain(fsdp.optim_state_dict(model, optimizer))]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(state)
    with fsdp.summon_full_params(model, writeback=False):
        results.append([p.detach().clone() for p in model.parameters()])
    return results


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fr_140_fsdp1(pool: Pool, strategy: str, original: bool) -> None:
    over_both(pool, 2, train_1, strategy, "", original, False)


@pytest.mark.parametrize("precision", ["bf16", "adds in bf16", "bf16, adds in fp32"])
def test_fr_140_fsdp1_in_mixed_precision(pool: Pool, precision: str) -> None:
    over_both(pool, 2, train_1, "FULL_SHARD", precision, True, False)


def test_fr_140_fsdp1_accumulates(pool: Pool) -> None:
    over_both(pool, 2, train_1, "FULL_SHARD", "", True, True)


@pytest.mark.parametrize(
    ("n", "strategy"), [(3, "FULL_SHARD"), (4, "HYBRID_SHARD"), (4, "_HYBRID_SHARD_ZERO2")]
)
def test_fr_140_fsdp1_of_more_ranks(pool: Pool, n: int, strategy: str) -> None:
    over_both(pool, n, train_1, strategy, "", True, False)


def check_alone_1(rank: int, n: int, strategy: str) -> None:
    _, got, states = train_1(rank, n, strategy, "", True, False)
    expected = [*train_alone(n, STEPS, torch.float64)[1].values()]
    assert_alike([g.double() for g in got], expected, BOUND)
    assert_alike([g.double() for g in states[-1]], expected, BOUND)


@pytest.mark.parametrize(("n", "strategy"), [(3, "FULL_SHARD"), (4, "SHARD_GRAD_OP"), (4, "HYBRID_SHARD")])
def test_fr_140_fsdp1_reaches_what_one_process_does(pool: Pool, n: int, strategy: str) -> None:
    pool.run(n, check_alone_1, strategy)

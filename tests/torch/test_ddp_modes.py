"""DDP over mccl and over gloo: mixed modes, all gradients, buffers, errors, uneven inputs, half precision."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both import dtype_for, over_both
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from patterns import assert_same
from ranks import Pool

STEPS = 8


class Net(nn.Module):
    """Has buffers, a complex parameter, and branches, of which a step uses those in `use`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, dtype=dtype)
        self.norm = nn.BatchNorm1d(10, dtype=dtype)
        self.branches = nn.ModuleList(nn.Linear(10, 10, dtype=dtype) for _ in range(3))
        self.phase = nn.Parameter(torch.randn(10, dtype=dtype.to_complex()))
        self.last = nn.Linear(10, 3, dtype=dtype)

    def forward(self, x: torch.Tensor, use: list[int]) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        for i in use:
            x = x + torch.tanh(self.branches[i](x))
        return self.last((x * self.phase).abs())


def batches(rank: int, count: int, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(4, 6, generator=data, dtype=dtype), torch.randint(3, (4,), generator=data)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def error_of(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def all_used(step: int, rank: int) -> list[int]:
    return [0, 1, 2]


def one_unused(step: int, rank: int) -> list[int]:
    return [0, 2]


def own_branch(step: int, rank: int) -> list[int]:
    """Another branch on each rank and in each step."""
    return [(step + rank) % 3]


def late_branch(step: int, rank: int) -> list[int]:
    """Branch 1 is used in the first of four steps only."""
    return [0, 1, 2] if step % 4 == 0 else [0, 2]


VIEW, UNUSED, STATIC = "gradient_as_bucket_view", "find_unused_parameters", "static_graph"
MODES: dict[str, tuple[dict[str, Any], Any, int]] = {  # DDP's arguments, branches to use, steps to accumulate
    "plain": ({}, all_used, 1),
    "many buckets and views": ({"bucket_cap_mb": 0.0005, VIEW: True}, all_used, 1),
    "buffers of each rank": ({"broadcast_buffers": False}, all_used, 1),
    "unused everywhere": ({UNUSED: True}, one_unused, 1),
    "unused here or there": ({UNUSED: True, VIEW: True}, own_branch, 1),
    "static graph, unused": ({STATIC: True}, one_unused, 1),
    "static graph, views": ({STATIC: True, VIEW: True}, all_used, 1),
    "accumulate 4": ({VIEW: True}, all_used, 4),
    "accumulate 4, used early only": ({UNUSED: True}, late_branch, 4),  # FR-137: stays local, as documented
    "accumulate 4, unused here or there": ({UNUSED: True}, own_branch, 4),
}


def train(rank: int, n: int, mode: str) -> Any:
    arguments, use, accumulate = MODES[mode]
    dtype = dtype_for(n)
    torch.manual_seed(10 + rank)  # DDP has to spread rank 0's weights
    model = DDP(Net(dtype), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trace = []
    for step, (x, target) in enumerate(batches(rank, STEPS, dtype)):
        last = step % accumulate == accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_of(model(x, use(step, rank)), target)
            loss.backward()
        trace.append((loss.item(), gradients(model)))
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return trace, state(model), optimizer.state_dict()["state"]


@pytest.mark.parametrize("mode", MODES)
def test_fr_137_losses_gradients_and_weights(pool: Pool, mode: str) -> None:
    """FR-137, and FR-004 for complex gradients."""
    over_both(pool, 2, train, mode)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("mode", ["plain", "unused here or there", "static graph, views"])
def test_fr_137_more_ranks(pool: Pool, n: int, mode: str) -> None:
    over_both(pool, n, train, mode)


# ---- sparse gradients -------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4, sparse=True, dtype=dtype)
        self.bag = nn.EmbeddingBag(20, 4, sparse=True, mode="sum", dtype=dtype)
        self.last = nn.Linear(4, 3, dtype=dtype)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(words).mean(dim=1) + self.bag(words % 20))


def train_sparse(rank: int, n: int, view: bool) -> Any:
    model = DDP(Words(dtype_for(n)), gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    trace = []
    for step in range(4):
        # The number of rows that a rank touches depends on the rank and the step.
        words = torch.randint(50, (3, 1 + 2 * rank + step), generator=data)
        loss = loss_of(model(words), torch.arange(3))
        loss.backward()
        trace.append((loss.item(), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return trace, state(model)


@pytest.mark.parametrize("n", [2, 3])
def test_sparse_gradients(pool: Pool, n: int) -> None:
    over_both(pool, n, train_sparse, False)


# ---- buffers ----------------------------------------------------------------------------------------------


def spread_buffers(rank: int, n: int) -> Any:
    model = Net(torch.float32)
    model.register_buffer("counts", torch.arange(5) * (rank + 1))
    model.register_buffer("mask", torch.tensor([rank == 0, True, False]))
    wrapped = DDP(model)
    after_wrapping = state(model)
    model.counts += 10 * (rank + 1)
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(module.counts.clone()))
    for x, target in batches(rank, 2, torch.float32):
        loss_of(wrapped(x, [0, 1, 2]), target).backward()
    assert seen[0].tolist() == [10, 11, 12, 13, 14], seen  # rank 0's
    return after_wrapping, seen, state(model)


def test_buffers_are_those_of_rank_0(pool: Pool) -> None:
    over_both(pool, 3, spread_buffers)


# ---- errors of DDP ----------------------------------------------------------------------------------------


def error_unused(rank: int, n: int) -> str:
    model = DDP(Net(torch.float32))
    data = batches(rank, 2, torch.float32)

    def step() -> None:
        x, target = next(data)
        loss_of(model(x, [0]), target).backward()

    step()
    return error_of(step)


def error_graph_changed(rank: int, n: int) -> str:
    model = DDP(Net(torch.float32), static_graph=True)

    def run() -> None:
        for step, (x, target) in enumerate(batches(rank, 4, torch.float32)):
            loss_of(model(x, [0, 1, 2] if step == 0 else [0]), target).backward()

    return error_of(run)


def error_ready_twice(rank: int, n: int) -> str:
    """A re-entrant checkpoint calls a parameter's hook a second time, before all are ready."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.part = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.part, self.first(x), use_reentrant=True)
            return checkpoint(self.part, x, use_reentrant=True)

    model = DDP(Twice())
    return error_of(lambda: model(torch.randn(4, 6)).sum().backward())


def error_other_count(rank: int, n: int) -> str:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(1 + rank)))
    return error_of(DDP, model)


def error_other_shape(rank: int, n: int) -> str:
    """Rank 1 notices, and rank 0 sends its weights all the same: somebody has to take them."""
    error = [error_of(DDP, nn.Linear(3, 4 + rank))]
    if rank == 1:
        dist._broadcast_coalesced(dist.group.WORLD, [torch.empty(4, 3), torch.empty(4)], 2**20, 0)
    dist.broadcast_object_list(error, 1)
    return error[0]


def error_no_gradients(rank: int, n: int) -> str:
    return error_of(DDP, nn.Linear(3, 4).requires_grad_(False))


def error_sync_batch_norm(rank: int, n: int) -> str:
    return error_of(DDP, nn.SyncBatchNorm.convert_sync_batchnorm(Net(torch.float32)))


def error_sync_batch_norm_alone(rank: int, n: int) -> str:
    return error_of(nn.SyncBatchNorm(4), torch.randn(5, 4))


# DDP asks for the versions of CUDA and NCCL that torch was built with, not for a GPU.
BF16_TEXT = "no error" if torch.version.cuda else "BF16 all reduce communication hook required"


def error_bf16_hook(rank: int, n: int) -> str:
    return error_of(DDP(nn.Linear(3, 4)).register_comm_hook, None, default_hooks.bf16_compress_hook)


def say(rank: int, n: int, name: str, text: str) -> str:
    error: str = globals()[name](rank, n)
    assert re.search(text, error), error
    return error


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (error_unused, "Expected to have finished reduction in the prior iteration"),
        (error_graph_changed, "graph has changed"),
        (error_ready_twice, "Expected to mark a variable ready only once"),
        (error_other_count, "DDP expects same model across all ranks"),
        (error_other_shape, "appears not to match sizes"),
        (error_no_gradients, "doesn't have any parameter that requires a gradient"),
        (error_bf16_hook, BF16_TEXT),
        (error_sync_batch_norm, "SyncBatchNorm layers only work with GPU modules"),
        (error_sync_batch_norm_alone, "SyncBatchNorm expected input tensor to be on"),
    ],
)
def test_ddp_says_the_same(pool: Pool, program: Any, text: str) -> None:
    """FR-137: an error of DDP does not depend on the backend."""
    over_both(pool, 2, say, program.__name__, text)


# ---- uneven inputs (FR-136) -------------------------------------------------------------------------------


def train_uneven(
    rank: int, n: int, counts: list[int], arguments: dict[str, Any], join: dict[str, Any]
) -> Any:
    dtype = dtype_for(n)
    model = DDP(Net(dtype), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trace = []

    def run() -> None:
        with model.join(**join):
            for step, (x, target) in enumerate(batches(rank, counts[rank], dtype)):
                use = own_branch(step, rank) if UNUSED in arguments else all_used(step, rank)
                loss = loss_of(model(x, use), target)
                loss.backward()
                trace.append((loss.item(), gradients(model)))
                optimizer.step()
                optimizer.zero_grad()

    error = error_of(run)
    stops = join.get("throw_on_early_termination", False)
    assert (error == "no error") != stops, error
    return error, trace, state(model)


ONE_MORE_TWO = [[5, 7], [7, 5], [0, 3], [3, 0]]


@pytest.mark.parametrize("counts", ONE_MORE_TWO)
@pytest.mark.parametrize(
    "join",
    [{}, {"divide_by_initial_world_size": False}, {"throw_on_early_termination": True}],
    ids=["join", "divide by those who are left", "throw"],
)
def test_fr_136_join(pool: Pool, counts: list[int], join: dict[str, Any]) -> None:
    over_both(pool, 2, train_uneven, counts, {}, join)


@pytest.mark.parametrize("arguments", [{UNUSED: True}, {VIEW: True, "bucket_cap_mb": 0.0005}])
def test_fr_136_join_in_other_modes(pool: Pool, arguments: dict[str, Any]) -> None:
    over_both(pool, 2, train_uneven, [2, 5], arguments, {})


def test_fr_136_join_of_four(pool: Pool) -> None:
    over_both(pool, 4, train_uneven, [3, 0, 5, 1], {}, {})


def bare_uneven(rank: int, n: int, store: dist.Store) -> str:
    """Without join: rank 0 runs out of batches and does something else. What rank 1 gets, and when."""
    limit = timedelta(seconds=3)
    inner = dist.PrefixStore("mccl", store)
    dist.init_process_group("mccl", store=inner, rank=rank, world_size=n, timeout=limit)
    model = DDP(Net(torch.float32))
    counts = [5, 7]

    def run() -> None:
        for x, target in batches(rank, counts[rank], torch.float32):
            loss_of(model(x, [0, 1, 2]), target).backward()

    started = time.monotonic()
    error = error_of(run)
    if rank == 0:
        store.wait(["rank 1 is done"], timedelta(seconds=30))
    else:
        assert time.monotonic() - started < 20, "the time-out of 3 s has no effect"
        store.set("rank 1 is done", "")
    return error


def test_fr_136_without_join_the_end_is_bounded_and_names_the_rank(pool: Pool) -> None:
    first, second = pool.run(2, bare_uneven, group=False)
    assert first == "no error"
    assert "MCCLTimeoutError" in second
    assert "rank 0" in second


# ---- half precision ---------------------------------------------------------------------------------------

COUNT = 1003


def halves(rank: int) -> torch.Tensor:
    """fp16 numbers around 20000, others on each rank: 8 of them add up to more than fp16 has, 65504."""
    position = torch.arange(COUNT)
    return ((20000 + 16 * ((position * 7 + rank * 5) % 13)) * (1 - 2 * (position % 2))).to(torch.float16)


class Scale(nn.Module):
    """The gradient of `weight` is the input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(COUNT, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def mean_of(how: str, rank: int, n: int) -> torch.Tensor:
    if how == "AVG":
        tensor = halves(rank)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        return tensor
    dtype = torch.float32 if how.endswith("hook") else torch.float16
    model = DDP(Scale(dtype))
    if how == "fp16 hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif how == "bf16 hook":
        # As a lambda: DDP refuses the hook by its name on a CPU, whatever the backend.
        model.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    (model(halves(rank).to(dtype)).sum(dtype=torch.float32)).backward()
    assert model.module.weight.grad is not None and model.module.weight.grad.dtype == dtype
    return model.module.weight.grad


def check_half_mean(rank: int, n: int, how: str) -> None:
    exact = torch.stack([halves(r).double() for r in range(n)]).mean(dim=0)
    got = mean_of(how, rank, n).double()
    # Between 16384 and 32768 an ulp of fp16 (10 bits behind the point) is 16, one of bf16 (7 bits) is 128.
    ulp = 128 if how == "bf16 hook" else 16
    assert exact.abs().max() < 32768
    assert torch.isfinite(got).all()
    worst = (got - exact).abs().max().item()
    assert worst <= ulp, f"{how}: off by {worst / ulp} ulp"
    everywhere = [torch.empty_like(got) for _ in range(n)]
    dist.all_gather(everywhere, got)
    for other in everywhere:
        assert_same(other, got, how)


def check_half_sum(rank: int, n: int) -> None:
    tensor = halves(rank)
    dist.all_reduce(tensor)
    sign = 1 - 2 * (torch.arange(COUNT) % 2)
    assert_same(tensor, (sign * float("inf")).to(torch.float16), "sum")


@pytest.mark.parametrize("how", ["DDP", "fp16 hook", "bf16 hook", "AVG"])
def test_fr_011_mean_of_eight_halves_is_finite(pool: Pool, how: str) -> None:
    """FR-011"""
    pool.run(8, check_half_mean, how, timeout=120)


def test_fr_011_sum_of_eight_halves_is_infinite_everywhere(pool: Pool) -> None:
    """FR-011"""
    pool.run(8, check_half_sum, timeout=120)

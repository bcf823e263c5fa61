"""DDP over mccl and over gloo: the same weights after 50 steps, in every mode of DDP."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import Pool

STEPS = 50
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "small_buckets": {"bucket_cap_mb": 0.001},
    "fp16_compress_hook": {},
    "powerSGD_hook": {},
}


class Net(nn.Module):
    """With a buffer (batch norm) and a branch that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 40)
        self.norm = nn.BatchNorm1d(40)
        self.branch = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.branch(x) if branch else x)


def train(rank: int, n: int, mode: str, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = DDP(Net(), process_group=group, **MODES[mode])
    if mode == "fp16_compress_hook":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    if mode == "powerSGD_hook":  # its callbacks begin operations and wait for their futures
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(8, 20, generator=data)
        target = torch.randint(3, (8,), generator=data)
        branch = mode != "find_unused_parameters" or (step + rank) % 3 != 0
        accumulate = mode == "no_sync" and step % 2 == 0
        with model.no_sync() if accumulate else contextlib.nullcontext():
            nn.functional.cross_entropy(model(x, branch), target).backward()
        if not accumulate:
            optimizer.step()
            optimizer.zero_grad()
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers()]]


# A callback of PowerSGD may hold the last reference to gloo's group in one of gloo's own threads, which then
# joins itself and aborts the process. So the groups stay.
_GLOO_GROUPS: list[dist.ProcessGroup] = []


def check_ddp(rank: int, n: int, mode: str) -> None:
    over_mccl = train(rank, n, mode, None)
    _GLOO_GROUPS.append(dist.new_group(backend="gloo"))
    over_gloo = train(rank, n, mode, _GLOO_GROUPS[-1])
    for a, b in zip(over_mccl, over_gloo):
        if n == 2:
            assert torch.equal(a, b), (mode, (a - b).abs().max())
        else:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    n_parameters = len(list(Net().parameters()))
    flat = torch.cat([t.flatten() for t in over_mccl[:n_parameters]])  # buffers follow each rank's own data
    everywhere = [torch.empty_like(flat) for _ in range(n)]
    dist.all_gather(everywhere, flat)
    assert all(torch.equal(other, flat) for other in everywhere), f"{mode}: ranks drifted apart"


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_match_gloo_bit_for_bit(pool: Pool, mode: str) -> None:
    pool.run(2, check_ddp, mode)


def test_three_ranks_match_gloo(pool: Pool) -> None:
    pool.run(3, check_ddp, "plain")

"""What tests of FSDP and of checkpoints share: a model with uneven layers, its training, its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    def __init__(self, inner: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, dtype=dtype)
        self.down = nn.Linear(inner, width, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Dimensions of 3, 5 and 100: four ranks cannot share the first evenly, and one of them gets nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 5, dtype=dtype)
        self.blocks = nn.ModuleList(Block(inner, 5, dtype) for inner in (100, 3, 7))
        self.scale = nn.Parameter(torch.ones(5, dtype=dtype))
        self.last = nn.Linear(5, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x * self.scale)


def batch(rank: int, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 6, generator=data, dtype=dtype), torch.randint(3, (4,), generator=data)


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    x, target = batch(rank, step, dtype)
    return nn.functional.cross_entropy(model(x).to(dtype), target)


def train_alone(n: int, steps: int, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What n ranks together should reach, in one process: losses, weights."""
    model = Net(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        loss = torch.stack([loss_of(model, rank, step, dtype) for rank in range(n)]).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def plain(value: Any) -> Any:
    """A copy in which sharded tensors are what this rank holds of them, with its place in the whole."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, ShardedTensor):
        return [
            (s.metadata.shard_offsets, s.metadata.shard_sizes, s.tensor.clone()) for s in value.local_shards()
        ]
    if isinstance(value, DTensor):
        return str(value.placements), tuple(value.shape), value.to_local().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def whole(value: Any) -> Any:
    """A copy in which sharded tensors are gathered: collective, so in the same order on all ranks."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value

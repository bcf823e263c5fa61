"""Tensor parallel modules, parallel loss, and tensor parallel under FSDP2 on a 2-D mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from both import dtype_for, over_both
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ranks import Pool

WORDS, WIDTH, LENGTH = 24, 12, 6


class Block(nn.Module):
    """Attention and a feed-forward part, written for whatever share of the heads it holds."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))
        self.norm2 = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype)
        self.down = nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q, k, v = (f(x).view(batch, length, -1, 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.out = nn.Linear(WIDTH, WORDS, bias=False, dtype=dtype)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def parallelize(model: Model, mesh: Any, sequence: bool, parallel_loss: bool) -> None:
    """As torch's tutorial does; with `sequence` the norms work on a share of the positions."""
    positions = Shard(1) if sequence else Replicate()
    local = not sequence
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=positions, use_local_output=local),
        "out": ColwiseParallel(
            input_layouts=positions,
            output_layouts=Shard(-1) if parallel_loss else Replicate(),
            use_local_output=not parallel_loss,
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        plan = {
            "q": ColwiseParallel(input_layouts=positions),
            "k": ColwiseParallel(input_layouts=positions),
            "v": ColwiseParallel(input_layouts=positions),
            "o": RowwiseParallel(output_layouts=positions, use_local_output=local),
            "up": ColwiseParallel(input_layouts=positions),
            "down": RowwiseParallel(output_layouts=positions, use_local_output=local),
        }
        if sequence:
            plan["norm"] = plan["norm2"] = SequenceParallel()
        parallelize_module(block, mesh, plan)


def whole(value: torch.Tensor | None) -> torch.Tensor | None:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return None if value is None else value.detach().clone()


def train(model: nn.Module, seed: int, parallel_loss: bool, steps: int = 3) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for step in range(steps):
        data = torch.Generator().manual_seed(seed + step)
        words = torch.randint(WORDS, (2, LENGTH), generator=data)
        targets = torch.randint(WORDS, (2 * LENGTH,), generator=data)
        logits = model(words).flatten(0, 1)
        if parallel_loss:
            with loss_parallel():
                loss = nn.functional.cross_entropy(logits, targets)
                loss.backward()
        else:
            loss = nn.functional.cross_entropy(logits.float(), targets)
            loss.backward()
        losses.append(whole(loss))
        gradients = [whole(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, [whole(parameter) for parameter in model.parameters()]


def tensor_parallel(rank: int, n: int, sequence: bool, parallel_loss: bool) -> Any:
    dtype = dtype_for(n)
    torch.manual_seed(5)
    alone = Model(dtype)
    model = Model(dtype)
    model.load_state_dict(alone.state_dict())
    parallelize(model, init_device_mesh("cpu", (n,)), sequence, parallel_loss)
    together = train(model, 80, parallel_loss)
    expected = train(alone, 80, False)
    for got, want in zip(together[2], expected[2]):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    return together


@pytest.mark.parametrize("parallel_loss", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel(pool: Pool, sequence: bool, parallel_loss: bool) -> None:
    over_both(pool, 2, tensor_parallel, sequence, parallel_loss)
    over_both(pool, 3, tensor_parallel, sequence, parallel_loss)


def two_dimensions(rank: int, n: int, bf16: bool) -> Any:
    """Tensor parallel inside pairs, FSDP2 across them."""
    dtype = torch.float32 if bf16 else torch.float64
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(5)
    model = Model(dtype)
    parallelize(model, mesh["model"], False, False)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"], mp_policy=precision)
    fully_shard(model, mesh=mesh["data"], mp_policy=precision)
    return train(model, 200 + 10 * mesh.get_local_rank("data"), False)


@pytest.mark.parametrize("bf16", [False, True])
def test_tensor_parallel_under_fsdp2(pool: Pool, bf16: bool) -> None:
    over_both(pool, 4, two_dimensions, bf16)  # each sum is over two ranks: the bound holds for bf16 too

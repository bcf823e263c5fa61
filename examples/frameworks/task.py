"""What the examples in this folder train: a small network, on data made here, for 20 steps on 2 ranks.

results() and show() prove what was trained, and over which backend.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 20
BATCH_SIZE = 16  # per rank
WORLD_SIZE = 2
LEARNING_RATE = 0.5

loss_function = nn.CrossEntropyLoss()


def backend(default: str) -> str:
    """`default`, unless the script's first argument names another one: gloo, to compare."""
    return sys.argv[1] if len(sys.argv) > 1 else default


def make_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def make_dataset() -> TensorDataset:
    """One epoch is STEPS steps of WORLD_SIZE ranks. A linear map of the input says its class."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(STEPS * BATCH_SIZE * WORLD_SIZE, 32, generator=generator)
    labels = (inputs @ torch.randn(32, 10, generator=generator)).argmax(dim=1)
    return TensorDataset(inputs, labels)


def results(network: nn.Module) -> list[dict[str, Any]]:
    """What each rank holds after training, by rank. Called by all ranks."""
    import mccl  # for its counters; training needs no import

    digest = hashlib.sha256()
    for parameter in network.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    inputs, labels = make_dataset().tensors
    with torch.no_grad():
        loss = loss_function(network(inputs), labels).item()
    mine = {
        "backend": dist.get_backend(),
        "bytes sent by mccl": mccl.get_metrics().total_bytes_sent,
        "loss": round(loss, 4),
        "weights": digest.hexdigest(),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def show(everyone: list[dict[str, Any]]) -> None:
    """Prints results(), once: on rank 0, or in a process that is no rank."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    for rank, result in enumerate(everyone):
        print(f"rank {rank}: {json.dumps(result)}", flush=True)
    if len({result["weights"] for result in everyone}) != 1:
        raise SystemExit("the weights differ between ranks")

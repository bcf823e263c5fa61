"""Plain PyTorch whose script starts the processes itself.

python examples/frameworks/train_spawn.py
"""

from __future__ import annotations

import socket

import task
import torch.distributed as dist
import torch.multiprocessing as mp
from train_torchrun import train


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_main(rank: int, size: int, url: str) -> None:
    dist.init_process_group(backend=task.backend("mccl"), init_method=url, rank=rank, world_size=size)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    url = f"tcp://127.0.0.1:{free_port()}"
    mp.spawn(rank_main, (task.WORLD_SIZE, url), nprocs=task.WORLD_SIZE)

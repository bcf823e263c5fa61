"""Plain PyTorch under torchrun.

torchrun --standalone --nproc_per_node=2 examples/frameworks/train_torchrun.py
"""

from __future__ import annotations

import task
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train() -> None:
    """20 steps, in the default group."""
    network = task.make_network()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LEARNING_RATE)
    dataset = task.make_dataset()
    loader = DataLoader(dataset, batch_size=task.BATCH_SIZE, sampler=DistributedSampler(dataset))
    for inputs, labels in loader:
        optimizer.zero_grad()
        task.loss_function(model(inputs), labels).backward()
        optimizer.step()
    task.show(task.results(network))


if __name__ == "__main__":
    dist.init_process_group(backend=task.backend("mccl"))
    train()
    dist.destroy_process_group()

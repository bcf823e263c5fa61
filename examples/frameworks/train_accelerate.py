"""Hugging Face Accelerate.

accelerate launch --multi_gpu --num_processes=2 --main_process_port=0 examples/frameworks/train_accelerate.py

Accelerate knows no backend but gloo and mpi for the CPU, and takes a group that is there already.
"""

from __future__ import annotations

import task
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main() -> None:
    dist.init_process_group(backend=task.backend("mccl"))  # before the Accelerator is made
    accelerator = Accelerator(cpu=True)

    network = task.make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=task.LEARNING_RATE)
    loader = DataLoader(task.make_dataset(), batch_size=task.BATCH_SIZE)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(task.loss_function(model(inputs), labels))
        optimizer.step()
    task.show(task.results(accelerator.unwrap_model(model)))
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Ray Train, on a Ray of this machine's own that ends with the script.

python examples/frameworks/train_ray.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import ray
import ray.train.torch
import task
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader


def train() -> list[dict[str, Any]]:
    network = task.make_network()
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LEARNING_RATE)
    loader = DataLoader(task.make_dataset(), batch_size=task.BATCH_SIZE, shuffle=True)
    for inputs, labels in ray.train.torch.prepare_data_loader(loader):
        optimizer.zero_grad()
        task.loss_function(model(inputs), labels).backward()
        optimizer.step()
    return task.results(network)


def main() -> None:
    ray.init(num_cpus=task.WORLD_SIZE, include_dashboard=False)
    torch_config = TorchConfig(backend=task.backend("mccl"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            torch_config=torch_config,
            scaling_config=ScalingConfig(num_workers=task.WORLD_SIZE),
            run_config=RunConfig(storage_path=folder),
        )
        task.show(trainer.fit().return_value)
    ray.shutdown()


if __name__ == "__main__":
    main()

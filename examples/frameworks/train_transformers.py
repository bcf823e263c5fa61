"""The Trainer of Hugging Face Transformers.

torchrun --standalone --nproc_per_node=2 examples/frameworks/train_transformers.py

On the CPU its ddp_backend must be gloo or mpi; a group that is there already is taken.
"""

from __future__ import annotations

import tempfile
from typing import Any

import task
import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    """The network in the form that Trainer expects: the loss is part of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.network = task.make_network()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(inputs)
        return {"loss": task.loss_function(logits, labels), "logits": logits}


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    inputs, labels = zip(*rows)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def main() -> None:
    dist.init_process_group(backend=task.backend("mccl"))  # before TrainingArguments are made
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=task.STEPS,
            per_device_train_batch_size=task.BATCH_SIZE,
            learning_rate=task.LEARNING_RATE,
            optim="sgd",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = Model()
        Trainer(model, arguments, train_dataset=task.make_dataset(), data_collator=collate).train()
    task.show(task.results(model.network))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Lightning, which starts the other processes itself.

python examples/frameworks/train_lightning.py
"""

from __future__ import annotations

import lightning
import task
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = task.make_network()

    def prepare_data(self) -> None:
        """Downloads belong here; for its time Lightning makes a gloo group of its own, to wait in."""

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = task.loss_function(self.network(inputs), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=task.LEARNING_RATE)


def main() -> None:
    strategy = DDPStrategy(process_group_backend=task.backend("mccl"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=task.WORLD_SIZE,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(task.make_dataset(), batch_size=task.BATCH_SIZE, shuffle=True))
    task.show(task.results(module.network))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

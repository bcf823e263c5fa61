"""Trains a small network on scikit-learn's handwritten digits, data-parallel over all ranks.

    torchrun --standalone --nproc_per_node=2 examples/train_ddp.py

or on two machines, started on each with its own --node_rank:

    torchrun --nproc_per_node=1 --nnodes=2 --node_rank=0 \
        --master_addr=169.254.x.x --master_port=29500 examples/train_ddp.py

Prints loss, held-out accuracy, throughput and the share of a step that waits for communication, and ends by
proving that all ranks hold bit-identical weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mccl

BATCH_SIZE = 32  # per rank
HELD_OUT = 360  # of 1797 images


def setup(backend: str) -> tuple[int, int, torch.device]:
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])

    # For machines joined by a Thunderbolt cable; harmless elsewhere.
    mccl.apply_thunderbolt_production_defaults(training_defaults=True)
    if torch.backends.mps.is_available():
        device = torch.device("mps:0")
        dist.init_process_group(backend=backend, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group(backend=backend)  # torch refuses device_id for the CPU
    return rank, world_size, device


def init_data(seed: int) -> tuple[DataLoader, DistributedSampler, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(
        len(labels), generator=torch.Generator().manual_seed(0)
    )  # the same split everywhere
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    dataset = TensorDataset(images[train], labels[train])
    sampler = DistributedSampler(dataset, seed=seed)  # shuffles, so the loader must not
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=False, sampler=sampler)
    return loader, sampler, TensorDataset(images[test], labels[test])


def init_model(device: torch.device, seed: int) -> tuple[DDP, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    ).to(device)  # fmt: skip
    ddp_model = DDP(model, bucket_cap_mb=mccl.get_config().ddp_bucket_mb)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=2e-3)
    return ddp_model, optimizer, nn.CrossEntropyLoss()


def communication_share(model: DDP, loss_fn: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Part of forward and backward that is spent waiting for other ranks.

    The same batch is timed with and without gradient exchange, in turn; what communication hides behind
    computation does not count. Weights do not change.
    """
    images, labels = (tensor.to(device) for tensor in next(iter(loader)))

    def step_seconds() -> float:
        started = time.perf_counter()
        loss_fn(model(images), labels).backward()
        if device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter() - started

    with_exchange, without = [], []
    for _ in range(30):
        with_exchange.append(step_seconds())
        with model.no_sync():
            without.append(step_seconds())
    model.zero_grad()
    # Ranks do not measure alike; the mean is what the job sees.
    share = torch.tensor(1 - statistics.median(without) / statistics.median(with_exchange))
    dist.all_reduce(share)
    return max(0.0, share.item() / dist.get_world_size())


def train(
    model: DDP,
    optimizer: torch.optim.Optimizer,
    loss_fn: nn.Module,
    loader: DataLoader,
    sampler: DistributedSampler,
    device: torch.device,
    epochs: int,
) -> None:
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        total = torch.zeros(2, device=device)  # loss, images
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()
            total += torch.stack(
                [loss.detach() * len(labels), torch.tensor(float(len(labels)), device=device)]
            )
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            loss_sum, n_images = total.tolist()
            rate = n_images / (time.perf_counter() - started)
            print(f"epoch {epoch + 1:2d}  loss {loss_sum / n_images:.4f}  {rate:6.0f} images/s", flush=True)


def accuracy(model: DDP, test: TensorDataset, device: torch.device) -> float:
    images, labels = test.tensors
    with torch.no_grad():
        predictions = model.module(images.to(device)).argmax(dim=1).cpu()
    return (predictions == labels).float().mean().item()


def weights_digest(model: DDP) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def cleanup() -> None:
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--backend", default="mccl", help="mccl, or gloo to compare")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    rank, world_size, device = setup(arguments.backend)
    loader, sampler, test = init_data(arguments.seed)
    model, optimizer, loss_fn = init_model(device, arguments.seed)
    share = communication_share(model, loss_fn, loader, device)
    train(model, optimizer, loss_fn, loader, sampler, device, arguments.epochs)

    digests: list[str | None] = [None] * world_size
    dist.all_gather_object(digests, weights_digest(model))
    if rank == 0:
        print(f"held-out accuracy {100 * accuracy(model, test, device):.1f} % of {HELD_OUT} images")
        print(
            f"communication {100 * share:.0f} % of a step ({world_size} ranks, {arguments.backend}, {device})"
        )
        if len(set(digests)) == 1:
            print(f"weights bit-identical on all {world_size} ranks: sha256 {digests[0]}", flush=True)
    cleanup()
    if len(set(digests)) != 1:
        raise SystemExit(f"rank {rank}: weights differ between ranks: {digests}")


if __name__ == "__main__":
    main()

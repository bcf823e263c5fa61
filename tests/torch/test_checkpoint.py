"""torch.distributed.checkpoint over mccl: save, async_save, load on other ranks and over gloo (FR-140)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from both import assert_alike, run_over
from fsdp_models import Net, loss_of, plain, whole
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import Pool

DTYPE = torch.float32


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(DTYPE)
    if kind == "ddp":
        model = DDP(model)
    elif kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "note": {"steps": 3, "of": "rank 0"},
        "own": {f"r{rank}": rank},
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, rank, step, DTYPE).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(rank: int, n: int, folder: str, kind: str, how: str) -> None:
    """Trains, saves, and writes besides what a reader has to find; trains on while async_save writes.

    Meanwhile async_save's thread calls too: it needs a group of its own, since calls on one have an order.
    """
    model, optimizer = make(kind)
    train(model, optimizer, rank, range(3))
    state = state_of(model, optimizer, rank)
    expected = {"model": whole(state["model"]), "optimizer": whole(state["optimizer"])}
    if how == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        own = dist.new_group() if how == "THREAD" else None
        future = dcp.async_save(
            state,
            checkpoint_id=folder,
            process_group=own,
            async_checkpointer_type=AsyncCheckpointerType[how],
        )
        train(model, optimizer, rank, range(3, 5))
        getattr(future, "upload_completion", future).result()
    if rank == 0:
        torch.save(expected, f"{folder}.expected")
    dist.barrier()


def load(rank: int, n: int, folder: str, kind: str) -> Any:
    model, optimizer = make(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    state = state_of(model, optimizer, 0)
    state["note"] = {"steps": 0, "of": ""}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["note"] == {"steps": 3, "of": "rank 0"} and state["own"] == {"r0": 0}
    weights, moments = get_state_dict(model, optimizer)
    found = {"model": whole(weights), "optimizer": whole(moments)}
    assert_alike(found, torch.load(f"{folder}.expected"), 0.0)
    return plain(weights), plain(moments)


def load_over_both(rank: int, n: int, store: dist.Store, folder: str, kind: str) -> None:
    over_mccl = run_over("mccl", rank, n, store, load, folder, kind)
    assert_alike(over_mccl, run_over("gloo", rank, n, store, load, folder, kind), 0.0)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize(("n_save", "n_load"), [(2, 3), (4, 2), (3, 4), (2, 1)])
def test_fr_140_load_on_other_ranks(pool: Pool, tmp_path: Path, kind: str, n_save: int, n_load: int) -> None:
    folder = str(tmp_path / "checkpoint")
    pool.run(n_save, save, folder, kind, "save")
    pool.run(n_load, load_over_both, folder, kind, group=False)


@pytest.mark.parametrize("how", ["THREAD", "PROCESS"])
def test_fr_140_async_save(pool: Pool, tmp_path: Path, how: str) -> None:
    """What is trained meanwhile is not in it."""
    folder = str(tmp_path / "checkpoint")
    pool.run(2, save, folder, "fsdp2", how, timeout=120)
    pool.run(3, load_over_both, folder, "fsdp2", group=False)


def save_over(rank: int, n: int, store: dist.Store, backend: str, folder: str) -> None:
    run_over(backend, rank, n, store, save, folder, "fsdp2", "save")


def test_what_gloo_saved(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    pool.run(2, save_over, "gloo", folder, group=False)
    pool.run(3, load_over_both, folder, "fsdp2", group=False)


def error_of_load(rank: int, n: int, folder: str) -> list[str]:
    try:
        dcp.load({"model": {"absent": torch.zeros(3)}}, checkpoint_id=folder)
    except CheckpointException as failure:
        return [f"rank {rank}: {error}" for rank, (error, _) in failure.failures.items()]
    return []


def load_broken(rank: int, n: int, store: dist.Store, folder: str) -> None:
    errors = [run_over(backend, rank, n, store, error_of_load, folder) for backend in ("mccl", "gloo")]
    assert "absent" in str(errors[0]) and errors[0] == errors[1], errors


def test_errors_reach_all_ranks(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    pool.run(2, save, folder, "fsdp2", "save")
    pool.run(2, load_broken, folder, group=False)

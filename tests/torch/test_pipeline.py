"""torch.distributed.pipelining over mccl and gloo: GPipe, 1F1B and interleaved schedules, also beside
data parallel groups. Stages tell each other shapes in messages of objects.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from both import over_both
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)

from ranks import Pool

WIDTH, BATCH, PARTS = 10, 12, 4
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(11)
    return [Layer() for _ in range(count)]


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(BATCH, WIDTH, generator=data, dtype=torch.float64) for _ in range(2))
    return x, target


def alone(count: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients of one process; of each part of the batch, as the schedules do."""
    model = nn.Sequential(*layers(count))
    x, target = batch(seed)
    outputs = []
    for part, wanted in zip(x.chunk(PARTS), target.chunk(PARTS)):
        outputs.append(model(part))
        (nn.functional.mse_loss(outputs[-1], wanted) / PARTS).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat(outputs).detach(), gradients


def run(schedule: Any, first: bool, last: bool, seed: int) -> Any:
    x, target = batch(seed)
    losses: list[torch.Tensor] = []
    output = schedule.step(*([x] if first else []), **({"target": target, "losses": losses} if last else {}))
    return output.detach() if last else None, [loss.detach() for loss in losses]


def stages(rank: int, n: int, name: str) -> Any:
    """One layer per rank; three steps."""
    module = layers(n)[rank]
    stage = PipelineStage(module, rank, n, torch.device("cpu"))
    schedule = SCHEDULES[name](stage, PARTS, loss_fn=nn.functional.mse_loss)
    results = []
    for seed in range(3):
        module.zero_grad()
        results.append(run(schedule, rank == 0, rank == n - 1, seed))
        output, gradients = alone(n, seed)
        own = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        torch.testing.assert_close(own, gradients[2 * rank : 2 * rank + 2], rtol=1e-9, atol=1e-12)
        if rank == n - 1:
            torch.testing.assert_close(results[-1][0], output, rtol=1e-9, atol=1e-12)
        results.append(own)
    return results


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages(pool: Pool, name: str) -> None:
    for n in (2, 3):
        over_both(pool, n, stages, name, bound=0)  # nothing is summed over ranks


def interleaved(rank: int, n: int) -> Any:
    """Two layers per rank."""
    every = layers(2 * n)
    own = [PipelineStage(every[i], i, 2 * n, torch.device("cpu")) for i in (rank, rank + n)]
    schedule = ScheduleInterleaved1F1B(own, PARTS, loss_fn=nn.functional.mse_loss)
    result = run(schedule, rank == 0, rank == n - 1, 5)
    output, gradients = alone(2 * n, 5)
    got = [p.grad for stage in own for p in stage.submod.parameters() if p.grad is not None]
    wanted = [gradients[2 * i + j] for i in (rank, rank + n) for j in (0, 1)]
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    if rank == n - 1:
        torch.testing.assert_close(result[0], output, rtol=1e-9, atol=1e-12)
    return result, got


def test_interleaved(pool: Pool) -> None:
    over_both(pool, 2, interleaved, bound=0)


def split_by_torch(rank: int, n: int) -> Any:
    """torch traces and splits the model."""
    model = nn.Sequential(*layers(4))
    x, _ = batch(9)
    pipe = pipeline(model, mb_args=(x.chunk(PARTS)[0],), split_spec={"2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
    return run(ScheduleGPipe(stage, PARTS, loss_fn=nn.functional.mse_loss), rank == 0, rank == n - 1, 9)


def test_split_by_torch(pool: Pool) -> None:
    over_both(pool, 2, split_by_torch, bound=0)


def beside_data_parallel(rank: int, n: int) -> Any:
    """2 x 2: pipelines along one dimension of a mesh, gradients summed along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    position, group = mesh.get_local_rank("stage"), mesh["stage"].get_group()
    module = layers(2)[position]
    stage = PipelineStage(module, position, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, PARTS, loss_fn=nn.functional.mse_loss)
    result = run(schedule, position == 0, position == 1, 20 + mesh.get_local_rank("data"))
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad, group=mesh["data"].get_group())
    return result, [parameter.grad for parameter in module.parameters()]


def test_beside_data_parallel(pool: Pool) -> None:
    over_both(pool, 4, beside_data_parallel, bound=0)  # two terms: one order

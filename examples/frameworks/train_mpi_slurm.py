"""Plain PyTorch under Open MPI's mpirun or SLURM's srun.

mpirun -np 2 python examples/frameworks/train_mpi_slurm.py
srun --ntasks=2 python examples/frameworks/train_mpi_slurm.py
"""

from __future__ import annotations

import os
import re

import task
import torch.distributed as dist
from train_torchrun import train


def first_host(nodes: str) -> str:
    """Of SLURM's short form: "node[03-05,9],other" gives "node03"."""
    host = re.match(r"(\[[^]]*\]|[^,[])+", nodes)
    if host is None:
        raise ValueError(f"no host in {nodes!r}")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", host[0])


def set_launch_environment() -> None:
    """Sets the variables that torch reads (RANK, WORLD_SIZE, ...) from those of mpirun or srun.

    What is set already stays, so torchrun inside a batch job works, and so does an address of your own.
    """
    env = os.environ
    if "RANK" in env:
        return
    if "OMPI_COMM_WORLD_RANK" in env:
        ours = {
            "RANK": env["OMPI_COMM_WORLD_RANK"],
            "WORLD_SIZE": env["OMPI_COMM_WORLD_SIZE"],
            "LOCAL_RANK": env["OMPI_COMM_WORLD_LOCAL_RANK"],
            "LOCAL_WORLD_SIZE": env["OMPI_COMM_WORLD_LOCAL_SIZE"],
            "MASTER_PORT": "29500",
        }
        # Open MPI does not tell where rank 0 is.
        if ours["LOCAL_WORLD_SIZE"] == ours["WORLD_SIZE"]:
            ours["MASTER_ADDR"] = "127.0.0.1"
        elif "MASTER_ADDR" not in env:
            raise SystemExit("several hosts: mpirun -x MASTER_ADDR=<address of rank 0's host> ...")
    elif "SLURM_PROCID" in env:
        ours = {
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": env["SLURM_NTASKS"],
            "LOCAL_RANK": env["SLURM_LOCALID"],
            "MASTER_ADDR": first_host(env["SLURM_STEP_NODELIST"]),
            # Jobs that share a host need different ports, below the ones that the system hands out.
            "MASTER_PORT": str(20000 + int(env["SLURM_JOB_ID"]) % 10000),
        }
    else:
        raise SystemExit("start this with mpirun, srun or torchrun")
    for name, value in ours.items():
        env.setdefault(name, value)


if __name__ == "__main__":
    set_launch_environment()
    dist.init_process_group(backend=task.backend("mccl"))
    train()
    dist.destroy_process_group()

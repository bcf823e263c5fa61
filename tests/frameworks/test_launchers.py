"""Launchers people use, FR-143: 2 CPU processes, 20 steps, same bits on both ranks and as over gloo.

The commands are those of docs/frameworks.md.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import re
import socket
from dataclasses import dataclass
from typing import Any

import pytest
from commands import ROOT, Command, run

EXAMPLES = ROOT / "examples" / "frameworks"
DOCS = (ROOT / "docs" / "frameworks.md").read_text()
TIMEOUT_S = 200
STEPS = 20
PARAMETER_BYTES = 4 * (32 * 64 + 64 + 64 * 10 + 10)


@dataclass(frozen=True)
class Launcher:
    command: str
    gloo: str = ""  # the launcher whose run over gloo trains the same; its own if empty
    needs_port: bool = False


LAUNCHERS = {
    "torchrun": Launcher("torchrun --standalone --nproc_per_node=2 examples/frameworks/train_torchrun.py"),
    "spawn": Launcher("python examples/frameworks/train_spawn.py", gloo="torchrun"),
    "accelerate": Launcher(
        "accelerate launch --multi_gpu --num_processes=2 --main_process_port=0 "
        "examples/frameworks/train_accelerate.py"
    ),
    "lightning": Launcher("python examples/frameworks/train_lightning.py"),
    "transformers": Launcher(
        "torchrun --standalone --nproc_per_node=2 examples/frameworks/train_transformers.py"
    ),
    "ray": Launcher("python examples/frameworks/train_ray.py"),
    "mpirun": Launcher(
        "mpirun -np 2 python examples/frameworks/train_mpi_slurm.py", gloo="torchrun", needs_port=True
    ),
}


def free_port() -> int:
    """Of 21000 to 21999, where the system takes none for outgoing connections."""
    for port in range(21000, 22000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def results(output: str) -> list[dict[str, Any]]:
    found = re.findall(r"^rank (\d): (\{.*\})$", output, re.MULTILINE)
    assert [rank for rank, _ in found] == ["0", "1"], output
    return [json.loads(text) for _, text in found]


@functools.cache
def train(name: str, backend: str) -> list[dict[str, Any]]:
    launcher = LAUNCHERS[name]
    line = launcher.command + ("" if backend == "mccl" else f" {backend}")
    env = {"MASTER_PORT": str(free_port())} if launcher.needs_port else {}

    def once() -> list[dict[str, Any]]:
        return results(run(Command(line, env), timeout=TIMEOUT_S))

    # The reference may abort at its end: gloo's group joins its own thread if a callback was the last to hold
    # it. What is tested has one try.
    for _ in range(0 if backend == "mccl" else 2):
        with contextlib.suppress(AssertionError):
            return once()
    return once()


def assert_mccl_trained_as_gloo(over_mccl: list[dict[str, Any]], over_gloo: list[dict[str, Any]]) -> None:
    for result in over_mccl:
        assert result["backend"] == "mccl"
        # Of 2 ranks each sends every gradient once per step, whatever the algorithm.
        assert result["bytes sent by mccl"] >= STEPS * PARAMETER_BYTES
        assert result["loss"] < 0.9 * math.log(10)  # of chance, among 10 classes
    for result in over_gloo:
        assert result["backend"] == "gloo"
        assert result["bytes sent by mccl"] == 0
    assert len({result["weights"] for result in over_mccl + over_gloo}) == 1


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher(name: str) -> None:
    assert_mccl_trained_as_gloo(train(name, "mccl"), train(LAUNCHERS[name].gloo or name, "gloo"))


def test_slurm() -> None:
    """No SLURM here: two processes with the variables that srun sets."""
    job = {
        "SLURM_JOB_ID": str(7_010_000 + free_port() - 20_000),  # the script makes the port of it
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",  # where srun was called: rank 0 need not be there
    }
    line = "python examples/frameworks/train_mpi_slurm.py"
    ranks = [Command(line, {**job, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}) for i in range(2)]
    over_mccl = results(run(*ranks, timeout=TIMEOUT_S))
    assert_mccl_trained_as_gloo(over_mccl, train("torchrun", "gloo"))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("mac1", "mac1"),
        ("mac-a,mac-b", "mac-a"),
        ("node[03-05,9],other", "node03"),
        ("node[7,9]", "node7"),
        ("rack[2-3]-node[010-012]", "rack2-node010"),
        ("gpu[1-2].lan,x[1]", "gpu1.lan"),
    ],
)
def test_first_host_of_slurm(monkeypatch: pytest.MonkeyPatch, nodes: str, first: str) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    assert importlib.import_module("train_mpi_slurm").first_host(nodes) == first


def test_docs_show_what_is_tested() -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    shell = [line for language, block in blocks if language == "sh" for line in block.splitlines()]
    for name, launcher in LAUNCHERS.items():
        assert launcher.command in shell, name
    scripts = [
        path.read_text().replace('task.backend("mccl")', '"mccl"') for path in EXAMPLES.glob("train_*.py")
    ]
    python = [line for language, block in blocks if language == "python" for line in block.splitlines()]
    assert len(python) >= len(LAUNCHERS)
    for line in python:
        assert any(line in script for script in scripts), line

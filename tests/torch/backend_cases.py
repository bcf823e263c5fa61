# SPDX-License-Identifier: MIT
"""TestMCCL: torch's DistributedTest._DistTestBase on backend "mccl". Reads WORLD_SIZE while it is imported.

The tests ask for a backend's name in many places. This is what is done about it, and nothing else:

* The module is imported as if for gloo, whose features it knows. Then its BACKEND becomes "mccl", which the
  comparisons inside of tests find equal to "gloo".
* Tests that name MPI as the only backend with all-to-all of CPU tensors are run: mccl has it too.
* `dist.monitored_barrier`, which refuses other names than gloo up to torch 2.13, is `mccl.monitored_barrier`.
* Tests for GPUs are skipped before processes are started for them; so are those that need more ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

TEST_LIMIT_S = 120  # after which torch's harness ends a test's processes
LIFTED = ("Only MPI supports",)  # skip reasons that are not true of mccl


def _prepare_environment() -> None:
    os.environ["BACKEND"] = "gloo"
    os.environ.setdefault("INIT_METHOD", "file://")
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", str(TEST_LIMIT_S))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "TEMP_DIR" not in os.environ:  # for the import; each test has one of its own
        os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="mccl-dist-suite-")
        Path(os.environ["TEMP_DIR"], "barrier").mkdir()


_prepare_environment()

import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

import mccl  # noqa: E402


def _skip(reason: str) -> Callable[[Any], Any]:
    def mark(method: Any) -> Any:
        method.__unittest_skip__ = True
        method.__unittest_skip_why__ = method.lasting_skip = reason
        return method

    return mark


def _skip_if_lt_x_gpu(count: int, *, allow_cpu: bool = False) -> Callable[[Any], Any]:
    return (lambda method: method) if allow_cpu else _skip(f"Need at least {count} CUDA devices")


common_distributed.skip_if_no_gpu = _skip("CUDA is not available.")
common_distributed.skip_if_lt_x_gpu = _skip_if_lt_x_gpu
if int(os.environ["WORLD_SIZE"]) < 8:
    common_distributed.skip_if_small_worldsize = _skip("Skipped due to small world size.")

from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402


class _Backend(str):
    """A name that is found equal to gloo's."""

    def __eq__(self, other: object) -> bool:
        return str(other) in (str(self), "gloo")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


suite.BACKEND = _Backend("mccl")
dist.monitored_barrier = mccl.monitored_barrier


def _lift() -> None:
    base = suite.DistributedTest._DistTestBase
    for name in dir(base):
        method = getattr(base, name)
        if getattr(method, "__unittest_skip_why__", "").startswith(LIFTED):
            lasting = getattr(method, "lasting_skip", None)
            method.__unittest_skip__ = lasting is not None
            method.__unittest_skip_why__ = lasting


_lift()


def _run(environment: dict[str, str], target: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """In a test's process: the server's environment is that of an earlier test."""
    os.environ.update(environment)
    suite.INIT_METHOD = environment["INIT_METHOD"]
    target(*args, **kwargs)


def _process(target: Callable[..., Any], name: str, args: Any, kwargs: Any) -> ForkServerProcess:
    # From a server that has imported torch: a tenth of the time of a fresh interpreter.
    context = multiprocessing.get_context("forkserver")
    return context.Process(target=_run, name=name, args=(dict(os.environ), target, args, kwargs))


class TestMCCL(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
    """setUp starts the ranks of a test, which run it."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _spawn_processes(self) -> None:
        self._start_processes(_process)

"""Runs a seeded program over mccl, then over gloo, and compares everything that it returns.

    def program(rank, n, *args): ...         # returns tensors, numbers, text, in dicts and lists
    over_both(pool, 2, program, *args)

With two ranks there is only one order in which numbers can be summed, so all must be the same bit for bit.
With more, each library has an order of its own: programs then compute in dtype_for(n), float64, and differ by
at most BOUND times the largest number of a tensor, or BOUND if all are below 1: some thousand roundings. A
mistake is larger by orders of magnitude.
"""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ranks import GROUP_TIMEOUT, Pool

BOUND = 1e-12

# A callback may hold the last reference to gloo's group in one of gloo's own threads, which then joins itself
# and aborts the process. So the groups stay.
_GLOO_GROUPS: list[Any] = []


def dtype_for(n: int) -> torch.dtype:
    """Of parameters and data."""
    return torch.float32 if n <= 2 else torch.float64


def over_both(
    pool: Pool, n: int, program: Any, *args: Any, bound: float = BOUND, timeout: float = 60
) -> None:
    """RankFailed if results over mccl differ from those over gloo. `bound` is for more than 2 ranks."""
    where = program.__module__, program.__qualname__
    pool.run(n, _compare, *where, args, bound if n > 2 else 0.0, timeout=timeout, group=False)


def _compare(
    rank: int, n: int, store: dist.Store, module: str, name: str, args: tuple[Any, ...], bound: float
) -> None:
    program = getattr(importlib.import_module(module), name)
    over_mccl = run_over("mccl", rank, n, store, program, *args)
    over_gloo = run_over("gloo", rank, n, store, program, *args)
    assert_alike(over_mccl, over_gloo, bound)


def over_both_apart(n: int, program: Any, *args: Any, timeout: float = 60) -> None:
    """As over_both for two ranks, in new processes for each library: for programs that leave a group in one
    of torch's caches.
    """
    assert n == 2, "the order of sums differs with more"
    where = program.__module__, program.__qualname__
    saved = []
    for backend in ("mccl", "gloo"):
        pool = Pool.with_modules(Path(__file__).parent)
        try:
            saved.append(pool.run(n, _saved, backend, *where, args, timeout=timeout, group=False))
        finally:
            pool.close()
    for rank, (over_mccl, over_gloo) in enumerate(zip(*saved)):
        assert_alike(_load(over_mccl), _load(over_gloo), 0.0, f"result of rank {rank}")


def _saved(
    rank: int, n: int, store: dist.Store, backend: str, module: str, name: str, args: tuple[Any, ...]
) -> bytes:
    """Tensors in a pipe would be handles of the process's shared memory, which goes with it."""
    program = getattr(importlib.import_module(module), name)
    buffer = io.BytesIO()
    torch.save(run_over(backend, rank, n, store, program, *args), buffer)
    return buffer.getvalue()


def _load(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)


def run_over(backend: str, rank: int, n: int, store: dist.Store, program: Any, *args: Any) -> Any:
    """What `program` returns as rank `rank` of a default group of `backend`."""
    store = dist.PrefixStore(backend, store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=GROUP_TIMEOUT)
    if backend == "gloo":
        _GLOO_GROUPS.append(dist.group.WORLD)
    torch.manual_seed(1234)
    try:
        assert dist.get_backend() == backend
        return program(rank, n, *args)
    finally:
        dist.destroy_process_group()


def assert_alike(got: Any, expected: Any, bound: float, where: str = "result") -> None:
    """Bit for bit if `bound` is 0, text always; the structure, shapes and dtypes are the same."""
    assert type(got) is type(expected), (where, got, expected)
    if isinstance(got, dict):
        assert list(got) == list(expected), (where, list(got), list(expected))
        for key in got:
            assert_alike(got[key], expected[key], bound, f"{where}[{key!r}]")
    elif isinstance(got, (list, tuple)):
        assert len(got) == len(expected), (where, len(got), len(expected))
        for i, pair in enumerate(zip(got, expected)):
            assert_alike(*pair, bound, f"{where}[{i}]")
    elif isinstance(got, torch.Tensor):
        _assert_alike_tensors(got, expected, bound, where)
    elif isinstance(got, float):
        _assert_alike_tensors(torch.tensor(got).double(), torch.tensor(expected).double(), bound, where)
    else:
        assert got == expected, (where, got, expected)


def _assert_alike_tensors(got: torch.Tensor, expected: torch.Tensor, bound: float, where: str) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, (
        where,
        got.dtype,
        expected.dtype,
        got.shape,
        expected.shape,
    )
    assert got.layout == expected.layout, (where, got.layout, expected.layout)
    if got.is_sparse:
        got, expected = got.coalesce(), expected.coalesce()
        _assert_alike_tensors(got.indices(), expected.indices(), bound, f"{where}.indices")
        got, expected = got.values(), expected.values()
    if torch.equal(got, expected):
        return
    difference = (got - expected).abs().max().item()
    allowed = bound * max(1.0, expected.abs().max().item())
    assert difference <= allowed, f"{where}: differs by {difference}, allowed are {allowed}"

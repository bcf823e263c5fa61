"""Inputs that depend on rank and position, and references computed from all ranks' inputs with numpy.

Values are small integers, so that sums are exact in every dtype and only real mistakes differ. They repeat
after PERIOD elements, which is no power of two, so that blocks differ; long tensors are made by repetition.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import numpy as np
import torch
import torch.distributed as dist

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
]  # fmt: skip
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [  # older torch versions lack the last
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]
REDUCIBLE = [*FLOATS, *INTEGERS, torch.bool, *COMPLEX]
MOVABLE = [*REDUCIBLE, *FLOAT8]

PERIOD = 117  # of numbers(): 7 * 39 and 39 // 3 are multiples of 13, for products 9 is enough

SUM, PRODUCT, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX
AVG, BAND, BOR, BXOR = dist.ReduceOp.AVG, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR
OPS = {
    "sum": SUM,
    "product": PRODUCT,
    "min": MIN,
    "max": MAX,
    "avg": AVG,
    "band": BAND,
    "bor": BOR,
    "bxor": BXOR,
}


def ops_for(dtype: torch.dtype) -> list[str]:
    if dtype in FLOATS:
        return ["sum", "product", "min", "max", "avg", "premul"]
    if dtype in COMPLEX:
        return ["sum", "product", "avg", "premul"]
    return ["sum", "product", "min", "max", "band", "bor", "bxor"]


def factor(rank: int) -> float:
    """Of "premul": another one on each rank."""
    return 0.5 * (rank + 1)


def torch_op(op: str, rank: int) -> Any:
    return dist._make_nccl_premul_sum(factor(rank)) if op == "premul" else OPS[op]


def numbers(rank: int, count: int, op: str = "sum", salt: int = 0) -> np.ndarray[Any, Any]:
    """int64, in 0..12; for products 1 or 2."""
    position = np.arange(count, dtype=np.int64)
    mixed = position * 7 + rank * 5 + (position // 3) * (rank + 1) + salt * 11
    return 1 + (mixed % 3 == 0) if op == "product" else mixed % 13


def to_tensor(values: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """int64 or float64 values, rounded or wrapped to `dtype`; complex numbers get an imaginary part."""
    if dtype is torch.bool:
        return torch.from_numpy(values % 2 == 1)
    if dtype in COMPLEX:
        return torch.from_numpy(values + 1j * values[::-1]).to(dtype)
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return torch.from_numpy(values.astype(str(dtype).replace("torch.", "")))
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def tensor(rank: int, count: int, dtype: torch.dtype, op: str = "sum", salt: int = 0) -> torch.Tensor:
    return _repeated(count, lambda short: _tensor(rank, short, dtype, op == "product", salt))


def reduced(op: str, n: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What `op` over ranks 0..n-1 of tensor(rank, ...) has to be."""
    return _repeated(count, lambda short: _reduced(op, n, short, dtype, salt))


def _repeated(count: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """A copy of make(count). The short count has its remainder: complex numbers count from both ends."""
    if count < 2 * PERIOD:
        return make(count).clone(memory_format=torch.contiguous_format)
    period = make(PERIOD + count % PERIOD)[:PERIOD]
    repeats = -(-count // PERIOD)
    data = period.contiguous().view(torch.uint8).repeat(repeats)[: count * period.element_size()]
    return data.view(period.dtype)


@functools.lru_cache(maxsize=4096)
def _tensor(rank: int, count: int, dtype: torch.dtype, product: bool, salt: int) -> torch.Tensor:
    return to_tensor(numbers(rank, count, "product" if product else "sum", salt), dtype)


@functools.lru_cache(maxsize=4096)
def _reduced(op: str, n: int, count: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    inputs = [numbers(rank, count, op, salt) for rank in range(n)]
    if op == "premul":
        inputs, op = [values * factor(rank) for rank, values in enumerate(inputs)], "sum"
    if dtype is torch.bool:
        return torch.from_numpy(_reduce_bool(op, [values % 2 == 1 for values in inputs]))
    if dtype in COMPLEX:
        values = [values + 1j * values[::-1] for values in inputs]
        total = np.prod(values, axis=0) if op == "product" else np.sum(values, axis=0)
        if op == "avg":  # numpy would multiply by 1 / n
            total = total.real / n + 1j * (total.imag / n)
        return torch.from_numpy(total).to(dtype)
    stack = np.stack(inputs)
    if op == "avg":
        return torch.from_numpy(stack.sum(axis=0) / n).to(dtype)
    functions = {
        "sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }  # fmt: skip
    return to_tensor(functions[op].reduce(stack, axis=0), dtype)


def _reduce_bool(op: str, inputs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    stack = np.stack(inputs)
    if op in ("sum", "max", "bor"):
        return stack.any(axis=0)
    if op == "bxor":
        return np.logical_xor.reduce(stack, axis=0)
    return stack.all(axis=0)


def assert_same(got: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Bit for bit, shape and dtype included."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, (
        what,
        got.shape,
        expected.shape,
        got.dtype,
    )
    a, b = (_bytes(t) for t in (got, expected))
    if not torch.equal(a, b):
        width = got.element_size()
        bad = int((a != b).nonzero()[0]) // width
        pair = got.reshape(-1)[bad].item(), expected.reshape(-1)[bad].item()
        raise AssertionError(f"{what}: element {bad} of {got.numel()} is {pair[0]}, expected {pair[1]}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # also a single element's
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)

"""From tensors to what the C library takes: address, number of elements, dtype, reduction.

The library moves dense elements. A tensor whose elements do not lie densely in order is packed into a private
copy first, and an output gets its elements back from such a copy when the operation is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_size_t, c_void_p
from typing import Any

import torch
import torch.distributed as dist

_DTYPE_NAMES = (
    "float32 float64 float16 bfloat16 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool "
    "complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
# The index is the mccl_dtype; older torch versions lack some of them.
DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}

PREMUL_SUM = 5
_KINDS: Any = dist.ReduceOp.RedOpType
OP_NAMES = "SUM PRODUCT MIN MAX AVG PREMUL_SUM BAND BOR BXOR".split()
# By hash, which a ReduceOp shares with its kind: that is three times as fast as asking for the kind.
OPS: dict[int, int] = {hash(getattr(_KINDS, name)): code for code, name in enumerate(OP_NAMES)}


def reduction(op: Any) -> tuple[int, float]:
    """The ``mccl_op`` and the PREMUL_SUM factor (else 1.0) of a ``dist.ReduceOp``."""
    code = OPS[hash(op)]
    if code != PREMUL_SUM or isinstance(op, _KINDS):
        return code, 1.0
    return code, float(op.__getstate__()[1])  # `op.factor` exists in newer torch only


def dtype_code(tensor: torch.Tensor, name: str) -> int:
    """Checks that `tensor` is something the library can read or write; its ``mccl_dtype``.

    TypeError that says what was given to operation `name` and what is supported.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"mccl {name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        if tensor.is_nested:
            kind, instead = "nested", ".values()"
        else:
            kind, instead = str(tensor.layout).replace("torch.", "").lstrip("_"), ".to_dense()"
        raise TypeError(
            f"mccl {name}: {kind} tensors are not supported; pass a dense tensor, for example {instead}"
        )
    if not tensor.is_cpu:
        raise TypeError(
            f"mccl {name}: tensors on device '{tensor.device}' are not supported; supported: cpu. "
            "Move the tensor with .cpu()"
        )
    code = DTYPES.get(tensor.dtype)
    if code is None:
        kind = str(tensor.dtype).replace("torch.", "")
        raise TypeError(f"mccl {name}: dtype {kind} is not supported; supported: {', '.join(_DTYPE_NAMES)}")
    return code


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements lie in memory just as they read."""
    return tensor.is_contiguous() and not tensor.is_neg() and not (tensor.is_complex() and tensor.is_conj())


def _pointer(tensor: torch.Tensor) -> int:
    """Address of the first element; 0 if there is no memory."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # inside torch.vmap and the like
        return 0


def address(tensor: torch.Tensor, name: str) -> int:
    """Address of the first element. TypeError for wrappers that have no memory of their own."""
    pointer = _pointer(tensor)
    if not pointer and tensor.numel():
        raise TypeError(
            f"mccl {name}: {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own; "
            "pass the local tensor behind it, or give it memory if its storage was freed"
        )
    return pointer


class Operands:
    """The buffers of one operation: what has to stay alive, and what is copied back when it is done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keep: list[torch.Tensor] = []
        self.copies: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # (output, dense copy that is received into)
        self._written: list[tuple[int, int]] = []  # address ranges that the library writes

    def output(self, tensor: torch.Tensor) -> int:
        """Address to receive into."""
        dense = (
            tensor if is_dense(tensor) else self._stage(tensor, torch.empty_like(tensor, memory_format=_ROWS))
        )
        return self._write(dense)

    def in_out(self, tensor: torch.Tensor) -> int:
        """Address of a buffer that is read and overwritten."""
        return self._write(tensor if is_dense(tensor) else self._stage(tensor, _packed(tensor)))

    def input(self, tensor: torch.Tensor, in_place: int | None = None) -> int:
        """Address to send from; call after the outputs.

        An input that overlaps an output is copied, except where it begins at `in_place`, the address at which
        the operation allows that.
        """
        dense = tensor if is_dense(tensor) else _packed(tensor)
        start = address(dense, self.name)
        end = start + dense.numel() * dense.element_size()
        if start != in_place and any(start < high and low < end for low, high in self._written):
            dense = dense.clone(memory_format=_ROWS)
            start = dense.data_ptr()
        self.keep.append(dense)
        return start

    def _write(self, dense: torch.Tensor) -> int:
        start = address(dense, self.name)
        self.keep.append(dense)
        self._written.append((start, start + dense.numel() * dense.element_size()))
        return start

    def _stage(self, tensor: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
        if _overlaps_itself(tensor):
            raise ValueError(
                f"mccl {self.name}: the output of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
                "has elements that share memory (an expanded tensor?); pass one with memory for every element"
            )
        self.copies.append((tensor, staged))
        return staged


_ROWS = torch.contiguous_format


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def pointers(addresses: Sequence[int]) -> Any:
    """A C array of addresses."""
    return (c_void_p * len(addresses))(*addresses)


def counts(numbers: Sequence[int]) -> Any:
    """A C array of element counts."""
    return (c_size_t * len(numbers))(*numbers)


def check_disjoint(tensors: Sequence[torch.Tensor], name: str) -> None:
    """ValueError that names two positions of an output list whose tensors share an element.

    Interleaved views of one storage, such as the columns of a matrix, share none and are fine.
    """
    spans = sorted(
        (*_span(tensor), position)
        for position, tensor in enumerate(tensors)
        if tensor.numel() and _pointer(tensor)
    )
    cluster: list[int] = []
    reach = 0
    for start, end, position in [*spans, (float("inf"), 0, -1)]:
        if start >= reach:  # nothing before reaches this far
            if len(cluster) > 1:
                _check_cluster(tensors, cluster, name)
            cluster = []
        cluster.append(position)
        reach = max(reach, end)


def _check_cluster(tensors: Sequence[torch.Tensor], cluster: list[int], name: str) -> None:
    """Marks the bytes of one tensor after the other and looks for bytes that are marked already."""
    low = min(_span(tensors[position])[0] for position in cluster)
    high = max(_span(tensors[position])[1] for position in cluster)
    marks = torch.zeros(high - low, dtype=torch.uint8)
    for i, position in enumerate(cluster):
        view = _bytes_of(tensors[position], marks, low)
        if bool(view.any()):
            taken = set(view.flatten().tolist())
            other = next(cluster[j] for j in range(i) if j % 255 + 1 in taken)
            first, second = sorted((other, position))
            raise ValueError(
                f"mccl {name}: outputs {first} and {second} share memory; pass tensors that do not overlap"
            )
        view.fill_(i % 255 + 1)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if two indices lead to one element."""
    reach = 0  # largest offset that the dimensions looked at so far can have
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride <= reach:
                break
            reach += stride * (size - 1)
    else:
        return False
    if tensor.numel() == 0:
        return False
    low, high = _span(tensor)
    marks = torch.zeros(high - low, dtype=torch.uint8)
    _bytes_of(tensor, marks, low).fill_(1)
    return int(marks.sum(dtype=torch.int64)) < tensor.numel() * tensor.element_size()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of the memory in which the elements lie."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _bytes_of(tensor: torch.Tensor, marks: torch.Tensor, low: int) -> torch.Tensor:
    """The bytes in `marks`, which stands for memory from `low` on, that belong to `tensor`."""
    width = tensor.element_size()
    strides = [stride * width for stride in tensor.stride()]
    return marks.as_strided((*tensor.shape, width), (*strides, 1), tensor.data_ptr() - low)

"""all_reduce of sparse COO tensors, such as the gradients of ``nn.Embedding(sparse=True)``.

Ranks have different numbers of entries: each gathers the entries of all and adds them up in the order of
ranks, so that all get the same bits.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from mccl import _errors, _lib
from mccl._tensor import OP_NAMES

if TYPE_CHECKING:
    from mccl.torch.pg import ProcessGroupMCCL

_AVG = 4  # mccl_op
_OPS = (0, _AVG)  # with SUM
_FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
_DTYPES = [*_FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
_DIMS = 64  # as many as torch's own operations take


def all_reduce(group: ProcessGroupMCCL, tensor: torch.Tensor, op: int, timeout: timedelta | None) -> None:
    """In place, on all ranks; op, dtype, shape and the number of sparse dimensions agree. Blocks.

    SUM, and AVG of floating point. Three all-gathers; a rank receives the entries of all.
    """
    tensor = _complex_behind(tensor)
    _check(tensor, op)
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        mine = tensor.coalesce()
        try:
            heads = [head.tolist() for head in _gather(group, _head(mine, op), None, timeout)]
        except BaseException:
            group.abort()  # else the others, who go on, would wait for this rank until their time-out
            raise
        _check_agreement(group, heads)  # all ranks see the same: nobody goes on
        try:
            total = _total(group, mine, [head[0] for head in heads], timeout)
        except BaseException:
            group.abort()
            raise
        if op == _AVG:
            values = total.values()
            # Part by part, as dense tensors are: division of complex numbers rounds otherwise.
            (torch.view_as_real(values) if values.is_complex() else values).div_(group.size())
        tensor.copy_(total)


def _complex_behind(tensor: torch.Tensor) -> torch.Tensor:
    """torch.distributed hands over view_as_real() of a complex tensor, through which new entries cannot be
    written to the tensor itself.
    """
    base = tensor._base
    if base is not None and base.is_complex() and tensor.shape == (*base.shape, 2):
        return base
    return tensor


def _check(tensor: torch.Tensor, op: int) -> None:
    if not tensor.is_cpu:
        raise TypeError(
            f"mccl all_reduce: {_plain(tensor.layout)} tensors on '{tensor.device}' are not supported; "
            "sparse tensors must be COO and on the cpu: .to_sparse_coo(), .cpu()"
        )
    if op not in _OPS:
        raise TypeError(
            f"mccl all_reduce: sparse tensors can be reduced with SUM and AVG only, not with "
            f"{OP_NAMES[op]}; pass a dense tensor, for example .to_dense()"
        )
    dtypes = _FLOATS if op == _AVG else _DTYPES
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"mccl all_reduce: {OP_NAMES[op]} of sparse tensors is not supported for dtype "
            f"{_plain(tensor.dtype)}; supported: {', '.join(map(_plain, dtypes))}"
        )


def _head(mine: torch.Tensor, op: int) -> torch.Tensor:
    """Number of entries, and what must agree. The length does too, so that it is here where it is said."""
    padding = [0] * (_DIMS - mine.dim())
    return torch.tensor(
        [mine._nnz(), op, _DTYPES.index(mine.dtype), mine.sparse_dim(), mine.dim(), *mine.shape, *padding]
    )


def _check_agreement(group: ProcessGroupMCCL, heads: list[list[int]]) -> None:
    for rank, head in enumerate(heads):
        if head[1:] != heads[0][1:]:
            raise _errors.error_from(
                _lib.ERR_MISMATCH,
                f"mccl all_reduce: group '{group.group_name}' (rank {group.rank()}/{group.size()}): rank 0 "
                f"passes {_describe(heads[0])}, rank {rank} {_describe(head)}; all ranks must agree",
            )


def _total(
    group: ProcessGroupMCCL, mine: torch.Tensor, entries: list[int], timeout: timedelta | None
) -> torch.Tensor:
    indices, values = mine.indices(), mine.values()
    depth, row = mine.sparse_dim(), math.prod(values.shape[1:])
    all_indices = _gather(group, indices.t(), [n * depth for n in entries], timeout)
    all_values = torch.cat(_gather(group, values, [n * row for n in entries], timeout))
    if values.dtype in (torch.float16, torch.bfloat16):
        all_values = all_values.float()  # rounded once, by whoever copies the result
    n = sum(entries)
    return torch.sparse_coo_tensor(
        torch.cat(all_indices).view(n, depth).t(),
        all_values.view(n, *values.shape[1:]),
        mine.shape,
        is_coalesced=False,
        check_invariants=False,
    ).coalesce()


def _gather(
    group: ProcessGroupMCCL, tensor: torch.Tensor, sizes: list[int] | None, timeout: timedelta | None
) -> list[torch.Tensor]:
    """Flat, from each rank; without sizes all are as long as this one."""
    flat = tensor.detach().reshape(-1)
    parts = [flat.new_empty(size) for size in sizes or [flat.numel()] * group.size()]
    group.allgather([parts], [flat], timeout=timeout).wait()
    return parts


def _describe(head: list[int]) -> str:
    _, op, dtype, sparse, dim, *shape = head
    return (
        f"a sparse tensor of {_plain(_DTYPES[dtype])}, shape {shape[:dim]}, with {sparse} sparse dimensions "
        f"and op {OP_NAMES[op]}"
    )


def _plain(name: object) -> str:
    return str(name).replace("torch.", "")

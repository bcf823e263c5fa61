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

if TYPE_CHECKING:
    from mccl.torch.pg import ProcessGroupMCCL

_AVG = 4  # mccl_op
_OPS = {0: "SUM", _AVG: "AVG"}


def all_reduce(group: ProcessGroupMCCL, tensor: torch.Tensor, op: int, timeout: timedelta | None) -> None:
    """In place, on all ranks; shape and the numbers of sparse and dense dimensions agree. Blocks.

    SUM and AVG only. Three all-gathers; a rank receives the entries of all.
    """
    if tensor.layout is not torch.sparse_coo or not tensor.is_cpu:
        raise TypeError(
            f"mccl all_reduce: {str(tensor.layout).replace('torch.', '')} tensors on '{tensor.device}' are "
            "not supported; sparse tensors must be COO and on the cpu: .to_sparse_coo(), .cpu()"
        )
    if op not in _OPS:
        raise TypeError(
            "mccl all_reduce: sparse tensors can be reduced with SUM and AVG only; pass a dense tensor, for "
            "example .to_dense()"
        )
    mine = tensor.coalesce()
    indices, values = mine.indices(), mine.values()
    heads = _gather(
        group,
        torch.tensor([mine.sparse_dim(), *mine.shape, values.shape[0]]),
        [mine.dim() + 2] * group.size(),
        timeout,
    )
    for rank, head in enumerate(heads):
        if not torch.equal(head[:-1], heads[0][:-1]):
            raise _errors.error_from(
                _lib.ERR_MISMATCH,
                f"mccl all_reduce: group '{group.group_name}': rank 0 passes a sparse tensor with "
                f"{_describe(heads[0])}, rank {rank} one with {_describe(head)}; all ranks must agree",
            )
    entries = [int(head[-1]) for head in heads]
    row, depth = math.prod(values.shape[1:]), mine.sparse_dim()
    all_indices = _gather(group, indices.t(), [n * depth for n in entries], timeout)
    all_values = _gather(group, values, [n * row for n in entries], timeout)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices).view(-1, depth).t(),
        torch.cat(all_values).view(-1, *values.shape[1:]),
        mine.shape,
        is_coalesced=False,
    ).coalesce()
    tensor.copy_(total / group.size() if op == _AVG else total)


def _gather(
    group: ProcessGroupMCCL, tensor: torch.Tensor, sizes: list[int], timeout: timedelta | None
) -> list[torch.Tensor]:
    """Flat, from each rank."""
    flat = tensor.reshape(-1)
    parts = [flat.new_empty(size) for size in sizes]
    group.allgather([parts], [flat], timeout=timeout).wait()
    return parts


def _describe(head: torch.Tensor) -> str:
    sparse, *shape, _ = head.tolist()
    return f"shape {shape} and {sparse} sparse dimensions"

"""What compiled programs need: functional collectives (``torch.ops._c10d_functional``), and to be let be.

Most of them reach a group written in Python. Two call C++ methods that torch up to 2.13 does not forward to
Python: the out-variant of all_gather_into_tensor, with which inductor gathers into memory that it has laid
out, and batch_p2p_ops. Kernels for the devices of this package take their place. They serve the groups of
all backends: in torch's own they lead to the same C++ methods as torch's kernels.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_lock = threading.Lock()
_library: Any = None  # torch.library.Library; its kernels live as long as it does


def prepare() -> None:
    """Once per process, with the first group: a process without one keeps torch as it is."""
    global _library
    with _lock:
        if _library is not None:
            return
        _hide_from_dynamo()
        library: Any = torch.library.Library  # not typed
        _library = library("_c10d_functional", "IMPL")
        for function in (all_gather_into_tensor_out, batch_p2p_ops):
            name = f"_c10d_functional::{function.__name__}"
            if not hasattr(torch.ops._c10d_functional, function.__name__):  # batch_p2p_ops: older torch
                continue
            for key in ("CPU", "MPS"):
                # torch's own are for all devices at once; one for this device alone would be newer than this.
                if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
                    _library.impl(function.__name__, function, key)


def _hide_from_dynamo() -> None:
    """Inside a compiled call, torch would compile methods that its C++ part calls, such as DDP's broadcast of
    buffers, and fail: it cannot look into groups.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for code in set(_codes()):
            frames.set_code_exec_strategy(code, skip)
    elif hasattr(frames, "skip_code"):  # older torch
        for code in set(_codes()):
            frames.skip_code(code)


def _codes() -> Iterator[CodeType]:
    """Of all functions of this package."""
    package = __name__.partition(".")[0]
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == package]:
        for value in list(vars(module).values()):
            for member in [value, *(vars(value).values() if isinstance(value, type) else ())]:
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    """Every rank's input, in rank order, in `out`, once wait_tensor(out) has returned."""
    c10d._register_work(out, _resolve(group_name)._allgather_base(out, input, c10d.AllgatherOptions()))
    return out


def batch_p2p_ops(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[torch.Tensor],
    group_name: Any,
) -> list[torch.Tensor]:
    """Several "isend" and "irecv"; peers are ranks of the group. What wait_tensor() has to be called on: the
    tensors that receive, and an empty one for each that is sent.
    """
    group = _resolve(group_name)
    results = []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors):
        if op not in ("isend", "irecv"):
            raise ValueError(f"mccl batch_p2p_ops: operation {op!r}; expected 'isend' or 'irecv'")
        method, result = (group.send, tensor.new_empty(0)) if op == "isend" else (group.recv, tensor)
        c10d._register_work(result, method([tensor], peer, tag))
        results.append(result)
    return results


def _resolve(group: Any) -> Any:
    """By name; newer versions of torch may also pass the group, boxed or not."""
    if isinstance(group, str):
        resolve: Any = c10d._resolve_process_group
        return resolve(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)

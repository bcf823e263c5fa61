"""The process group that ``dist.init_process_group(backend="mccl")`` makes.

A Python subclass of ``torch.distributed.ProcessGroup``: torch's own dispatcher has no kernels for MPS
tensors, so its C++ backends cannot be used for them, and no compiled extension means one package for every
torch and Python.

torch renamed methods in the course of time; the old and the new name are aliases of one method here. All
`opts` are optional. Each method takes what torch's C++ bindings take, including their short forms. Every
operation returns a WorkMCCL at once; see there for waiting and errors.
"""

from __future__ import annotations

import operator
import struct
import threading
from collections.abc import Sequence
from ctypes import c_void_p
from datetime import timedelta
from typing import Any, Union

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.distributed.constants import default_pg_timeout

from mccl import _errors, _lib
from mccl._config import settings_text
from mccl._options import MCCLOptions
from mccl._tensor import (
    DTYPES,
    OPS,
    PREMUL_SUM,
    Operands,
    check_disjoint,
    counts,
    dtype_code,
    pointers,
    reduction,
)
from mccl.torch import functional, rendezvous, sparse
from mccl.torch.core import FINISHED, GroupCore
from mccl.torch.members import Members
from mccl.torch.monitored import monitored_barrier
from mccl.torch.work import WAIT_SLICE_MS, WorkMCCL, milliseconds

_errors.also_raise_as(dist.DistBackendError)

Tensor = torch.Tensor
Tensors = Union[Tensor, Sequence[Tensor]]
TensorLists = Union[Sequence[Tensor], Sequence[Sequence[Tensor]]]

_LARGEST_TAG = 2**31 - 1
_PLAIN_CLASSES = (Tensor, torch.nn.Parameter)
_REAL_DTYPES = {dtype: code for dtype, code in DTYPES.items() if not dtype.is_complex}
# Those that can say that the caller waits, if this torch has them.
_AllreduceOptions = dist.AllreduceOptions if hasattr(dist.AllreduceOptions, "asyncOp") else None
# Fields of AllReduceArgs from `send` to `comm`.
_fill = struct.Struct("@PPNiiP").pack_into
_FROM = _lib.AllReduceArgs.send.offset


class ProcessGroupMCCL(GroupCore):
    """One rank's view of a group. Any thread may use it; one thread at a time orders the collectives."""

    # -- reductions and broadcast -------------------------------------------------------------------------

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> WorkMCCL:
        """In place: the reduction over all ranks of one tensor; shape, dtype and op agree on all ranks.

        A sparse tensor's entries may differ by rank; its call blocks, see sparse.py. Short form:
        ``allreduce(tensor, ReduceOp.MAX)``.
        """
        comm = self._comm
        # The short way for a plain dense tensor that the caller waits for. What a small one costs is time in
        # Python, so nothing is called before the library that need not be.
        if (
            opts.__class__ is not _AllreduceOptions
            or timeout is not None
            or op is not None
            or opts.asyncOp
            or opts.timeout.days >= 0  # unset is negative
            or tensors.__class__ is not list
            or len(tensors) != 1
            or (tensor := tensors[0]).__class__ not in _PLAIN_CLASSES
            or (dtype := _REAL_DTYPES.get(tensor.dtype)) is None
            or not tensor.is_cpu
            or tensor.is_nested
            or tensor.is_neg()
            or comm.pending
            or self._batches
            or self._timeout_ms
            or self._extra_ms
            or not self._sequence
            or profiler._is_profiler_enabled
        ):
            return self._allreduce(tensors, opts, op, timeout)
        try:
            pointer = tensor.is_contiguous() and tensor.data_ptr()
        except RuntimeError:  # sparse; also inside torch.vmap and the like
            pointer = 0
        kind = OPS[hash(opts.reduceOp)]
        if not pointer or kind == PREMUL_SUM or (handle := comm._handle.value) is None:
            return self._allreduce(tensors, opts, op, timeout)
        self._sequence += 1
        forms = self._forms
        form = args, reference = forms.pop() if forms else self._make_form()
        _fill(args, _FROM, pointer, pointer, tensor.numel(), dtype, kind, handle)
        try:
            code = self._all_reduce(reference)
            while code == _lib.IN_PROGRESS:  # back here once per slice, so that Ctrl-C is seen
                code = self._lib.mccl_request_wait(args.request, WAIT_SLICE_MS)
        except BaseException:
            self._leave(c_void_p(args.request), (tensor,), ())
            raise
        error = _errors.last_error(code) if code else None
        if args.request:
            self._free(args.request)
            args.request = None
        forms.append(form)
        if error is not None:
            raise error
        return FINISHED

    def _allreduce(self, tensors: Tensors, opts: Any, op: Any, timeout: timedelta | None) -> WorkMCCL:
        tensor = _one(tensors, "all_reduce")
        if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensor, opts, op, timeout)
        dtype = dtype_code(tensor, "all_reduce")
        kind, factor = reduction(_reduce_op(opts, op))
        buffers = Operands("all_reduce")
        pointer = buffers.in_out(tensor)
        arguments = (pointer, pointer, tensor.numel(), dtype, kind)
        return self._launch(
            buffers, self._lib.mccl_all_reduce, arguments, [tensor], opts, timeout=timeout, factor=factor
        )

    def _allreduce_sparse(self, tensor: Tensor, opts: Any, op: Any, timeout: timedelta | None) -> WorkMCCL:
        if threading.get_ident() in self._batches:
            raise ValueError("mccl all_reduce: a sparse tensor cannot be part of a coalescing block")
        limit = timeout if timeout is not None else getattr(opts, "timeout", None)
        with _RecordFunctionFast("mccl:all_reduce", [tensor]):  # around the rows of its parts
            sparse.all_reduce(self, tensor, reduction(_reduce_op(opts, op))[0], limit)
        return WorkMCCL.make_finished([tensor])

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> WorkMCCL:
        """allreduce of each tensor, submitted together."""
        rows = [(tensor,) for tensor in tensors]
        return self._together(self.allreduce, rows, opts, "all_reduce_coalesced", tensors)

    def reduce(
        self,
        tensors: Tensors,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> WorkMCCL:
        """As allreduce, the result on the root only; other ranks' tensors are unchanged.

        Short form: ``reduce(tensor, root, op)``.
        """
        tensor = _one(tensors, "reduce")
        dtype = dtype_code(tensor, "reduce")
        kind, factor = reduction(_reduce_op(opts, op))
        root_rank = self._root(opts, root, "reduce")
        buffers = Operands("reduce")
        is_root = root_rank == self._comm.rank
        pointer = buffers.in_out(tensor) if is_root else buffers.input(tensor)
        arguments = (pointer, pointer if is_root else None, tensor.numel(), dtype, kind, root_rank)
        return self._launch(
            buffers, self._lib.mccl_reduce, arguments, [tensor], opts, timeout=timeout, factor=factor
        )

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> WorkMCCL:
        """The root's tensor, in place on the others. Short form: ``broadcast(tensor, root)``."""
        tensor = _one(tensors, "broadcast")
        dtype = dtype_code(tensor, "broadcast")
        root_rank = self._root(opts, root, "broadcast")
        buffers = Operands("broadcast")
        pointer = buffers.input(tensor) if root_rank == self._comm.rank else buffers.output(tensor)
        arguments = (pointer, pointer, tensor.numel(), dtype, root_rank)
        return self._launch(buffers, self._lib.mccl_broadcast, arguments, [tensor], opts, timeout=timeout)

    def reduce_scatter(
        self,
        outputs: Tensors,
        inputs: TensorLists,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> WorkMCCL:
        """The reduction over ranks of their ``inputs[0][rank]``; sizes may differ by position.

        Short form: ``reduce_scatter(output, inputs, op)``.
        """
        name = "reduce_scatter"
        output, parts = _one(outputs, name), _row(outputs, inputs, name)
        dtype = self._check_parts(parts, output, name)
        kind, factor = reduction(_reduce_op(opts, op))
        buffers = Operands(name)
        receive = buffers.output(output)
        rank = self._comm.rank
        sends = [buffers.input(part, receive if i == rank else None) for i, part in enumerate(parts)]
        sizes = counts([part.numel() for part in parts])
        arguments = (pointers(sends), sizes, receive, dtype, kind)
        return self._launch(
            buffers,
            self._lib.mccl_reduce_scatter_v,
            arguments,
            [output],
            opts,
            timeout=timeout,
            factor=factor,
        )

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> WorkMCCL:
        """The reduction of block `rank` of `input`, which holds size() times the elements of `output`."""
        name = "reduce_scatter_tensor"
        dtype = self._check_whole(input, output, name)
        kind, factor = reduction(_reduce_op(opts, None))
        buffers = Operands(name)
        receive = buffers.output(output)
        offset = self._comm.rank * output.numel() * output.element_size()
        send = buffers.input(input, receive - offset)
        arguments = (send, receive, output.numel(), dtype, kind)
        return self._launch(buffers, self._lib.mccl_reduce_scatter, arguments, [output], opts, factor=factor)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> WorkMCCL:
        """reduce_scatter_single of each pair, submitted together."""
        rows = list(zip(outputs, inputs))
        name = "reduce_scatter_tensor_coalesced"
        return self._together(self._reduce_scatter_base, rows, opts, name, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # -- gathering and scattering -------------------------------------------------------------------------

    def allgather(
        self, outputs: TensorLists, inputs: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> WorkMCCL:
        """``outputs[0][r]`` becomes rank r's input; sizes may differ by rank.

        Short form: ``allgather(outputs, input)``.
        """
        name = "all_gather"
        tensor, parts = _one(inputs, name), _row(inputs, outputs, name)
        dtype = self._check_parts(parts, tensor, name)
        check_disjoint(parts, name)
        buffers = Operands(name)
        receives = [buffers.output(part) for part in parts]
        send = buffers.input(tensor, receives[self._comm.rank])
        arguments = (send, pointers(receives), counts([part.numel() for part in parts]), dtype)
        return self._launch(
            buffers, self._lib.mccl_all_gather_v, arguments, list(parts), opts, timeout=timeout
        )

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> WorkMCCL:
        """``output_lists[r][i]`` becomes rank r's ``inputs[i]``."""
        if len(output_lists) != self._comm.size or any(len(row) != len(inputs) for row in output_lists):
            raise ValueError(
                f"mccl all_gather_coalesced: expected {self._comm.size} output lists (one per rank) of "
                f"{len(inputs)} tensors (one per input), got {[len(row) for row in output_lists]}"
            )
        columns = [[row[i] for row in output_lists] for i in range(len(inputs))]
        rows = [([column], [tensor]) for column, tensor in zip(columns, inputs)]
        return self._together(self.allgather, rows, opts, "all_gather_coalesced", [])

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> WorkMCCL:
        """Block r of `output`, which holds size() times the elements of `input`, becomes rank r's input."""
        name = "all_gather_into_tensor"
        dtype = self._check_whole(output, input, name)
        buffers = Operands(name)
        receive = buffers.output(output)
        send = buffers.input(input, receive + self._comm.rank * input.numel() * input.element_size())
        arguments = (send, receive, input.numel(), dtype)
        return self._launch(buffers, self._lib.mccl_all_gather, arguments, [output], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> WorkMCCL:
        """all_gather_single of each pair, submitted together."""
        rows = list(zip(outputs, inputs))
        return self._together(self._allgather_base, rows, opts, "all_gather_into_tensor_coalesced", outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(
        self,
        outputs: TensorLists,
        inputs: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> WorkMCCL:
        """On the root ``outputs[0][r]`` becomes rank r's input; sizes may differ. Elsewhere no outputs.

        Short form: ``gather(outputs, input, root)``.
        """
        name = "gather"
        tensor, root_rank = _one(inputs, name), self._root(opts, root, name)
        dtype = dtype_code(tensor, name)
        buffers = Operands(name)
        parts: Sequence[Tensor] = []
        receives = sizes = None
        in_place = None
        if root_rank == self._comm.rank:
            parts = _row(inputs, outputs, name)
            self._check_parts(parts, tensor, name)
            check_disjoint(parts, name)
            addresses = [buffers.output(part) for part in parts]
            receives, sizes = pointers(addresses), counts([part.numel() for part in parts])
            in_place = addresses[self._comm.rank]
        send = buffers.input(tensor, in_place)
        arguments = (send, tensor.numel(), receives, sizes, dtype, root_rank)
        return self._launch(buffers, self._lib.mccl_gather_v, arguments, list(parts), opts, timeout=timeout)

    def gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, *, root: int | None = None
    ) -> WorkMCCL:
        """On the root block r of `output` becomes rank r's input; `output` is ignored elsewhere."""
        name = "gather_into_tensor"
        root_rank = self._root(opts, root, name)
        dtype = dtype_code(input, name)
        buffers = Operands(name)
        receive = in_place = None
        if root_rank == self._comm.rank:
            self._check_whole(output, input, name)
            receive = buffers.output(output)
            in_place = receive + self._comm.rank * input.numel() * input.element_size()
        arguments = (buffers.input(input, in_place), receive, input.numel(), dtype, root_rank)
        outputs = [output] if receive is not None else []
        return self._launch(buffers, self._lib.mccl_gather, arguments, outputs, opts)

    gather_into_tensor = gather_single

    def scatter(
        self,
        outputs: Tensors,
        inputs: TensorLists,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> WorkMCCL:
        """The root's ``inputs[0][rank]``; sizes may differ by rank. Elsewhere no inputs.

        Short form: ``scatter(output, inputs, root)``.
        """
        name = "scatter"
        output, root_rank = _one(outputs, name), self._root(opts, root, name)
        dtype = dtype_code(output, name)
        buffers = Operands(name)
        receive = buffers.output(output)
        sends = sizes = None
        if root_rank == self._comm.rank:
            parts = _row(outputs, inputs, name)
            self._check_parts(parts, output, name)
            rank = self._comm.rank
            sends = pointers(
                [buffers.input(part, receive if i == rank else None) for i, part in enumerate(parts)]
            )
            sizes = counts([part.numel() for part in parts])
        arguments = (sends, sizes, receive, output.numel(), dtype, root_rank)
        return self._launch(buffers, self._lib.mccl_scatter_v, arguments, [output], opts, timeout=timeout)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> WorkMCCL:
        """``outputs[r]`` becomes rank r's ``inputs[rank]``; sizes may differ."""
        name = "all_to_all"
        dtype = self._check_parts(outputs, None, name)
        self._check_parts(inputs, outputs[0], name)
        check_disjoint(outputs, name)
        buffers = Operands(name)
        receives = [buffers.output(part) for part in outputs]
        sends = [buffers.input(part) for part in inputs]
        return self._all_to_all(
            buffers,
            list(outputs),
            opts,
            None,
            dtype,
            (sends, [part.numel() for part in inputs], receives, [part.numel() for part in outputs]),
        )

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> WorkMCCL:
        """Blocks along dimension 0, one per rank, go out from `input` and come in to `output`.

        Split sizes are rows per rank; empty or None: equal blocks.
        """
        name = "all_to_all_single"
        dtype = dtype_code(output, name)
        _check_same_dtype(dtype, dtype_code(input, name), input, output, name)
        buffers = Operands(name)
        receives, receive_counts = self._blocks(buffers.output(output), output, output_split_sizes, "output")
        sends, send_counts = self._blocks(buffers.input(input), input, input_split_sizes, "input")
        return self._all_to_all(
            buffers, [output], opts, timeout, dtype, (sends, send_counts, receives, receive_counts)
        )

    all_to_all_single = alltoall_base

    def _all_to_all(
        self,
        buffers: Operands,
        outputs: list[Tensor],
        opts: Any,
        timeout: timedelta | None,
        dtype: int,
        blocks: tuple[list[int], list[int], list[int], list[int]],
    ) -> WorkMCCL:
        sends, send_counts, receives, receive_counts = blocks
        arguments = (pointers(sends), counts(send_counts), pointers(receives), counts(receive_counts), dtype)
        return self._launch(buffers, self._lib.mccl_all_to_all_v, arguments, outputs, opts, timeout=timeout)

    def _blocks(
        self, start: int, tensor: Tensor, splits: Sequence[int] | None, which: str
    ) -> tuple[list[int], list[int]]:
        """Addresses and element counts of a tensor's blocks, one per rank."""
        size = self._comm.size
        rows = tensor.shape[0] if tensor.dim() else 1
        wanted = splits
        try:  # also numbers of numpy and tensors of one element; torch's own backends take them
            splits = [] if splits is None else [operator.index(rows_of_rank) for rows_of_rank in splits]
        except TypeError as error:
            raise TypeError(
                f"mccl all_to_all_single: {which}_split_sizes must be a list of integers, got {wanted!r}"
            ) from error
        if not splits:
            if rows % size:
                raise ValueError(
                    f"mccl all_to_all_single: {which} has {rows} rows, which {size} ranks cannot share "
                    f"equally; pass {which}_split_sizes"
                )
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"mccl all_to_all_single: {which}_split_sizes {splits} must be {size} numbers >= 0 "
                f"(one per rank) whose sum is {rows}, the rows of the {which}"
            )
        elements_per_row = tensor.numel() // rows if rows else 0
        block_counts = [rows_of_rank * elements_per_row for rows_of_rank in splits]
        addresses = []
        for count in block_counts:
            addresses.append(start)
            start += count * tensor.element_size()
        return addresses, block_counts

    # -- point to point and barriers ----------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> WorkMCCL:
        """To rank `dst` of this group; matched by (rank, tag)."""
        tensor = _one(tensors, "send")
        dtype = dtype_code(tensor, "send")
        buffers = Operands("send")
        self._check_rank(dst, "destination", "send")
        self._check_tag(tag, "send")
        arguments = (buffers.input(tensor), tensor.numel(), dtype, dst)
        return self._launch(buffers, self._lib.mccl_send, arguments, [tensor], tag=tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> WorkMCCL:
        """From rank `src` of this group; size and dtype are the sender's."""
        self._check_rank(src, "source", "recv")
        return self._recv(tensors, src, tag)

    def _recv(self, tensors: Tensors, src: int, tag: int) -> WorkMCCL:
        self._check_tag(tag, "recv")
        tensor = _one(tensors, "recv")
        dtype = dtype_code(tensor, "recv")
        buffers = Operands("recv")
        arguments = (buffers.output(tensor), tensor.numel(), dtype, src)
        return self._launch(buffers, self._lib.mccl_recv, arguments, [tensor], tag=tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> WorkMCCL:
        """From whoever sends first; the Work's source_rank() says who it was."""
        return self._recv(tensors, _lib.ANY_SOURCE, tag)

    recvAnysource = recv_anysource

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> WorkMCCL:
        """Done on a rank only after every rank has called it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        return self._launch(Operands("barrier"), self._lib.mccl_barrier, (), [], opts, timeout=timeout)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that blocks. Rank 0's error after `timeout` (the group's, if None) names the first rank
        that is missing, or all of them; the group goes on.
        """
        wanted = self.timeout if timeout is None else timeout
        seconds = wanted.total_seconds() if isinstance(wanted, timedelta) else float(wanted)
        comm = self._comm
        with _RecordFunctionFast("mccl:monitored_barrier"):
            monitored_barrier(self._store, comm.rank, comm.size, self.group_name, seconds, wait_all_ranks)

    monitoredBarrier = monitored_barrier

    # -- checks -------------------------------------------------------------------------------------------

    # ctypes would cut numbers down to 32 bits: 2**32 would arrive as 0.

    def _check_tag(self, tag: int, name: str) -> None:
        if not 0 <= operator.index(tag) <= _LARGEST_TAG:
            raise self._refusal(name, f"tag is {tag}; tags are 0 .. {_LARGEST_TAG}")

    def _check_rank(self, rank: int, role: str, name: str) -> None:
        last = self._comm.size - 1
        if not 0 <= operator.index(rank) <= last:
            raise self._refusal(name, f"{role} is {rank}; the ranks of the group are 0 .. {last}")

    def _refusal(self, name: str, text: str) -> _errors.MCCLError:
        comm = self._comm
        return _errors.error_from(
            _lib.ERR_INVALID_ARGUMENT,
            f"mccl {name}: group '{self.group_name}' (rank {comm.rank}/{comm.size}): {text}",
        )

    def _root(self, opts: Any, root: int | None, name: str) -> int:
        if root is None:
            root = opts if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))
        self._check_rank(root, "root", name)
        return root

    def _check_parts(self, parts: Sequence[Tensor], whole: Tensor | None, name: str) -> int:
        """One tensor per rank, all of one dtype; this rank's has the size of `whole`. Returns the dtype."""
        size, rank = self._comm.size, self._comm.rank
        if len(parts) != size:
            raise ValueError(
                f"mccl {name}: expected a list of {size} tensors (one per rank), got {len(parts)}"
            )
        dtype = dtype_code(parts[0], name)
        for part in parts[1:]:
            _check_same_dtype(dtype, dtype_code(part, name), part, parts[0], name)
        if whole is None:
            return dtype
        _check_same_dtype(dtype, dtype_code(whole, name), whole, parts[0], name)
        if name != "all_to_all" and parts[rank].numel() != whole.numel():
            raise ValueError(
                f"mccl {name}: tensor {rank} of the list (this rank's) has {parts[rank].numel()} elements, "
                f"the single tensor {whole.numel()}; they must be equal"
            )
        return dtype

    def _check_whole(self, whole: Tensor, part: Tensor, name: str) -> int:
        """`whole` has one block of the size of `part` per rank. Returns the dtype."""
        dtype = dtype_code(part, name)
        _check_same_dtype(dtype, dtype_code(whole, name), whole, part, name)
        size = self._comm.size
        if whole.numel() != size * part.numel():
            raise ValueError(
                f"mccl {name}: the tensor for all {size} ranks has {whole.numel()} elements, expected "
                f"{size} x {part.numel()} = {size * part.numel()}"
            )
        return dtype


def _one(tensors: Tensors, name: str) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"mccl {name}: expected one tensor per call, got {len(tensors)}")
    return tensors[0]


def _row(single: Tensors, lists: TensorLists, name: str) -> Sequence[Tensor]:
    """The list that belongs to the one tensor of `single`: bare in the short form, else inside a list."""
    if isinstance(single, Tensor):
        return lists  # type: ignore[return-value]
    if len(lists) != 1 or isinstance(lists[0], Tensor):
        raise ValueError(f"mccl {name}: expected one list of tensors per call, got {len(lists)}")
    return lists[0]


def _reduce_op(opts: Any, op: Any) -> Any:
    """From options, from a bare ReduceOp in their place, or from a keyword."""
    if op is not None:
        return op
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM)


def _check_same_dtype(expected: int, found: int, tensor: Tensor, other: Tensor, name: str) -> None:
    if expected != found:
        raise TypeError(f"mccl {name}: all tensors must have one dtype, got {tensor.dtype} and {other.dtype}")


def create_process_group(opts: Any, pg_options: Any = None) -> ProcessGroupMCCL:
    """What torch.distributed calls to make a group; blocks until all its ranks are connected.

    `opts` has store, group_rank, group_size, timeout, group_id and global_ranks_in_group; `pg_options` is an
    MCCLOptions or a dict of settings.
    """
    options = MCCLOptions() if pg_options is None else pg_options
    if isinstance(options, dict):
        options = MCCLOptions(**options)
    if not isinstance(options, MCCLOptions):
        raise TypeError(
            f"mccl: pg_options must be MCCLOptions or a dict of settings, got {type(pg_options).__name__}"
        )
    timeout: timedelta = options.timeout or opts.timeout
    # torch always passes a time-out. Its default is nobody's wish: with 0 the library takes the same, or a
    # watchdog value that the user chose.
    chosen = options.timeout is not None or opts.timeout != default_pg_timeout
    rank, size = opts.group_rank, opts.group_size
    name = options.group_name or opts.group_id or "default"
    if not 0 <= rank < size:
        raise _errors.error_from(
            _lib.ERR_INVALID_ARGUMENT,
            f"mccl: rank {rank} of a group of {size} ('{name}'): ranks are 0 .. {size - 1}; check rank and "
            "world_size, or RANK and WORLD_SIZE",
        )
    comm = rendezvous.meet(
        opts.store,
        rank,
        size,
        name,
        milliseconds(timeout) if chosen else 0,
        settings_text(options.settings),
        _members(opts),
    )
    ranks = options.global_ranks_in_group or list(opts.global_ranks_in_group) or list(range(size))
    group = ProcessGroupMCCL(comm, timeout, ranks, opts.store)
    group.bound_device_id = getattr(getattr(opts, "process_group", None), "bound_device_id", None)
    functional.prepare()
    return group


def _members(opts: Any) -> Members | None:
    """Of a sub-group of a world of mccl."""
    world = dist.group.WORLD
    if not isinstance(world, ProcessGroupMCCL) or not opts.global_ranks_in_group:
        return None
    return Members(list(opts.global_ranks_in_group), world._comm.digest)

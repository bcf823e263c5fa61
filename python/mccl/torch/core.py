"""What a group is apart from its operations: submission, coalescing blocks, identity, life."""

from __future__ import annotations

import functools
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_void_p, sizeof
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from mccl import _errors, _lib
from mccl._comm import Communicator
from mccl._options import MCCLOptions
from mccl._tensor import Operands, check_disjoint, dtype_code
from mccl.torch.completer import Request
from mccl.torch.work import WAIT_SLICE_MS, WorkMCCL, copy_back, milliseconds

if TYPE_CHECKING:

    class _Base:
        """torch's stubs have the signatures of one release; the methods here take those of all."""

        def __init__(self, rank: int, size: int) -> None: ...
        def rank(self) -> int: ...
        def size(self) -> int: ...

else:
    _Base = dist.ProcessGroup

_DEVICES = [torch.device("cpu"), torch.device("mps")]
FINISHED = WorkMCCL.make_finished([])  # of all calls with asyncOp=False: done when they return

# torch < 2.7 lets go of the Python half of a Work that only C++ holds, whose wait() then never ends. abort()
# came with the fix. Without it the latest Works are kept. The fix leaves out the Work that DDP.join with
# divide_by_initial_world_size=False gives to the reducer: of one element, so the latest of those are kept.
_TORCH_KEEPS_WORKS = hasattr(dist.ProcessGroup, "abort")
_KEPT_WORKS = 4096


@functools.lru_cache(maxsize=1)
def _waiting_stream() -> int:
    """On which the calls themselves wait, a slice at a time."""
    stream = c_void_p()
    _errors.check(_lib.lib().mccl_stream_create(_lib.DEVICE_HOST, None, byref(stream)))
    _errors.check(_lib.lib().mccl_stream_set_wait(stream, WAIT_SLICE_MS))
    assert stream.value is not None
    return stream.value


class _Batch:
    """Operations between start_coalescing and end_coalescing: submitted together, one Work for all."""

    def __init__(self, work: WorkMCCL) -> None:
        self.work = work
        self.calls: list[tuple[Any, tuple[Any, ...], _lib.Options | None]] = []
        self.keep: list[Any] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []


class BackendView:
    """What torch asks of the object that ``group._get_backend(device)`` returns."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False

    def __init__(self, group: GroupCore) -> None:
        self._group = group
        self.options = MCCLOptions(
            timeout=group.timeout, group_name=group.group_name, global_ranks_in_group=group.global_ranks
        )

    def name(self) -> str:
        """Name of the backend."""
        return "mccl"

    _get_backend_name = getBackendName = name

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank()

    def size(self) -> int:
        """Number of ranks."""
        return self._group.size()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """No special memory is needed."""
        return False

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An ordinary tensor of `size` elements."""
        return torch.empty(size, dtype=dtype, device=device)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    set_timeout = _set_default_timeout


class GroupCore(_Base):
    """One rank's view of a group, without operations."""

    # The base class asks the backends registered in it, of which there are none.
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False

    def __init__(self, comm: Communicator, timeout: timedelta, global_ranks: list[int], store: Store) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._lib = _lib.lib()
        self._free = self._lib.mccl_request_free
        self._waiting_stream = _waiting_stream()
        self._all_reduce = self._lib.mccl_all_reduce_by
        # Arguments of all-reduces, with their addresses. A call takes one out, so that no other thread and no
        # signal handler finds it, and puts it back when it is done with it.
        self._forms: list[tuple[_lib.AllReduceArgs, Any]] = []
        self.timeout = timeout
        self.global_ranks = global_ranks
        self._store = store
        self._timeout_ms = 0  # of operations; 0: what the communicator was made with
        self._extra_ms = 0  # added to the time-out of the next operation
        self._name = comm.name
        self._desc = "undefined"
        self._bound_device_id: torch.device | None = None
        self._batches: dict[int, _Batch] = {}  # open coalescing blocks, by thread
        self._sequence = 0
        self.splits = 0  # calls of mccl.split_group with this group as the parent
        self._kept: deque[WorkMCCL] = deque(maxlen=_KEPT_WORKS)

    # -- submitting ---------------------------------------------------------------------------------------

    def _launch(
        self,
        buffers: Operands,
        function: Any,
        arguments: tuple[Any, ...],
        outputs: list[torch.Tensor],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
        factor: float = 1.0,
        tag: int = 0,
    ) -> WorkMCCL:
        """Submits one operation, or adds it to the open coalescing block.

        `arguments` are those before the communicator, `outputs` what the Work's future gives.
        """
        options = self._options(opts, timeout, factor, tag)
        waits = not getattr(opts, "asyncOp", True)
        if profiler._is_profiler_enabled:
            # What is read and written comes with it: record_shapes=True then shows sizes and dtypes.
            with _RecordFunctionFast(f"mccl:{buffers.name}", buffers.keep):
                return self._submit(buffers, function, arguments, outputs, options, waits)
        return self._submit(buffers, function, arguments, outputs, options, waits)

    def _submit(
        self,
        buffers: Operands,
        function: Any,
        arguments: tuple[Any, ...],
        outputs: list[torch.Tensor],
        options: _lib.Options | None,
        waits: bool,
    ) -> WorkMCCL:
        comm = self._comm
        handle = comm.handle
        self._sequence += 1
        if self._sequence == 1:
            self._warn_if_mixed()
        if self._batches and (batch := self._batches.get(threading.get_ident())) is not None:
            batch.calls.append((function, arguments, options))
            batch.keep.append(buffers.keep)
            batch.copies.extend(buffers.copies)
            batch.work.result().extend(outputs)
            return batch.work
        if comm.pending:
            comm.sweep(2)
            comm.make_room()
        if waits:
            self._run(function, arguments, options, buffers.keep, buffers.copies)
            return FINISHED
        work = WorkMCCL.make(comm, self._lib, outputs)
        request = Request(self._free)
        try:
            work.prepare((request,), buffers.keep, buffers.copies)
            self._call(function, arguments, handle, options, request)
            if not request.slot.value:
                raise self._no_request(buffers.name)
        except BaseException:  # Ctrl-C may come at any point
            self._lib.mccl_set_options(None)  # or the next operation would get them
            self._settle(work, (request,))
            raise
        work.publish()
        if not _TORCH_KEEPS_WORKS or (len(outputs) == 1 and outputs[0].numel() == 1):
            self._kept.append(work)
        return work

    def _run(
        self,
        function: Any,
        arguments: tuple[Any, ...],
        options: _lib.Options | None,
        keep: Sequence[torch.Tensor],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Submits one operation and waits for it, in one call of the library if that is enough."""
        library, slot, handle = self._lib, c_void_p(), self._comm.handle
        try:
            if options is not None:
                _errors.check(library.mccl_set_options(byref(options)))
            code = function(*arguments, handle, self._waiting_stream, byref(slot))
            while code == _lib.IN_PROGRESS:  # back here once per slice, so that Ctrl-C is seen
                code = library.mccl_request_wait(slot, WAIT_SLICE_MS)
        except BaseException:
            library.mccl_set_options(None)  # or the next operation would get them
            self._leave(slot, keep, copies)
            raise
        error = _errors.last_error(code) if code else None
        if slot.value:
            self._free(slot)
        if error is None and copies and (failure := copy_back(copies)) is not None:
            error = _errors.error_from(*failure)
        if error is not None:
            raise error

    def _make_form(self) -> tuple[_lib.AllReduceArgs, Any]:
        """Arguments of an all-reduce, and their address."""
        args = _lib.AllReduceArgs(size=sizeof(_lib.AllReduceArgs), stream=self._waiting_stream)
        return args, byref(args)

    def _leave(
        self,
        slot: c_void_p,
        keep: Sequence[torch.Tensor],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """After an exception in a call that waits: what the library has taken goes on without the caller."""
        request, work = Request(self._free), WorkMCCL.make(self._comm, self._lib, [])
        request.slot = slot
        work.prepare((request,), keep, list(copies))
        self._settle(work, (request,))

    def _call(
        self,
        function: Any,
        arguments: tuple[Any, ...],
        handle: int,
        options: _lib.Options | None,
        to: Request,
    ) -> None:
        if options is not None:
            _errors.check(self._lib.mccl_set_options(byref(options)))
        code = function(*arguments, handle, None, byref(to.slot))
        if code:
            raise _errors.last_error(code)

    def _settle(self, work: WorkMCCL, requests: Sequence[Request]) -> None:
        """After an exception: what the library has taken goes on and needs its buffers."""
        taken = [request for request in requests if request.slot.value]
        if taken:
            work.publish(taken)
        else:
            work.drop()

    def _no_request(self, what: str) -> _errors.MCCLError:
        return _errors.error_from(
            _lib.ERR_INTERNAL,
            f"mccl {what}: group '{self._name}' (rank {self._comm.rank}/{self._comm.size}): the library took "
            "the call but began no operation; is a group of calls open in this thread (mccl_group_start)?",
        )

    def _warn_if_mixed(self) -> None:
        """torch tells which backends were asked for only after the group is made."""
        try:
            config = dist.get_backend_config(self)  # type: ignore[arg-type]
        except TypeError:  # not made by torch but inside somebody's wrapper
            return
        others = [part for part in config.split(",") if ":" in part and not part.endswith(":mccl")]
        if others:
            warnings.warn(
                f"mccl: backend '{config}': mccl serves a group as a whole, so {', '.join(others)} has no "
                'effect; say backend="mccl"',
                stacklevel=6,
            )

    def _options(self, opts: Any, timeout: timedelta | None, factor: float, tag: int) -> _lib.Options | None:
        timeout_ms = milliseconds(timeout if timeout is not None else getattr(opts, "timeout", None))
        timeout_ms = timeout_ms or self._timeout_ms
        if self._extra_ms:
            timeout_ms = (timeout_ms or milliseconds(self.timeout)) + self._extra_ms
            self._extra_ms = 0
        if timeout_ms or tag or factor != 1.0:
            return _lib.Options(sizeof(_lib.Options), timeout_ms, tag, factor)
        return None

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Operations of this thread are collected until _end_coalescing."""
        if threading.get_ident() in self._batches:
            raise ValueError(f"mccl: group '{self._name}': coalescing blocks of one group do not nest")
        self._batches[threading.get_ident()] = _Batch(WorkMCCL.make(self._comm, self._lib, []))

    def _end_coalescing(self, device: torch.device | None = None) -> WorkMCCL:
        """Submits them together. The first error fails all of them."""
        batch = self._batches.pop(threading.get_ident(), None)
        if batch is None:
            raise ValueError(f"mccl: group '{self._name}': end of a coalescing block that was not started")
        handle = self._comm.handle
        if batch.calls:
            with _RecordFunctionFast("mccl:coalesced"):
                self._submit_batch(batch, handle)
        batch.work.publish()
        return batch.work

    def _submit_batch(self, batch: _Batch, handle: int) -> None:
        comm, library, work = self._comm, self._lib, batch.work
        comm.make_room()
        requests = [Request(self._free) for _ in batch.calls]
        try:
            work.prepare(requests, batch.keep, batch.copies)
            _errors.check(library.mccl_group_start())
            for (function, arguments, options), request in zip(batch.calls, requests):
                self._call(function, arguments, handle, options, request)
            _errors.check(library.mccl_group_end())
            if not all(request.slot.value for request in requests):
                raise self._no_request("coalescing block")
        except BaseException:  # Ctrl-C may come at any point
            # A bad call fails an open group as a whole: nothing of it is sent. Without one both are refused.
            library.mccl_set_options(None)
            library.mccl_barrier(None, None, None)
            library.mccl_group_end()
            self._settle(work, requests)
            raise

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    def _together(
        self,
        operation: Any,
        rows: Sequence[tuple[Any, ...]],
        opts: Any,
        name: str,
        outputs: Sequence[torch.Tensor],
    ) -> WorkMCCL:
        """`operation` for each row of arguments, as one batch (or as part of the open one).

        `outputs` of the different rows may not overlap.
        """
        me = threading.get_ident()
        inside = me in self._batches
        try:
            for output in outputs:
                dtype_code(output, name)
            check_disjoint(outputs, name)
            if not inside:
                self._start_coalescing()
            for row in rows:
                operation(*row, opts)
        except BaseException:
            # torch does not end its block then, which would go on swallowing this thread's operations.
            self._batches.pop(me, None)
            raise
        return self._batches[me].work if inside else self._end_coalescing()

    # -- identity -----------------------------------------------------------------------------------------

    def name(self) -> str:
        """Name of the backend."""
        return "mccl"

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        """The same, for C++ callers."""
        return self._name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        """torch's description of the group."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        """The same, for C++ callers."""
        return self._desc

    setGroupDesc = _set_group_desc

    def getRank(self) -> int:
        """The same as rank(), for C++ callers."""
        return self._comm.rank

    def getSize(self) -> int:
        """The same as size(), for C++ callers."""
        return self._comm.size

    @property
    def bound_device_id(self) -> torch.device | None:
        """The accelerator that init_process_group was given, where torch tells backends."""
        return self._bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device_id = device

    @property
    def _device_types(self) -> list[torch.device]:
        return list(_DEVICES)  # cpu first: object collectives then stay on the host

    def _get_backend(self, device: torch.device | str) -> BackendView:
        """What stands for the backend of a device; RuntimeError for devices that are not served."""
        if torch.device(device).type not in ("cpu", "mps"):
            raise RuntimeError(
                f"mccl: group '{self._name}' serves cpu and mps tensors, not device '{device}'"
            )
        return BackendView(self)

    get_backend = _get_backend

    # -- life ---------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leaves the group. Operations in flight get at most 2 s."""
        self._comm.destroy()

    def abort(self) -> None:
        """Fails all operations in flight, here and on the other ranks."""
        self._comm.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Time-out of operations submitted from now on."""
        self.timeout = timeout
        self._timeout_ms = milliseconds(timeout)

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Longer, by this much, for the next operation."""
        self._extra_ms += milliseconds(timeout)

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        for work in list(self._comm.pending):
            if isinstance(work, WorkMCCL):
                work.wait()

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: the library counts operations itself."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _enable_collectives_timing(self) -> None:
        """Operations are not timed."""

"""One rank of a library that is called through torch.

    python -m mccl.bench.rank LIBRARY RANK N FOLDER SCHED WAIT

Speaks the protocol of bench/worker.c. Only this module of the package imports torch.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from mccl.bench.congestion import use_common_congestion_control
from mccl.bench.lineup import LineUp
from mccl.bench.operations import ELEMENT_BYTES, OPERATIONS

_BACKENDS = {"mccl-torch": "mccl", "gloo": "gloo"}
_GROUP_TIMEOUT = timedelta(seconds=120)
_POISON = 0xA5


class Data:
    """Buffers of one rank for one size of an operation, what goes in and what has to come out."""

    def __init__(self, torch: Any, rank: int, n: int, op: str, dtype: str, n_bytes: int) -> None:
        self._torch, self._rank, self._n, self._dtype = torch, rank, n, getattr(torch, dtype)
        # Few integers are exact in the small types; 16 ranks add up to less than 128 there.
        self._values = 7 if dtype in ("int8", "uint8", "bfloat16") else 61
        count = n_bytes // ELEMENT_BYTES[dtype]
        block = count // n
        begin = rank * block
        is_root = rank == 0
        self.in_place = op in ("all_reduce", "reduce", "broadcast")
        self.is_checked = op != "barrier" and (is_root or op not in ("reduce", "gather"))
        n_in = {"all_gather": block, "gather": block, "scatter": count if is_root else 0}.get(op, count)
        self.source = self._values_of(rank, 0, n_in).to(self._dtype)
        if op in ("all_reduce", "reduce"):
            expected = self._sum(0, count)
        elif op == "reduce_scatter":
            expected = self._sum(begin, block)
        elif op in ("all_gather", "gather"):
            expected = torch.cat([self._values_of(other, 0, block) for other in range(n)])
        elif op == "all_to_all":
            expected = torch.cat([self._values_of(other, begin, block) for other in range(n)])
        elif op == "scatter":
            expected = self._values_of(0, begin, block)
        else:
            expected = self._values_of((rank - 1) % n if op == "send_recv" else 0, 0, count)
        self.expected = expected.to(self._dtype)
        self.target = torch.empty_like(self.expected)
        self._raw = self.target.view(torch.uint8) if self.target.numel() else self.target

    def _values_of(self, rank: int, begin: int, count: int) -> Any:
        """`count` elements of a rank's input: the numbers of bench/data.c, in 32 bits that wrap."""
        mixed = self._torch.arange(begin, begin + count, dtype=self._torch.int32)
        mixed.mul_(_signed(2654435761)).add_(_signed(rank * 1013904223))
        return mixed.bitwise_right_shift_(16).bitwise_and_(0xFFFF).remainder_(self._values)

    def _sum(self, begin: int, count: int) -> Any:
        total = self._torch.zeros(count, dtype=self._torch.int32)
        for other in range(self._n):
            total += self._values_of(other, begin, count)
        return total

    def fill(self) -> None:
        """Before each call: the input, and nothing that could pass for a result."""
        if self.in_place:
            self.target.copy_(self.source)
        else:
            self._raw.fill_(_POISON)

    def count_wrong(self) -> int:
        """After each call: the number of wrong elements."""
        if not self.is_checked or self._torch.equal(self.target, self.expected):
            return 0
        return int((self.target != self.expected).sum())


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


class Rank:
    """The group, the data, and the answers to the driver's requests."""

    def __init__(self, library: str, rank: int, n: int, folder: Path, spins: bool) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        self._backend, self._rank, self._n, self._folder = _BACKENDS[library], rank, n, folder
        self._line_up = LineUp(folder / "page", rank, n, spins)
        self._key: tuple[str, str, int] | None = None
        self._data: Data | None = None

    def id(self) -> dict[str, Any]:
        """What the others need to join."""
        return {"id": f"file://{self._folder}/store"}

    def join(self, store: str) -> dict[str, Any]:
        """Makes the group."""
        self._dist.init_process_group(
            self._backend,
            init_method=store,
            rank=self._rank,
            world_size=self._n,
            timeout=_GROUP_TIMEOUT,
        )
        return {"version": f"torch {self._torch.__version__}"}

    def run(self, op: str, dtype: str, n_bytes: str, warm_up: str, calls: str) -> dict[str, Any]:
        """Times in ns of `calls` calls on this rank, and the number of wrong elements."""
        if self._key != (op, dtype, int(n_bytes)):
            self._data = None  # before the new buffers are made
            self._data = Data(self._torch, self._rank, self._n, op, dtype, int(n_bytes))
            self._key = (op, dtype, int(n_bytes))
        assert self._data is not None
        call, data, line_up = self._call(op, self._data), self._data, self._line_up
        times, wrong = [], 0
        gc.disable()
        for _ in range(int(warm_up) + int(calls)):
            data.fill()
            line_up.wait()
            begin = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begin)
            wrong += data.count_wrong()
        gc.enable()
        return {"wrong": wrong, "ns": times[int(warm_up) :]}

    def _call(self, op: str, data: Data) -> Callable[[], object]:
        dist, rank, n = self._dist, self._rank, self._n
        send, recv = data.source, data.target
        sends = list(send.chunk(n)) if op == "scatter" and rank == 0 else None
        recvs = list(recv.chunk(n)) if op == "gather" and rank == 0 else None

        def send_recv() -> None:
            pair = [
                dist.P2POp(dist.isend, send, (rank + 1) % n),
                dist.P2POp(dist.irecv, recv, (rank - 1) % n),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(recv),
            "reduce": lambda: dist.reduce(recv, 0),
            "broadcast": lambda: dist.broadcast(recv, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(recv, send),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(recv, send),
            "gather": lambda: dist.gather(send, recvs, 0),
            "scatter": lambda: dist.scatter(recv, sends, 0),
            "all_to_all": lambda: dist.all_to_all_single(recv, send),
            "send_recv": send_recv,
            "barrier": lambda: dist.barrier(),
        }
        return calls[OPERATIONS[op].name]

    def congestion(self) -> dict[str, Any]:
        """Sets the common one on all TCP connections of this process; what they then have."""
        return {"congestion": use_common_congestion_control()}

    def leave(self) -> None:
        """Destroys the group if there is one."""
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def main() -> None:
    """The process: answers requests until the driver closes the connection."""
    library, rank, n, folder, schedule, wait = sys.argv[1:7]
    if schedule == "rr":
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    worker = Rank(library, int(rank), int(n), Path(folder), wait == "spin")
    requests: dict[str, Callable[..., dict[str, Any]]] = {
        "id": worker.id,
        "join": worker.join,
        "run": worker.run,
        "congestion": worker.congestion,
    }
    with socket.socket(socket.AF_UNIX) as driver:
        driver.connect(f"{folder}/socket")
        stream = driver.makefile("rw", buffering=1)
        print(json.dumps({"rank": int(rank)}), file=stream, flush=True)
        for line in stream:
            name, *arguments = line.split()
            print(json.dumps(requests[name](*arguments)), file=stream, flush=True)
    worker.leave()


if __name__ == "__main__":
    main()

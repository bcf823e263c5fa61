"""One rank of ranks.Pool: takes calls from a pipe, answers (True, result) or (False, traceback)."""

from __future__ import annotations

import importlib
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import mccl
from ranks import GROUP_TIMEOUT

warnings.simplefilter("ignore", FutureWarning)


def call(store_port: int, message: tuple[Any, ...]) -> Any:
    job, rank, n, module, name, args, group = message
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    store = dist.PrefixStore(job, dist.TCPStore("127.0.0.1", store_port, is_master=False))
    torch.manual_seed(1234)
    try:
        if not group:
            return function(rank, n, store, *args)
        dist.init_process_group("mccl", store=store, rank=rank, world_size=n, timeout=GROUP_TIMEOUT)
        return function(rank, n, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch numbers groups in each process; one whose creation failed here would shift the next job's.
        dist.distributed_c10d._world.group_count = 0


def main() -> None:
    # A shell that starts the tests in the background leaves SIGINT ignored, and Python then keeps it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection = Connection(int(sys.argv[1]))
    assert mccl.version()
    torch.set_num_threads(1)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, call(int(sys.argv[2]), message))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    main()

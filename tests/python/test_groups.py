"""Many groups, sub-groups, groups again in one process, object collectives, forked children."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import mccl
from mccl import _lib
from mccl.torch import rendezvous
from mccl.torch.members import Members
from patterns import assert_same, reduced, tensor
from ranks import Pool

F32 = torch.float32


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_kib() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def make_many(rank: int, n: int, store: dist.Store, groups: int) -> None:
    def once(i: int) -> None:
        dist.init_process_group("mccl", store=dist.PrefixStore(str(i), store), rank=rank, world_size=n)
        value = tensor(rank, 100, F32, salt=i)
        dist.all_reduce(value, async_op=True).get_future().wait()
        assert_same(value, reduced("sum", n, 100, F32, salt=i), i)
        dist.destroy_process_group()

    for i in range(20):  # until pools of the allocator and of torch have filled
        once(i)
    gc.collect()
    before = descriptors(), threads(), resident_kib()
    for i in range(groups):
        once(100 + i)
    gc.collect()
    time.sleep(0.2)
    after = descriptors(), threads(), resident_kib()
    assert after[0] <= before[0], ("descriptors", before, after)
    assert after[1] <= before[1], ("threads", before, after)
    assert after[2] <= before[2] + 4096, ("resident KiB", before, after)


def test_groups_leave_nothing_behind(pool: Pool) -> None:
    pool.run(2, make_many, 200, group=False, timeout=120)


def check_gc(rank: int, n: int) -> None:
    """A group that is only dropped, as torch < 2.7 does, is left as well."""
    before = len(mccl._comm.live())
    group = dist.new_group()
    assert len(mccl._comm.live()) == before + 1
    comm = group._comm
    world = dist.distributed_c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    world.pg_to_tag.pop(group, None)
    for tagged in world.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)
    dist.distributed_c10d._unregister_process_group(group.group_name)
    del comm, group
    gc.collect()
    assert len(mccl._comm.live()) == before


def check_again(rank: int, n: int, store: dist.Store) -> None:
    """The same store and the same keys for one group after the other."""
    for i in range(5):
        dist.init_process_group("mccl", store=store, rank=rank, world_size=n)
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == n
        if rank == i % n:
            time.sleep(0.05)
        dist.destroy_process_group()


def check_stale_id(rank: int, n: int, store: dist.Store) -> None:
    """An id of an earlier life of the group lies in the store, and nobody lives behind it."""
    own = dist.PrefixStore("again", store)
    if rank == 0:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # an id whose maker is gone
            os.write(writer, _lib.unique_id_to_text(_lib.new_unique_id()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        own.set(rendezvous.KEY, os.read(reader, 4096))
        store.set("stale", "1")
        time.sleep(0.7)
    else:
        store.wait(["stale"])
    comm = rendezvous.meet(own, rank, n, "again", 20_000, "")
    assert not own.check([rendezvous.KEY]) or rank, "rank 0 left the id in the store"
    comm.destroy()


def check_subgroups(rank: int, n: int) -> None:
    even = dist.new_group(list(range(0, n, 2)))
    odd = dist.new_group(list(range(1, n, 2)), group_desc="the odd ones")
    pairs = [dist.new_group([i, (i + 1) % n]) for i in range(n)]  # overlapping
    backwards = dist.new_group(list(range(n))[::-1])
    mine, members = (odd, range(1, n, 2)) if rank % 2 else (even, range(0, n, 2))
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=mine)
    assert value.item() == sum(members)
    for i in [rank, (rank - 1) % n] if rank else [n - 1, 0]:
        value = torch.tensor([float(rank + 1)])
        dist.broadcast(value, i, group=pairs[i])
        assert value.item() == i + 1
    value = torch.tensor([float(rank)])
    dist.broadcast(value, n - 1, group=backwards)
    assert value.item() == n - 1
    dist.destroy_process_group(mine)
    dist.barrier()


def check_objects(rank: int, n: int) -> None:
    thing = {"rank": rank, "list": list(range(rank * 10))}
    everybody: list[Any] = [None] * n
    dist.all_gather_object(everybody, thing)
    assert [t["rank"] for t in everybody] == list(range(n))
    gathered: list[Any] | None = [None] * n if rank == 1 else None
    dist.gather_object(thing, gathered, dst=1)
    assert gathered is None or len(gathered[n - 1]["list"]) == (n - 1) * 10
    objects = [thing if rank == 0 else None]
    dist.broadcast_object_list(objects, src=0)
    assert objects[0] == {"rank": 0, "list": []}
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(n)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list(["hello", 1], dst=1)
    elif rank == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == ["hello", 1]


def check_identity(rank: int, n: int) -> None:
    pg: Any = dist.group.WORLD
    group = dist.new_group(group_desc="described", pg_options=mccl.MCCLOptions(chunk_bytes=65536))
    assert group.group_desc == "described" and group.group_name != pg.group_name
    assert [d.type for d in pg._device_types] == ["cpu", "mps"]
    view = pg._get_backend(torch.device("cpu"))
    assert view.name() == "mccl" and not view.supports_splitting and not view.supports_coalescing
    assert view.options._timeout.total_seconds() == 30 and view.options.global_ranks_in_group == list(
        range(n)
    )
    assert dist.get_backend() == "mccl" and dist.get_process_group_ranks(pg) == list(range(n))
    try:
        pg._get_backend(torch.device("cuda"))
        raise AssertionError("cuda is not served")
    except RuntimeError as error:
        assert "cuda" in str(error)
    metrics = mccl.get_metrics()
    dist.all_reduce(torch.ones(1000))
    after = mccl.get_metrics()
    assert after.groups == 2 and after.total_ops == metrics.total_ops + 1
    assert after.total_bytes_sent > metrics.total_bytes_sent
    mccl.reset_metrics()
    assert mccl.get_metrics().total_ops == 0


@pytest.mark.parametrize("check", [check_gc, check_subgroups, check_objects, check_identity])
def test_groups(pool: Pool, check: object) -> None:
    pool.run(3, check)


@pytest.mark.parametrize("check", [check_again, check_stale_id])
def test_store(pool: Pool, check: object) -> None:
    pool.run(3, check, group=False)


class Squares(TensorDataset):
    """Looks at the parent's group from a worker process."""

    def __getitem__(self, index: int) -> Any:
        (value,) = super().__getitem__(index)
        return value * value


def check_data_loader(rank: int, n: int) -> None:
    loader = DataLoader(
        Squares(torch.arange(40.0)), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    for _ in range(2):
        for i, batch in enumerate(loader):
            dist.all_reduce(batch)
            assert batch.tolist() == [n * float(i * 4 + j) ** 2 for j in range(4)]
    t = torch.ones(1)
    dist.all_reduce(t, async_op=True).get_future().wait()


def check_child_error(rank: int, n: int) -> None:
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()  # the completion thread runs
    work = dist.group.WORLD.recv([torch.ones(1)], 1 - rank, 3)  # in flight
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        for use in (work.wait, lambda: dist.all_reduce(torch.ones(1))):
            try:
                use()
                text += "no error"
            except mccl.MCCLError as error:
                text += str(error)
        del work
        gc.collect()
        os.write(writer, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reader, 4096).decode()
    assert text.count("fork") == 2 and "no error" not in text and f"rank {rank}/{n}" in text, text
    dist.send(torch.ones(1), 1 - rank, tag=3)
    work.wait()
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == n


def fork_and_die(rank: int, n: int) -> tuple[str, float]:
    """The child of a killed rank must not keep the rank's sockets open."""
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.time()
    try:
        dist.all_reduce(torch.ones(1))
    except mccl.MCCLError as error:
        return str(error), time.time() - started - 0.5
    raise AssertionError("no error")


@pytest.mark.parametrize("check", [check_data_loader, check_child_error])
def test_fork(pool: Pool, check: object) -> None:
    pool.run(2, check)


def test_a_killed_rank_with_a_living_child_is_noticed(pool: Pool) -> None:
    pool.start(2, fork_and_die)
    text, seconds = pool.results(2, timeout=30, lost=(1,))[0]
    assert "rank 1" in text and seconds < 2, (text, seconds)


def check_thread_count(rank: int, n: int) -> int:
    return threading.active_count()


def test_no_python_threads_before_the_first_future() -> None:
    pool = Pool()
    try:
        assert pool.run(2, check_thread_count) == [1, 1]
    finally:
        pool.close()


class PlainStore(dist.Store):
    """A store in Python that has no compare_set, as torch allows."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@pytest.mark.parametrize("members", [None, Members([0, 1], "world")])
def test_a_store_that_cannot_compare(members: Members | None) -> None:
    store = PlainStore()
    with ThreadPoolExecutor(2) as pool:
        comms = list(pool.map(lambda r: rendezvous.meet(store, r, 2, "g", 20_000, "", members), range(2)))
    for rank, comm in enumerate(comms):
        assert (comm.rank, comm.size) == (rank, 2)
        comm.destroy()

"""Field reports on how third-party backends are named, chosen, split, wrapped and set up: FR-141, FR-142."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mccl
from patterns import assert_same, reduced, tensor
from ranks import GROUP_TIMEOUT, Pool

F32 = torch.float32


def check_sum(count: int, group: Any = None, members: list[int] | None = None) -> None:
    """An all_reduce over the members' ranks in the world."""
    members = members or list(range(dist.get_world_size(group)))
    value = tensor(members[dist.get_rank(group)], count, F32)
    dist.all_reduce(value, group=group)
    expected = torch.stack([tensor(member, count, F32) for member in members]).sum(0)  # small whole numbers
    assert_same(value, expected, (count, members))


# ---- FR-141: names, defaults, barriers, objects, meshes, splits ----


def use_as(rank: int, n: int, store: dist.Store, spec: str, name: str, config: str) -> None:
    dist.init_process_group(spec, store=store, rank=rank, world_size=n, timeout=GROUP_TIMEOUT)
    try:
        assert dist.get_backend() == name
        assert dist.get_backend_config() == config
        assert dist.is_backend_available("mccl") and dist.Backend.MCCL == "mccl"
        assert type(dist.group.WORLD).__name__ == "ProcessGroupMCCL"

        works = []
        for salt in range(5):
            value = tensor(rank, 100_000, F32, salt=salt)
            works.append((value, dist.all_reduce(value, async_op=True)))
        dist.barrier()
        for salt, (value, work) in enumerate(works):
            assert work.is_completed()
            assert_same(value, reduced("sum", n, 100_000, F32, salt=salt), salt)

        objects: list[Any] = [None] * n
        dist.all_gather_object(objects, {"rank": rank, "tensor": tensor(rank, 3, F32)})
        for r, found in enumerate(objects):
            assert found["rank"] == r
            assert_same(found["tensor"], tensor(r, 3, F32), r)
        picked = [f"from {rank}"]
        dist.broadcast_object_list(picked, src=1)
        assert picked == ["from 1"]

        mesh = init_device_mesh("cpu", (n,))
        check_sum(77, mesh.get_group())
        for options in (None, mccl.MCCLOptions(chunk_bytes=65536)):
            check_sum(1001, dist.new_group(pg_options=options))
        for other in ("gloo", "mccl"):  # a sub-group may have another backend
            group = dist.new_group([1, 0], backend=other)
            assert dist.get_backend(group) == other
            check_sum(13, group, [0, 1])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("spec", "name", "config"),
    [
        ("mccl", "mccl", "cpu:mccl,mps:mccl"),
        ("MCCL", "mccl", "cpu:mccl,mps:mccl"),
        ("cpu:mccl", "cpu:mccl", "cpu:mccl"),
        ("cpu:mccl,mps:mccl", "cpu:mccl,mps:mccl", "cpu:mccl,mps:mccl"),
        ("cpu:gloo,mps:mccl", "cpu:gloo,mps:mccl", "cpu:gloo,mps:mccl"),
    ],
)
def test_fr_141_every_way_to_name_the_backend(pool: Pool, spec: str, name: str, config: str) -> None:
    pool.run(2, use_as, spec, name, config, group=False)


def beside_gloo(rank: int, n: int, store: dist.Store) -> None:
    """A default group of gloo, groups of mccl in it; options that belong to another backend."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=GROUP_TIMEOUT)
    try:
        group = dist.new_group(backend="mccl")
        assert (dist.get_backend(), dist.get_backend(group)) == ("gloo", "mccl")
        check_sum(501, group)
        check_sum(501)
        mesh = init_device_mesh("cpu", (n,))
        check_sum(9, mesh.get_group())
        with pytest.raises(TypeError, match="pg_options must be MCCLOptions or a dict of settings, got"):
            dist.new_group(backend="mccl", pg_options=dist.ProcessGroupGloo._Options())
        for theirs, call in ((dist.group.WORLD, mccl.split_group), (None, mccl.monitored_barrier)):
            with pytest.raises(TypeError, match="expected a group of mccl, got ProcessGroup"):
                call(theirs)
    finally:
        dist.destroy_process_group()


def test_fr_141_groups_of_both_backends_side_by_side(pool: Pool) -> None:
    pool.run(2, beside_gloo, group=False)


def refuse_accelerators(rank: int, n: int, store: dist.Store) -> None:
    """No accelerator here: torch says so at once, and a group can be made afterwards."""
    for device, words in (("cpu", "must be an accelerator"), ("mps:0", "accelerator")):
        for backend in (None, "mccl"):
            with pytest.raises(ValueError, match=words):
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore(f"{device}{backend}", store),
                    rank=rank,
                    world_size=n,
                    device_id=torch.device(device),
                )
            assert not dist.is_initialized()
    dist.init_process_group(
        "mccl", store=dist.PrefixStore("then", store), rank=rank, world_size=n, timeout=GROUP_TIMEOUT
    )
    check_sum(20)
    dist.destroy_process_group()


def test_fr_141_a_device_that_is_not_there_is_refused_at_once(pool: Pool) -> None:
    pool.run(2, refuse_accelerators, group=False)


def split(rank: int, n: int) -> None:
    # torch lets only backends of an accelerator split, and says so.
    with pytest.raises(RuntimeError, match=r"No device associated|does not support splitting"):
        dist.split_group(split_ranks=[[0, 1], [2, 3]])

    halves = [[0, 3], [2, 1]]
    group = mccl.split_group(split_ranks=halves, timeout=timedelta(seconds=17), group_desc="half")
    members = sorted(next(half for half in halves if rank in half))
    assert dist.get_process_group_ranks(group) == members
    assert dist.get_rank(group) == members.index(rank)
    assert group.timeout == timedelta(seconds=17) and group.group_desc == "half"
    check_sum(333, group, members)

    # Ranks are those in the parent, which is [1, 2, 3] here.
    parent = dist.new_group([1, 2, 3])
    if rank == 0:
        with pytest.warns(UserWarning, match="split_group on global rank 0 which does not belong"):
            assert mccl.split_group(parent, [[0, 2]]) is None
    else:
        options = mccl.MCCLOptions(chunk_bytes=65536)
        child = mccl.split_group(parent, [[2, 0]], pg_options=options)
        assert (child is None) == (rank == 2)
        if child is not None:
            assert dist.get_process_group_ranks(child) == [1, 3]
            check_sum(41, child, [1, 3])
            dist.destroy_process_group(child)
    for _ in range(3):  # the same split again is another group
        again = mccl.split_group(split_ranks=[[0, 1, 2, 3]])
        check_sum(5, again)
    check_sum(6)


def test_fr_141_split_group(pool: Pool) -> None:
    pool.run(4, split)


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([], "at least one list of ranks"),
        ([[0], []], "none of them empty"),
        ([[0, 3]], r"ranks of the group are 0 \.\. 2"),
        ([[-1, 0]], r"ranks of the group are 0 \.\. 2"),
        ([[0, 1], [1, 2]], "one sub-group only"),
        ([[0, 0]], "one sub-group only, and once"),
        ([0, 1], "expected lists of ranks"),
        ([["0"]], "expected lists of ranks"),
        (None, "expected lists of ranks"),
    ],
)
def test_fr_141_bad_splits_are_refused_everywhere(pool: Pool, lists: Any, words: str) -> None:
    pool.run(3, refuse_split, lists, words)


def refuse_split(rank: int, n: int, lists: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mccl.split_group(split_ranks=lists)
    # One rank alone is wrong: the others are told.
    wrong = rank == 1
    with pytest.raises(ValueError if wrong else mccl.MCCLMismatchError, match=words if wrong else "rank 1"):
        mccl.split_group(split_ranks=lists if wrong else [[0, 1, 2]])
    check_sum(8)


def disagree(rank: int, n: int) -> None:
    lists = [[0, 1], [2, 3]] if rank != 2 else [[0, 2], [1, 3]]
    with pytest.raises(mccl.MCCLMismatchError) as caught:
        mccl.split_group(split_ranks=lists)
    text = str(caught.value)
    assert "[[0, 1], [2, 3]]" in text and "[[0, 2], [1, 3]]" in text, text
    assert (f"rank {rank}/{n}" in text) and ("rank 0" if rank == 2 else "rank 2") in text, text
    check_sum(8)


def test_fr_141_ranks_that_split_differently_are_told(pool: Pool) -> None:
    pool.run(4, disagree)


# ---- FR-142: options as callers expect them, a group inside a wrapper ----


def test_fr_142_options_have_what_callers_get_and_set() -> None:
    options = mccl.MCCLOptions()
    assert options.backend == "mccl"
    assert (options.group_name, options.global_ranks_in_group, options._timeout) == (None, None, None)
    assert options.is_high_priority_stream is False
    options.group_name = "a"
    options.global_ranks_in_group = [3, 1]
    options._timeout = timedelta(seconds=3)
    options.is_high_priority_stream = True
    assert options.timeout == options._timeout == timedelta(seconds=3)
    assert (options.group_name, options.global_ranks_in_group) == ("a", [3, 1])
    assert options.is_high_priority_stream is True
    assert options.settings == {}, "none of these is a setting of the library"
    with pytest.raises(TypeError, match="is_high_priority"):
        options.is_high_priority = True


def read_back(rank: int, n: int) -> None:
    """What torch and wrappers read from a group's backend."""
    options = mccl.MCCLOptions(timeout=timedelta(seconds=21))
    group = dist.new_group([2, 0], pg_options=options)
    if rank == 1:
        return
    found = group._get_backend(torch.device("cpu")).options
    assert found.global_ranks_in_group == [0, 2]
    assert found.group_name == group.group_name
    assert found._timeout == timedelta(seconds=21)


def test_fr_142_options_of_a_group_tell_its_members(pool: Pool) -> None:
    pool.run(3, read_back)


class Reconfigurable(dist.ProcessGroup):
    """As fault-tolerance layers have it: one group for the program, exchanged inside when members change."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.inner: Any = None

    def configure(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        if self.inner is not None:
            self.inner.abort()
        wanted = dist.distributed_c10d._DistributedBackendOptions()
        wanted.store = dist.PrefixStore(name, store)
        wanted.group_rank, wanted.group_size = rank, size
        wanted.timeout = GROUP_TIMEOUT
        wanted.group_id = name
        options = mccl.MCCLOptions(group_name=name, global_ranks_in_group=list(range(size)))
        self.inner = dist.Backend._plugins["MCCL"].creator_fn(wanted, options)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self.inner.allreduce(tensors, opts)

    def size(self) -> int:
        return int(self.inner.size())


def reconfigure(rank: int, n: int, store: dist.Store) -> None:
    wrapper = Reconfigurable()
    for turn in range(10):
        size = (3, 2, 4)[turn % 3]
        if rank < size:
            wrapper.configure(store, f"turn{turn}", rank, size)
            assert wrapper.size() == size
            value = tensor(rank, 2000, F32, salt=turn)
            opts = dist.AllreduceOptions()
            opts.reduceOp = dist.ReduceOp.SUM
            work = wrapper.allreduce([value], opts)
            assert work.wait()
            assert_same(value, reduced("sum", size, 2000, F32, salt=turn), turn)
        # The layer above agrees on the next members before anybody leaves the last ones.
        if store.add(f"through{turn}", 1) == n:
            store.set(f"next{turn}", "")
        store.wait([f"next{turn}"])
    wrapper.inner.shutdown()


def test_fr_142_a_wrapper_reconfigures_ten_times(pool: Pool) -> None:
    pool.run(4, reconfigure, group=False)


def lose_one(rank: int, n: int, store: dist.Store) -> None:
    """A rank goes in the middle of an operation; the rest configure without it and go on."""
    wrapper = Reconfigurable()
    wrapper.configure(store, "before", rank, n)
    if rank == n - 1:
        wrapper.inner.abort()
        return
    with pytest.raises(mccl.MCCLError, match=f"rank {n - 1}"):
        wrapper.allreduce([tensor(rank, 10, F32)]).wait()
    wrapper.configure(store, "after", rank, n - 1)
    value = tensor(rank, 300, F32)
    wrapper.allreduce([value]).wait()
    assert_same(value, reduced("sum", n - 1, 300, F32), "after")
    wrapper.inner.shutdown()


def test_fr_142_a_wrapper_goes_on_without_a_lost_rank(pool: Pool) -> None:
    pool.run(4, lose_one, group=False)

"""The rest of torch.distributed: blocks, sub-groups, meshes, any root, time-outs, one life after another."""

from __future__ import annotations

import itertools
import random
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.device_mesh import init_device_mesh

import mccl
from patterns import MAX, SUM, assert_same, reduced, tensor, torch_op
from ranks import GROUP_TIMEOUT, Pool

F32 = torch.float32
CPU = torch.device("cpu")
SIZES = [2, 3, 4]


def in_order(check: Any) -> str:
    return str(check.__name__)[6:]


# ---- every collective on a group, with every root --------------------------------------------------------


def total(members: list[int], count: int, salt: int, op: str = "sum") -> torch.Tensor:
    """Over the members, which are ranks of the world."""
    stack = torch.stack([tensor(m, count, F32, salt=salt) for m in members])
    return stack.amax(dim=0) if op == "max" else stack.sum(dim=0)


def rows(source: int, target: int, salt: int) -> int:
    """That one member sends to another in all_to_all: none in a third of the cases."""
    return (source * 2 + target + salt) % 3


Pending = tuple[str, Any, Callable[[], None]]  # what it is, its Work, a check of the result when it is done


def begin_all(group: Any, salt: int) -> Iterator[Pending]:
    """Begins every collective on `group`, those with a root for every root. Data is that of world ranks."""
    members = dist.get_process_group_ranks(group)
    me, n, i = dist.get_rank(), len(members), dist.get_rank(group)

    def same(what: str, got: torch.Tensor, expected: torch.Tensor) -> Callable[[], None]:
        return lambda: assert_same(got, expected, (what, members, salt))

    def all_same(what: str, got: list[torch.Tensor], expected: list[torch.Tensor]) -> Callable[[], None]:
        def check() -> None:
            for position, pair in enumerate(zip(got, expected)):
                assert_same(*pair, (what, position, members, salt))

        return check

    for op, name in ((SUM, "sum"), (MAX, "max")):
        value = tensor(me, 41, F32, salt=salt)
        work = dist.all_reduce(value, op, group=group, async_op=True)
        yield f"all_reduce {name}", work, same("all_reduce", value, total(members, 41, salt, name))

    for root, source in enumerate(members):
        value = tensor(me, 23 + root, F32, salt=salt)
        work = dist.broadcast(value, group=group, group_src=root, async_op=True)
        yield f"broadcast {root}", work, same("broadcast", value, tensor(source, 23 + root, F32, salt=salt))

        value = tensor(me, 19 + root, F32, salt=salt)
        expected = total(members, 19 + root, salt) if i == root else value.clone()
        work = dist.reduce(value, group=group, group_dst=root, async_op=True)
        yield f"reduce {root}", work, same("reduce", value, expected)

        parts = [torch.empty(3 + j) for j in range(n)] if i == root else None
        work = dist.gather(
            tensor(me, 3 + i, F32, salt=salt), parts, group=group, group_dst=root, async_op=True
        )
        sent = [tensor(m, 3 + j, F32, salt=salt) for j, m in enumerate(members)]
        yield f"gather {root}", work, all_same("gather", parts or [], sent if i == root else [])

        got = torch.empty(2 + i)
        sent = [tensor(source, 2 + j, F32, salt=salt + j) for j in range(n)]
        inputs = sent if i == root else None
        work = dist.scatter(got, inputs, group=group, group_src=root, async_op=True)
        yield f"scatter {root}", work, same("scatter", got, sent[i])

    parts = [torch.empty(4 + j) for j in range(n)]
    work = dist.all_gather(parts, tensor(me, 4 + i, F32, salt=salt), group=group, async_op=True)
    sent = [tensor(m, 4 + j, F32, salt=salt) for j, m in enumerate(members)]
    yield "all_gather", work, all_same("all_gather", parts, sent)

    whole = torch.empty(5 * n)
    work = dist.all_gather_into_tensor(whole, tensor(me, 5, F32, salt=salt), group=group, async_op=True)
    expected = torch.cat([tensor(m, 5, F32, salt=salt) for m in members])
    yield "all_gather_into_tensor", work, same("all_gather_into_tensor", whole, expected)

    got = torch.empty(6 + i)
    inputs = [tensor(me, 6 + j, F32, salt=salt) for j in range(n)]
    work = dist.reduce_scatter(got, inputs, group=group, async_op=True)
    yield "reduce_scatter", work, same("reduce_scatter", got, total(members, 6 + i, salt))

    got = torch.empty(7)
    whole = torch.cat([tensor(me, 7, F32, salt=salt + j) for j in range(n)])
    work = dist.reduce_scatter_tensor(got, whole, group=group, async_op=True)
    yield "reduce_scatter_tensor", work, same("reduce_scatter_tensor", got, total(members, 7, salt + i))

    sends, receives = ([rows(i, j, salt) for j in range(n)], [rows(j, i, salt) for j in range(n)])
    outgoing = [tensor(me, 3 * sends[j], F32, salt=salt + j).view(-1, 3) for j in range(n)]
    incoming = [tensor(m, 3 * receives[j], F32, salt=salt + i).view(-1, 3) for j, m in enumerate(members)]
    got = torch.empty(sum(receives), 3)
    work = dist.all_to_all_single(got, torch.cat(outgoing), receives, sends, group=group, async_op=True)
    yield "all_to_all_single", work, same("all_to_all_single", got, torch.cat(incoming))

    parts = [torch.empty(receives[j], 3) for j in range(n)]
    work = dist.all_to_all(parts, outgoing, group=group, async_op=True)
    yield "all_to_all", work, all_same("all_to_all", parts, incoming)

    got = torch.empty(9)
    work = dist.irecv(got, group=group, group_src=(i - 1) % n, tag=salt)
    sending: Any = dist.isend(tensor(me, 9, F32, salt=salt), group=group, group_dst=(i + 1) % n, tag=salt)
    yield "irecv", work, same("irecv", got, tensor(members[(i - 1) % n], 9, F32, salt=salt))
    yield "isend", sending, lambda: None
    yield "barrier", dist.barrier(group=group, async_op=True), lambda: None


def every_collective(group: Any, salt: int = 0) -> None:
    for what, work, check in begin_all(group, salt):
        assert work.wait(), what
        check()


def check_any_root_and_any_order(rank: int, n: int) -> None:
    """All in flight at once on several groups; each rank waits in an order of its own, and twice."""
    chance = random.Random(rank)
    pair = [r for r in range(n) if r != 1]
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group(pair)]
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    for salt in range(3):
        pending = list(itertools.chain(*(begin_all(group, salt + 4 * i) for i, group in enumerate(mine))))
        assert len(pending) > 17 * len(mine)
        chance.shuffle(pending)
        for what, work, check in pending:
            assert work.wait() and work.is_completed() and work.is_success(), what
            check()
        for _, work, check in pending:
            assert work.wait() and work.exception() is None
            check()
    assert not any(group._comm.pending for group in mine)


# ---- coalescing blocks ------------------------------------------------------------------------------------


def block_of_all_reduce(n: int, rank: int, group: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    value = tensor(rank, 10 * i, F32, salt=i)
    dist.all_reduce(value, group=group)
    return value, reduced("sum", n, 10 * i, F32, salt=i)


def block_of_max(n: int, rank: int, group: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    value = tensor(rank, 10 * i, F32, salt=i)
    dist.all_reduce(value, MAX, group=group)
    return value, reduced("max", n, 10 * i, F32, salt=i)


def block_of_all_gather(n: int, rank: int, group: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.empty(7 * i * n)
    dist.all_gather_into_tensor(whole, tensor(rank, 7 * i, F32, salt=i), group=group)
    return whole, torch.cat([tensor(r, 7 * i, F32, salt=i) for r in range(n)])


def block_of_reduce_scatter(n: int, rank: int, group: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    got = torch.empty(5 * i)
    whole = torch.cat([tensor(rank, 5 * i, F32, salt=i + r) for r in range(n)])
    dist.reduce_scatter_tensor(got, whole, group=group)
    return got, reduced("sum", n, 5 * i, F32, salt=i + rank)


def block_of_premul(n: int, rank: int, group: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """With another factor on each rank."""
    value = tensor(rank, 10 * i, F32, salt=i)
    dist.all_reduce(value, torch_op("premul", rank), group=group)
    return value, reduced("premul", n, 10 * i, F32, salt=i)


def block_of_messages(n: int, rank: int, group: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Received in another order than sent, one of them long. Only blocks with a device take these."""
    last = LENGTH_OF_BLOCK - 1
    counts = {j: 100_000 if j == 2 else 8 * j for j in range(LENGTH_OF_BLOCK)}
    got = torch.empty(counts[last - i])
    dist.isend(tensor(rank, counts[i], F32, salt=i), group=group, group_dst=(rank + 1) % n, tag=i)
    dist.irecv(got, group=group, group_src=(rank - 1) % n, tag=last - i)
    return got, tensor((rank - 1) % n, counts[last - i], F32, salt=last - i)


LENGTH_OF_BLOCK = 4
BLOCKS = [
    block_of_all_reduce,
    block_of_max,
    block_of_premul,
    block_of_all_gather,
    block_of_reduce_scatter,
    block_of_messages,
]


def check_coalescing(rank: int, n: int) -> None:
    """Each kind of block, with and without a device, whether or not the caller waits for it later."""
    for group in (dist.group.WORLD, dist.new_group(list(range(n))[::-1], sort_ranks=False)):
        me = dist.get_rank(group)
        for body, device, later in itertools.product(BLOCKS, (None, CPU, "cpu"), (False, True)):
            if body is block_of_messages and device is None:
                continue
            with dist._coalescing_manager(group=group, device=device, async_ops=later) as manager:
                pairs = [body(n, me, group, i) for i in range(LENGTH_OF_BLOCK)]
            if later:
                assert len(manager.works) == 1
                manager.wait()
            for i, (got, expected) in enumerate(pairs):
                assert_same(got, expected, (body.__name__, device, later, i))
        with dist._coalescing_manager(group=group, async_ops=True) as manager:
            pass  # nothing in it
        dist.barrier(group)


def check_coalescing_refused(rank: int, n: int) -> None:
    """Nothing of such a block is sent, and the group goes on."""
    value = tensor(rank, 4, F32)
    with pytest.raises(RuntimeError, match="same type"):
        with dist._coalescing_manager():
            dist.all_reduce(value)
            dist.all_gather_into_tensor(torch.empty(4 * n), value)
    for device in (None, CPU):
        with pytest.raises(TypeError, match=r"mccl all_reduce.*meta"):
            with dist._coalescing_manager(device=device):
                dist.all_reduce(value)
                dist.all_reduce(torch.empty(3, device="meta"))
    assert_same(value, tensor(rank, 4, F32), "untouched")
    every_collective(dist.group.WORLD)


def check_messages_beside_a_block(rank: int, n: int) -> None:
    """A block without a device does not collect messages: they have Works of their own."""
    value, got = tensor(rank, 10, F32), torch.empty(6)
    with dist._coalescing_manager():
        works: list[Any] = [
            dist.isend(tensor(rank, 6, F32), (rank + 1) % n),
            dist.irecv(got, (rank - 1) % n),
        ]
        dist.all_reduce(value)
        for work in works:
            work.wait()
        assert_same(got, tensor((rank - 1) % n, 6, F32), "in the block")
    assert_same(value, reduced("sum", n, 10, F32), "after it")


# ---- sub-groups -------------------------------------------------------------------------------------------


def check_new_subgroups(rank: int, n: int) -> None:
    for size in (size for size in range(1, n + 1) if n % size == 0):
        mine, groups = dist.new_subgroups(
            size, group_desc=f"of {size}", pg_options=mccl.MCCLOptions(chunk_bytes=8192)
        )
        first = rank // size * size
        assert len(groups) == n // size and mine is groups[rank // size]
        assert dist.get_process_group_ranks(mine) == list(range(first, first + size))
        assert mine.group_desc == f"of {size}" and mine._comm._setting("chunk_bytes") == "8192"
        every_collective(mine, size)
    for size in (0, n + 1, *((n - 1,) if n > 2 else ())):
        with pytest.raises(ValueError, match="group_size"):
            dist.new_subgroups(size)
    some: Any = dist.new_group([0, n - 1])
    if rank in (0, n - 1):
        with pytest.raises(ValueError, match="must not exceed the world size"):
            dist.new_subgroups(n + 1, group=some)
    dist.barrier()


def check_subgroups_by_enumeration(rank: int, n: int) -> None:
    """In any order, and not everybody need be in one."""
    plans = [[[n - 1, 0]], [[r] for r in range(n)], [list(range(0, n, 2)), list(range(1, n, 2))]]
    for salt, plan in enumerate(plans):
        mine, groups = dist.new_subgroups_by_enumeration(plan, timeout=timedelta(seconds=20))
        assert len(groups) == len(plan)
        expected = [members for members in plan if rank in members]
        assert (mine is None) == (not expected)
        if mine is not None:
            assert dist.get_process_group_ranks(mine) == sorted(expected[0])
            assert mine.timeout == timedelta(seconds=20)
            every_collective(mine, salt)
            dist.destroy_process_group(mine)
    with pytest.raises(ValueError, match="Rank 0 has appeared in both"):
        dist.new_subgroups_by_enumeration([[0], [0, 1]])
    every_collective(dist.group.WORLD)


def check_split_and_shrink(rank: int, n: int) -> None:
    """torch 2.13 splits groups of accelerators only, and says so; the group does not notice."""
    split: Any = dist.split_group
    with pytest.raises(RuntimeError, match=r"not safe to split|does not support splitting"):
        split(dist.group.WORLD, [[0], list(range(1, n))])
    with pytest.raises(ValueError, match="split_ranks cannot be None or empty"):
        split(dist.group.WORLD, [])
    world: Any = dist.group.WORLD
    world.bound_device_id = CPU  # what init_process_group(device_id=) would do
    with pytest.raises(RuntimeError, match="does not support splitting"):
        split(dist.group.WORLD, [[0], list(range(1, n))])
    if hasattr(dist, "shrink_group"):
        with pytest.raises((TypeError, RuntimeError), match=r"(?i)shrink"):
            dist.shrink_group([n - 1])
    every_collective(dist.group.WORLD)


MESHES = {
    2: [(2,), (1, 2), (2, 1, 1)],
    3: [(3,), (3, 1), (1, 3, 1)],
    4: [(4,), (2, 2), (4, 1), (2, 1, 2), (1, 2, 2)],
}


def check_meshes(rank: int, n: int) -> None:
    """Every collective along every dimension, every part, and dimensions that are made one."""
    for shape in MESHES[n]:
        names = ("x", "y", "z")[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        ranks, here = torch.arange(n).view(shape), mesh.get_coordinate()
        assert here is not None and int(ranks[tuple(here)]) == rank and torch.equal(mesh.mesh, ranks)
        for i, name in enumerate(names):
            line = [(*here[:i], k, *here[i + 1 :]) for k in range(shape[i])]
            members = [int(ranks[at]) for at in line]
            part = mesh[name]
            assert part.get_local_rank() == mesh.get_local_rank(name) == here[i]
            for group in (
                mesh.get_group(i),
                mesh.get_group(name),
                part.get_group(),
                mesh.get_all_groups()[i],
            ):
                assert dist.get_process_group_ranks(group) == members, (shape, name)
            every_collective(part.get_group(), i)
        if len(shape) > 1:
            flat = mesh._flatten("all")
            assert flat.size() == n and flat.get_local_rank() == rank
            every_collective(flat.get_group(), 5)
        for two in itertools.combinations(names, 2):
            flat = mesh[two]._flatten("".join(two))
            fixed = [k for k, name in enumerate(names) if name not in two]
            members = [
                int(ranks[at])
                for at in itertools.product(*map(range, shape))
                if all(at[k] == here[k] for k in fixed)
            ]
            assert dist.get_process_group_ranks(flat.get_group()) == members, (shape, two)
            every_collective(flat.get_group(), 6)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "check",
    [
        check_any_root_and_any_order,
        check_coalescing,
        check_coalescing_refused,
        check_messages_beside_a_block,
        check_new_subgroups,
        check_subgroups_by_enumeration,
        check_split_and_shrink,
        check_meshes,
    ],
    ids=in_order,
)
def test_groups(pool: Pool, n: int, check: Any) -> None:
    pool.run(n, check)


# ---- time-outs --------------------------------------------------------------------------------------------

SHORT, SHORT_TEXT = timedelta(milliseconds=150), "150ms"


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    made.timeout = SHORT
    for name, value in values.items():
        setattr(made, name, value)
    return made


def calls_with_options(group: Any, later: bool) -> dict[str, Callable[[], Any]]:
    """For rank 0, all of which wait for rank 1. The keys are words of the errors."""
    n = group.size()
    one, whole = torch.ones(2), torch.ones(2 * n)
    parts = list(torch.ones(n, 2).unbind())

    def made(kind: Any, **values: Any) -> Any:
        return options(kind, **values, **({} if later else {"asyncOp": False}))

    return {
        "all_reduce": lambda: group.allreduce([one], made(dist.AllreduceOptions)),
        "all_reduce ": lambda: group.allreduce_coalesced(
            [one, parts[0]], made(dist.AllreduceCoalescedOptions)
        ),
        "broadcast": lambda: group.broadcast([one], made(dist.BroadcastOptions, rootRank=1)),
        "reduce": lambda: group.reduce([one], made(dist.ReduceOptions, rootRank=0)),
        "all_gather": lambda: group.allgather([parts], [one], made(AllgatherOptions)),
        "all_gather ": lambda: group._allgather_base(whole, one, made(AllgatherOptions)),
        "gather": lambda: group.gather([parts], [one], made(dist.GatherOptions, rootRank=0)),
        "scatter": lambda: group.scatter([one], [], made(dist.ScatterOptions, rootRank=1)),
        "reduce_scatter": lambda: group.reduce_scatter([one], [parts], made(dist.ReduceScatterOptions)),
        "reduce_scatter ": lambda: group._reduce_scatter_base(one, whole, made(dist.ReduceScatterOptions)),
        "all_to_all": lambda: group.alltoall(parts, [one] * n, made(dist.AllToAllOptions)),
        "all_to_all ": lambda: group.alltoall_base(whole, whole.clone(), [], [], made(dist.AllToAllOptions)),
        "barrier": lambda: group.barrier(made(dist.BarrierOptions)),
    }


def check_each_calls_own_timeout(rank: int, n: int) -> None:
    """Far shorter than the group's, which is what the others would get."""
    world: Any = dist.group.WORLD
    for later in (False, True):
        for word in calls_with_options(world, later):
            group: Any = dist.new_group()
            if rank == 0:
                with pytest.raises(mccl.MCCLTimeoutError) as caught:
                    calls_with_options(group, later)[word]().wait()
                text = str(caught.value)
                assert text.startswith(word.strip()) and SHORT_TEXT in text and "rank 1" in text, (word, text)
                assert group.timeout > 100 * SHORT
            dist.barrier()
            dist.destroy_process_group(group)


def check_what_an_all_reduce_that_waits_is_told(rank: int, n: int) -> None:
    """In a group that is in use already, where a call takes the short way if it can."""
    group: Any = dist.new_group()
    dist.barrier(group=group)
    at_once = dist.AllreduceOptions()
    at_once.asyncOp = False
    value = torch.arange(3.0) + rank
    group.allreduce([value], at_once, op=dist.ReduceOp.MAX)
    assert value.tolist() == [n - 1, n, n + 1]
    dist.destroy_process_group(group)

    calls: list[Callable[[Any], Any]] = [
        lambda group: group.allreduce([torch.ones(2)], options(dist.AllreduceOptions, asyncOp=False)),
        lambda group: group.allreduce([torch.ones(2)], at_once, timeout=SHORT),
    ]
    for call in calls:
        group = dist.new_group()
        dist.barrier(group=group)
        if rank == 0:
            with pytest.raises(mccl.MCCLTimeoutError, match=f"all_reduce.*{SHORT_TEXT} for rank 1"):
                call(group)
        dist.barrier()
        dist.destroy_process_group(group)


def check_set_timeout(rank: int, n: int) -> None:
    """Of the group, at any time, and by every way that torch has to it."""
    long = timedelta(seconds=20)
    ways: dict[str, Callable[[Any, timedelta], None]] = {
        "group": lambda group, value: group.set_timeout(value),
        "backend": lambda group, value: group._get_backend(CPU)._set_default_timeout(value),
        "new name": lambda group, value: group._get_backend(CPU).set_timeout(value),
        "mccl": lambda group, value: mccl.set_timeout(value, group),
    }
    for name, way in ways.items():
        group: Any = dist.new_group()
        way(group, SHORT)
        assert group.timeout == SHORT == group._get_backend(CPU).options._timeout, name
        if rank == 0:
            with pytest.raises(mccl.MCCLTimeoutError, match=f"all_gather.*{SHORT_TEXT} for rank 1"):
                dist.all_gather([torch.empty(2) for _ in range(n)], torch.ones(2), group=group)
        dist.barrier()

        again: Any = dist.new_group()
        way(again, SHORT)
        way(again, long)
        if rank:
            time.sleep(0.3)
        every_collective(again)
        assert again.timeout == long and dist.group.WORLD.timeout == GROUP_TIMEOUT  # type: ignore[union-attr]

    group = dist.new_group()
    group.set_timeout(SHORT)
    group._add_ephemeral_timeout(long)  # for the next operation only
    if rank:
        time.sleep(0.3)
    dist.barrier(group)
    if rank == 0:
        with pytest.raises(mccl.MCCLTimeoutError, match=f"barrier.*{SHORT_TEXT}"):
            dist.barrier(group)
    dist.barrier()


def check_timeout_by_name(rank: int, n: int) -> None:
    """torch up to 2.13 sets it for its own backends only, says so, and then nothing has changed."""
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    group: Any = dist.new_group()
    before = group.timeout
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_timeout(SHORT, group)
    assert group.timeout == (before if caught else SHORT), [str(each.message) for each in caught]
    assert all("only supported for" in str(each.message) for each in caught)
    if caught:
        if rank:
            time.sleep(0.3)
        every_collective(group)
    dist.barrier()


@pytest.mark.parametrize(
    "check",
    [
        check_each_calls_own_timeout,
        check_what_an_all_reduce_that_waits_is_told,
        check_set_timeout,
        check_timeout_by_name,
    ],
    ids=in_order,
)
def test_timeouts(pool: Pool, check: Any) -> None:
    pool.run(2, check)


# ---- one life after another -------------------------------------------------------------------------------


def shutdown(group: Any) -> None:
    group.shutdown()
    with pytest.raises(mccl.MCCLError, match="destroyed"):
        group.barrier()
    dist.destroy_process_group()


def abort(group: Any) -> None:
    group.abort()
    with pytest.raises(mccl.MCCLAbortedError):
        group.barrier().wait()
    dist.destroy_process_group()


def abort_all(group: Any) -> None:
    """What people call who restart in the process."""
    dist.distributed_c10d._abort_process_group()
    with pytest.raises(mccl.MCCLAbortedError):
        group.barrier().wait()


def destroy(group: Any) -> None:
    dist.destroy_process_group()


ENDS = [destroy, shutdown, abort, abort_all]


def live_again(rank: int, n: int, store: dist.Store) -> None:
    """In another order of ranks each time, with sub-groups, left in every way, idle and busy."""
    for life, (busy, end) in enumerate(itertools.product((False, True), ENDS * 2)):
        me = (rank + life) % n if life % 2 else n - 1 - rank
        dist.init_process_group("mccl", store=store, rank=me, world_size=n, timeout=GROUP_TIMEOUT)
        world, pair = dist.group.WORLD, dist.new_group([0, n - 1])
        assert dist.get_rank() == me and world.group_name == "0" and not world._comm.pending
        every_collective(world, life % 4)
        if me in (0, n - 1):
            every_collective(pair, life % 4)
        kept: Any = None
        if busy and me == 0:  # a message that nobody sends
            kept = dist.irecv(torch.empty(3), 1, tag=77)
        dist.barrier()  # an abort would fail what another rank still waits for
        store.add(f"done{life}", 1)
        while store.add(f"done{life}", 0) < n:
            time.sleep(0.001)
        end(world)
        assert not dist.is_initialized()
        if kept is not None:
            with pytest.raises(mccl.MCCLError):
                kept.wait()


@pytest.mark.parametrize("n", SIZES)
def test_one_life_after_another(pool: Pool, n: int) -> None:
    pool.run(n, live_again, group=False)


# ---- anyone's message, and groups in several threads ------------------------------------------------------


def check_from_anyone_by_tag(rank: int, n: int) -> None:
    """The tag chooses, whoever sends; sources are ranks of the world, inside of groups too."""
    backwards = dist.new_group(list(range(n))[::-1], sort_ranks=False)
    for group in (dist.group.WORLD, backwards):
        if rank == 0:
            for tag in (9, 0, 2**31 - 1):
                sources = []
                for _ in range(n - 1):
                    got = torch.empty(12)
                    source = dist.recv(got, group=group, tag=tag)
                    assert_same(got, tensor(source, 12, F32, salt=tag % 10), (source, tag))
                    sources.append(source)
                assert sorted(sources) == list(range(1, n)), (tag, sources)
        else:
            works: list[Any] = [
                dist.isend(tensor(rank, 12, F32, salt=tag % 10), 0, group=group, tag=tag)
                for tag in (2**31 - 1, 0, 9)
            ]
            for work in works:
                work.wait()
    if rank == 0:  # several wait at once, and one that names its source goes first
        named = torch.empty(4)
        first: Any = dist.irecv(named, n - 1, tag=3)
        anyone = [torch.empty(4) for _ in range(n - 1)]
        others: list[Any] = [dist.irecv(each, tag=3) for each in anyone]
    dist.barrier()
    if rank:
        dist.send(tensor(rank, 4, F32), 0, tag=3)
        if rank == n - 1:
            dist.send(tensor(rank, 4, F32, salt=1), 0, tag=3)
    else:
        first.wait()
        assert_same(named, tensor(n - 1, 4, F32), "named")
        for work, got in zip(others, anyone):
            work.wait()
            source = work._source_rank()
            assert_same(got, tensor(source, 4, F32, salt=int(source == n - 1)), source)


def check_threads(rank: int, n: int) -> None:
    """Each with a group of its own: everything, blocks, and messages, at the same time."""
    groups: list[Any] = [dist.new_group() for _ in range(4)]
    failures: list[BaseException] = []

    def blocks(group: Any, salt: int) -> None:
        for device, body in (
            (CPU, block_of_messages),
            (None, block_of_all_reduce),
            (CPU, block_of_all_gather),
        ):
            with dist._coalescing_manager(group=group, device=device):
                pairs = [body(n, rank, group, i) for i in range(LENGTH_OF_BLOCK)]
            for got, expected in pairs:
                assert_same(got, expected, (body.__name__, salt))

    def use(i: int) -> None:
        try:
            for salt in range(6):
                (every_collective, blocks)[i % 2](groups[i], salt)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("check", [check_from_anyone_by_tag, check_threads], ids=in_order)
def test_messages_and_threads(pool: Pool, n: int, check: Any) -> None:
    pool.run(n, check)

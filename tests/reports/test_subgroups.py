"""Field reports on subgroups and ranks in them: FR-044, FR-045, FR-047, FR-048, FR-050."""

from __future__ import annotations

import os
import random
import re
import resource
import socket
import stat
import sys
import time
import warnings
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from zygote import Zygote

import mccl
from mccl import _lib
from mccl._comm import Communicator
from mccl._errors import check
from mccl._tensor import DTYPES
from mccl.torch import rendezvous
from patterns import SUM, assert_same, reduced, tensor
from ranks import Pool

F32 = torch.float32
MIB = 2**20 // 4  # elements of float32


# ---- FR-044: two ways to say who is the root ----


def make(members: list[int], local: bool, **more: Any) -> Any:
    """None on ranks that are no members."""
    if local and dist.get_rank() not in members:
        return None
    return dist.new_group(members, use_local_synchronization=local, sort_ranks=False, **more)


def summed(members: list[int], count: int, salt: int = 0) -> torch.Tensor:
    return torch.stack([tensor(rank, count, F32, salt=salt) for rank in members]).sum(0)


def check_roots(group: Any, members: list[int], rank: int) -> None:
    """Each rooted collective with each member as its root, said as rank of the world and of the group."""
    place = members.index(rank)
    assert group.rank() == dist.get_rank(group) == dist.get_group_rank(group, rank) == place
    assert dist.get_process_group_ranks(group) == members
    for index, root in enumerate(members):
        for salt, (src, dst) in enumerate(
            [({"src": root}, {"dst": root}), ({"group_src": index}, {"group_dst": index})]
        ):
            for count in (5, 100_000):
                what = (members, root, src, count)
                mine = tensor(rank, count, F32, salt=salt)
                got = mine.clone()
                dist.broadcast(got, group=group, **src)
                assert_same(got, tensor(root, count, F32, salt=salt), what)

                got = mine.clone()
                dist.reduce(got, group=group, **dst)
                assert_same(got, summed(members, count, salt) if rank == root else mine, what)

                outputs = [torch.empty(count) for _ in members] if rank == root else None
                dist.gather(mine, outputs, group=group, **dst)
                for of, output in zip(members, outputs or []):
                    assert_same(output, tensor(of, count, F32, salt=salt), (of, *what))

                inputs = [tensor(root, count, F32, salt=to) for to in members] if rank == root else None
                dist.scatter(got, inputs, group=group, **src)
                assert_same(got, tensor(root, count, F32, salt=rank), what)
            check_objects(group, members, rank, root, src, dst)


def check_objects(group: Any, members: list[int], rank: int, root: int, src: Any, dst: Any) -> None:
    objects: list[Any] = [f"of {rank}", rank]
    dist.broadcast_object_list(objects, group=group, **src)
    assert objects == [f"of {root}", root]
    gathered: list[Any] | None = [None] * len(members) if rank == root else None
    dist.gather_object(f"of {rank}", gathered, group=group, **dst)
    assert gathered in (None, [f"of {of}" for of in members])
    got: list[Any] = [None]
    parts = [f"{root} to {to}" for to in members] if rank == root else None
    dist.scatter_object_list(got, parts, group=group, **src)
    assert got == [f"{root} to {rank}"]


def check_messages(group: Any, members: list[int], rank: int) -> None:
    """From each member to the next, blocking and not, in batches, as objects."""
    place, size = members.index(rank), len(members)
    right, left = (place + 1) % size, (place - 1) % size
    for salt, (to, of) in enumerate(
        [
            ({"dst": members[right]}, {"src": members[left]}),
            ({"group_dst": right}, {"group_src": left}),
        ]
    ):
        expected = tensor(members[left], 30_000, F32, salt=salt)
        got = torch.empty(30_000)
        works: Any = [dist.isend(tensor(rank, 30_000, F32, salt=salt), group=group, **to)]
        works.append(dist.irecv(got, group=group, **of))
        for work in works:
            work.wait()
        assert_same(got, expected, (members, to))

        got = torch.empty(7)
        objects: list[Any] = [None]
        if place == 0:
            dist.send(tensor(rank, 7, F32), group=group, **to)
            dist.send_object_list([rank], group=group, **to)
        dist.recv(got, group=group, **of)
        assert dist.recv_object_list(objects, group=group, **of) == members[left]
        assert_same(got, tensor(members[left], 7, F32), (members, of))
        assert objects == [members[left]]
        if place != 0:
            dist.send(tensor(rank, 7, F32), group=group, **to)
            dist.send_object_list([rank], group=group, **to)

    for peers in ({"group_peer": right}, {"group_peer": left}), ((members[right],), (members[left],)):
        named: Any = [({}, p) if isinstance(p, tuple) else (p, ()) for p in peers]
        got = torch.empty(9)
        operations = [
            dist.P2POp(dist.isend, tensor(rank, 9, F32), *named[0][1], group=group, **named[0][0]),
            dist.P2POp(dist.irecv, got, *named[1][1], group=group, **named[1][0]),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert_same(got, tensor(members[left], 9, F32), (members, "batch"))


def check_order(group: Any, members: list[int], rank: int) -> None:
    """Whatever has one part per rank has them in the order of the group."""
    place, size = members.index(rank), len(members)
    outputs = [torch.empty(3) for _ in members]
    dist.all_gather(outputs, tensor(rank, 3, F32), group=group)
    whole = torch.empty(3 * size)
    dist.all_gather_into_tensor(whole, tensor(rank, 3, F32), group=group)
    expected = torch.cat([tensor(of, 3, F32) for of in members])
    assert_same(torch.cat(outputs), expected, members)
    assert_same(whole, expected, members)
    functional_whole = functional.all_gather_tensor(tensor(rank, 3, F32), 0, group)
    assert_same(functional_whole * 1, expected, members)

    got = torch.empty(4)
    dist.reduce_scatter_tensor(got, tensor(rank, 4 * size, F32), group=group)
    assert_same(got, summed(members, 4 * size)[4 * place :][:4], members)
    got = torch.empty(size)
    dist.all_to_all_single(got, torch.arange(size) * 10.0 + rank, group=group)
    assert got.tolist() == [place * 10 + of for of in members]


def check_functional(group: Any, members: list[int], rank: int) -> None:
    """Roots of functional collectives are ranks of the group."""
    for index, root in enumerate(members):
        got = functional.broadcast(tensor(rank, 6, F32), index, group)
        assert_same(got * 1, tensor(root, 6, F32), members)
    leaf = tensor(rank, 6, F32).requires_grad_()
    got = functional.all_gather_tensor_autograd(leaf, 0, group)
    weights = tensor(rank + 4, 6 * len(members), F32)
    (got * weights).sum().backward()
    place = members.index(rank)
    total = torch.stack([tensor(of + 4, 6 * len(members), F32) for of in members]).sum(0)
    assert leaf.grad is not None
    assert_same(leaf.grad, total[6 * place :][:6], members)


def roots(rank: int, n: int, members: list[int], local: bool) -> None:
    group = make(members, local)
    if rank in members:
        for check in (check_roots, check_messages, check_order, check_functional):
            check(group, members, rank)
    dist.barrier()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("members", [[1, 3], [3, 1], [2, 3, 0], [3, 2, 1, 0]])
def test_fr_044_roots_as_ranks_of_the_world_and_of_the_group(
    pool: Pool, members: list[int], local: bool
) -> None:
    pool.run(4, roots, members, local)


# Up to torch 2.13 the gradient of broadcast compares the root, a rank of the world, with one of the group.
TORCH_MIXES_RANKS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


def gradients(rank: int, n: int, members: list[int]) -> None:
    """torch's own functions with gradients take ranks of the world."""
    group = make(members, False)
    if rank not in members:
        return
    weight, total = tensor(rank + 9, 8, F32), torch.stack([tensor(of + 9, 8, F32) for of in members]).sum(0)

    def check(call: Callable[[torch.Tensor], torch.Tensor], result: Any, gradient: Any) -> None:
        leaf = tensor(rank, 8, F32).requires_grad_()
        got = call(leaf)
        (got * weight).sum().backward()
        if result is not None:
            assert_same(got.detach(), result, (members, rank))
        if gradient is not None:
            assert leaf.grad is not None
            assert_same(leaf.grad, gradient, (members, rank))

    for index, root in enumerate(members):
        gradient = total if rank == root else torch.zeros(8)
        check(
            lambda leaf: differentiable.broadcast(leaf, root, group),  # noqa: B023
            tensor(root, 8, F32),
            None if TORCH_MIXES_RANKS and index != root else gradient,
        )
        check(
            lambda leaf: differentiable.reduce(leaf, root, SUM, group),  # noqa: B023
            summed(members, 8) if rank == root else None,
            tensor(root + 9, 8, F32),
        )
    check(lambda leaf: differentiable.all_reduce(leaf, SUM, group), summed(members, 8), total)


@pytest.mark.parametrize("members", [[1, 3], [3, 1], [0, 1, 3], [3, 1, 2]])
def test_fr_044_gradients_of_functional_forms(pool: Pool, members: list[int]) -> None:
    pool.run(4, gradients, members)


def wrong_roots(rank: int, n: int) -> None:
    """A root that is no member is refused on all members, and nothing was sent."""
    group: Any = make([3, 1], False)
    if rank not in (1, 3):
        return
    for call in (
        lambda: dist.broadcast(torch.ones(1), 2, group=group),
        lambda: dist.reduce(torch.ones(1), 0, group=group),
        lambda: dist.send(torch.ones(1), 2, group=group),
        lambda: dist.broadcast(torch.ones(1), group=group, group_src=2),
        lambda: dist.reduce(torch.ones(1), group=group, group_dst=-1),
        lambda: dist.recv(torch.ones(1), group=group, group_src=3),
        lambda: dist.broadcast_object_list([1], 0, group=group),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            call()
    check_order(group, [3, 1], rank)


def test_fr_044_a_root_outside_the_group_is_refused(pool: Pool) -> None:
    pool.run(4, wrong_roots)


# ---- FR-045: a call on a group that one is not in ----


def outsiders(rank: int, n: int) -> None:
    members = [2, 3]
    group: Any = dist.new_group(members)
    one: Any = torch.full((2,), 5.0)
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(one, 2, group=group),
        "barrier": lambda: dist.barrier(group),
        "all_reduce": lambda: dist.all_reduce(one, group=group),
        "reduce": lambda: dist.reduce(one, 3, group=group),
        "all_gather": lambda: dist.all_gather([one, one], one, group=group),
        "gather": lambda: dist.gather(one, None, 2, group=group),
        "scatter": lambda: dist.scatter(one, None, 2, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(one, [one, one], group=group),
        "all_to_all": lambda: dist.all_to_all([one, one], [one, one], group=group),
        "all_gather_object": lambda: dist.all_gather_object([None, None], 1, group=group),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], 2, group=group),
        "monitored_barrier": lambda: mccl.monitored_barrier(group),
        "isend": lambda: dist.isend(one, 2, group=group),
        "irecv": lambda: dist.irecv(one, 2, group=group),
    }
    if rank not in members:
        for name, call in calls.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert call() is None, name
            words = [str(warning.message) for warning in caught]
            assert any(f"global rank {rank}" in text and "not" in text for text in words), (name, words)
        assert one.tolist() == [5.0, 5.0]
    else:
        for check in (check_roots, check_messages, check_order):
            check(group, members, rank)
    dist.barrier()


def test_fr_045_calls_of_ranks_that_are_no_members(pool: Pool) -> None:
    pool.run(4, outsiders)


# ---- FR-047: many groups in flight, in another order on each rank ----


def opposite(rank: int, n: int, count: int, rounds: int, groups: int) -> None:
    all_groups = [dist.new_group() for _ in range(groups)]
    for turn in range(rounds):
        values = [tensor(rank, count, F32, salt=turn + i) for i in range(groups)]
        order = list(range(groups))
        if groups > 2:
            random.Random(turn * n + rank).shuffle(order)
        elif rank % 2:
            order.reverse()
        works: dict[int, Any] = {}
        for i in order:
            works[i] = dist.all_reduce(values[i], group=all_groups[i], async_op=True)
        for i in reversed(order) if turn % 2 else order:
            works[i].wait()
        for i, value in enumerate(values):
            assert_same(value, reduced("sum", n, count, F32, salt=turn + i), (turn, i))


@pytest.mark.parametrize(
    ("n", "count", "rounds", "groups"), [(2, 64 * MIB, 4, 2), (2, MIB, 100, 2), (3, 50_000, 40, 8)]
)
def test_fr_047_groups_in_opposite_order(pool: Pool, n: int, count: int, rounds: int, groups: int) -> None:
    pool.run(n, opposite, count, rounds, groups)


def overlapping(rank: int, n: int, count: int) -> None:
    """Pairs in a circle: an order between groups would deadlock. And messages beside."""
    pairs = [[i, (i + 1) % n] for i in range(n)]
    groups = [dist.new_group(pair, sort_ranks=False) for pair in pairs]
    for turn in range(20):
        works: list[Any] = []
        checks = []
        for i in (rank, (rank - 1) % n) if turn % 2 else ((rank - 1) % n, rank):
            pair, salt = pairs[i], turn * n + i
            value = tensor(rank, count, F32, salt=salt)
            if (turn + i) % 3 == 0:
                works.append(dist.broadcast(value, pair[1], group=groups[i], async_op=True))
                checks.append((value, tensor(pair[1], count, F32, salt=salt)))
            else:
                works.append(dist.all_reduce(value, group=groups[i], async_op=True))
                checks.append((value, summed(pair, count, salt)))
            peer = pair[pair[0] == rank]
            got = torch.empty(count)
            works.append(dist.irecv(got, peer, group=groups[i], tag=i))
            works.append(dist.isend(tensor(rank, count, F32, salt=salt + 1), peer, group=groups[i], tag=i))
            checks.append((got, tensor(peer, count, F32, salt=salt + 1)))
        total = tensor(rank, 100, F32, salt=turn)
        works.append(dist.all_reduce(total, async_op=True))
        checks.append((total, reduced("sum", n, 100, F32, salt=turn)))
        for work in works[:: 1 if rank % 2 else -1]:
            work.wait()
        for i, (got, expected) in enumerate(checks):
            assert_same(got, expected, (turn, i))


@pytest.mark.parametrize("count", [10, MIB])
def test_fr_047_overlapping_groups(pool: Pool, count: int) -> None:
    pool.run(3, overlapping, count)


# ---- FR-048: many ranks on one host, and few descriptors ----


def descriptors() -> tuple[int, int]:
    """How many are open, and how many of them listen."""
    opened = os.listdir("/proc/self/fd")
    listening = 0
    for name in opened:
        try:
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    listening += one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:  # the one of listdir() is closed
            continue
    return len(opened) - 1, listening


def meet(store: dist.Store, rank: int, n: int, name: str, timeout_ms: int = 60_000) -> Communicator:
    """A group as init_process_group makes it, without the time that torch takes beside, and one sum."""
    own = dist.PrefixStore(name, store)
    comm = rendezvous.meet(own, rank, n, name, timeout_ms, "listen_addr=loopback")
    value = tensor(rank, 500, F32)
    pointer = value.data_ptr()
    check(_lib.lib().mccl_all_reduce(pointer, pointer, 500, DTYPES[F32], 0, comm.handle, None, None))
    assert_same(value, reduced("sum", n, 500, F32), name)
    return comm


def many_ranks(rank: int, n: int, port: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    before, _ = descriptors()
    comm = meet(store, rank, n, "first")
    opened, listening = descriptors()
    print(f"descriptors={opened - before} listening={listening}")
    # A second group, for which one rank has no descriptors left.
    if rank == 5:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 1024))
    try:
        meet(store, rank, n, "second", 3000)
    except mccl.MCCLError as error:
        print(error)
    if rank == 5:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    other = meet(store, rank, n, "third")
    check(_lib.lib().mccl_barrier(comm.handle, None, None))  # the first one has lost nothing
    other.destroy()
    comm.destroy()
    sys.stdout.flush()
    os._exit(0)  # unloading torch 64 times takes longer than all the rest


def test_fr_048_64_ranks_on_one_host_and_128_descriptors(zygote: Zygote) -> None:
    n = 64
    ends = zygote.run(n, many_ranks, timeout=90)
    for rank, end in enumerate(ends):
        first, *rest = [line for line in end.output.splitlines() if "WARN" not in line]
        found = re.fullmatch(r"descriptors=(\d+) listening=1", first)
        assert end.status == 0 and found and int(found[1]) <= 2 * (n - 1) + 6, end
        assert len(rest) == 1, end
        if rank == 5:
            assert re.search(r"rank 5 of 64.*`ulimit -n`\) from 128 to at least \d{3}$", rest[0]), end
        else:  # one that is told late says only that it is
            assert "second" in rest[0] and ("rank 5" in rest[0] or rank != 0), end


# ---- FR-050: who makes which groups, in which order ----


def pairs_of(turn: int) -> list[list[int]]:
    """Two random pairs of four ranks, in random order."""
    ranks = list(range(4))
    random.Random(turn).shuffle(ranks)
    return [ranks[:2], ranks[2:]]


def check_pair(rank: int, group: Any, members: list[int], salt: int) -> None:
    value = tensor(rank, 50, F32, salt=salt)
    dist.all_reduce(value, group=group)
    assert_same(value, summed(members, 50, salt), members)


def random_pairs(rank: int, n: int, local: bool) -> None:
    """Ten rounds: all ranks make both groups in one order, or each only its own."""
    kept = []
    for turn in range(10):
        for members in pairs_of(turn):
            group = make(members, local)
            if rank in members:
                kept.append((group, members, turn))
                check_pair(rank, *kept[-1])
    for row in kept:  # also when all of them are there
        check_pair(rank, *row)
    dist.barrier()


@pytest.mark.parametrize("local", [False, True])
def test_fr_050_random_pairs(pool: Pool, local: bool) -> None:
    pool.run(4, random_pairs, local)


def wrong_order(rank: int, n: int, how: str) -> list[tuple[str, str, float]]:
    """Each rank makes its own group only, or rank 3 makes both the other way round."""
    rows = []
    for turn in range(10 if how == "own" else 4):
        first, second = pairs_of(turn)
        order = [first, second]
        if how == "own":
            order = [pair for pair in order if rank in pair]
        elif rank == second[0]:
            order.reverse()
        started = time.monotonic()
        try:
            for members in order:
                dist.new_group(members, timeout=timedelta(seconds=10 if how == "own" else 1.5))
            rows.append(("", "", time.monotonic() - started))
        except mccl.MCCLError as error:
            rows.append((type(error).__name__, str(error), time.monotonic() - started))
        dist.distributed_c10d._world.group_count = 100 * (turn + 1)  # in step again
        dist.barrier()
    return rows


@pytest.mark.parametrize("how", ["own", "opposite"])
def test_fr_050_wrong_order_tells_both_member_lists(pool: Pool, how: str) -> None:
    for turn, rows in enumerate(zip(*pool.run(4, wrong_order, how))):
        pairs = [sorted(pair) for pair in pairs_of(turn)]
        wrong = [row for row in rows if row[0] == "MCCLMismatchError"]
        # A pair may have met before the others came; with the other order somebody may meet nobody.
        assert len(wrong) >= (2 if how == "own" else 1), (turn, pairs, rows)
        for kind, text, seconds in rows:
            assert seconds < 9, (turn, kind, text, seconds)
            if kind == "MCCLMismatchError":
                assert all(str(pair) in text for pair in pairs), (turn, pairs, text)
                assert "new_group" in text and "use_local_synchronization" in text, text
            elif kind or how == "own":
                assert kind in ("", "MCCLTimeoutError") and re.search("^$|waited 1.5 s for rank", text), text


def read_blob(rank: int, n: int, store: dist.Store, blob: bytes) -> tuple[str, str]:
    """Rank 1 finds it where the id of the group should be, and nobody replaces it."""
    own = dist.PrefixStore("blob", store)
    own.set(rendezvous.KEY, blob)
    try:
        rendezvous.meet(own, 1, 2, "blob", 2000, "")
    except mccl.MCCLError as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")


WHOLE = "mccl1:" + "00" * 512
BLOBS = {
    "nothing": b"",
    "truncated": _lib.unique_id_to_text(_lib.new_unique_id()).encode()[:-1],
    "half": _lib.unique_id_to_text(_lib.new_unique_id()).encode()[:500],
    "longer": _lib.unique_id_to_text(_lib.new_unique_id()).encode() + b"00",
    "zeros": WHOLE.encode(),
    "ones": WHOLE.replace("0", "f").encode(),
    "no hex": WHOLE.replace("0", "g").encode(),
    "version": WHOLE.replace("mccl1", "mccl2").encode(),
    "binary": bytes(range(256)) * 5,
    "newlines": b"\n" * 1030,
    "large": b"mccl1:" + b"0" * 1_000_000,
}


@pytest.mark.parametrize("blob", BLOBS)
def test_fr_050_a_blob_in_the_store_is_a_named_error(pool: Pool, blob: str) -> None:
    for kind, text in pool.run(1, read_blob, BLOBS[blob], group=False):
        assert kind.startswith("MCCL") and "rank 1/2 of group 'blob'" in text, (kind, text)
        assert rendezvous.KEY in text and len(text) < 500 and text.isprintable(), (kind, text)


def read_members(rank: int, n: int, blob: bytes) -> tuple[str, str]:
    """Something that is no list of members, where such a list should be."""
    world: Any = dist.group.WORLD
    name = f"blob {len(blob)}"
    own = dist.PrefixStore(name, world._store)
    members = rendezvous.Members([0, 1], "world")
    own.set("mccl/members/world", blob)
    try:
        rendezvous.meet(own, rank, n, name, 2000, "", members)
    except mccl.MCCLError as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("blob", ["nothing", "truncated", "binary", "newlines", "large"])
def test_fr_050_a_blob_for_members_is_a_named_error(pool: Pool, blob: str) -> None:
    for kind, text in pool.run(2, read_members, BLOBS[blob] if blob != "nothing" else b"[0, "):
        assert kind == "MCCLMismatchError" and "[0, 1]" in text and "of group 'blob" in text, (kind, text)
        assert len(text) < 500 and text.isprintable(), text

"""Field reports on object collectives: FR-144, FR-146."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist

import mccl
from patterns import assert_same, reduced, tensor
from ranks import Pool

F32 = torch.float32
CPU = torch.device("cpu")


def thing(rank: int, salt: int) -> Any:
    """Another size on each rank and in each round, from one byte of data to some kilobytes."""
    kinds: list[Any] = [
        None,
        b"",
        [],
        [""],
        [f"{rank}:{i}" for i in range((salt * 37 + rank * 11) % 300)],
        {"rank": rank, "nested": ({salt: b"\0" * (salt % 5000)}, [None, ...])},
        bytes((rank + i) % 256 for i in range(salt % 1000)),
        "é\0\U0001f600" * (rank + 1),
    ]
    return kinds[(salt + rank) % len(kinds)]


def call_all(rank: int, n: int, salt: int, make: Callable[[int, int], Any], group: Any = None) -> None:
    """Each object collective once, roots in turn; `make(rank, salt)` are the objects."""
    expected = [make(r, salt) for r in range(n)]
    root = salt % n
    everybody: list[Any] = ["?"] * n
    dist.all_gather_object(everybody, expected[rank], group=group)
    assert everybody == expected, (salt, rank)

    gathered: list[Any] | None = ["?"] * n if rank == root else None
    dist.gather_object(expected[rank], gathered, group=group, group_dst=root)
    assert gathered is None or gathered == expected, (salt, rank)

    objects = list(expected) if rank == root else ["?"] * n
    dist.broadcast_object_list(objects, group=group, group_src=root)
    assert objects == expected, (salt, rank)

    got: list[Any] = ["?"]
    dist.scatter_object_list(got, expected if rank == root else None, group=group, group_src=root)
    assert got == [expected[rank]], (salt, rank)

    to, other = (root + 1) % n, ["?", "?"]
    if rank == root:
        dist.send_object_list([expected[rank], salt], group=group, group_dst=to)
    elif rank == to:
        dist.recv_object_list(other, group=group, group_src=root)
        assert other == [expected[root], salt], (salt, rank)


def objects_beside_reductions(rank: int, n: int, rounds: int) -> None:
    busy = dist.new_group()
    flying: list[tuple[int, torch.Tensor, Any]] = []
    for salt in range(rounds):
        value = tensor(rank, 1 + salt * 331 % 70000, F32, salt=salt)
        flying.append((salt, value, dist.all_reduce(value, group=busy, async_op=True)))
        call_all(rank, n, salt, thing)
        if len(flying) == 4:
            for of, reduction, work in flying:
                work.wait()
                assert_same(reduction, reduced("sum", n, reduction.numel(), F32, salt=of), of)
            flying.clear()


def test_fr_144_objects_while_another_group_reduces(pool: Pool) -> None:
    pool.run(4, objects_beside_reductions, 200, timeout=60)  # 1000 object collectives


def text_lists(rank: int) -> Any:
    """Of 0, 1 and a million strings, and None."""
    if rank == 2:
        return [str(i) for i in range(1_000_000)]
    return [[], ["one"], ..., None][rank]


def many_strings(rank: int, n: int) -> None:
    everybody: list[Any] = ["?"] * n
    dist.all_gather_object(everybody, text_lists(rank))
    for r in range(n):
        assert everybody[r] == text_lists(r), r


def large_bytes(rank: int, n: int, size: int) -> None:
    """On one rank, and nothing or little on the others."""

    def check(got: Any) -> None:
        assert len(got) == size and got[: len(pattern)] == pattern and got[-len(pattern) :] == pattern

    pattern = bytes(range(251))
    repeats = size // len(pattern)
    size = repeats * len(pattern)
    large = pattern * repeats if rank == 1 else b""
    objects = [None, large, "end"] if rank == 1 else ["?"] * 3
    dist.broadcast_object_list(objects, src=1)
    check(objects[1])
    assert objects[::2] == [None, "end"]
    if n == 2:
        return  # enough, at its size
    gathered: list[Any] | None = ["?"] * n if rank == 0 else None
    dist.gather_object(large, gathered)
    if gathered is not None:
        check(gathered.pop(1))
        assert gathered == [b""] * (n - 1)
    objects = ["?"]
    dist.scatter_object_list(objects, [rank, large, b"", None][:n] if rank == 1 else None, src=1)
    if rank == 1:
        check(objects[0])
    else:
        assert objects == [[1, None, b"", None][rank]]
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.tolist() == [n] * 3


def test_fr_144_a_million_strings_beside_empty_lists(pool: Pool) -> None:
    pool.run(4, many_strings)


@pytest.mark.parametrize(("n", "mib"), [(4, 40), (2, 300)])
def test_fr_144_large_bytes_on_one_rank(pool: Pool, n: int, mib: int) -> None:
    pool.run(n, large_bytes, mib * 2**20)


def fails_to_load(*_: object) -> None:
    raise LookupError("this object cannot be loaded here")


class Unloadable:
    """Can be pickled, but not be loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return fails_to_load, (1,)


class Undumpable:
    """Cannot be pickled, which shows only in the middle of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise LookupError("this object cannot be pickled")


# What rank `odd` passes, and the others; rank 1 is the root.
OBJECT_CALLS: dict[str, Callable[[int, int, Any, Any], Any]] = {
    "all_gather": lambda rank, n, own, group: dist.all_gather_object([None] * n, own, group=group),
    "gather": lambda rank, n, own, group: dist.gather_object(
        own, [None] * n if rank == 1 else None, dst=1, group=group
    ),
    "broadcast": lambda rank, n, own, group: dist.broadcast_object_list([own, 3], src=1, group=group),
    "scatter": lambda rank, n, own, group: dist.scatter_object_list(
        [None], [own] * n if rank == 1 else None, src=1, group=group
    ),
    "send": lambda rank, n, own, group: (
        dist.send_object_list([own, 2], dst=0, group=group)
        if rank == 1
        else dist.recv_object_list([None, None], src=1, group=group)
        if rank == 0
        else None
    ),
}


def unpicklable(rank: int, n: int, what: str, then: str) -> tuple[str, str, float]:
    """Rank 1's object is at fault: it raises before it sends anything."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1.5))
    started = time.perf_counter()
    row = ("", "", 0.0)
    try:
        OBJECT_CALLS[what](rank, n, {"deep": [Undumpable()]} if rank == 1 else rank, group)
        assert rank not in (0, 1), "no error"
    except LookupError as error:
        assert rank == 1 and "cannot be pickled" in str(error), error
        if then == "abort":
            group.abort()
        elif then == "destroy":
            dist.destroy_process_group(group)
        row = ("LookupError", str(error), 0.0)
    except mccl.MCCLError as error:
        row = (type(error).__name__, str(error), time.perf_counter() - started)
    dist.barrier()  # the other group is not affected
    return row


@pytest.mark.parametrize("then", ["stay", "abort", "destroy"])
@pytest.mark.parametrize("what", OBJECT_CALLS)
def test_fr_144_an_unpicklable_object_ends_all_in_bounded_time(pool: Pool, what: str, then: str) -> None:
    rows = pool.run(3, unpicklable, what, then)
    kinds = {
        "stay": ["MCCLTimeoutError"],
        "abort": ["MCCLAbortedError"],
        "destroy": ["MCCLPeerLostError"],
    }[then]
    for rank in (0, 2):
        kind, text, seconds = rows[rank]
        if not kind and rank == 2 and what in ("gather", "send"):
            continue  # it needs nothing of rank 1
        assert kind in kinds and seconds < 4, (rank, rows[rank])
        assert "rank 1" in text and f"rank {rank}" in text, (rank, text)


def unloadable(rank: int, n: int) -> list[str]:
    """Raised where it is loaded, and nowhere else; the group stays in step."""
    raised = []
    for turn, (what, call) in enumerate(OBJECT_CALLS.items()):
        try:
            call(rank, n, Unloadable() if rank == 1 else rank, None)
        except LookupError:
            raised.append(what)
        value = tensor(rank, 10, F32, salt=turn)
        dist.all_reduce(value)
        assert_same(value, reduced("sum", n, 10, F32, salt=turn), what)
    call_all(rank, n, 5, thing)
    return raised


def test_fr_144_an_object_that_cannot_be_loaded_leaves_the_group_in_step(pool: Pool) -> None:
    # The root of a broadcast keeps its own object.
    assert pool.run(3, unloadable) == [
        ["all_gather", "broadcast", "scatter", "send"],
        ["all_gather", "gather", "scatter"],
        ["all_gather", "broadcast", "scatter"],
    ]


def disagreeing(rank: int, n: int, what: str) -> tuple[str, str]:
    """The last rank makes another call: lengths it never sent must not be taken for lengths."""
    odd = rank == n - 1
    group: Any = dist.new_group(timeout=timedelta(seconds=3))
    try:
        if what == "other call":
            call = OBJECT_CALLS["broadcast" if odd else "all_gather"]
            call(rank, n, "x" * 1000, group)
        elif what == "other length":
            dist.broadcast_object_list(["a"] if odd else ["a", "b"], src=0, group=group)
        elif what == "tensor":
            if odd:
                dist.broadcast(torch.full((n,), -(2**62)), src=0, group=group)
            else:
                dist.all_gather_object([None] * n, "x", group=group)
        dist.barrier(group=group)  # whoever only sends may learn it at its next call
    except mccl.MCCLError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("what", ["other call", "other length", "tensor"])
def test_fr_144_ranks_that_disagree_never_allocate_by_garbage(pool: Pool, what: str) -> None:
    for rank, (kind, text) in enumerate(pool.run(3, disagreeing, what)):
        assert kind == "MCCLMismatchError" and "rank 2" in text, (rank, kind, text)


def objects_in_subgroups(rank: int, n: int) -> None:
    for members in ([1, 3], [3, 1], [2, 0, 3]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        for salt in range(8):
            call_all(dist.get_rank(group), len(members), salt, thing, group)
        # Roots as ranks of the world.
        last = members[-1]
        objects: list[Any] = [f"of {rank}"]
        dist.broadcast_object_list(objects, src=last, group=group)
        assert objects == [f"of {last}"]
        gathered: list[Any] | None = ["?"] * len(members) if rank == last else None
        dist.gather_object(rank, gathered, dst=last, group=group)
        assert gathered in (None, dist.get_process_group_ranks(group)), (members, gathered)
        dist.destroy_process_group(group)
    dist.barrier()


def test_fr_144_objects_in_subgroups(pool: Pool) -> None:
    pool.run(4, objects_in_subgroups)


def tensors(rank: int, salt: int) -> dict[str, torch.Tensor]:
    base = tensor(rank, 60, F32, salt=salt)
    leaf = torch.nn.Parameter(base[:7].clone())
    return {
        "view": base.view(6, 10)[::2, 1:4],
        "transposed": base.view(6, 10).t(),
        "scalar": base[rank + 3],
        "empty": base[:0].view(0, 4),
        "bfloat16": base.bfloat16(),
        "complex": torch.complex(base, -base),
        "bool": base > 6,
        "leaf": leaf,
    }


def check_tensors(got: dict[str, torch.Tensor], rank: int, salt: int) -> None:
    for name, expected in tensors(rank, salt).items():
        assert got[name].device == CPU and type(got[name]) is type(expected), name
        assert got[name].requires_grad == expected.requires_grad, name
        assert_same(got[name].detach(), expected.detach(), (name, rank, salt))


def tensors_in_objects(rank: int, n: int, backend: str) -> None:
    group = dist.new_group(backend=backend)
    everybody: list[Any] = [None] * n
    dist.all_gather_object(everybody, tensors(rank, 1), group=group)
    for r in range(n):
        check_tensors(everybody[r], r, 1)
    gathered: list[Any] | None = [None] * n if rank == 2 else None
    dist.gather_object(tensors(rank, 2), gathered, dst=2, group=group)
    for r, row in enumerate(gathered or []):
        check_tensors(row, r, 2)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [tensors(r, 3) for r in range(n)] if rank == 0 else None, group=group)
    check_tensors(got[0], rank, 3)
    for salt, device in enumerate((None, CPU, torch.device("cpu", 0))):
        objects = [tensors(rank, salt) if rank == 0 else None]
        dist.broadcast_object_list(objects, src=0, group=group, device=device)
        check_tensors(objects[0], 0, salt)
        for use_batch in (False, True):
            if rank == 1:
                own = [tensors(1, salt), None]
                dist.send_object_list(own, dst=0, group=group, device=device, use_batch=use_batch)
            elif rank == 0:
                got = ["?", "?"]
                dist.recv_object_list(got, src=1, group=group, device=device, use_batch=use_batch)
                check_tensors(got[0], 1, salt)
                assert got[1] is None


@pytest.mark.parametrize("backend", ["mccl", "cpu:mccl"])
def test_fr_146_tensors_in_objects_come_back_on_the_cpu(pool: Pool, backend: str) -> None:
    pool.run(3, tensors_in_objects, backend)


def refused_device(rank: int, n: int) -> None:
    """A device that the group does not serve, on all ranks: refused, and nothing was sent."""
    with pytest.raises((TypeError, RuntimeError, NotImplementedError)) as caught:
        dist.broadcast_object_list([rank], src=0, device=torch.device("meta"))
    assert "meta" in str(caught.value), caught.value
    objects = [rank]
    dist.broadcast_object_list(objects, src=0)
    assert objects == [0]


def test_fr_146_a_device_that_is_not_served_is_refused(pool: Pool) -> None:
    pool.run(2, refused_device)

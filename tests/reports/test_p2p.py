"""Field reports about point to point: tags, order, handles, oneself, and receiving from anyone."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist

from patterns import assert_same, reduced, tensor
from ranks import Pool

F32 = torch.float32
MIB = 2**20 // 4  # elements of float32


def check_in_step(n: int, group: Any = None) -> None:
    """What every report ends with: the group's collectives are where they should be."""
    me = dist.get_rank(group)
    value = tensor(me, 33, F32, salt=5)
    dist.all_reduce(value, group=group)
    assert_same(value, reduced("sum", n, 33, F32, salt=5), "afterwards")


def failure(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Class and text of the error, and how long it took; "" without one."""
    started = time.monotonic()
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


# -- FR-035: matched by (peer, tag) -----------------------------------------------------------------------


def tags(rank: int, n: int) -> None:
    ones, zeros = torch.ones(5), torch.zeros(5)
    if rank == 0:
        works: list[Any] = [dist.isend(ones, 1, tag=1), dist.isend(zeros, 1, tag=2)]
    else:
        second, first = torch.full((5,), -1.0), torch.full((5,), -1.0)
        works = [dist.irecv(second, 0, tag=2), dist.irecv(first, 0, tag=1)]
    for work in works:
        work.wait()
    if rank == 1:
        assert second.tolist() == [0.0] * 5 and first.tolist() == [1.0] * 5

    sizes = [int(10 ** (6 * i / 99)) for i in range(100)]  # 1 .. 1e6
    if rank == 0:
        works = [dist.isend(tensor(0, sizes[tag], F32, salt=tag), 1, tag=tag) for tag in range(100)]
    else:
        got = {tag: torch.empty(sizes[tag]) for tag in reversed(range(100))}
        works = [dist.irecv(buffer, 0, tag=tag) for tag, buffer in got.items()]
    for work in works:
        work.wait()
    if rank == 1:
        for tag, buffer in got.items():
            assert_same(buffer, tensor(0, sizes[tag], F32, salt=tag), tag)
    check_in_step(n)


def tags_beyond_the_store(rank: int, n: int) -> None:
    """More than a receiver keeps for one sender, 4 MiB, does not get in the way of another tag."""
    count, each = 150, 15_000  # 60 KB, just small enough to be sent ahead
    if rank == 0:
        works = [dist.isend(tensor(0, each, F32, salt=i), 1, tag=7) for i in range(count)]
        dist.send(tensor(0, 3, F32), 1, tag=8)
        dist.send(tensor(0, MIB, F32), 1, tag=9)
        for work in works:
            work.wait()  # type: ignore[union-attr]
    else:
        large, small = torch.empty(MIB), torch.empty(3)
        dist.recv(small, 0, tag=8)
        dist.recv(large, 0, tag=9)
        assert_same(small, tensor(0, 3, F32), "small")
        assert_same(large, tensor(0, MIB, F32), "large")
        for i in range(count):  # of one tag in the order in which they were sent
            buffer = torch.empty(each)
            dist.recv(buffer, 0, tag=7)
            assert_same(buffer, tensor(0, each, F32, salt=i), i)
    check_in_step(n)


def tags_of_many(rank: int, n: int) -> None:
    """All pairs at once, each with its tags; receives posted by tag, by peer, and from anyone."""
    last = 2**31 - 1
    sent = [(peer, tag) for tag in (last, 0, 5) for peer in range(n) if peer != rank]
    received = [(peer, tag) for peer in reversed(range(n)) for tag in (5, last) if peer != rank]
    buffers = {key: torch.empty(2000) for key in received}
    operations = [dist.P2POp(dist.irecv, buffers[peer, tag], peer, tag=tag) for peer, tag in received]
    operations += [
        dist.P2POp(dist.isend, tensor(rank, 2000, F32, salt=tag % 100), peer, tag=tag) for peer, tag in sent
    ]
    works = dist.batch_isend_irecv(operations)
    sources = []
    for _ in range(n - 1):
        buffer = torch.empty(2000)
        sources.append(dist.recv(buffer))  # of tag 0
        assert_same(buffer, tensor(sources[-1], 2000, F32), "anyone")  # type: ignore[arg-type]
    for work in works:
        work.wait()
    assert sorted(sources) == [peer for peer in range(n) if peer != rank]  # type: ignore[type-var]
    for (peer, tag), buffer in buffers.items():
        assert_same(buffer, tensor(peer, 2000, F32, salt=tag % 100), (peer, tag))
    check_in_step(n)


def tags_inside_a_group(rank: int, n: int) -> None:
    """A tag means one thing in each group, and ranks in the calls are those the caller says."""
    group: Any = dist.new_group([2, 0], sort_ranks=False)  # ranks 0 and 1 are 2 and 0
    if rank == 0:
        dist.send(tensor(0, 4, F32), 2, group=group, tag=3)
        dist.send(tensor(0, 4, F32, salt=1), 2, tag=3)
        dist.send(tensor(0, 4, F32, salt=2), group=group, group_dst=0, tag=3)
    if rank == 2:
        buffers = [torch.empty(4) for _ in range(3)]
        dist.recv(buffers[1], 0, tag=3)
        dist.recv(buffers[0], group=group, group_src=1, tag=3)
        assert dist.recv(buffers[2], group=group, tag=3) == 0  # the sender's rank in the world
        for salt, buffer in enumerate(buffers):
            assert_same(buffer, tensor(0, 4, F32, salt=salt), salt)
    if rank != 1:
        peer = 2 - rank
        got = torch.empty(6)
        operations = [
            dist.P2POp(dist.irecv, got, group=group, group_peer=group.rank() ^ 1, tag=1),
            dist.P2POp(dist.isend, tensor(rank, 6, F32), peer, group=group, tag=1),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert_same(got, tensor(peer, 6, F32), "batch")
        check_in_step(2, group)
    check_in_step(n)


def test_fr_035_tags(pool: Pool) -> None:
    pool.run(2, tags)


def test_fr_035_tags_do_not_block_each_other(pool: Pool) -> None:
    pool.run(2, tags_beyond_the_store)


def test_fr_035_tags_of_many_peers(pool: Pool) -> None:
    pool.run(4, tags_of_many)


def test_fr_035_tags_inside_a_group(pool: Pool) -> None:
    pool.run(3, tags_inside_a_group)


# -- FR-036: messages of some ranks do not shift the collectives of all -----------------------------------


def exchange(rank: int, n: int) -> None:
    half = dist.new_group([0, 1, 2])
    for group, size in ((None, n), (half, 3)):
        if dist.get_rank(group) < 0:
            continue
        for i in range(3 if rank in (0, 1) else 0):
            got = torch.empty(10 + i)
            work: Any = dist.isend(tensor(rank, 10 + i, F32, salt=i), 1 - rank, group=group)
            dist.recv(got, 1 - rank, group=group)
            work.wait()
            assert_same(got, tensor(1 - rank, 10 + i, F32, salt=i), i)
        dist.barrier(group)
        check_in_step(size, group)
    if rank == 2:  # objects too
        dist.send_object_list(["one", {"two": 2}], 3)
    if rank == 3:
        objects: list[Any] = [None, None]
        assert dist.recv_object_list(objects, 2) == 2 and objects == ["one", {"two": 2}]
    everybody: list[Any] = [None] * n
    dist.all_gather_object(everybody, rank)
    assert everybody == list(range(n))
    dist.barrier()
    check_in_step(n)


def test_fr_036_messages_of_some_ranks(pool: Pool) -> None:
    pool.run(4, exchange)


# -- FR-037: both sides send first ------------------------------------------------------------------------


def both_send_first(rank: int, n: int, count: int) -> None:
    right, left = (rank + 1) % n, (rank - 1) % n
    total = tensor(rank, 1000, F32)
    got = torch.empty(count)
    works: list[Any] = [
        dist.isend(tensor(rank, count, F32), right),
        dist.all_reduce(total, async_op=True),
        dist.irecv(got, left),
    ]
    works[1].wait()  # progress at the same time, whoever is waited for first
    assert_same(total, reduced("sum", n, 1000, F32), "beside")
    for work in works:
        work.wait()
    assert_same(got, tensor(left, count, F32), "ring")
    check_in_step(n)


def many_sends_first(rank: int, n: int) -> None:
    right, left = (rank + 1) % n, (rank - 1) % n
    sizes = [1 + (i * 7919) % 40_000 for i in range(200)]  # up to 160 KB, 16 MB in all
    works: list[Any] = [dist.isend(tensor(rank, size, F32, salt=i), right) for i, size in enumerate(sizes)]
    got = [torch.empty(size) for size in sizes]
    works += [dist.irecv(buffer, left) for buffer in got]
    for work in works[::-1]:
        work.wait()
    for i, buffer in enumerate(got):
        assert_same(buffer, tensor(left, sizes[i], F32, salt=i), i)
    check_in_step(n)


@pytest.mark.parametrize(("n", "mib"), [(2, 64), (4, 8)])
def test_fr_037_both_send_first(pool: Pool, n: int, mib: int) -> None:
    pool.run(n, both_send_first, mib * MIB)


@pytest.mark.parametrize("n", [2, 3])
def test_fr_037_many_sends_before_the_first_receive(pool: Pool, n: int) -> None:
    pool.run(n, many_sends_first)


# -- FR-038: handles that nobody keeps --------------------------------------------------------------------

DROPPED = [10, 16_000, 700_000]  # sent ahead, just so, and only when the receiver is there


def dropped_handles(rank: int, n: int) -> None:
    def send() -> None:
        for i, count in enumerate(DROPPED):
            dist.isend(tensor(0, count, F32, salt=i), 1)
            gc.collect()

    def receive() -> list[torch.Tensor]:
        got = [torch.empty(count) for count in DROPPED]
        for buffer in got:
            dist.irecv(buffer, 0)
        return got

    def reduce() -> torch.Tensor:
        value = tensor(rank, 50_000, F32)
        dist.all_reduce(value, async_op=True)
        return value

    pg: Any = dist.group.WORLD
    if rank == 0:
        send()
    else:
        time.sleep(0.2)
        buffers = [torch.empty(count) for count in DROPPED]
        for work in [dist.irecv(buffer, 0) for buffer in buffers]:
            work.wait()  # type: ignore[union-attr]
        for i, buffer in enumerate(buffers):
            assert_same(buffer, tensor(0, DROPPED[i], F32, salt=i), ("sent", i))
    dist.barrier()
    buffers = receive() if rank else []
    gc.collect()
    if rank == 0:
        send()
    values = [reduce() for _ in range(3)]
    gc.collect()
    dist.barrier()
    pg._wait_for_pending_works()
    for i, buffer in enumerate(buffers):
        assert_same(buffer, tensor(0, DROPPED[i], F32, salt=i), ("received", i))
    for value in values:
        assert_same(value, reduced("sum", n, 50_000, F32), "reduced")
    check_in_step(n)


def sent_and_gone(rank: int, n: int) -> None:
    """The last thing a rank does is an isend; leaving the group delivers it."""
    if rank == 0:
        dist.isend(tensor(0, 9, F32), 1)
        dist.isend(tensor(0, 200_000, F32), 1, tag=1)
        dist.destroy_process_group()
        return
    time.sleep(0.3)
    for tag, count in enumerate((9, 200_000)):
        got = torch.empty(count)
        dist.recv(got, 0, tag=tag)
        assert_same(got, tensor(0, count, F32), count)


@pytest.mark.parametrize("body", [dropped_handles, sent_and_gone], ids=lambda body: body.__name__)
def test_fr_038_handles_that_are_dropped(pool: Pool, body: object) -> None:
    pool.run(2, body)


# -- FR-041: to oneself -----------------------------------------------------------------------------------


def to_oneself(rank: int, n: int) -> None:
    pg: Any = dist.group.WORLD
    for count, tag in itertools.product((0, 1, 16_384, 16_385, 300_000), (0, 6)):
        value, got = tensor(rank, count, F32), torch.full((count,), -1.0)

        def batch(value: Any = value, got: Any = got, tag: int = tag) -> None:
            operations = [
                dist.P2POp(dist.isend, value, rank, tag=tag),
                dist.P2POp(dist.irecv, got, rank, tag=tag),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        def plain(value: Any = value, got: Any = got, tag: int = tag) -> None:
            works: list[Any] = [dist.irecv(got, rank, tag=tag), dist.isend(value, rank, tag=tag)]
            for work in works:
                work.wait()

        for call in (batch, plain):  # torch refuses some of them
            kind, text, _ = failure(call)
            assert kind in ("", "ValueError"), (kind, text)
            if not kind:
                assert_same(got, value, (count, tag))
        got = torch.full((count,), -1.0)
        work = pg.send([value], rank, tag)
        pg.recv([got], rank, tag).wait()
        work.wait()
        assert_same(got, value, ("ours", count, tag))
        got = torch.full((count,), -1.0)
        work = pg.recv_anysource([got], tag)
        pg.send([value], rank, tag).wait()
        work.wait()
        assert_same(got, value, ("anyone", count, tag))
        assert work.source_rank() == rank
    kind, text, _ = failure(lambda: dist.send(value, rank))  # it would wait for its own receive
    assert kind == "ValueError" and "should not be the same as the rank" in text, text
    work = dist.isend(value, rank)
    got = torch.empty_like(value)
    assert dist.recv(got, rank) == rank
    work.wait()
    assert_same(got, value, "blocking")

    parts = [tensor(rank, 5 + r, F32, salt=r) for r in range(n)]
    blocks = [torch.empty(5 + rank) for _ in range(n)]  # all_to_all, made of messages
    works = [pg.send([part], r, 4) for r, part in enumerate(parts)]
    works += [pg.recv([block], r, 4) for r, block in enumerate(blocks)]
    for work in works:
        work.wait()
    for r, block in enumerate(blocks):
        assert_same(block, tensor(r, 5 + rank, F32, salt=rank), r)
    check_in_step(n)


@pytest.mark.parametrize("n", [1, 2])
def test_fr_041_to_oneself(pool: Pool, n: int) -> None:
    pool.run(n, to_oneself)


# -- FR-042: from anyone ----------------------------------------------------------------------------------


def from_anyone(rank: int, n: int) -> None:
    each = 50
    if rank:
        for i in range(each):
            dist.send(tensor(rank, 100, F32, salt=i), 0)
            if i == 0:
                dist.recv(torch.empty(1), 0)
    else:
        seen: dict[int, int] = {}
        order = []
        while len(order) < each * (n - 1):
            buffer = torch.empty(100)
            source = dist.recv(buffer)
            assert source is not None
            i = seen.get(source, 0)
            assert_same(buffer, tensor(source, 100, F32, salt=i), (source, i))
            seen[source] = i + 1
            order.append(source)
            if len(order) == n - 1:
                for peer in range(1, n):
                    dist.send(torch.ones(1), peer)
                time.sleep(0.3)  # now all have messages waiting here
        assert sorted(order[: n - 1]) == list(range(1, n))
        assert seen == dict.fromkeys(range(1, n), each)
    check_in_step(n)


def nobody_sends(rank: int, n: int, how: str) -> tuple[str, str, float]:
    """A receive from anyone ends: by its time-out, or by another thread that destroys or aborts the group."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1 if how == "timeout" else 20))
    result = ("", "", 0.0)
    if rank == 0:
        # the other ranks have to be there: all who leave would end it too
        receive = lambda: dist.recv(torch.empty(3), group=group)  # noqa: E731
        end: dict[str, Callable[[], Any]] = {
            "destroy": lambda: dist.destroy_process_group(group),
            "abort": group.abort,
            "shutdown": group.shutdown,
        }
        if how in end:
            thread = threading.Timer(0.5, end[how])
            thread.start()
        result = failure(receive)
        if how in end:
            thread.join()
    dist.barrier()
    check_in_step(n)  # the other group
    if how == "timeout" and rank == 0:
        again = failure(lambda: dist.all_reduce(torch.ones(1), group=group))
        assert again[0] == "MCCLTimeoutError" and again[2] < 1, again
    return result


def test_fr_042_from_anyone_names_the_sender(pool: Pool) -> None:
    pool.run(3, from_anyone)


@pytest.mark.parametrize("how", ["timeout", "destroy", "abort", "shutdown"])
def test_fr_042_from_anyone_ends_when_nobody_sends(pool: Pool, how: str) -> None:
    kind, text, seconds = pool.run(3, nobody_sends, how, timeout=25)[0]
    assert kind.startswith("MCCL") and seconds < 3.5, (kind, text, seconds)
    assert "recv" in text or how != "timeout", text
    assert (kind == "MCCLTimeoutError") == (how == "timeout"), (kind, text)


# -- their neighbours: sides that disagree ----------------------------------------------------------------


def messages_disagree(rank: int, n: int, what: str) -> tuple[str, str, float]:
    """A buffer that is too small, too large or of another dtype: both sides hear it, nothing is cut."""
    count = 40_000 if what.startswith("large") else 10
    changed = {"short": (count - 1, F32), "long": (count + 1, F32), "dtype": (count, torch.int32),
               "same bytes": (2 * count, torch.float16)}[what.partition(" ")[2]]  # fmt: skip
    if rank == 0:
        first = failure(lambda: dist.send(tensor(0, count, F32), 1))
    else:
        got = torch.full((changed[0],), 7, dtype=changed[1])
        first = failure(lambda: dist.recv(got, 0))
        assert bool((got == 7).all()), "a partial result"
    second = failure(lambda: dist.barrier())
    assert second[0] == "MCCLMismatchError" and second[2] < 5, second
    return first if first[0] else second  # a small send may have gone before anybody looked


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("what", ["short", "long", "dtype", "same bytes"])
def test_fr_035_sides_that_disagree(pool: Pool, size: str, what: str) -> None:
    words = {"short": "count=", "long": "count=", "dtype": "int32", "same bytes": "float16"}
    for kind, text, seconds in pool.run(2, messages_disagree, f"{size} {what}", timeout=20):
        assert kind == "MCCLMismatchError" and seconds < 5, (kind, text, seconds)
        assert words[what] in text and "send" in text and "recv" in text and "tag 0" in text, text

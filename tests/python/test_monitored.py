"""monitored_barrier: who is missing, what the others are told, and that the group goes on afterwards."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mccl
from ranks import Pool

SHORT = timedelta(seconds=0.5)


def text_of(group: Any, timeout: Any = SHORT, wait_all_ranks: bool = False) -> str:
    """Of the error; "" if the barrier passes."""
    try:
        mccl.monitored_barrier(group, timeout, wait_all_ranks)
    except mccl.MCCLTimeoutError as error:
        assert isinstance(error, dist.DistBackendError)
        return str(error)
    return ""


def check_in_step(group: Any = None) -> None:
    """The group's own operations have not noticed anything."""
    value = torch.tensor([float(dist.get_rank(group) + 1)])
    dist.all_reduce(value, group=group)
    n = dist.get_world_size(group)
    assert value.item() == n * (n + 1) / 2
    dist.barrier(group)


def check_is_a_barrier(rank: int, n: int) -> None:
    for late in range(n):
        if rank == late:
            time.sleep(0.3)
        else:
            started = time.monotonic()
        mccl.monitored_barrier(timeout=20)
        if rank != late:
            assert time.monotonic() - started > 0.25, (rank, late)
    for _ in range(20):
        mccl.monitored_barrier()
    check_in_step()


def check_names_the_missing(rank: int, n: int) -> None:
    """The first one, or with wait_all_ranks all of them."""
    for wait_all_ranks, word in ((False, "Rank 1 failed to pass"), (True, "Ranks 1, 3 failed to pass")):
        if rank in (0, 2):
            text = text_of(None, SHORT, wait_all_ranks)
            assert f"{word} monitoredBarrier in 500 ms" in text and "group '0'" in text, text
            assert f"[Rank {rank}]" in text and f"rank {rank}/{n}" in text, text
        dist.barrier()
        mccl.monitored_barrier(timeout=20)  # those that were missing are in step
        check_in_step()


def check_rank_0_is_missing(rank: int, n: int) -> None:
    if rank:
        started = time.monotonic()
        text = text_of(None, SHORT)
        assert 0.9 < time.monotonic() - started < 5
        assert f"Rank {rank} successfully reached monitoredBarrier" in text and "from rank 0" in text, text
    dist.barrier()
    if rank in (0, 1):  # nobody waits in the place where the others were
        assert "Rank 2 failed" in text_of(None, SHORT)
    dist.barrier()
    mccl.monitored_barrier(timeout=20)
    check_in_step()


def check_late(rank: int, n: int) -> None:
    """A rank that comes when the others have given up meets them at their second try."""
    if rank == n - 1:
        dist.recv(torch.empty(1), 0)
    else:
        assert f"Rank {n - 1} failed" in text_of(None, SHORT)
        if rank == 0:
            dist.send(torch.ones(1), n - 1)
    mccl.monitored_barrier(timeout=20)
    check_in_step()


def check_no_time(rank: int, n: int) -> None:
    if rank == 0:
        started = time.monotonic()
        assert "Rank 0 timed out in monitoredBarrier after 0 ms" in text_of(None, 0)
        assert time.monotonic() - started < 5
    dist.barrier()
    mccl.monitored_barrier(timeout=20)
    check_in_step()


def check_interrupted(rank: int, n: int) -> None:
    """Who leaves by Ctrl-C counts as missing."""
    if rank == 1:
        real = time.sleep

        def interrupted(_: float) -> None:
            raise KeyboardInterrupt

        time.sleep = interrupted  # type: ignore[assignment]
        try:
            with pytest.raises(KeyboardInterrupt):
                mccl.monitored_barrier()
        finally:
            time.sleep = real
    dist.barrier()
    if rank != 1:
        assert "Rank 1 failed" in text_of(None, SHORT)
    dist.barrier()
    mccl.monitored_barrier(timeout=20)


def check_subgroups(rank: int, n: int) -> None:
    """Ranks are those inside the group; groups do not disturb each other."""
    pair = dist.new_group([1, 3], timeout=SHORT)
    others = dist.new_group([0, 2, 3])
    alone = [dist.new_group([r]) for r in range(n)][rank]
    mccl.monitored_barrier(alone, 0)
    mccl.monitored_barrier(pair if rank in (1, 3) else dist.GroupMember.NON_GROUP_MEMBER)
    if rank == 1:  # the group's time-out
        text = text_of(pair, None)
        assert "Rank 1 failed to pass monitoredBarrier in 500 ms" in text and "rank 0/2" in text, text
    if rank in (0, 2):
        assert "Rank 2 failed" in text_of(others, SHORT)
    dist.barrier()
    for group, members in ((pair, (1, 3)), (others, (0, 2, 3))):
        if rank in members:
            mccl.monitored_barrier(group, 20)
            check_in_step(group)
    with pytest.raises(TypeError, match="expected a group of mccl, got int"):
        mccl.monitored_barrier(3)


def check_concurrent(rank: int, n: int) -> None:
    """Two groups, a thread each: in one of them a rank is missing."""
    groups = [dist.new_group() for _ in range(2)]
    texts: list[list[str]] = [[], []]

    def use(index: int) -> None:
        for _ in range(5):
            absent = index == 1 and rank == 1
            texts[index].append("absent" if absent else text_of(groups[index], 20 if index == 0 else SHORT))

    threads = [threading.Thread(target=use, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts[0] == [""] * 5, texts
    assert all("absent" in text or "Rank 1 failed" in text for text in texts[1]), texts
    dist.barrier()
    mccl.monitored_barrier(groups[1], 20)
    check_in_step(groups[1])


def check_again(rank: int, n: int, store: dist.Store) -> None:
    """Groups of the same name, one after the other, in the same store."""
    for i in range(3):
        dist.init_process_group("mccl", store=store, rank=rank, world_size=n)
        mccl.monitored_barrier(timeout=20)
        absent = (i + 1) % n
        if rank != absent:
            assert text_of(None, timedelta(seconds=0.2))
        dist.barrier()
        dist.destroy_process_group()


def check_after_failure(rank: int, n: int) -> None:
    """It tells who hangs also where the group's own operations have failed."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank != 1:
        with pytest.raises(mccl.MCCLTimeoutError):
            dist.all_reduce(torch.ones(1), group=group)
        assert "Rank 1 failed" in text_of(group, SHORT)
    dist.barrier()
    mccl.monitored_barrier(group, 20)


@pytest.mark.parametrize(
    "check",
    [
        check_is_a_barrier,
        check_rank_0_is_missing,
        check_late,
        check_no_time,
        check_interrupted,
        check_concurrent,
        check_after_failure,
    ],
    ids=lambda check: check.__name__[6:],
)
def test_monitored_barrier(pool: Pool, check: object) -> None:
    pool.run(3, check)


@pytest.mark.parametrize("check", [check_names_the_missing, check_subgroups], ids=["names", "subgroups"])
def test_monitored_barrier_of_some(pool: Pool, check: object) -> None:
    pool.run(4, check)


def test_monitored_barrier_after_init_again(pool: Pool) -> None:
    pool.run(2, check_again, group=False)

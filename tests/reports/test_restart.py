"""Field reports on start, re-init and restart: FR-095, FR-096, FR-098, FR-100, FR-102."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from zygote import Zygote, leaving

import mccl
from mccl import _lib
from mccl.torch import rendezvous
from patterns import assert_same, reduced, tensor
from ranks import Pool

F32 = torch.float32
ELASTIC = Path(__file__).with_name("elastic.py")


def check_sum(rank: int, n: int, salt: int = 0, group: Any = None) -> None:
    value = tensor(rank, 300, F32, salt=salt)
    dist.all_reduce(value, group=group)
    assert_same(value, reduced("sum", n, 300, F32, salt=salt), salt)


# ---- FR-095: elastic restart ----


def run_agents(agents: list[list[str]], timeout: float, **env: str) -> list[tuple[int, str]]:
    """Exit code and output of each torchrun. What has not ended at the limit is killed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
        for arguments in agents
    ]
    deadline = time.monotonic() + timeout
    try:
        outputs = [p.communicate(timeout=deadline - time.monotonic())[0] for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # an agent ends its workers, which have sessions of their own
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    return [(process.returncode, output) for process, output in zip(processes, outputs)]


@pytest.mark.parametrize(("apart", "plan"), [("0", "1@5,2@5,1@0,end"), ("1", "1@5,2@0,end")])
def test_fr_095_elastic_restarts_form_cleanly(tmp_path: Path, apart: str, plan: str) -> None:
    arguments = ["--nproc-per-node=3", "--max-restarts=3", str(ELASTIC), str(tmp_path), plan]
    ((status, output),) = run_agents(
        [["--standalone", *arguments]], timeout=120, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=apart
    )
    assert status == 0, output
    last = plan.count(",")
    assert sorted(re.findall(r"rank \d/3 is through in life \d", output)) == [
        f"rank {rank}/3 is through in life {last}" for rank in range(3)
    ], output


def free_port() -> int:
    return int(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)


def test_fr_095_only_one_of_two_agents_restarts(tmp_path: Path) -> None:
    port = free_port()
    common = [
        "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=fr095",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    agents = [[*common, str(ELASTIC), str(tmp_path), "1@5,1@0,end"]] * 2
    ends = run_agents(agents, timeout=120)
    output = "\n".join(output for _, output in ends)
    assert [status for status, _ in ends] == [0, 0], output
    assert output.count("is through in life 2") == 2, output


# ---- FR-096: the same store again ----


def cycle(rank: int, n: int, store: dist.Store, kind: str, path: str, cycles: int) -> None:
    if kind == "file":
        store = dist.FileStore(path, n)
    elif kind == "prefix":
        store = dist.PrefixStore("outer", dist.PrefixStore("inner", store))
    chance = random.Random(rank)
    for i in range(cycles):
        dist.init_process_group("mccl", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=20))
        check_sum(rank, n, i)
        if i % 5 == 1:  # others may begin the next cycle meanwhile
            time.sleep(chance.uniform(0, 0.05))
        if i % 3 == 0:
            check_sum(rank, n, i, dist.new_group())
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["tcp", "file", "prefix"])
def test_fr_096_cycles_with_one_store(pool: Pool, tmp_path: Path, kind: str) -> None:
    pool.run(3, cycle, kind, str(tmp_path / "store"), 50, group=False)


def test_fr_096_cycles_with_a_hash_store() -> None:
    """It is for threads of one process: each is a rank."""
    store, n, results = dist.HashStore(), 3, []

    def live(rank: int) -> None:
        for i in range(50):
            comm = rendezvous.meet(store, rank, n, "hash", 20_000, "")
            assert comm.is_open
            if i % 7 == rank:
                time.sleep(0.01)
            comm.destroy()
        results.append(rank)

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1, 2]


def init_by_url(rank: int, n: int, store: dist.Store, kind: str, url: str, port: int) -> None:
    own = {"RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    limit = timedelta(seconds=20)
    if kind == "env":
        os.environ.update(own)
        dist.init_process_group("mccl", init_method="env://", timeout=limit)
        for name in own:
            del os.environ[name]
    else:
        dist.init_process_group("mccl", init_method=url, rank=rank, world_size=n, timeout=limit)
    check_sum(rank, n)
    check_sum(rank, n, 1, dist.new_group())
    dist.barrier()
    dist.destroy_process_group()
    store.set(f"over{rank}", "")  # rank 0 has the server of tcp:// and env://
    store.wait([f"over{r}" for r in range(n)])


@pytest.mark.parametrize("kind", ["env", "tcp", "file"])
def test_fr_096_every_init_method(pool: Pool, tmp_path: Path, kind: str) -> None:
    port = free_port()
    url = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/store"}[kind]
    pool.run(3, init_by_url, kind, url, port, group=False)


def stale_id_of_the_living(rank: int, n: int, store: dist.Store, what: str) -> float:
    """The id that lies in the store has a maker that lives, but not as rank 0 of this group."""
    own = dist.PrefixStore("again", store)
    stale: Any = None
    if rank == 1:
        if what == "left":
            comm = rendezvous.meet(dist.HashStore(), 0, 1, "alone", 10_000, "")
            stale = _lib.new_unique_id()
            comm.destroy()
        elif what == "waits":
            stale = _lib.new_unique_id()
        text = "no id at all" if what == "garbage" else _lib.unique_id_to_text(stale)
        own.set(rendezvous.KEY, text)
        store.set("stale", "1")
    store.wait(["stale"])
    started = time.perf_counter()
    comm = rendezvous.meet(own, rank, n, "again", 20_000, "")
    seconds = time.perf_counter() - started
    comm.destroy()
    return seconds


@pytest.mark.parametrize("what", ["waits", "left"])
def test_fr_095_a_stale_id_whose_maker_lives(pool: Pool, what: str) -> None:
    assert max(pool.run(3, stale_id_of_the_living, what, group=False)) < 8


# ---- FR-098: file rendezvous ----


def with_file(rank: int, n: int, port: int, url: str, then: str) -> None:
    if then == "die in init" and rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "die in init":
        threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGKILL)).start()
    limit = timedelta(seconds=20)
    dist.init_process_group("mccl", init_method=url, rank=rank, world_size=n, timeout=limit)
    check_sum(rank, n)
    if then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "remove" and rank == 0:
        path = Path(url.removeprefix("file://"))
        path.unlink()
        path.parent.rmdir()
    leaving()
    if then == "remove" and n > 1:
        dist.barrier()
        dist.destroy_process_group()
    # n == 1: removed before the exit, and without destroy


@pytest.mark.parametrize("how", ["die", "die in init"])
def test_fr_098_left_over_file_of_killed_ranks(zygote: Zygote, tmp_path: Path, how: str) -> None:
    url = f"file://{tmp_path}/store"
    ends = zygote.run(2, with_file, url, how)
    assert [end.status for end in ends] == [-9, -9] and (tmp_path / "store").exists(), ends
    ends = zygote.run(2, with_file, url, "end")
    assert [end.status for end in ends] == [0, 0], ends
    assert all(end.seconds < 10 for end in ends), ends


@pytest.mark.parametrize("n", [1, 2])
def test_fr_098_file_removed_before_the_end(zygote: Zygote, tmp_path: Path, n: int) -> None:
    (tmp_path / "run").mkdir()
    for end in zygote.run(n, with_file, f"file://{tmp_path}/run/store", "remove"):
        assert end.status == 0 and end.seconds < 10 and end.output == "", end


# ---- FR-100: launch mistakes ----


def mistaken(
    index: int, _: int, store: dist.Store, ranks: list[int], size: int
) -> tuple[str, str, float, str]:
    """A process that was told the wrong rank."""
    me = f"{os.uname().nodename}:{os.getpid()}"
    time.sleep(0.1 * index)
    started = time.perf_counter()
    try:
        dist.init_process_group(
            "mccl", store=store, rank=ranks[index], world_size=size, timeout=timedelta(seconds=2)
        )
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - started, me
    return "", "", time.perf_counter() - started, me


@pytest.mark.parametrize(
    ("ranks", "size", "twice"),
    [([0, 0], 2, 0), ([0, 1, 1], 3, 1), ([1, 1, 0], 3, 1), ([0, 0, 1], 3, 0), ([0, 1, 0, 1], 4, 0)],
    ids=str,
)
def test_fr_100_duplicate_ranks_are_named_with_host_and_process(
    pool: Pool, ranks: list[int], size: int, twice: int
) -> None:
    rows = pool.run(len(ranks), mistaken, ranks, size, group=False)
    doubles = [me for rank, (*_, me) in zip(ranks, rows) if rank == twice]
    for kind, _, seconds, _ in rows:
        assert kind and seconds < 5, rows
    for rank, (kind, text, _, _) in zip(ranks, rows):
        if rank == twice or rank == 0:
            assert f"rank {twice} is there twice" in text, rows
            # Of two ranks 0 the one that came later cannot know that the other one is alive.
            assert kind == "MCCLMismatchError" or (twice == 0 and kind == "MCCLTimeoutError"), rows
            assert all(double in text for double in doubles), (doubles, text)


def test_fr_100_a_rank_that_was_never_started(pool: Pool) -> None:
    rows = pool.run(2, mistaken, [0, 2], 4, group=False)
    for rank, (kind, text, seconds, _) in zip((0, 2), rows):
        assert kind == "MCCLTimeoutError" and 1.5 < seconds < 5, rows
        assert rank == 2 or f"rank {rank} " in text, text
        assert "for rank 1, 3 to check in" in text, text
        assert f"0 ({rows[0][3]}), 2 ({rows[1][3]})" in text, text


def test_fr_100_rank_0_was_never_started(pool: Pool) -> None:
    rows = pool.run(2, mistaken, [1, 2], 3, group=False)
    for rank, (kind, text, seconds, _) in zip((1, 2), rows):
        assert kind == "MCCLTimeoutError" and 1.5 < seconds < 5, rows
        assert f"rank {rank}/3" in text and "rank 0" in text, text


def test_fr_100_a_rank_outside_the_group(pool: Pool) -> None:
    rows = pool.run(3, mistaken, [0, 1, 5], 3, group=False)
    assert rows[2][0] in ("ValueError", "MCCLArgumentError") and rows[2][2] < 2 and "5" in rows[2][1], rows
    for kind, text, seconds, _ in rows[:2]:
        assert kind == "MCCLTimeoutError" and 1.5 < seconds < 5, rows
        assert "for rank 2 to check in" in text and all(row[3] in text for row in rows[:2]), text


def other_size(rank: int, n: int, store: dist.Store) -> tuple[str, str]:
    with pytest.raises(mccl.MCCLError) as caught:
        dist.init_process_group(
            "mccl", store=store, rank=rank, world_size=3 + rank, timeout=timedelta(seconds=5)
        )
    return type(caught.value).__name__, str(caught.value)


def test_fr_100_world_sizes_that_differ(pool: Pool) -> None:
    for kind, text in pool.run(2, other_size, group=False):
        assert kind == "MCCLMismatchError" and "4 ranks" in text and "3" in text, (kind, text)


def env_with_rank(index: int, n: int, _: int, port: int, rank: int) -> None:
    own = {"RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(own)
    dist.init_process_group("mccl", timeout=timedelta(seconds=2))


def test_fr_100_two_stores_at_one_address(zygote: Zygote) -> None:
    """RANK=0 twice without torchrun: torch's own store fails first, in its words; it ends all the same."""
    for end in zygote.run(2, env_with_rank, free_port(), 0, timeout=25):
        assert end.status == 1 and "Error" in end.output, end


# ---- FR-102: the store's host leaves first ----


def leave_first(rank: int, n: int, _: int, port: int, how: str) -> None:
    url, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=20)
    dist.init_process_group("mccl", init_method=url, rank=rank, world_size=n, timeout=limit)
    check_sum(rank, n)
    if rank == 0:
        if how == "crash":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "destroy":
            dist.destroy_process_group()
        leaving()
        return
    if how == "crash":
        try:
            dist.all_reduce(torch.ones(5))
        except mccl.MCCLError as error:
            sys.exit(f"{type(error).__name__}: {error}")
        raise AssertionError("no error")
    time.sleep(1.5)
    if rank >= 2:  # those that are left may go on by themselves
        got = torch.empty(9)
        work = dist.isend(tensor(rank, 9, F32), 5 - rank)
        dist.recv(got, 5 - rank)
        work.wait()  # type: ignore[union-attr]
        assert_same(got, tensor(5 - rank, 9, F32), rank)
        time.sleep(0.2)
    leaving()
    if rank % 2:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["destroy", "exit"])
def test_fr_102_the_stores_host_leaves_first_and_nobody_minds(zygote: Zygote, how: str) -> None:
    for end in zygote.run(4, leave_first, free_port(), how):
        assert end.status == 0 and end.output == "" and end.seconds < 10, end


def test_fr_102_the_stores_host_crashes(zygote: Zygote) -> None:
    first, *ends = zygote.run(4, leave_first, free_port(), "crash")
    assert first.status == -9
    for end in ends:
        assert end.status == 1 and end.output.count("\n") == 1, end.output
        assert "MCCLPeerLostError" in end.output and re.search(r"rank 0 \(\S+:\d+\)", end.output), end.output

"""Field reports on fork and threads: FR-117, FR-119; and what is pickled for other processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from zygote import Zygote

import mccl
from mccl.torch import completer
from mccl.torch import work as works
from patterns import assert_same, reduced, tensor
from ranks import Pool

F32 = torch.float32


# ---- fork and spawn ----


def test_fr_117_importing_starts_no_thread(zygote: Zygote) -> None:
    assert zygote.threads == 1  # torch imported as well
    code = "import mccl, os, sys; mccl.version()"
    code += "; print(len(os.listdir('/proc/self/task')), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ran.stdout == "1 False\n", ran


def sum_up(rank: int, n: int, port: int, prefix: str) -> None:
    """A rank in a process of its own: group, result, end."""
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("mccl", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=20))
    value = tensor(rank, 500, F32)
    dist.all_reduce(value, async_op=True).get_future().wait()
    assert_same(value, reduced("sum", n, 500, F32), rank)
    dist.destroy_process_group()


def join(processes: list[Any]) -> None:
    for process in processes:
        process.join(25)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def launch_by_fork(_: int, __: int, port: int) -> None:
    """As notebooks and `start_method="fork"` do, twice; and the parent is a rank afterwards."""
    fork = multiprocessing.get_context("fork")
    for turn in range(2):
        ranks = [fork.Process(target=sum_up, args=(rank, 2, port, f"turn{turn}")) for rank in range(2)]
        for rank in ranks:
            rank.start()
        join(ranks)
    child = fork.Process(target=sum_up, args=(1, 2, port, "mixed"))
    child.start()
    sum_up(0, 2, port, "mixed")
    join([child])


def test_fr_117_forked_children_form_groups(zygote: Zygote) -> None:
    (end,) = zygote.run(1, launch_by_fork)
    assert end.status == 0 and end.output == "", end


def fork_after_init(rank: int, n: int, port: int) -> None:
    """Children of ranks, made with operations in flight: the old group is refused, a new one works."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("mccl", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=20))
    sub = dist.new_group()
    value = tensor(rank, 1000, F32)
    dist.all_reduce(value, async_op=True).get_future().wait()  # the completion thread runs
    later = dist.irecv(torch.ones(1), 1 - rank, tag=9)
    child = os.fork()
    if child == 0:
        for group in (None, sub):
            for use in (
                lambda group=group: dist.all_reduce(torch.ones(1), group=group),
                lambda group=group: dist.all_gather_object([None] * n, 1, group=group),
                lambda group=group: dist.barrier(group=group, async_op=True),
            ):
                with pytest.raises(mccl.MCCLError, match=r"fork\(\)"):
                    use()
        dist.destroy_process_group()
        sum_up(rank, n, port, "children")
        os.write(1, b"child is done ")
        os._exit(0)
    with_group = tensor(rank, 77, F32, salt=1)
    dist.all_reduce(with_group)
    assert_same(with_group, reduced("sum", n, 77, F32, salt=1), "parents")
    dist.send(torch.full((1,), 3.0), 1 - rank, tag=9)
    assert later is not None
    later.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    dist.destroy_process_group()


def test_fr_117_fork_after_init_is_a_clear_error_and_the_child_may_begin_anew(zygote: Zygote) -> None:
    for end in zygote.run(2, fork_after_init):
        assert end.status == 0 and end.output == "child is done ", end


def exec_beside_a_group(rank: int, n: int) -> None:
    """subprocess, system() and multiprocessing's helper processes, in the middle of operations."""
    for turn in range(3):
        value = tensor(rank, 200_000, F32, salt=turn)
        work = dist.all_reduce(value, async_op=True)
        assert subprocess.run(["true"], check=True).returncode == 0 and os.system("true") == 0
        with multiprocessing.get_context("fork").Pool(2) as workers:
            assert workers.map(abs, [-1, -2, 3]) == [1, 2, 3]
        work.wait()
        assert_same(value, reduced("sum", n, 200_000, F32, salt=turn), turn)


def test_fr_117_child_processes_beside_a_group(pool: Pool) -> None:
    pool.run(2, exec_beside_a_group)


def spawned(rank: int, n: int, port: int, options: mccl.MCCLOptions, answers: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "mccl", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=20), pg_options=options
    )
    value = tensor(rank, 100, F32)
    dist.all_reduce(value)
    try:
        dist.all_reduce(torch.ones(1 + rank))
    except mccl.MCCLError as error:
        group: Any = dist.group.WORLD
        answers.put((rank, value.numpy(), group._comm._setting("chunk_bytes"), error))
    answers.close()
    answers.join_thread()


def test_pickling_over_spawn() -> None:
    """Options on the way there, results and errors on the way back."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = torch.multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    options = mccl.MCCLOptions(chunk_bytes=65536)
    ranks = [
        spawn.Process(target=spawned, args=(rank, 2, server.port, options, answers)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        for _ in range(2):
            rank, value, chunk_bytes, error = answers.get(timeout=40)
            assert_same(torch.from_numpy(value), reduced("sum", 2, 100, F32), rank)
            assert chunk_bytes == "65536"
            assert isinstance(error, mccl.MCCLMismatchError) and "count=1" in str(error), error
            assert isinstance(error, dist.DistBackendError) and error.result_name.endswith("MISMATCH")
        join(ranks)
    finally:
        for process in ranks:
            process.kill()


def check_pickles(rank: int, n: int) -> None:
    """What belongs to a process is refused with a reason, the rest comes back the same."""
    for method in (pickle.dumps, copy.deepcopy):
        for thing in (dist.group.WORLD, dist.all_reduce(torch.ones(1), async_op=True)):
            with pytest.raises(TypeError, match="pickle"):
                method(thing)
    dist.barrier()
    with pytest.raises(ValueError) as caught:
        dist.all_gather([torch.ones(1)] * (n + 1), torch.ones(1))
    for method in (lambda thing: pickle.loads(pickle.dumps(thing)), copy.copy, copy.deepcopy):
        again = method(caught.value)
        assert type(again) is type(caught.value) and again.args == caught.value.args
        options = method(mccl.MCCLOptions(chunk_bytes=4096, timeout=timedelta(seconds=3)))
        assert options.settings == {"chunk_bytes": 4096} and options.timeout == timedelta(seconds=3)
        assert dict(method(mccl.get_config())) == dict(mccl.get_config())


def test_what_can_be_pickled(pool: Pool) -> None:
    pool.run(2, check_pickles)


# ---- threads ----


class Threads:
    """Runs functions at once; raises what they raise."""

    def __init__(self, *functions: Callable[[], Any]) -> None:
        self.failures: list[BaseException] = []
        self.threads = [threading.Thread(target=self._run, args=(f,), daemon=True) for f in functions]
        for thread in self.threads:
            thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            self.failures.append(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


def mixed_operations(rank: int, n: int, group: Any, index: int, rounds: int) -> None:
    """Of one thread on its own group: 5 operations a round."""
    for i in range(rounds):
        salt = index * 1000 + i
        count = 1 + (i * 97 + index) % 3000
        expected = reduced("sum", n, count, F32, salt=salt % 50)
        first, second = (tensor(rank, count, F32, salt=salt % 50) for _ in range(2))
        work = dist.all_reduce(first, group=group, async_op=True)
        dist.all_reduce(second, group=group)
        work.wait()
        assert_same(first, expected, (index, i, "async"))
        assert_same(second, expected, (index, i))
        whole = torch.empty(n * count)
        dist.all_gather_into_tensor(whole, tensor(rank, count, F32, salt=salt % 50), group=group)
        assert_same(whole[-count:], tensor(n - 1, count, F32, salt=salt % 50), (index, i, "gather"))
        got = torch.empty(count)
        works = [
            dist.isend(tensor(rank, count, F32, salt=salt % 50), group=group, group_dst=(rank + 1) % n),
            dist.irecv(got, group=group, group_src=(rank - 1) % n),
        ]
        for each in works:
            each.wait()
        assert_same(got, tensor((rank - 1) % n, count, F32, salt=salt % 50), (index, i, "ring"))


def threads_with_own_groups(rank: int, n: int) -> None:
    groups = [dist.new_group() for _ in range(4)]
    rounds = 50  # 1000 operations in all
    Threads(
        *(lambda i=i: mixed_operations(rank, n, groups[i], i, rounds) for i in range(4)),
    ).join()


def test_fr_119_four_threads_each_with_its_own_group(pool: Pool) -> None:
    pool.run(2, threads_with_own_groups)


def threads_on_one_group(rank: int, n: int) -> None:
    """Begun in turn under a lock, waited for outside of it, in any order, also by other threads."""
    group = dist.new_group()
    turn = threading.Condition()
    state = [0]
    begun: dict[int, Any] = {}

    def use(index: int) -> None:
        for i in range(index, 600, 4):
            with turn:
                turn.wait_for(lambda i=i: state[0] == i)
                value = tensor(rank, 1 + i * 53 % 9000, F32, salt=i % 40)
                begun[i] = dist.all_reduce(value, group=group, async_op=True), value
                state[0] += 1
                turn.notify_all()
            for j in (i, i - 3):
                if j >= 0:
                    work, value = begun[j]
                    work.wait()
                    assert_same(value, reduced("sum", n, value.numel(), F32, salt=j % 40), (i, j))
            begun.pop(i - 40, None)

    Threads(*(lambda index=index: use(index) for index in range(4))).join()


def test_fr_119_four_threads_on_one_group_under_a_lock(pool: Pool) -> None:
    pool.run(2, threads_on_one_group)


def tags_in_threads(rank: int, n: int) -> None:
    """Point to point needs no order between threads: each has a tag."""

    def talk(tag: int) -> None:
        for i in range(60):
            got = torch.empty(1 + i * tag)
            sending = dist.isend(tensor(rank, got.numel(), F32, salt=tag), (rank + 1) % n, tag=tag)
            dist.recv(got, (rank - 1) % n, tag=tag)
            sending.wait()  # type: ignore[union-attr]
            assert_same(got, tensor((rank - 1) % n, got.numel(), F32, salt=tag), (tag, i))

    Threads(*(lambda tag=tag: talk(tag) for tag in range(1, 5))).join()


def test_fr_119_threads_with_tags_on_one_group(pool: Pool) -> None:
    pool.run(3, tags_in_threads)


def end_from_another_thread(rank: int, n: int, how: str) -> str:
    """While a thread is blocked in an operation, another ends the group."""
    group: Any = dist.new_group()
    text = [""]
    if rank == 0:

        def wait() -> None:
            # Not inside dist.all_reduce, which, to log an error, looks up the group that torch has forgotten.
            work: Any = dist.all_reduce(torch.ones(5), group=group, async_op=True)
            with pytest.raises(mccl.MCCLError) as caught:
                work.wait()
            text[0] = f"{type(caught.value).__name__}: {caught.value}"

        waiting = Threads(wait)
        threading.Event().wait(0.3)
        {"abort": group.abort, "destroy": lambda: dist.destroy_process_group(group)}[how]()
        waiting.join()
    dist.barrier()
    return text[0]


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_fr_119_a_thread_ends_what_another_waits_for(pool: Pool, how: str) -> None:
    text = pool.run(2, end_from_another_thread, how, timeout=20)[0]
    assert text.startswith("MCCLAbortedError"), text


def busy_interpreter(rank: int, n: int) -> None:
    """One thread never lets go of the interpreter by itself, and a signal comes every 3 ms."""
    groups = [dist.new_group() for _ in range(2)]
    over = threading.Event()
    signals = [0]

    def spin() -> None:
        while not over.is_set():
            sum(range(2000))

    def on_signal(*_: object) -> None:
        signals[0] += 1

    before = signal.signal(signal.SIGALRM, on_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    busy = Threads(spin)
    try:
        other = Threads(lambda: mixed_operations(rank, n, groups[1], 1, 15))
        mixed_operations(rank, n, groups[0], 0, 15)
        other.join()
    finally:
        over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        busy.join()
    assert signals[0] > 10, signals


def test_fr_119_a_busy_thread_and_signals(pool: Pool) -> None:
    pool.run(2, busy_interpreter)


def handler_that_reduces(rank: int, n: int) -> None:
    """The handler uses a group of its own; it comes at another moment on each rank."""
    groups = [dist.new_group() for _ in range(2)]
    turns = [0]

    def on_signal(*_: object) -> None:
        value = torch.tensor([float(rank + turns[0])])
        dist.all_reduce(value, group=groups[1], async_op=True).get_future().wait()
        assert value.item() == sum(r + turns[0] for r in range(n)), (turns, value)
        turns[0] += 1
        if turns[0] < 25:
            signal.setitimer(signal.ITIMER_REAL, 0.004)

    before = signal.signal(signal.SIGALRM, on_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.004)
    try:
        for i in range(300):
            value = tensor(rank, 400, F32, salt=i % 9)
            work = dist.all_reduce(value, group=groups[0], async_op=True)
            if i % 2:
                work.get_future().wait()
            work.wait()
            assert_same(value, reduced("sum", n, 400, F32, salt=i % 9), i)
        while turns[0] < 25:
            threading.Event().wait(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_fr_119_a_signal_handler_that_uses_a_group(pool: Pool) -> None:
    pool.run(2, handler_that_reduces)


def come_back_at_every_line(rank: int, n: int) -> None:
    """As a handler that comes at the worst moment would, for each line of what looks after futures."""
    files = {completer.__file__, works.__file__}
    seen: set[tuple[str, int]] = set()

    def use_group(salt: int) -> None:
        value = tensor(rank, 50, F32, salt=salt % 9)
        done = dist.all_reduce(value, async_op=True).get_future()
        assert_same(done.wait()[0], reduced("sum", n, 50, F32, salt=salt % 9), salt)

    def trace(frame: Any, event: str, _: object) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if place[0] not in files:
            return None
        if event == "line" and place not in seen:
            seen.add(place)
            use_group(len(seen))
        return trace

    for salt in range(40):
        sys.settrace(trace)
        try:
            use_group(salt)
            strided = tensor(rank, 100, F32).reshape(10, 10).t()
            dist.all_reduce(strided, async_op=True).wait()
        finally:
            sys.settrace(None)
        assert_same(strided, reduced("sum", n, 100, F32).reshape(10, 10).t(), salt)
    functions = {file: sum(place[0] == file for place in seen) for file in files}
    assert functions[completer.__file__] >= 8 and functions[works.__file__] >= 40, functions


def test_fr_119_another_use_in_the_middle_of_one(pool: Pool) -> None:
    pool.run(1, come_back_at_every_line)


class Interrupted(Exception):
    """Raised by a signal handler."""


def handler_that_raises(rank: int, n: int) -> None:
    """As a job's preemption notice may: the wait ends, the operation goes on."""
    group = dist.new_group()

    def on_signal(*_: object) -> None:
        raise Interrupted

    value = tensor(rank, 5000, F32)
    if rank == 0:
        before = signal.signal(signal.SIGALRM, on_signal)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        work = dist.all_reduce(value, group=group, async_op=True)
        with pytest.raises(Interrupted):
            work.wait()
        signal.signal(signal.SIGALRM, before)
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.all_reduce(value, group=group)
    assert_same(value, reduced("sum", n, 5000, F32), rank)


def test_fr_119_a_signal_handler_that_raises(pool: Pool) -> None:
    pool.run(3, handler_that_raises)

"""Field reports on ranks that disagree or are late: FR-051, FR-052, FR-053, FR-055, FR-056."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from zygote import Zygote

import mccl
from patterns import MAX, SUM, assert_same, reduced, tensor
from ranks import Pool

F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32

Outcome = tuple[str, str]  # class and text of the error; "" without one


def outcome(call: Callable[[], Any]) -> Outcome:
    try:
        call()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def cause(text: str) -> str:
    """Of a group's failure, from the error of the operation that met it."""
    return re.sub(
        r"^.*?, group '.*?': | \(\d+ bytes had arrived\)$|^.*? has failed before seq \d+: |; destroy it .*$",
        "",
        text,
    )


def check_works(rank: int, n: int) -> None:
    """A failed group costs that group only: the process and its other groups live, and so do new ones."""
    for group in (None, dist.new_group()):
        value = tensor(rank, 33, F32, salt=7)
        dist.all_reduce(value, group=group)
        assert_same(value, reduced("sum", n, 33, F32, salt=7), "afterwards")


# ---- FR-051, FR-053: what the ranks call ----


class Call:
    """One rank's side of a collective: its tensors, made for `count` elements, and the call itself."""

    def __init__(
        self, rank: int, n: int, kind: str, count: int, dtype: torch.dtype = F32, **more: Any
    ) -> None:
        mine = tensor(rank, count, dtype)
        self.kind, self.inputs, self.outputs = kind, [mine], [torch.full_like(mine, 99)]
        root, op = more.get("root", 0), more.get("op", SUM)
        if kind == "all_reduce":
            self.outputs = [mine]
            self.function = lambda **kw: dist.all_reduce(mine, op, **kw)
        elif kind == "reduce":
            self.outputs = [mine]
            self.function = lambda **kw: dist.reduce(mine, root, op, **kw)
        elif kind == "broadcast":
            self.outputs = [mine]
            self.function = lambda **kw: dist.broadcast(mine, root, **kw)
        elif kind == "all_gather":
            self.outputs = [torch.full_like(mine, 99) for _ in range(n)]
            self.function = lambda **kw: dist.all_gather(self.outputs, mine, **kw)
        elif kind == "all_gather_into_tensor":
            self.outputs = [torch.full((n * count,), 99, dtype=dtype)]
            self.function = lambda **kw: dist.all_gather_into_tensor(self.outputs[0], mine, **kw)
        elif kind == "reduce_scatter":
            inputs = [tensor(rank, count, dtype, salt=r) for r in range(n)]
            self.function = lambda **kw: dist.reduce_scatter(self.outputs[0], inputs, op, **kw)
        elif kind == "reduce_scatter_tensor":
            whole = tensor(rank, n * count, dtype)
            self.function = lambda **kw: dist.reduce_scatter_tensor(self.outputs[0], whole, op, **kw)
        else:
            assert kind == "barrier", kind
            self.outputs = []
            self.function = lambda **kw: dist.barrier(**kw)
        self.before = [output.clone() for output in self.outputs]

    def run(self, group: Any, async_op: bool) -> Any:
        work = self.function(group=group, async_op=async_op)
        return work.wait() if async_op else None


Side = tuple[Any, ...]  # kind, count, dtype, more


def disagree(rank: int, n: int, sides: list[tuple[Side, Side]], odd: int) -> list[Any]:
    """Rank `odd` makes the second call, the others the first, blocking and not."""
    rows = []
    for most, other in sides:
        for async_op in (False, True):
            group: Any = dist.new_group(timeout=timedelta(seconds=20))
            dist.barrier(group)  # seq 0
            dist.barrier()  # everybody has left that one
            kind, count, dtype, more = other if rank == odd else most
            call = Call(rank, n, kind, count, dtype, **more)
            first = outcome(lambda: call.run(group, async_op))  # noqa: B023
            if not first[0]:
                check_complete(call, n, more.get("root", 0), (most, other, rank))
            second = outcome(lambda: dist.barrier(group))  # noqa: B023
            rows.append((first, second))
            dist.destroy_process_group(group)
    check_works(rank, n)
    return rows


def check_complete(call: Call, n: int, root: int, what: object) -> None:
    """Who needs nothing of the odd rank may have its result; then it is whole."""
    assert call.kind in ("broadcast", "reduce") or call.inputs[0].numel() == 0, (what, "no error")
    for output, before in zip(call.outputs, call.before):
        if output.numel() == 0:
            continue
        if call.kind == "reduce":
            assert_same(output, before, what)
        else:
            assert_same(output, tensor(root, output.numel(), output.dtype), what)


def check_rows(rows: list[Any], sides: list[tuple[Side, Side]], words: list[list[str]], odd: int) -> None:
    """`words` are those of both sides, which each rank has to be told."""
    for case, (first_side, other_side) in enumerate(sides):
        for turn in range(2):
            for rank, row in enumerate(rows):
                first, second = row[2 * case + turn]
                what = (first_side, other_side, rank, first, second)
                kind, text = first if first[0] else second
                assert kind == second[0] == "MCCLMismatchError" and cause(text) in second[1], what
                assert "seq 1" in text and f"rank {odd}" in text, what
                assert all(re.search(rf"{word}(?!\d)", text) for word in words[case]), what


COUNTS = [(4096, 4098), (1, 2), (100, 200), (65536, 65535), (1_000_000, 999_999), (0, 1)]


@pytest.mark.parametrize("n", [2, 4])
def test_fr_051_all_reduce_of_different_sizes(pool: Pool, n: int) -> None:
    pairs = [*COUNTS, *([(409_600, 32_768_000)] if n == 2 else [])]
    sides: Any = [(("all_reduce", a, F32, {}), ("all_reduce", b, F32, {})) for a, b in pairs]
    words = [["all_reduce", f"count={a}", f"count={b}"] for a, b in pairs]
    rows = pool.run(n, disagree, sides, n - 1)
    check_rows(rows, sides, words, n - 1)


OFF_BY_ONE = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce",
]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("odd", [0, 1])
def test_fr_051_one_rank_off_by_one(pool: Pool, n: int, odd: int) -> None:
    sides: Any = []
    words = []
    for kind in OFF_BY_ONE:
        for count, other in ((100, 101), (200_001, 200_000)):
            sides.append(((kind, count, F32, {}), (kind, other, F32, {})))
            words.append([kind.replace("_into_tensor", "").replace("_tensor", ""), f"{count}", f"{other}"])
    rows = pool.run(n, disagree, sides, odd)
    check_rows(rows, sides, words, odd)


@pytest.mark.parametrize("n", [2, 3])
def test_fr_051_root_or_operation_differs(pool: Pool, n: int) -> None:
    sides: Any = [
        (("broadcast", 50, F32, {"root": 0}), ("broadcast", 50, F32, {"root": 1})),
        (("reduce", 300_000, F32, {"root": 1}), ("reduce", 300_000, F32, {"root": 0})),
        (("all_reduce", 50, F32, {}), ("broadcast", 50, F32, {"root": 0})),
        (("all_reduce", 300_000, F32, {}), ("broadcast", 300_000, F32, {"root": 1})),
        (("broadcast", 5, F32, {"root": 1}), ("all_reduce", 5, F32, {})),
        (("all_gather_into_tensor", 5, F32, {}), ("reduce_scatter_tensor", 5, F32, {})),
        (("all_reduce", 5, F32, {}), ("barrier", 5, F32, {})),
    ]
    words = [
        ["broadcast", "root=0", "root=1"],
        ["reduce", "root=1", "root=0"],
        ["all_reduce", "broadcast"],
        ["all_reduce", "broadcast"],
        ["all_reduce", "broadcast"],
        ["all_gather", "reduce_scatter"],
        ["all_reduce", "barrier"],
    ]
    rows = pool.run(n, disagree, sides, n - 1)
    check_rows(rows, sides, words, n - 1)


def test_fr_053_dtype_or_reduction_differs(pool: Pool) -> None:
    sides: Any = []
    words = []
    for (dtype, count), (other, others) in (
        ((F32, 4), (BF16, 8)),
        ((F32, 4), (I32, 4)),
        ((F16, 4), (BF16, 4)),
        ((F32, 200_000), (F16, 400_000)),
    ):
        for kind in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter"):
            sides.append(((kind, count, dtype, {}), (kind, others, other, {})))
            words.append([str(dtype).rpartition(".")[2], str(other).rpartition(".")[2]])
    for kind in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
        sides.append(((kind, 4, F32, {"op": SUM}), (kind, 4, F32, {"op": MAX})))
        words.append([kind.replace("_tensor", ""), "op=sum", "op=max"])
    rows = pool.run(3, disagree, sides, 2)
    check_rows(rows, sides, words, 2)


def part_off_by_one(rank: int, n: int, kind: str, count: int, async_op: bool) -> tuple[Outcome, Outcome]:
    """Where sizes may differ by rank: rank 1's own part is one longer than rank 0 and the others mean."""
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    dist.barrier(group)
    dist.barrier()
    odd = count + (rank == 1)
    mine = tensor(rank, odd, F32)
    even = [torch.zeros(count) for _ in range(n)]
    sizes = [count if i == rank else odd for i in range(n)]  # its own is a matter of its own
    given: Any = {"group": group, "async_op": async_op}

    def call() -> None:
        work: Any = None
        if kind == "gather":
            work = dist.gather(mine, even if rank == 0 else None, 0, **given)
        elif kind == "scatter":
            work = dist.scatter(mine, even if rank == 0 else None, 0, **given)
        elif kind == "all_to_all":
            work = dist.all_to_all([torch.empty(size) for size in sizes], even, **given)
        elif kind == "all_to_all_single":
            work = dist.all_to_all_single(torch.empty(sum(sizes)), torch.empty(n * count), sizes, **given)
        elif kind == "all_gather of other sizes":
            parts = [torch.empty(count + i + (rank == 1 and i == 2)) for i in range(n)]
            work = dist.all_gather(parts, tensor(rank, count + rank, F32), **given)
        elif kind == "coalesced":
            with dist._coalescing_manager(group, async_ops=async_op) as manager:
                for size in (4, odd, 5):
                    dist.all_reduce(torch.ones(size), group=group)
            work = manager if async_op else None
        else:
            assert kind == "functional", kind
            functional.wait_tensor(functional.all_reduce(mine, "sum", group))
        if work is not None:
            work.wait()

    first = outcome(call)
    second = outcome(lambda: dist.barrier(group))
    check_works(rank, n)
    return first, second


PARTS = {
    "gather": r"sends \d+ bytes, rank 0 expects \d+|went on without sending",
    "scatter": r"sends \d+ bytes, rank 1 expects \d+|went on without sending",
    "all_to_all": r"sends \d+ bytes, rank 1 expects \d+|went on without sending",
    "all_to_all_single": r"sends \d+ bytes, rank 1 expects \d+|went on without sending",
    "all_gather of other sizes": "counts=.* in all .*counts=.* in all",
    "coalesced": "count=.*count=",
    "functional": "count=.*count=",
}


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("kind", PARTS)
def test_fr_051_a_part_off_by_one(pool: Pool, kind: str, async_op: bool) -> None:
    for count in (7, 100_000):
        for rank, (first, second) in enumerate(pool.run(3, part_off_by_one, kind, count, async_op)):
            own = first if first[0] else second
            assert own[0] == second[0] == "MCCLMismatchError", (count, rank, first, second)
            assert "rank 1" in own[1] and re.search(PARTS[kind], own[1]), (count, rank, own)


def one_of_many(rank: int, n: int, count: int) -> list[str]:
    """40 in flight, of which rank 1 makes the 20th longer."""
    group: Any = dist.new_group()
    values = [tensor(rank, count + (rank == 1 and i == 20), F32, salt=i) for i in range(40)]
    works: list[Any] = []
    begun = [
        outcome(lambda: works.append(dist.all_reduce(value, group=group, async_op=True)))  # noqa: B023
        for value in values
    ]
    rows = []
    for i, value in enumerate(values):
        kind, _ = begun[i] if begun[i][0] else outcome(works[i].wait)
        if not kind:
            assert_same(value, reduced("sum", n, count, F32, salt=i), i)
        rows.append(kind)
    check_works(rank, n)
    return rows


@pytest.mark.parametrize("count", [10, 200_000])
def test_fr_051_one_of_many_in_flight(pool: Pool, count: int) -> None:
    for rows in pool.run(3, one_of_many, count):
        # What came before may be lost with the group, but never is wrong; from there on nothing is done.
        assert set(rows[:20]) <= {"", "MCCLMismatchError"} and rows[20:] == ["MCCLMismatchError"] * 20, rows


# ---- FR-052: the error is raised where it is waited for, and the process goes on ----


def log_and_go_on(rank: int, n: int, port: int, count: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("mccl", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=20))
    for how in ("wait", "future", "callback", "dropped"):
        group: Any = dist.new_group()
        value = torch.ones(count + rank)
        work: Any = dist.all_reduce(value, group=group, async_op=True)
        seen: list[str] = []
        try:
            if how == "wait":
                work.wait()
            elif how == "future":
                work.get_future().wait()
            elif how == "callback":
                work.get_future().then(lambda future: future.value()).wait()
            else:
                del work
                dist.barrier(group=group)
        except RuntimeError as error:
            seen.append(str(error))
        assert len(seen) == 1 and f"count={count}" in seen[0] and f"count={count + 1}" in seen[0], (how, seen)
        dist.destroy_process_group(group)
    check_works(rank, n)
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [3, 500_000])
def test_fr_052_a_mismatch_raises_and_ends_no_process(zygote: Zygote, count: int) -> None:
    for end in zygote.run(2, log_and_go_on, count):
        assert end.status == 0 and "Traceback" not in end.output and "terminate" not in end.output, end


# ---- FR-055: a group that has failed stays failed ----


OPERATIONS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "barrier": lambda value, group: dist.barrier(group=group),
    "broadcast": lambda value, group: dist.broadcast(value, group=group, group_src=1),
    "all_reduce": lambda value, group: dist.all_reduce(value, group=group),
    "all_gather": lambda value, group: dist.all_gather(list(torch.empty(2, len(value))), value, group=group),
    "message": lambda value, group: (
        dist.recv(value, group=group, group_src=1)
        if dist.get_rank() == 0
        else dist.send(value, group=group, group_dst=0)
    ),
    "objects": lambda value, group: dist.all_gather_object([None, None], value, group=group),
}


def go_on_after_time_out(rank: int, n: int, what: str, count: int) -> list[Outcome]:
    """Operation k times out on rank 0, because rank 1 is late. Both go on with k and k + 1."""
    group: Any = dist.new_group(timeout=timedelta(seconds=0.5 if rank == 0 else 20))
    operation = OPERATIONS[what]
    operation(tensor(rank, count, F32), group)
    value = tensor(rank, count, F32, salt=1)
    rows = []
    if rank == 0:
        rows.append(outcome(lambda: operation(value, group)))
    dist.barrier()  # rank 1 comes when rank 0 has given up
    if rank == 1:
        rows.append(outcome(lambda: operation(value, group)))
        if not rows[0][0]:  # what rank 0 had sent was there, and the news was not
            whole = {"all_reduce": reduced("sum", n, count, F32, salt=1)}
            assert_same(value, whole.get(what, tensor(1, count, F32, salt=1)), what)
    started = time.monotonic()
    for later in OPERATIONS.values():
        buffer = torch.full((5,), -1.0)
        rows.append(outcome(lambda: later(buffer, group)))  # noqa: B023
        assert buffer.tolist() == [-1.0] * 5, "a partial result"
    assert time.monotonic() - started < 5, "not at once"
    check_works(rank, n)
    return rows


@pytest.mark.parametrize("count", [5, 300_000])
@pytest.mark.parametrize("what", OPERATIONS)
def test_fr_055_after_a_time_out_nothing_is_paired_wrongly(pool: Pool, what: str, count: int) -> None:
    rows = pool.run(2, go_on_after_time_out, what, count)
    first = rows[0][0]
    assert first[0] == "MCCLTimeoutError" and re.search(r" (500|499)ms for rank 1\b", first[1]), first
    for own, *later in rows:
        for kind, text in [own, *later] if own[0] else later:
            assert kind == first[0] and cause(first[1]) in text, (first, text)
        assert len(later) == len(OPERATIONS)


# ---- FR-056: a rank that does not come ----


def stall(rank: int, n: int, port: int, how: str) -> None:
    """The last rank leaves out one all_reduce."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("mccl", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=20))
    late = n - 1
    count = {"ring": 500_000, "large": 8_000_000}.get(how, 5)
    group = dist.new_group(
        timeout=timedelta(seconds=20 if how == "late" else 2.2),
        pg_options=mccl.MCCLOptions(watchdog_timeout_ms=900),
    )
    dist.barrier(group)
    for turn in range(2 if how == "late" else 1):
        values = [tensor(rank, count, F32, salt=i) for i in range(200 if how == "many" else 1)]
        dist.barrier()
        if rank == late:  # until the others have warned, or have given up
            store.wait([f"over{r}/{turn}" for r in range(late)], timedelta(seconds=20))
            if how != "late":
                break
        works: Any = [dist.all_reduce(value, group=group, async_op=True) for value in values]
        if how == "late" and rank != late:
            time.sleep(1.4)
            store.set(f"over{rank}/{turn}", "")
        for i, work in enumerate(works):
            try:
                work.wait()
                assert_same(values[i], reduced("sum", n, count, F32, salt=i), i)
            except mccl.MCCLTimeoutError as error:
                print(f"error: {error}", flush=True)
        if how != "late":
            store.set(f"over{rank}/{turn}", "")
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["small", "ring", "large", "many", "late"])
def test_fr_056_one_warning_per_stall_names_who_is_missing(zygote: Zygote, how: str) -> None:
    ends = zygote.run(3, stall, how)
    for rank in (0, 1):
        lines = ends[rank].output.splitlines()
        warnings = [line for line in lines if "WARN" in line]
        errors = [line for line in lines if line.startswith("error")]
        assert len(warnings) == (2 if how == "late" else 1), ends[rank]
        assert len(errors) == {"many": 200, "late": 0}.get(how, 1) and len(set(map(cause, errors))) <= 1, (
            ends[rank]
        )
        for line in (*warnings, *errors[:1]):
            assert "all_reduce seq " in line and re.search(r"for rank 2\b", line), ends[rank]
        assert "seq 1 " in (*errors, *warnings)[0], lines
        assert ends[rank].status == 0 and len(lines) == len(warnings) + len(errors), ends[rank]
    assert ends[2].status == 0 and "WARN" not in ends[2].output, ends[2]


def stay_away(rank: int, n: int, missing: int, kinds: list[tuple[str, int]]) -> list[Outcome]:
    """One operation of each kind without rank `missing`."""
    rows = []
    for kind, count in kinds:
        group: Any = dist.new_group(timeout=timedelta(seconds=0.6))
        dist.barrier(group)
        dist.barrier()
        call = Call(rank, n, kind, count, root=missing)
        rows.append(outcome(lambda: call.run(group, False)) if rank != missing else ("", ""))  # noqa: B023
        dist.barrier()
        dist.destroy_process_group(group)
    check_works(rank, n)
    return rows


STALLS = [
    *[(kind, count) for kind in ("all_reduce", "reduce", "broadcast") for count in (5, 400_000)],
    *[(kind, count) for kind in ("all_gather", "reduce_scatter_tensor") for count in (5, 100_000)],
    ("barrier", 0),
]


@pytest.mark.parametrize(("n", "missing"), [(3, 1), (5, 0)])
def test_fr_056_every_kind_of_operation_names_the_missing_rank(pool: Pool, n: int, missing: int) -> None:
    rows = pool.run(n, stay_away, missing, STALLS)
    for rank in set(range(n)) - {missing}:
        for (kind, count), (error, text) in zip(STALLS, rows[rank]):
            if kind == "reduce" and not error:  # it has sent what it had
                continue
            assert error == "MCCLTimeoutError" and re.search(r"seq 1 on rank \d", text), (kind, count, text)
            assert f" for rank {missing};" in text, (kind, count, rank, text)

"""Field reports: strides, aliasing, empty and uneven tensors, in every collective."""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import Any, Callable

import everything
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from everything import bytewise_cat
from refused import expect

import mccl
from patterns import MOVABLE, assert_same, reduced, tensor
from ranks import Pool

F32, I64 = torch.float32, torch.int64
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX

# ---- strides ---------------------------------------------------------------------------------------------


class Layouts:
    """Puts values into storages with gaps, and remembers these to see whether anyone wrote between."""

    def __init__(self) -> None:
        self.laid: list[tuple[torch.Tensor, torch.Tensor]] = []  # storage, and the tensor in it

    def _put(self, storage: torch.Tensor, view: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        view.copy_(values)
        self.laid.append((storage, view))
        return view

    def column(self, values: torch.Tensor) -> torch.Tensor:
        """x[..., 0] of a tensor with four of them: no two elements are neighbours."""
        storage = empty((*values.shape, 4), values.dtype)
        return self._put(storage, storage[..., 0], values)

    def every_second(self, values: torch.Tensor) -> torch.Tensor:
        """x[::2]"""
        storage = empty((2 * values.shape[0], *values.shape[1:]), values.dtype)
        return self._put(storage, storage[::2], values)

    def transposed(self, values: torch.Tensor) -> torch.Tensor:
        """Dense, but the dimensions lie the other way round."""
        storage = empty(tuple(reversed(values.shape)), values.dtype)
        return self._put(storage, storage.permute(*reversed(range(values.dim()))), values)

    def transposed_window(self, values: torch.Tensor) -> torch.Tensor:
        """The same inside a larger matrix: stride and offset in both dimensions."""
        shape = [size + 3 for size in reversed(values.shape)]
        storage = empty(tuple(shape), values.dtype)
        window = storage[tuple(slice(2, size - 1) for size in shape)]
        return self._put(storage, window.permute(*reversed(range(values.dim()))), values)

    def offset(self, values: torch.Tensor) -> torch.Tensor:
        """Contiguous, at an odd place of its storage."""
        storage = empty((values.numel() + 5,), values.dtype)
        return self._put(storage, storage[3:-2].view(values.shape), values)

    def check_gaps(self) -> None:
        """Nothing but the tensors themselves was written."""
        for storage, view in self.laid:
            view.copy_(empty(tuple(view.shape), view.dtype))
            assert_same(storage, empty(tuple(storage.shape), storage.dtype), "memory between the elements")


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Filled with one byte, 1 so that it is a bool as well."""
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.ones((*shape, width), dtype=torch.uint8).view(dtype).reshape(shape)


def check_strided(rank: int, n: int, name: str, dtype: torch.dtype) -> None:
    def make(r: int, salt: int) -> torch.Tensor:
        return tensor(r, 15, dtype, salt=salt).reshape(3, 5)

    def expected(op: str) -> everything.Reference:
        return lambda salt: reduced(op, n, 15, dtype, salt).reshape(3, 5)

    layouts = Layouts()
    lay = getattr(layouts, name)
    dense = everything.as_it_is
    reducible = dtype not in (torch.float8_e5m2, torch.uint16)
    for lay_input, lay_output in [(lay, dense), (dense, lay), (lay, lay)]:
        everything.move(rank, n, make, lay_input, lay_output)
        if reducible:
            everything.reduce(rank, n, make, expected("sum"), SUM, lay_input, lay_output)
    if dtype.is_floating_point and reducible:
        everything.reduce(rank, n, make, expected("avg"), AVG, lay, lay)
    strides = [view.stride() for _, view in layouts.laid]
    layouts.check_gaps()
    assert strides == [view.stride() for _, view in layouts.laid]


STRIDED_DTYPES = [F32, I64, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint16]


@pytest.mark.parametrize("dtype", STRIDED_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["column", "every_second", "transposed", "transposed_window", "offset"])
def test_fr_018_strided_tensors_in_every_collective(pool: Pool, name: str, dtype: torch.dtype) -> None:
    pool.run(2, check_strided, name, dtype)


def check_three_ranks(rank: int, n: int) -> None:
    check_strided(rank, n, "transposed_window", F32)
    check_strided(rank, n, "column", torch.float16)


def test_fr_018_strided_tensors_on_three_ranks(pool: Pool) -> None:
    pool.run(3, check_three_ranks)


def check_shapes_of_the_report(rank: int, n: int) -> None:
    """x[4,4][:,0] as reported: broadcast, reduce and scatter were wrong."""
    square = tensor(rank, 16, F32).reshape(4, 4)
    dist.broadcast(square[:, 0], 1)
    assert_same(square[:, 0], tensor(1, 16, F32).reshape(4, 4)[:, 0], "broadcast")
    assert_same(square[:, 1:], tensor(rank, 16, F32).reshape(4, 4)[:, 1:], "beside the column")
    square = tensor(rank, 16, F32).reshape(4, 4)
    dist.reduce(square[:, 0], 0)
    columns = [tensor(r, 16, F32).reshape(4, 4)[:, 0] for r in range(n)]
    assert_same(square[:, 0], torch.stack(columns).sum(0) if rank == 0 else columns[rank], "reduce")
    dist.scatter(square[:, 0], [c.clone() + 1 for c in columns] if rank == 1 else None, 1)
    assert_same(square[:, 0], columns[rank] + 1, "scatter")

    for wide in [tensor(rank, 4, F32), tensor(rank, 4, torch.float64)]:
        rows = wide[:1].expand(4, 5)  # one element, twenty times: fine to read
        for root in range(n):
            got = torch.empty(4, 5, dtype=wide.dtype)
            dist.broadcast(rows if rank == root else got, root)
            assert rank == root or got.unique().tolist() == tensor(root, 4, wide.dtype)[:1].tolist()
        outputs = [torch.empty(4, 5, dtype=wide.dtype) for _ in range(n)]
        dist.all_gather(outputs, rows)
        dist.all_to_all(outputs, [rows] * n)
        for r, output in enumerate(outputs):
            assert_same(output, tensor(r, 4, wide.dtype)[:1].expand(4, 5), "expanded input")
        got = torch.empty(4, 5, dtype=wide.dtype)
        dist.reduce_scatter(got, [rows] * n)
        expected = sum(tensor(r, 4, wide.dtype)[0] for r in range(n))
        assert got.unique().tolist() == [expected.item()]
        expected_here = rows.clone()
        if rank:
            dist.reduce(rows, 0)  # not the root: read only
            assert_same(rows, expected_here, "expanded input of reduce")
        else:
            dist.reduce(got, 0)

    # As an output it cannot hold its elements.
    group = dist.group.WORLD
    one = torch.zeros(1)
    diagonal = torch.zeros(9).as_strided((4, 2), (2, 1))  # fine: dense
    overlapping = torch.zeros(9).as_strided((4, 3), (2, 1))  # rows share an element
    for bad in [one.expand(4), one.expand(4, 5), overlapping, torch.zeros(3, 1).expand(3, 4)]:
        parts = [torch.empty(bad.shape) for _ in range(n)]
        whole = torch.empty(n * bad.numel())
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (dist.all_reduce, (bad,)),
            (dist.all_reduce_coalesced, ([bad],)),
            (dist.all_gather, ([bad, *parts[1:]], parts[0])),
            (dist.reduce_scatter, (bad, parts)),
            (dist.reduce_scatter_tensor, (bad, whole)),
            (group.scatter, ([bad], [parts] if rank == 0 else [])),
            (dist.all_to_all, ([*parts[1:], bad], parts)),
            (dist.recv, (bad, 1 - rank)),
        ]
        calls.append((dist.reduce, (bad, rank)))
        calls.append((dist.broadcast, (bad, 1 - rank)))
        for function, args in calls:
            expect(ValueError, "share memory", function, *args)
    dist.all_reduce(diagonal)
    check_in_step(rank, n)


def check_in_step(rank: int, n: int) -> None:
    after = tensor(rank, 7, F32)
    dist.all_reduce(after)
    assert_same(after, reduced("sum", n, 7, F32), "the all_reduce after it")


def test_fr_018_columns_expanded_and_overlapping_tensors(pool: Pool) -> None:
    pool.run(2, check_shapes_of_the_report)


def check_gathers(rank: int, n: int) -> None:
    """Every combination of strided and dense among input and list entries."""
    choose = random.Random(11)  # the same on all ranks
    names = ["column", "every_second", "transposed", "transposed_window", "offset"]
    for trial in range(60):
        layouts = Layouts()
        rows, columns = choose.randint(1, 6), choose.randint(1, 6)
        dtype = choose.choice([d for d in MOVABLE if d not in (torch.uint32, torch.uint64)])

        def make(r: int, salt: int = 0) -> torch.Tensor:
            return tensor(r, rows * columns, dtype, salt=salt + trial).reshape(rows, columns)  # noqa: B023

        def lay(values: torch.Tensor) -> torch.Tensor:
            name = choose.choice([*names, "dense"])
            return values.clone() if name == "dense" else getattr(layouts, name)(values)  # noqa: B023

        mine = lay(make(rank))
        outputs = [lay(make(99)) for _ in range(n)]
        dist.all_gather(outputs, mine)
        for r, output in enumerate(outputs):
            assert_same(output, make(r), ("all_gather", trial, dtype, r))
        root = trial % n
        outputs = [lay(make(99)) for _ in range(n)]
        dist.gather(mine, outputs if rank == root else None, root)
        for r, output in enumerate(outputs):
            assert_same(output, make(r if rank == root else 99), ("gather", trial, dtype, r))
        whole = lay(bytewise_cat([make(99) for _ in range(n)]))
        dist.all_gather_into_tensor(whole, mine)
        assert_same(
            whole, bytewise_cat([make(r) for r in range(n)]), ("all_gather_into_tensor", trial, dtype)
        )
        layouts.check_gaps()


@pytest.mark.parametrize("n", [2, 3])
def test_fr_019_gathers_of_strided_inputs_and_list_entries(pool: Pool, n: int) -> None:
    pool.run(n, check_gathers)


def test_fr_019_data_of_these_tests_shows_wrong_addresses() -> None:
    """Neighbours, ranks, salts and a transposition all differ; a constant would hide them."""
    for dtype in MOVABLE:
        data = [tensor(r, 15, dtype, salt=s).view(torch.uint8) for r in range(3) for s in range(3)]
        assert len({tuple(t.tolist()) for t in data}) > (4 if dtype is torch.bool else 8), dtype
        for values in data:
            width = values.numel() // 15
            rows = values.reshape(3, 5, width)
            assert not torch.equal(rows.transpose(0, 1).reshape(-1), values), dtype
            assert not torch.equal(values.roll(width), values), dtype


# ---- aliasing --------------------------------------------------------------------------------------------


def check_aliases(rank: int, n: int) -> None:
    group = dist.group.WORLD
    mine = tensor(rank, 4, F32)
    t, a, b = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    big = torch.zeros(10)
    bad_lists = [
        ([t] * 3, "outputs 0 and 1 share memory"),
        ([a, b, b], "outputs 1 and 2 share memory"),
        ([a, b, a], "outputs 0 and 2 share memory"),
        ([big[0:4], big[6:10], big[3:7]], "outputs [01] and 2 share memory"),
        ([big[0:4], a, big[0:8:2]], "outputs 0 and 2 share memory"),
        ([a, big.view(5, 2)[:4, 0], big[2:6]], "outputs 1 and 2 share memory"),
    ]
    for outputs, words in bad_lists:
        expect(ValueError, f"mccl all_gather: {words}", dist.all_gather, outputs, mine)
        expect(ValueError, f"mccl all_gather: {words}", dist.all_gather, outputs, mine, async_op=True)
        expect(ValueError, f"mccl all_to_all: {words}", dist.all_to_all, outputs, [mine] * 3)
        expect(ValueError, words, dist.all_reduce_coalesced, outputs)
        if rank == 2:
            expect(ValueError, f"mccl gather: {words}", dist.gather, mine, outputs, 2)
        expect(
            ValueError,
            words,
            group.reduce_scatter_tensor_coalesced,
            outputs,
            [torch.ones(12) for _ in range(3)],
        )
    assert not any(bool(x.any()) for x in (t, a, b, big)), "a refused call wrote"

    # Views of one storage that share no element, in any order.
    def views() -> dict[str, tuple[torch.Tensor, list[torch.Tensor]]]:
        table = torch.full((3, 4), -1.0)
        columns = torch.full((4, 3), -1.0)
        flat = torch.full((20,), -1.0)
        return {
            "rows": (table, list(table.unbind(0))),
            "rows, backwards": (table, list(reversed(table.unbind(0)))),
            "columns": (columns, list(columns.unbind(1))),
            "split": (flat, list(flat[4:16].split(4))),
            "interleaved": (flat, [flat[0:16:4], flat[1:16:4], flat[3:16:4]]),
        }

    for name, (_, outputs) in views().items():
        dist.all_gather(outputs, mine)
        for r, output in enumerate(outputs):
            assert_same(output, tensor(r, 4, F32), ("all_gather", name, r))
    for name, (storage, outputs) in views().items():
        dist.gather(mine, outputs if rank == 1 else None, 1)
        for r, output in enumerate(outputs):
            assert rank != 1 or output.tolist() == tensor(r, 4, F32).tolist(), ("gather", name, r)
        assert rank == 1 or bool((storage == -1).all())
    for name, (_, outputs) in views().items():
        dist.all_to_all(outputs, [tensor(rank, 4, F32, salt=r) for r in range(3)])
        for r, output in enumerate(outputs):
            assert_same(output, tensor(r, 4, F32, salt=rank), ("all_to_all", name, r))

    # Inputs may be one tensor many times.
    outputs = [torch.zeros(4) for _ in range(3)]
    dist.all_to_all(outputs, [mine] * 3)
    for r, output in enumerate(outputs):
        assert_same(output, tensor(r, 4, F32), "all_to_all of one input")
    got = torch.zeros(4)
    dist.scatter(got, [mine] * 3 if rank == 2 else None, 2)
    assert_same(got, tensor(2, 4, F32), "scatter of one input")
    dist.reduce_scatter(got, [mine] * 3)
    assert_same(got, reduced("sum", 3, 4, F32), "reduce_scatter of one input")
    empties = [torch.empty(0)] * 3  # without an element nothing is shared
    dist.all_gather(empties, torch.empty(0))
    check_in_step(rank, n)


def test_fr_022_outputs_that_share_memory_are_named(pool: Pool) -> None:
    pool.run(3, check_aliases)


# ---- empty tensors ---------------------------------------------------------------------------------------


def check_empty(rank: int, n: int) -> None:
    for shape in [(0,), (1, 0, 2), (0, 5)]:
        for dtype in [F32, I64, torch.bool, torch.bfloat16, torch.complex64]:

            def make(r: int, salt: int) -> torch.Tensor:
                return torch.empty(shape, dtype=dtype)  # noqa: B023

            def nothing(salt: int) -> torch.Tensor:
                return make(0, salt)

            if shape[0] == 0:
                everything.move(rank, n, make)
                everything.reduce(rank, n, make, nothing, SUM)
                everything.reduce(rank, n, make, nothing, AVG if dtype.is_floating_point else SUM)
            else:  # what has rows, of nothing
                for tensor_ in [make(0, 0), make(0, 0).transpose(0, 2)]:
                    dist.all_reduce(tensor_)
                    dist.reduce(tensor_, 1)
                    dist.broadcast(tensor_, 2)
                    parts = [make(0, 0) for _ in range(n)]
                    dist.all_gather(parts, make(0, 0))
                    dist.all_to_all(parts, [make(0, 0) for _ in range(n)])
                    dist.reduce_scatter(parts[0], parts)
                    whole = torch.empty(n, 0, 2, dtype=dtype)
                    dist.all_gather_into_tensor(whole, make(0, 0))
                    dist.reduce_scatter_tensor(make(0, 0), whole)
                    dist.all_to_all_single(whole, whole.clone())
                    dist.gather(make(0, 0), parts if rank == 3 else None, 3)
                    dist.scatter(make(0, 0), parts if rank == 3 else None, 3)
                    assert tensor_.numel() == 0
            check_in_step(rank, n)

    # Point to point: an empty message is a message, and keeps its place among others.
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    got = torch.zeros(3)
    works = [dist.isend(t, ahead) for t in (torch.empty(0), tensor(rank, 3, F32), torch.empty(0, 5))]
    dist.recv(torch.empty(0), behind)
    dist.recv(got, behind)
    dist.recv(torch.empty(0, 5), behind)
    for work in works:
        work.wait()
    assert_same(got, tensor(behind, 3, F32), "between two empty messages")

    # Objects of no bytes.
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, b"" if rank % 2 else "")
    assert objects == [b"" if r % 2 else "" for r in range(n)]
    for nothing_ in (b"", "", [], None):
        box = [nothing_ if rank == 1 else "old"]
        dist.broadcast_object_list(box, 1)
        assert box == [nothing_]

    # In a coalesced group all but one are empty.
    for full in range(4):
        several = [tensor(rank, 5 if i == full else 0, F32, salt=i) for i in range(4)]
        with dist._coalescing_manager():
            for t in several:
                dist.all_reduce(t)
        for i, t in enumerate(several):
            assert_same(t, reduced("sum", n, 5 if i == full else 0, F32, salt=i), ("coalesced", full, i))
        wholes = [torch.empty(n * (5 if i == full else 0)) for i in range(4)]
        inputs = [tensor(rank, 5 if i == full else 0, F32, salt=i) for i in range(4)]
        with dist._coalescing_manager():
            for whole, t in zip(wholes, inputs):
                dist.all_gather_into_tensor(whole, t)
        assert_same(wholes[full], torch.cat([tensor(r, 5, F32, salt=full) for r in range(n)]), "coalesced")
    got = funcol.wait_tensor(funcol.all_reduce(torch.empty(0, 3), "sum", dist.group.WORLD))
    assert got.shape == (0, 3)
    dist.barrier()
    check_in_step(rank, n)


def test_fr_024_empty_tensors_keep_ranks_in_step(pool: Pool) -> None:
    pool.run(4, check_empty)


# ---- uneven splits ---------------------------------------------------------------------------------------


def rows_between(source: int, target: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return tensor(source, rows * width, dtype, salt=target).reshape(rows, width)


def check_splits(rank: int, n: int) -> None:
    choose = random.Random(3)  # the same on all ranks
    tables = [
        [[0, 2, 3]] * 3,
        [[0, 0, 0], [1, 2, 3], [4, 0, 1]],  # rank 0 sends nothing
        [[0, 1, 2], [0, 1, 2], [0, 3, 0]],  # rank 0 receives nothing
        [[0, 0, 0]] * 3,  # nobody sends
        [[0, 0, 0], [0, 0, 0], [0, 0, 1]],  # one row, to itself
        [[5, 0, 0], [0, 1, 0], [0, 0, 2]],
    ]
    tables += [[[choose.choice([0, 1, 2, 5, 900]) for _ in range(3)] for _ in range(3)] for _ in range(20)]
    for dtype in [F32, torch.float8_e5m2, torch.bool, torch.complex64]:
        for table in tables:
            for width in [1, 3]:
                inputs = [rows_between(rank, r, table[rank][r], width, dtype) for r in range(n)]
                expected = [rows_between(r, rank, table[r][rank], width, dtype) for r in range(n)]
                receives = [table[r][rank] for r in range(n)]
                got = bytewise_cat([rows_between(99, r, receives[r], width, dtype) for r in range(n)])
                dist.all_to_all_single(got, bytewise_cat(inputs), receives, table[rank])
                assert_same(got, bytewise_cat(expected), ("all_to_all_single", table, width, dtype))
                outputs = [rows_between(99, r, receives[r], width, dtype) for r in range(n)]
                dist.all_to_all(outputs, inputs)
                for r, output in enumerate(outputs):
                    assert_same(output, expected[r], ("all_to_all", table, r))
                if dtype is F32:
                    source = bytewise_cat(inputs)
                    work = funcol.all_to_all_single(source, receives, table[rank], dist.group.WORLD)
                    assert_same(funcol.wait_tensor(work), bytewise_cat(expected), ("funcol", table))
    # an empty list means equal parts, on either side
    for splits in [[], None, [2, 2, 2]]:
        got = torch.full((6, 2), -1.0)
        dist.all_to_all_single(
            got, torch.cat([rows_between(rank, r, 2, 2, F32) for r in range(n)]), splits, []
        )
        assert_same(got, torch.cat([rows_between(r, rank, 2, 2, F32) for r in range(n)]), splits)

    # numbers of other kinds, as torch's own backends take them
    for splits in [torch.tensor([1, 2, 3]).numpy(), list(torch.tensor([1, 2, 3])), (1, 2, 3)]:
        got = torch.full((3 * (rank + 1),), -1.0)
        source = torch.cat([rows_between(rank, r, r + 1, 1, F32) for r in range(n)]).flatten()
        dist.all_to_all_single(got, source, [rank + 1] * n, splits)
        expected = [rows_between(r, rank, rank + 1, 1, F32) for r in range(n)]
        assert_same(got, torch.cat(expected).flatten(), splits)

    six, seven = torch.zeros(6), torch.zeros(7)
    for splits, words in [([2.0] * 3, r"must be a list of integers, got \[2.0, 2.0, 2.0\]"), (6, "got 6")]:
        expect(TypeError, words, dist.all_to_all_single, six, six.clone(), [2, 2, 2], splits)
    for output, input_, output_splits, input_splits, words in [
        (seven, seven, None, None, "output has 7 rows, which 3 ranks cannot share"),
        (six, seven, [], [], "input has 7 rows"),
        (seven, six, [], [], "output has 7 rows"),
        (seven, six, [2, 2, 2], [2, 2, 2], r"output_split_sizes \[2, 2, 2\] .* sum is 7"),
        (six, seven, [2, 2, 2], [2, 2, 2], r"input_split_sizes \[2, 2, 2\] .* sum is 7"),
        (six, six, [6], [2, 2, 2], r"output_split_sizes \[6\] must be 3 numbers"),
        (six, six, [2, 2, 2], [1, 1, 1, 3], r"input_split_sizes .* must be 3 numbers"),
        (six, six, [2, 2, 2], [-1, 1, 6], ">= 0"),
    ]:
        expect(ValueError, words, dist.all_to_all_single, output, input_, output_splits, input_splits)
    check_in_step(rank, n)


def test_fr_025_uneven_and_empty_splits(pool: Pool) -> None:
    pool.run(3, check_splits, timeout=100)


def check_bad_split_on_one_rank(rank: int, n: int) -> None:
    """Refused where it is wrong; the others wait for that rank and say so."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank == 1:
        expect(
            ValueError,
            "sum is 6",
            dist.all_to_all_single,
            torch.zeros(6),
            torch.zeros(6),
            [2, 2, 2],
            [1, 1, 1],
            group,
        )
        time.sleep(3)
        return
    start = time.monotonic()
    text = expect(
        mccl.MCCLTimeoutError,
        "all_to_all",
        dist.all_to_all_single,
        torch.zeros(6),
        torch.zeros(6),
        group=group,
    )
    assert time.monotonic() - start < 4 and "1" in text.split("rank", 1)[1], text


def check_splits_that_disagree(rank: int, n: int) -> None:
    """Rank 2 sends one row less to rank 0 than rank 0 asks for: rank 0 says so, and then everybody."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    start = time.monotonic()
    sends = [1, 2, 2] if rank == 2 else [2, 2, 2]
    call = (dist.all_to_all_single, torch.zeros(6), tensor(rank, sum(sends), F32), [2, 2, 2], sends, group)
    if rank == 0:
        expect(mccl.MCCLMismatchError, "all_to_all.*rank 2", *call)
    else:  # what these two ask for is sent to them
        try:
            dist.all_to_all_single(*call[1:])
        except mccl.MCCLError:  # unless rank 0 was quicker to end the group
            pass
    expect(mccl.MCCLError, "all_to_all.*rank [02]", dist.barrier, group)
    assert time.monotonic() - start < 7


def test_fr_025_wrong_splits_end_in_named_errors(pool: Pool) -> None:
    pool.run(3, check_bad_split_on_one_rank)
    pool.run(3, check_splits_that_disagree)


# ---- uneven lists ----------------------------------------------------------------------------------------


def check_uneven(rank: int, n: int) -> None:
    """Sizes that differ by rank, one of them 0 in the last round."""
    for dtype in [F32, torch.bfloat16, I64, torch.bool]:
        for rows in [[1, 2, 3], [3, 1, 2], [2, 0, 70000]]:
            mine = rows_between(rank, 0, rows[rank], 4, dtype)
            outputs = [rows_between(99, r, rows[r], 4, dtype) for r in range(n)]
            dist.all_gather(outputs, mine)
            for r, output in enumerate(outputs):
                assert_same(output, rows_between(r, 0, rows[r], 4, dtype), ("all_gather", rows, r))

            # the flat form of the same: views of one tensor
            whole = torch.zeros(sum(rows), 4, dtype=dtype)
            dist.all_gather(list(whole.split(rows)), mine, async_op=True).wait()
            everyone = torch.cat([rows_between(r, 0, rows[r], 4, dtype) for r in range(n)])
            assert_same(whole, everyone, ("all_gather into views", rows))

            for root in range(n):
                outputs = [rows_between(99, r, rows[r], 4, dtype) for r in range(n)]
                dist.gather(mine, outputs if rank == root else None, root)
                for r, output in enumerate(outputs if rank == root else []):
                    assert_same(output, rows_between(r, 0, rows[r], 4, dtype), ("gather", rows, r))
                inputs = [rows_between(root, r, rows[r], 4, dtype) for r in range(n)]
                got = rows_between(99, 0, rows[rank], 4, dtype)
                dist.scatter(got, inputs if rank == root else None, root)
                assert_same(got, rows_between(root, rank, rows[rank], 4, dtype), ("scatter", rows, root))

            inputs = [rows_between(rank, r, rows[r], 4, dtype) for r in range(n)]
            got = rows_between(99, 0, rows[rank], 4, dtype)
            dist.reduce_scatter(got, inputs)
            total = reduced("sum", n, rows[rank] * 4, dtype, salt=rank).reshape(-1, 4)
            assert_same(got, total, ("reduce_scatter", rows))
            if dtype is F32:
                dist.reduce_scatter(got, inputs, AVG)
                total = reduced("avg", n, rows[rank] * 4, dtype, salt=rank).reshape(-1, 4)
                assert_same(got, total, ("reduce_scatter, avg", rows))

    # What torch's documentation asks to be even is refused before anything is sent.
    expect(ValueError, "expected 3 x 4 = 12", dist.all_gather_into_tensor, torch.zeros(13), torch.zeros(4))
    expect(ValueError, "expected 3 x 4 = 12", dist.reduce_scatter_tensor, torch.zeros(4), torch.zeros(13))
    sizes = [torch.zeros(4 + (r == rank)) for r in range(n)]
    expect(ValueError, "has 5 elements, .* 4; they must be equal", dist.all_gather, sizes, torch.zeros(4))
    expect(ValueError, "has 5 elements", dist.reduce_scatter, torch.zeros(4), sizes)
    check_in_step(rank, n)


def test_fr_026_sizes_may_differ_by_rank(pool: Pool) -> None:
    pool.run(3, check_uneven)


# ---- inputs stay as they are -----------------------------------------------------------------------------


def check_inputs_kept(rank: int, n: int) -> None:
    for dtype in [I64, F32, torch.float16]:
        for count in [1, 5, 4096, 300_000]:  # the last one is cut into shards
            for op in [SUM, MAX, dist._make_nccl_premul_sum(0.5) if dtype is not I64 else SUM]:
                for root in range(n):
                    for strided in [False, True]:
                        data = tensor(rank, count, dtype)
                        if strided:
                            data = torch.stack([data, data], 1)[:, 0]
                        before = data.clone()
                        dist.reduce(data, root, op)
                        what = ("reduce", dtype, count, op, root, strided)
                        if rank != root:
                            assert_same(data, before, what)
                        elif op is SUM or op is MAX:
                            assert_same(data, reduced("sum" if op is SUM else "max", n, count, dtype), what)
            whole = torch.cat([tensor(rank, count, dtype, salt=r) for r in range(n)])
            before = whole.clone()
            dist.reduce_scatter_tensor(torch.empty(count, dtype=dtype), whole)
            dist.reduce_scatter(torch.empty(count, dtype=dtype), list(whole.split(count)))
            dist.all_to_all_single(torch.empty_like(whole), whole)
            assert_same(whole, before, ("inputs", dtype, count))


@pytest.mark.parametrize("n", [2, 4])
def test_fr_028_reduce_leaves_inputs_alone(pool: Pool, n: int) -> None:
    pool.run(n, check_inputs_kept)

"""Each collective x dtype x op x count x number of ranks through torch, exact against a reference."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from patterns import (
    COMPLEX,
    FLOATS,
    MOVABLE,
    REDUCIBLE,
    assert_same,
    ops_for,
    reduced,
    tensor,
    torch_op,
)
from ranks import Pool

COUNTS = [0, 1, 3, 17, 255, 4097]
SIZES = [1, 2, 3, 5, 8]


def counts_for(dtype: torch.dtype) -> list[int]:
    """The last one is a little more than 1 MiB."""
    return [*COUNTS, 2**20 // torch.empty(0, dtype=dtype).element_size() + 3]


def check_all_reduce(rank: int, n: int) -> None:
    pg = dist.group.WORLD
    for dtype in REDUCIBLE:
        for op in ops_for(dtype):
            for count in counts_for(dtype):
                got = tensor(rank, count, dtype, op)
                # c10d turns complex tensors into pairs of reals, for which a product would be another thing
                if dtype in COMPLEX:
                    pg.allreduce(got, torch_op(op, rank)).wait()
                else:
                    dist.all_reduce(got, op=torch_op(op, rank))
                assert_same(got, reduced(op, n, count, dtype), ("all_reduce", dtype, op, count))


def check_rooted(rank: int, n: int) -> None:
    for i, dtype in enumerate(MOVABLE):
        for j, count in enumerate(counts_for(dtype)):
            root = (i + j) % n
            what = (dtype, count, root)
            got = tensor(rank, count, dtype)
            dist.broadcast(got, root)
            assert_same(got, tensor(root, count, dtype), ("broadcast", *what))

            outputs = [tensor(99, count, dtype) for _ in range(n)] if rank == root else None
            dist.gather(tensor(rank, count, dtype), outputs, root)
            for r, output in enumerate(outputs or []):
                assert_same(output, tensor(r, count, dtype), ("gather", r, *what))

            inputs = [tensor(root, count, dtype, salt=r) for r in range(n)] if rank == root else None
            got = tensor(99, count, dtype)
            dist.scatter(got, inputs, root)
            assert_same(got, tensor(root, count, dtype, salt=rank), ("scatter", *what))

    for dtype in REDUCIBLE:
        for i, op in enumerate(ops_for(dtype)):
            for count in counts_for(dtype):
                root = (i + count) % n
                got = tensor(rank, count, dtype, op)
                dist.group.WORLD.reduce(got, root, torch_op(op, rank)).wait()
                expected = reduced(op, n, count, dtype) if rank == root else tensor(rank, count, dtype, op)
                assert_same(got, expected, ("reduce", dtype, op, count, root))


def check_gathering(rank: int, n: int) -> None:
    for dtype in MOVABLE:
        for count in counts_for(dtype):
            outputs = [tensor(99, count, dtype) for _ in range(n)]
            dist.all_gather(outputs, tensor(rank, count, dtype))
            for r, output in enumerate(outputs):
                assert_same(output, tensor(r, count, dtype), ("all_gather", dtype, count, r))

            whole = tensor(99, n * count, dtype)
            dist.all_gather_into_tensor(whole, tensor(rank, count, dtype))
            for r in range(n):
                block = whole[r * count : (r + 1) * count]
                assert_same(block, tensor(r, count, dtype), ("all_gather_into_tensor", dtype, count, r))

        # sizes that differ by rank
        outputs = [tensor(99, 3 * r, dtype) for r in range(n)]
        dist.all_gather(outputs, tensor(rank, 3 * rank, dtype))
        for r, output in enumerate(outputs):
            assert_same(output, tensor(r, 3 * r, dtype), ("all_gather of unequal sizes", dtype, r))


def check_reduce_scatter(rank: int, n: int) -> None:
    for dtype in REDUCIBLE:
        for i, op in enumerate(ops_for(dtype)):
            for count in counts_for(dtype):
                if dtype in COMPLEX and op == "product":
                    continue  # c10d would multiply real and imaginary parts
                inputs = [tensor(rank, count, dtype, op, salt=r) for r in range(n)]
                expected = reduced(op, n, count, dtype, salt=rank)
                # the long ones in one of the two forms: on few cores they take most of the time
                if count < 2**16 or i % 2:
                    got = tensor(99, count, dtype)
                    dist.reduce_scatter(got, inputs, torch_op(op, rank))
                    assert_same(got, expected, ("reduce_scatter", dtype, op, count))
                if count < 2**16 or not i % 2:
                    got = tensor(99, count, dtype)
                    dist.reduce_scatter_tensor(got, torch.cat(inputs), torch_op(op, rank))
                    assert_same(got, expected, ("reduce_scatter_tensor", dtype, op, count))


def check_all_to_all(rank: int, n: int) -> None:
    for dtype in MOVABLE:
        for count in counts_for(dtype):
            inputs = [tensor(rank, count, dtype, salt=r) for r in range(n)]
            outputs = [tensor(99, count, dtype) for _ in range(n)]
            dist.all_to_all(outputs, inputs)
            whole = tensor(99, n * count, dtype)
            dist.all_to_all_single(whole, torch.cat([t.view(torch.uint8) for t in inputs]).view(dtype))
            for r in range(n):
                expected = tensor(r, count, dtype, salt=rank)
                assert_same(outputs[r], expected, ("all_to_all", dtype, count, r))
                block = whole[r * count : (r + 1) * count]
                assert_same(block, expected, ("all_to_all_single", dtype, count, r))

    # rank s sends s + r + 1 rows of 5 to rank r
    def block(source: int, target: int) -> torch.Tensor:
        return tensor(source, (source + target + 1) * 5, torch.float32, salt=target).reshape(-1, 5)

    rows = [rank + r + 1 for r in range(n)]
    got = torch.zeros(sum(rows), 5)
    dist.all_to_all_single(got, torch.cat([block(rank, r) for r in range(n)]), rows, rows)
    assert_same(got, torch.cat([block(r, rank) for r in range(n)]), "all_to_all_single with splits")


def check_barrier(rank: int, n: int) -> None:
    for _ in range(5):
        dist.barrier()
    dist.group.WORLD.monitored_barrier()


CHECKS = [
    check_all_reduce,
    check_rooted,
    check_gathering,
    check_reduce_scatter,
    check_all_to_all,
    check_barrier,
]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_exact(pool: Pool, n: int, check: object) -> None:
    pool.run(n, check, timeout=240)


def check_bit_identity(rank: int, n: int) -> list[str]:
    """Random numbers, for which the order of additions shows."""
    generator = torch.Generator().manual_seed(rank)
    hashes = []
    for dtype in FLOATS:
        for count in [5, 4097, 300_001]:
            values = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
            for _ in range(2):
                got = values.clone()
                dist.all_reduce(got)
                hashes.append(hashlib.sha256(got.view(torch.uint8).numpy()).hexdigest())
    return hashes


@pytest.mark.parametrize("n", [2, 3, 5])
def test_results_are_bit_identical_on_all_ranks_and_between_runs(pool: Pool, n: int) -> None:
    hashes = pool.run(n, check_bit_identity)
    assert all(row == hashes[0] for row in hashes)
    assert hashes[0][0::2] == hashes[0][1::2]

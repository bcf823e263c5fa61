"""All collectives in turn, each checked byte for byte, on tensors that a caller makes and lays out.

`make(rank, salt)` gives the values of one tensor, `lay` brings a tensor into the layout under test.
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from patterns import assert_same

Tensor = torch.Tensor
Make = Callable[[int, int], Tensor]
Lay = Callable[[Tensor], Tensor]
Reference = Callable[[int], Tensor]  # of a salt: the reduction over all ranks of make(rank, salt)

NOBODY = 99  # rank of the data that outputs are filled with


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def bytewise_cat(tensors: list[Tensor]) -> Tensor:
    """torch.cat, also for dtypes that it does not know."""
    flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    return flat.view(tensors[0].dtype).reshape(-1, *tensors[0].shape[1:])


def move(rank: int, n: int, make: Make, lay_input: Lay = as_it_is, lay_output: Lay = as_it_is) -> None:
    """Every collective that only moves data. make() gives at least one dimension."""

    def filled(salt: int = 0) -> Tensor:
        return lay_output(make(NOBODY, salt))

    mine = lay_input(make(rank, 0))
    everyone = bytewise_cat([make(r, 0) for r in range(n)])
    to_all = [lay_input(make(rank, r)) for r in range(n)]
    from_all = bytewise_cat([make(r, rank) for r in range(n)])
    blank = bytewise_cat([make(NOBODY, r) for r in range(n)])
    all_of_mine = lay_input(bytewise_cat([make(rank, r) for r in range(n)]))

    for root in range(n):
        got = lay_input(make(rank, root)) if rank == root else filled(root)
        dist.broadcast(got, root)
        assert_same(got, make(root, root), ("broadcast", root))

        outputs = [filled(r) for r in range(n)] if rank == root else None
        dist.gather(mine, outputs, root)
        for r, output in enumerate(outputs or []):
            assert_same(output, make(r, 0), ("gather", root, r))

        got = filled()
        dist.scatter(got, to_all if rank == root else None, root)
        assert_same(got, make(root, rank), ("scatter", root))

    outputs = [filled(r) for r in range(n)]
    dist.all_gather(outputs, mine, async_op=True).wait()
    for r, output in enumerate(outputs):
        assert_same(output, make(r, 0), ("all_gather", r))

    whole = lay_output(blank.clone())
    dist.all_gather_into_tensor(whole, mine)
    assert_same(whole, everyone, "all_gather_into_tensor")

    whole, other = lay_output(blank.clone()), lay_output(blank.clone())
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(whole, mine)
        dist.all_gather_into_tensor(other, to_all[1])
    assert_same(whole, everyone, "coalesced all_gather_into_tensor")
    assert_same(other, bytewise_cat([make(r, 1) for r in range(n)]), "coalesced all_gather_into_tensor, 2nd")

    outputs = [filled(r) for r in range(n)]
    dist.all_to_all(outputs, to_all)
    for r, output in enumerate(outputs):
        assert_same(output, make(r, rank), ("all_to_all", r))

    whole = lay_output(blank.clone())
    dist.all_to_all_single(whole, all_of_mine, async_op=True).wait()
    assert_same(whole, from_all, "all_to_all_single")

    ahead, behind = (rank + 1) % n, (rank - 1) % n
    got = filled()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, to_all[0], ahead), dist.P2POp(dist.irecv, got, behind)]
    ):
        work.wait()
    assert_same(got, make(behind, 0), "batch_isend_irecv")
    if rank < n // 2 * 2:  # pairs
        got = filled()
        if rank % 2 == 0:
            dist.send(to_all[0], rank + 1, tag=3)
        else:
            dist.recv(got, rank - 1, tag=3)
            assert_same(got, make(rank - 1, 0), "send and recv")

    world = dist.group.WORLD
    assert_same(funcol.wait_tensor(funcol.all_gather_tensor(mine, 0, world)), everyone, "funcol all_gather")
    assert_same(funcol.wait_tensor(funcol.broadcast(mine, 0, world)), make(0, 0), "funcol broadcast")
    exchanged = funcol.wait_tensor(funcol.all_to_all_single(all_of_mine, None, None, world))
    assert_same(exchanged, from_all, "funcol all_to_all_single")

    assert_same(mine, make(rank, 0), "the input of all this")


def reduce(
    rank: int,
    n: int,
    make: Make,
    expected: Reference,
    op: dist.ReduceOp.RedOpType,
    lay_input: Lay = as_it_is,
    lay_output: Lay = as_it_is,
) -> None:
    """Every collective that reduces, by `op`."""

    def filled(salt: int = 0) -> Tensor:
        return lay_output(make(NOBODY, salt))

    to_all = [lay_input(make(rank, r)) for r in range(n)]
    got = lay_output(make(rank, 0))
    dist.all_reduce(got, op)
    assert_same(got, expected(0), ("all_reduce", op))

    several = [lay_output(make(rank, salt)) for salt in range(3)]
    works = [dist.all_reduce(t, op, async_op=True) for t in several]
    for work in reversed(works):
        work.wait()
    for salt, got in enumerate(several):
        assert_same(got, expected(salt), ("async all_reduce", op, salt))

    several = [lay_output(make(rank, salt)) for salt in range(3)]
    with dist._coalescing_manager():
        for got in several:
            dist.all_reduce(got, op)
    for salt, got in enumerate(several):
        assert_same(got, expected(salt), ("coalesced all_reduce", op, salt))

    for root in range(n):
        got = lay_output(make(rank, root))
        dist.reduce(got, root, op)
        assert_same(got, expected(root) if rank == root else make(rank, root), ("reduce", op, root))

    got = filled()
    dist.reduce_scatter(got, to_all, op)
    assert_same(got, expected(rank), ("reduce_scatter", op))

    whole = lay_input(bytewise_cat([make(rank, r) for r in range(n)]))
    got = filled()
    dist.reduce_scatter_tensor(got, whole, op)
    assert_same(got, expected(rank), ("reduce_scatter_tensor", op))

    got = filled()
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(got, whole, op)
    assert_same(got, expected(rank), ("coalesced reduce_scatter_tensor", op))

    name = str(op).split(".")[-1].lower()
    if name in ("sum", "avg", "product", "min", "max"):
        world = dist.group.WORLD
        got = funcol.wait_tensor(funcol.all_reduce(to_all[0], name, world))
        assert_same(got, expected(0), ("funcol all_reduce", op))
        got = funcol.wait_tensor(funcol.reduce_scatter_tensor(whole, name, 0, world))
        assert_same(got, expected(rank), ("funcol reduce_scatter", op))

    for r, tensor in enumerate(to_all):
        assert_same(tensor, make(rank, r), ("an input of all this", op))

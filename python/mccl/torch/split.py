"""Several sub-groups of a group by one call: what torch.distributed.split_group is for NCCL."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mccl import _lib
from mccl._errors import MCCLError, error_from


def split_group(
    parent: Any,
    split_ranks: Sequence[Sequence[int]],
    timeout: timedelta | None,
    pg_options: Any,
    group_desc: str | None,
) -> Any:
    """See mccl.split_group. `parent` is a ProcessGroupMCCL."""
    rank, size = parent.rank(), parent.size()
    what = f"mccl split_group: group '{parent.group_name}' (rank {rank}/{size})"
    splits: Any = split_ranks
    try:
        splits = [sorted(operator.index(member) for member in split) for split in split_ranks]
        wrong = _fault(splits, size)
    except TypeError as error:
        splits, wrong = repr(splits), f"expected lists of ranks, got {splits!r}: {error}"
    parent.splits += 1
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, splits, group=parent)  # so that nobody waits for who has raised
    if wrong is not None:
        raise ValueError(f"{what}: {wrong}")
    for other, theirs in enumerate(everyone):
        if theirs != splits:
            raise _mismatch(f"{what}: this rank splits it into {splits}, rank {other} into {theirs}")
    mine = next((split for split in splits if rank in split), None)
    if mine is None:
        return None
    members = [dist.get_global_rank(parent, member) for member in mine]
    name = f"{parent.group_name}/split{parent.splits}/{'_'.join(map(str, members))}"
    timeout = timeout or parent.timeout
    return _make_group(members, mine.index(rank), name, timeout, pg_options, group_desc)


def _make_group(
    members: list[int],
    rank: int,
    name: str,
    timeout: timedelta,
    pg_options: Any,
    group_desc: str | None,
) -> Any:
    """What new_group does after it has chosen a name. With use_local_synchronization it would depend on how
    many groups the process has had, and members that differ in that would wait for each other for ever.
    """
    world = dist.distributed_c10d._world
    helper: Any = dist.distributed_c10d._new_process_group_helper
    options = "backend_options" if "backend_options" in inspect.signature(helper).parameters else "pg_options"
    group, _ = helper(
        len(members),
        rank,
        members,
        dist.Backend("mccl"),
        dist.distributed_c10d._get_default_store(),
        name,
        timeout=timeout,
        group_desc=group_desc,
        **{options: pg_options},
    )
    world.pg_group_ranks[group] = {member: i for i, member in enumerate(members)}
    return group


def _fault(splits: list[list[int]], size: int) -> str | None:
    """What is wrong with them."""
    members = [member for split in splits for member in split]
    if not splits or not all(splits):
        return f"expected at least one list of ranks, none of them empty, got {splits}"
    if min(members) < 0 or max(members) >= size:
        return f"the ranks of the group are 0 .. {size - 1}, got {splits}"
    if len(set(members)) != len(members):
        return f"a rank can be in one sub-group only, and once, got {splits}"
    return None


def _mismatch(text: str) -> MCCLError:
    return error_from(_lib.ERR_MISMATCH, f"{text}; all ranks must pass the same lists")

"""MCCL: collective communication for training on Macs and the Linux machines beside them.

>>> import mccl, torch.distributed as dist
>>> dist.init_process_group(backend="mccl")     # under torchrun

Importing the package starts no thread and imports no torch; the backend registers itself when torch is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mccl import _lib, _register
from mccl._config import MCCLConfig, apply_thunderbolt_production_defaults, get_config, init
from mccl._errors import (
    MCCLAbortedError,
    MCCLArgumentError,
    MCCLAuthError,
    MCCLConfigError,
    MCCLConnectError,
    MCCLError,
    MCCLMismatchError,
    MCCLPeerLostError,
    MCCLTimeoutError,
    MCCLUnsupportedError,
)
from mccl._metrics import MetricsSummary, get_metrics, log_metrics, reset_metrics
from mccl._options import MCCLOptions

if TYPE_CHECKING:
    from datetime import timedelta

    __version__: str

__all__ = [
    "MCCLAbortedError",
    "MCCLArgumentError",
    "MCCLAuthError",
    "MCCLConfig",
    "MCCLConfigError",
    "MCCLConnectError",
    "MCCLError",
    "MCCLMismatchError",
    "MCCLOptions",
    "MCCLPeerLostError",
    "MCCLTimeoutError",
    "MCCLUnsupportedError",
    "MetricsSummary",
    "__version__",
    "apply_thunderbolt_production_defaults",
    "get_config",
    "get_metrics",
    "init",
    "log_metrics",
    "monitored_barrier",
    "reset_metrics",
    "set_timeout",
    "split_group",
    "version",
]


def version() -> str:
    """Version of the C library that is loaded, such as ``"0.1.0"``."""
    text: bytes = _lib.lib().mccl_version_string()
    return text.decode()


def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """``torch.distributed.monitored_barrier`` for groups of mccl, which torch up to 2.13 refuses by name.

    Blocks until all ranks of `group` (None: the default one) have called it. After `timeout` (the group's, if
    None; numbers are seconds) rank 0 raises MCCLTimeoutError that names the first rank that is missing, with
    `wait_all_ranks` all of them; the others raise too. The group can be used afterwards.
    """
    chosen = _group(group, "monitored_barrier")
    if chosen is not None:
        chosen.monitored_barrier(timeout, wait_all_ranks)


def set_timeout(timeout: timedelta, group: Any = None) -> None:
    """``torch.distributed.set_timeout``, which torch up to 2.13 does not have, for groups of mccl.

    Operations that this rank begins from now on in `group` (None: the default one) fail after `timeout`.
    """
    chosen = _group(group, "set_timeout")
    if chosen is not None:
        chosen.set_timeout(timeout)


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] = (),
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Any:
    """``torch.distributed.split_group`` for groups of mccl, which torch refuses without an accelerator.

    All ranks of `parent_pg` (None: the default group) call it with the same `split_ranks`: lists of their
    ranks in that group, of which no two share one. Blocks until the sub-groups are connected. Returns the one
    with this rank in it, its ranks in ascending order, or None. `pg_options` and `group_desc` are those of
    new_group, as is `timeout` (None: the parent's). ValueError on the ranks that pass bad lists,
    MCCLMismatchError on all if the lists differ; the parent can be used afterwards.
    """
    chosen = _group(parent_pg, "split_group")
    if chosen is None:
        return None
    from mccl.torch import split

    return split.split_group(chosen, split_ranks, timeout, pg_options, group_desc)


def _group(group: Any, what: str) -> Any:
    """The default group for None. None, and a warning, for a group that this rank is not in. TypeError if it
    is not ours.
    """
    import torch.distributed as dist

    from mccl.torch.pg import ProcessGroupMCCL

    chosen: Any = dist.distributed_c10d._get_default_group() if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        warnings.warn(  # torch's words
            f"Running {what} on global rank {dist.get_rank()} which does not belong to the given group.",
            stacklevel=3,
        )
        return None
    if not isinstance(chosen, ProcessGroupMCCL):
        raise TypeError(f"mccl.{what}: expected a group of mccl, got {type(chosen).__name__}")
    return chosen


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version()
    raise AttributeError(f"module 'mccl' has no attribute {name!r}")


def _autoload() -> None:
    """Entry point of torch (groups torch.backends and torch.distributed.backends): registers the backend."""
    _register.register_or_warn()


_register.register_when_torch_is_there()

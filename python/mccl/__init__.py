"""MCCL: collective communication for training on Macs and the Linux machines beside them.

>>> import mccl, torch.distributed as dist
>>> dist.init_process_group(backend="mccl")     # under torchrun

Importing the package starts no thread and imports no torch; the backend registers itself when torch is there.
"""

from __future__ import annotations

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
    import torch.distributed as dist

    chosen: Any = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        return
    if not hasattr(chosen, "monitored_barrier"):
        raise TypeError(f"mccl.monitored_barrier: expected a group of mccl, got {type(chosen).__name__}")
    chosen.monitored_barrier(timeout, wait_all_ranks)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version()
    raise AttributeError(f"module 'mccl' has no attribute {name!r}")


def _autoload() -> None:
    """Entry point of torch (groups torch.backends and torch.distributed.backends): registers the backend."""
    _register.register_or_warn()


_register.register_when_torch_is_there()

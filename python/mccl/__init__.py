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
    "reset_metrics",
    "version",
]


def version() -> str:
    """Version of the C library that is loaded, such as ``"0.1.0"``."""
    text: bytes = _lib.lib().mccl_version_string()
    return text.decode()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version()
    raise AttributeError(f"module 'mccl' has no attribute {name!r}")


def _autoload() -> None:
    """Entry point of torch (groups torch.backends and torch.distributed.backends): registers the backend."""
    _register.register_or_warn()


_register.register_when_torch_is_there()

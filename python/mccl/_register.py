"""Makes torch.distributed know the backend "mccl", without importing torch before the user does."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

NAME = "mccl"


def register() -> None:
    """Registers the backend for cpu and mps tensors. RuntimeError if the name belongs to somebody else."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from mccl.torch.pg import create_process_group

    _stop_watching()
    plugin = dist.Backend._plugins.get(NAME.upper())
    if plugin is not None and plugin.creator_fn is create_process_group:
        return
    if plugin is not None or hasattr(dist.Backend, NAME.upper()):
        owner = getattr(getattr(plugin, "creator_fn", None), "__module__", "another package")
        raise RuntimeError(
            f"mccl: the torch.distributed backend name 'mccl' is already taken by {owner}. Two "
            "packages of that name are installed or imported; uninstall one of them (`pip list` shows both)."
        )
    dist.Backend.register_backend(NAME, create_process_group, extended_api=True, devices=["cpu", "mps"])
    # torch 2.15 hooks its flight recorder into the C++ part of every group whose backend is not in this set.
    # For a group that is written in Python this raises, and the hook would see no operation of it.
    not_hooked: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    not_hooked.add(NAME)


def register_or_warn() -> None:
    """As register(), for moments at which an exception would break other programs' ``import torch``."""
    try:
        register()
    except Exception as error:
        warnings.warn(f"mccl: the backend is not registered: {error}", RuntimeWarning, stacklevel=2)


def register_when_torch_is_there() -> None:
    """Registers now if torch is loaded, else right after it has been imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _watcher)
    elif not getattr(torch.__spec__, "_initializing", False):
        register()
    # Else this runs inside `import torch`, whose entry point calls register_or_warn() at its end.


class _TorchWatcher(importlib.abc.MetaPathFinder):
    """Lets `import mccl` stay light: wraps the loader of torch once, to register after it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        _stop_watching()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        exec_module = loader.exec_module

        def exec_and_register(module: types.ModuleType) -> None:
            exec_module(module)
            register_or_warn()

        loader.exec_module = exec_and_register
        return spec


def _stop_watching() -> None:
    if _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)


_watcher = _TorchWatcher()

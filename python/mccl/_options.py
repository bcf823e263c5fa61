"""Options of one group, for ``pg_options=`` of init_process_group and new_group. Imports no torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mccl._config import Value, check_name

_OF_TORCH = ("timeout", "_timeout", "group_name", "global_ranks_in_group", "is_high_priority_stream")


class MCCLOptions:
    """Settings of one group; they win over :func:`mccl.init` and the environment.

    >>> dist.new_group(pg_options=mccl.MCCLOptions(allreduce_algo="ring", timeout=timedelta(seconds=20)))

    `timeout` limits check-in and every operation, over the one given to init_process_group. `group_name` is
    what errors and logs say, `global_ranks_in_group` the members; both default to what torch knows.
    `is_high_priority_stream` is there for code that sets it on any backend's options: nothing here runs on
    a CUDA stream. TypeError for a name that is neither.
    """

    backend = "mccl"
    timeout: timedelta | None
    group_name: str | None
    global_ranks_in_group: list[int] | None
    is_high_priority_stream: bool

    def __init__(
        self,
        *,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        global_ranks_in_group: list[int] | None = None,
        is_high_priority_stream: bool = False,
        **settings: Value,
    ) -> None:
        object.__setattr__(self, "settings", {})
        self.timeout = timeout
        self.group_name = group_name
        self.global_ranks_in_group = global_ranks_in_group
        self.is_high_priority_stream = is_high_priority_stream
        for name, value in settings.items():
            setattr(self, name, value)

    settings: dict[str, Value]

    @property
    def _timeout(self) -> timedelta | None:
        """torch's name for it."""
        return self.timeout

    @_timeout.setter
    def _timeout(self, value: timedelta | None) -> None:
        self.timeout = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_TORCH:
            object.__setattr__(self, name, value)
            return
        check_name(name)
        self.settings[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["settings"][name]
        except KeyError:
            raise AttributeError(f"mccl: option {name!r} was not set") from None

"""Settings seen from Python: the table lives in C, this file reads it. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import functools
import threading
from collections.abc import Iterator, Mapping
from ctypes import byref
from typing import Any, NamedTuple, Union

from mccl import _lib
from mccl._errors import check

Value = Union[bool, int, float, str]

_FIELDS = ("name", "variable", "type", "default_value", "range", "help", "available")
_TRUE = {"on", "true", "yes", "1"}


class Setting(NamedTuple):
    """One row of the table of settings."""

    name: str
    variable: str
    type: str
    default: str
    range: str
    help: str
    available: str  # "" if live, else why another value than the default is refused


@functools.cache
def table() -> dict[str, Setting]:
    """All rows, by name, in the table's order."""
    rows: dict[str, Setting] = {}
    info = _lib.SettingInfo()
    while _lib.lib().mccl_setting_get_info(len(rows), byref(info)) == _lib.OK:
        row = Setting(*(getattr(info, field).decode() for field in _FIELDS))
        rows[row.name] = row
    return rows


def current(name: str) -> tuple[str, str]:
    """Text of the value that the next group will get, and its source (config, init, environment, ...)."""
    value = ctypes.create_string_buffer(1024)
    source = ctypes.create_string_buffer(32)
    check(_lib.lib().mccl_setting_get(None, name.encode(), value, len(value), source, len(source)))
    return value.value.decode("utf-8", "replace"), source.value.decode()


def parse(setting: Setting, text: str) -> Value:
    """A value of the row's type. Sizes are bytes, times are milliseconds."""
    if setting.type == "bool":
        return text.lower() in _TRUE
    if setting.type in ("int", "bytes", "ms"):
        return int(text)
    if setting.type == "float":
        return float(text)
    if setting.type == "ports" and text.isdigit():  # else a range
        return int(text)
    return text


def settings_text(settings: Mapping[str, Any]) -> str:
    """``"name=value; name=value"``, as the library reads it. Checks names, not values."""
    parts = []
    for name, value in settings.items():
        check_name(name)
        text = ("on" if value else "off") if isinstance(value, bool) else str(value)
        if ";" in text or "\0" in text:
            raise ValueError(
                f"mccl: setting {name}={text!r} contains ';' or NUL, which separates settings; remove it"
            )
        parts.append(f"{name}={text}")
    return "; ".join(parts)


def check_name(name: str) -> None:
    """TypeError that suggests the nearest name if there is no such setting."""
    if name in table():
        return
    near = difflib.get_close_matches(name, table(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`mccl env` lists all settings"
    raise TypeError(f"mccl: there is no setting {name!r}; {hint}")


class MCCLConfig(Mapping[str, Value]):
    """Settings by name. What was not given reads as the value now in force and changes nothing.

    >>> config = MCCLConfig(chunk_bytes=16 * 1024 * 1024)
    >>> config.chunk_bytes, config["port_base"], config.explicit()
    (16777216, 29600, {'chunk_bytes': 16777216})

    Not thread-safe.
    """

    _explicit: dict[str, Value]

    def __init__(self, **settings: Value) -> None:
        object.__setattr__(self, "_explicit", {})
        for name, value in settings.items():
            setattr(self, name, value)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Value]) -> MCCLConfig:
        """The same as ``MCCLConfig(**settings)``."""
        return cls(**settings)

    def explicit(self) -> dict[str, Value]:
        """Only what was given."""
        return dict(self._explicit)

    def to_dict(self) -> dict[str, Value]:
        """All settings."""
        return {name: self[name] for name in self}

    def __getitem__(self, name: str) -> Value:
        if name in self._explicit:
            return self._explicit[name]
        if name not in table():
            raise KeyError(name)
        return parse(table()[name], current(name)[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"mccl: there is no setting {name!r}") from None

    def __setattr__(self, name: str, value: Value) -> None:
        check_name(name)
        self._explicit[name] = value

    def __iter__(self) -> Iterator[str]:
        return iter(table())

    def __len__(self) -> int:
        return len(table())

    def __repr__(self) -> str:
        return f"MCCLConfig({', '.join(f'{name}={value!r}' for name, value in self.items())})"


_lock = threading.Lock()
_given: dict[str, Value] = {}  # what init() has been given so far; under _lock
_OF_ENDPOINT = ("listen_addr", "port_base", "ifname")  # as in src/comm/endpoint.c


def init(config: MCCLConfig | Mapping[str, Value] | None = None, **settings: Value) -> MCCLConfig:
    """Settings for groups that this process makes from now on; they win over environment variables.

    `config` and keyword arguments are merged, keywords win. Calls add up: what is not passed keeps its
    value. Raises MCCLConfigError (a ValueError) for a bad value, naming setting, value and range, and
    TypeError for an unknown name; both change nothing. Does not block; any thread may call it.
    """
    passed = dict(config.explicit() if isinstance(config, MCCLConfig) else config or {})
    passed.update(settings)
    with _lock:
        merged = {**_given, **passed}
        check(_lib.lib().mccl_set_defaults(settings_text(merged).encode()))
        _given.update(passed)
    return get_config()


@contextlib.contextmanager
def opening(settings: str) -> Iterator[None]:
    """While it lasts, what the text `settings` says about the process's endpoint is a default of the process.

    For a group whose id is made here: the library opens the endpoint for the id, before it is told the
    group's settings. Other settings stay the group's own. MCCLConfigError for a bad value.
    """
    own = [item for item in settings.split("; ") if item.partition("=")[0] in _OF_ENDPOINT]
    if not own:
        yield
        return
    with _lock:
        given = settings_text(_given)
        check(_lib.lib().mccl_set_defaults("; ".join([given, *own]).encode()))
        try:
            yield
        finally:
            check(_lib.lib().mccl_set_defaults(given.encode()))


def get_config() -> MCCLConfig:
    """The settings now in force, as attributes and items. A copy: changing it changes nothing."""
    with _lock:
        return MCCLConfig(**_given)


def apply_thunderbolt_production_defaults(*, training_defaults: bool = False) -> None:
    """Settings for Macs joined by a Thunderbolt cable: the link profile ``thunderbolt``.

    With `training_defaults` also communication beside computation (``overlap_comm``) and gradient buckets of
    100 MB (``ddp_bucket_mb``, for scripts to pass to DDP). What the user has set, by environment or
    :func:`init`, stays as it is.
    """
    wanted: dict[str, Value] = {"link_profile": "thunderbolt"}
    if training_defaults:
        wanted.update(overlap_comm=True, ddp_bucket_mb=100)
    init({name: value for name, value in wanted.items() if current(name)[1] in ("default", "profile")})

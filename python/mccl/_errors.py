"""Exceptions for result codes of the C library. Imports no torch."""

from __future__ import annotations

from typing import Any

from mccl import _lib


class MCCLError(RuntimeError):
    """A call into the library failed; the text says what, where, which value and what to do next.

    `code` is the ``mccl_result``. Once the torch backend is in use, what is raised is also a
    ``torch.distributed.DistBackendError``.
    """

    code = 14

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        if code is not None:
            self.code = code

    @property
    def result_name(self) -> str:
        """Name of the code, such as ``MCCL_ERR_TIMEOUT``."""
        name: bytes = _lib.lib().mccl_result_name(self.code)
        return name.decode()

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from, (self.code, str(self)), self.__dict__


class MCCLArgumentError(MCCLError, ValueError):
    """A bad argument, found before anything was sent. The group stays usable."""

    code = 2


class MCCLUnsupportedError(MCCLError, TypeError):
    """A combination that does not exist, such as AVG of integers. The group stays usable."""

    code = 3


class MCCLConfigError(MCCLError, ValueError):
    """A bad setting; the text names it, the value and the range."""

    code = 4


class MCCLMismatchError(MCCLError):
    """Ranks called different operations; the text has both sides' values."""

    code = 5


class MCCLTimeoutError(MCCLError):
    """A deadline passed; the text names the ranks that were waited for."""

    code = 6


class MCCLPeerLostError(MCCLError):
    """A rank is gone; the text names it."""

    code = 7


class MCCLAbortedError(MCCLError):
    """The group was aborted, here or on another rank."""

    code = 8


class MCCLConnectError(MCCLError):
    """No connection to another rank."""

    code = 9


class MCCLAuthError(MCCLError):
    """The other side does not know the group's secret."""

    code = 10


_CLASSES: dict[int, type[MCCLError]] = {
    cls.code: cls
    for cls in (
        MCCLArgumentError,
        MCCLUnsupportedError,
        MCCLConfigError,
        MCCLMismatchError,
        MCCLTimeoutError,
        MCCLPeerLostError,
        MCCLAbortedError,
        MCCLConnectError,
        MCCLAuthError,
    )
}
_raised: dict[int, type[MCCLError]] = {}
_fallback: type[MCCLError] = MCCLError


def also_raise_as(base: type[RuntimeError]) -> None:
    """From now on every error raised is an instance of `base` as well."""
    global _fallback

    def join(cls: type[MCCLError]) -> type[MCCLError]:
        return type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": "mccl"})

    _raised.update({code: join(cls) for code, cls in _CLASSES.items()})
    _fallback = join(MCCLError)


def error_from(code: int, text: str) -> MCCLError:
    """The exception for a result code."""
    cls = _raised.get(code) or _CLASSES.get(code, _fallback)
    return cls(text, code)


def last_error(code: int) -> MCCLError:
    """The exception for a call of this thread that has just returned `code`."""
    text = _lib.last_error() or _lib.lib().mccl_result_text(code).decode()
    return error_from(code, text)


def check(code: int) -> None:
    """Raises unless `code` is MCCL_OK."""
    if code:
        raise last_error(code)

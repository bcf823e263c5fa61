"""The C library: where it is, its prototypes and its structs. Imports no torch, starts no thread.

Functions are called through ``ctypes.CDLL``, which releases the interpreter lock for the length of each call.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path

OK = 0
IN_PROGRESS = 1
ERR_INVALID_ARGUMENT = 2
ERR_CONFIG = 4
ERR_MISMATCH = 5
ERR_TIMEOUT = 6
ERR_ABORTED = 8
ERR_CONNECT = 9
ERR_INVALID_USAGE = 13
ERR_INTERNAL = 14

UNIQUE_ID_BYTES = 512
UNIQUE_ID_TEXT_BYTES = 1040
CONFIG_NONBLOCKING = 1
ANY_SOURCE = -1
DEVICE_HOST = 0


class UniqueId(ctypes.Structure):
    """``mccl_unique_id``."""

    _fields_ = [("opaque", ctypes.c_ubyte * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """``mccl_config``."""

    _fields_ = [
        ("size", c_size_t),
        ("timeout_ms", c_int64),
        ("settings", c_char_p),
        ("name", c_char_p),
        ("flags", c_uint32),
    ]


class Options(ctypes.Structure):
    """``mccl_options``: options of one operation."""

    _fields_ = [
        ("size", c_size_t),
        ("timeout_ms", c_int64),
        ("tag", c_int32),
        ("factor", c_double),
    ]


class AllReduceArgs(ctypes.Structure):
    """``mccl_all_reduce_args``: what mccl_all_reduce takes, in one place."""

    _fields_ = [
        ("size", c_size_t),
        ("send", c_void_p),
        ("recv", c_void_p),
        ("count", c_size_t),
        ("dtype", c_int),
        ("op", c_int),
        ("comm", c_void_p),
        ("stream", c_void_p),
        ("request", c_void_p),
    ]


class Stats(ctypes.Structure):
    """``mccl_stats``."""

    _fields_ = [
        ("size", c_size_t),
        ("operations", c_uint64),
        ("errors", c_uint64),
        ("bytes_sent", c_uint64),
        ("bytes_received", c_uint64),
        ("heartbeats_sent", c_uint64),
        ("heartbeats_received", c_uint64),
    ]


class Status(ctypes.Structure):
    """``mccl_status``: of a finished request."""

    _fields_ = [("size", c_size_t), ("source", c_int), ("tag", c_int32), ("bytes", c_uint64)]


class SettingInfo(ctypes.Structure):
    """``mccl_setting_info``: one row of the table of settings."""

    _fields_ = [
        ("name", c_char_p),
        ("variable", c_char_p),
        ("type", c_char_p),
        ("default_value", c_char_p),
        ("range", c_char_p),
        ("help", c_char_p),
        ("available", c_char_p),
    ]


# The last three parameters of every operation: comm, stream, address of the request.
_TAIL = (c_void_p, c_void_p, c_void_p)

# name: (result, parameters). On the way of every operation, pointers are plain addresses: byref() is faster.
# None: not checked nor converted, which is faster still; the caller passes what byref() gives.
_PROTOTYPES: dict[str, tuple[object, tuple[object, ...] | None]] = {
    "mccl_result_name": (c_char_p, (c_int,)),
    "mccl_result_text": (c_char_p, (c_int,)),
    "mccl_last_error": (c_char_p, ()),
    "mccl_version": (c_int, ()),
    "mccl_version_string": (c_char_p, ()),
    "mccl_op_supports": (c_int, (c_int, c_int)),
    "mccl_set_defaults": (c_int, (c_char_p,)),
    "mccl_setting_get_info": (c_int, (c_size_t, POINTER(SettingInfo))),
    "mccl_setting_get": (c_int, (c_void_p, c_char_p, c_char_p, c_size_t, c_char_p, c_size_t)),
    "mccl_get_unique_id": (c_int, (POINTER(UniqueId),)),
    "mccl_unique_id_to_text": (c_int, (POINTER(UniqueId), c_char_p)),
    "mccl_unique_id_from_text": (c_int, (c_char_p, POINTER(UniqueId))),
    "mccl_comm_init_rank": (c_int, (c_void_p, c_int, POINTER(UniqueId), c_int, POINTER(Config))),
    "mccl_comm_wait_ready": (c_int, (c_void_p, c_int64)),
    "mccl_comm_destroy": (c_int, (c_void_p,)),
    "mccl_comm_abort": (c_int, (c_void_p,)),
    "mccl_comm_get_stats": (c_int, (c_void_p, POINTER(Stats))),
    "mccl_stream_create": (c_int, (c_int, c_void_p, c_void_p)),
    "mccl_stream_set_wait": (c_int, (c_void_p, c_uint32)),
    "mccl_set_options": (c_int, (c_void_p,)),
    "mccl_all_reduce": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, *_TAIL)),
    "mccl_all_reduce_by": (c_int, None),
    "mccl_reduce": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, *_TAIL)),
    "mccl_broadcast": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, *_TAIL)),
    "mccl_all_gather": (c_int, (c_void_p, c_void_p, c_size_t, c_int, *_TAIL)),
    "mccl_all_gather_v": (c_int, (c_void_p, c_void_p, c_void_p, c_int, *_TAIL)),
    "mccl_reduce_scatter": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, *_TAIL)),
    "mccl_reduce_scatter_v": (c_int, (c_void_p, c_void_p, c_void_p, c_int, c_int, *_TAIL)),
    "mccl_gather": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, *_TAIL)),
    "mccl_gather_v": (c_int, (c_void_p, c_size_t, c_void_p, c_void_p, c_int, c_int, *_TAIL)),
    "mccl_scatter_v": (c_int, (c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, *_TAIL)),
    "mccl_all_to_all": (c_int, (c_void_p, c_void_p, c_size_t, c_int, *_TAIL)),
    "mccl_all_to_all_v": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p, c_int, *_TAIL)),
    "mccl_barrier": (c_int, _TAIL),
    "mccl_send": (c_int, (c_void_p, c_size_t, c_int, c_int, *_TAIL)),
    "mccl_recv": (c_int, (c_void_p, c_size_t, c_int, c_int, *_TAIL)),
    "mccl_group_start": (c_int, ()),
    "mccl_group_end": (c_int, ()),
    "mccl_request_wait": (c_int, (c_void_p, c_int64)),
    "mccl_request_test": (c_int, (c_void_p,)),
    "mccl_request_free": (c_int, (c_void_p,)),
    "mccl_request_get_status": (c_int, (c_void_p, POINTER(Status))),
    "mccl_queue_create": (c_int, (c_void_p,)),
    "mccl_queue_add": (c_int, (c_void_p, c_void_p, c_uint64)),
    "mccl_queue_wait": (c_int, (c_void_p, c_int64, POINTER(c_uint64), c_void_p)),
    "mccl_queue_close": (c_int, (c_void_p,)),
    "mccl_queue_destroy": (c_int, (c_void_p,)),
}


def default_path() -> Path:
    """Where the library is expected: beside this file."""
    return Path(__file__).with_name("libmccl.dylib" if sys.platform == "darwin" else "libmccl.so")


def load(path: Path | None = None) -> ctypes.CDLL:
    """Loads the library and declares its functions.

    Raises ImportError that names the file and says how to make it.
    """
    file = default_path() if path is None else path
    if not file.exists():
        raise ImportError(
            f"mccl: the C library {file} is missing. Build and install the package with `pip install .` in "
            "the source folder (it needs a C11 compiler), or install a wheel made for this platform.",
            path=str(file),
        )
    try:
        library = ctypes.CDLL(str(file))
        for name, (result, parameters) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = parameters
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"mccl: the C library {file} cannot be used: {error}. It was made for another platform or "
            "another version; reinstall the package.",
            path=str(file),
        ) from error
    return library


@functools.cache
def lib() -> ctypes.CDLL:
    """The library, loaded on first use. ImportError if that fails."""
    return load()


def last_error() -> str:
    """Text of this thread's last failed call."""
    text: bytes = lib().mccl_last_error()
    return text.decode("utf-8", "replace")


def new_unique_id() -> UniqueId:
    """Opens this process's endpoint and names a group that is about to be made. Does not block."""
    from mccl._errors import check

    unique_id = UniqueId()
    check(lib().mccl_get_unique_id(byref(unique_id)))
    return unique_id


def unique_id_to_text(unique_id: UniqueId) -> str:
    """Printable form, without spaces."""
    from mccl._errors import check

    text = ctypes.create_string_buffer(UNIQUE_ID_TEXT_BYTES)
    check(lib().mccl_unique_id_to_text(byref(unique_id), text))
    return text.value.decode("ascii")


def unique_id_from_text(text: str) -> UniqueId:
    """Inverse of :func:`unique_id_to_text`. MCCLError if the text is not an id."""
    from mccl._errors import check

    unique_id = UniqueId()
    check(lib().mccl_unique_id_from_text(text.encode("ascii", "replace"), byref(unique_id)))
    return unique_id

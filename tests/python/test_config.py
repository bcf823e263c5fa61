"""Settings, options, registration, the command line: all in fresh processes, without other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

import mccl
from mccl import _lib

ALONE = """
import torch, torch.distributed as dist
def alone(**options):
    store = dist.HashStore()
    dist.init_process_group("mccl", store=store, rank=0, world_size=1, **options)
"""


def run(code: str, **env: str) -> str:
    """Runs code in a fresh interpreter; its output. AssertionError with the traceback if it fails."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light() -> None:
    run("""
        import os, sys, threading
        import mccl
        assert "torch" not in sys.modules
        assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
        mccl.version(), mccl.get_config()
        assert len(os.listdir("/proc/self/task")) == 1
        """)


@pytest.mark.parametrize(
    "order", ["import mccl, torch", "import torch, mccl", "import torch.distributed, mccl"]
)
def test_the_backend_registers_in_any_order_of_imports(order: str) -> None:
    out = run(f"""
        {order}
        import torch.distributed as dist
        devices = dist.Backend.backend_capability["mccl"]
        print(dist.Backend("mccl"), dist.is_backend_available("mccl"), devices)
        """)
    assert out.split("\n")[0] == "mccl True ['cpu', 'mps']"


def test_entry_points_are_functions_that_register() -> None:
    found = {point.group: point.value for point in metadata.distribution("mccl").entry_points}
    assert found["torch.backends"] == found["torch.distributed.backends"] == "mccl:_autoload"
    assert found["console_scripts"] == "mccl.cli:main"


def test_a_mixed_backend_string_is_warned_about() -> None:
    run("""
        import warnings, torch, torch.distributed as dist, mccl
        dist.init_process_group("cpu:gloo,mps:mccl", store=dist.HashStore(), rank=0, world_size=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                dist.all_reduce(torch.ones(1))
        assert [w for w in caught if "cpu:gloo has no effect" in str(w.message)].__len__() == 1, caught
        """)


def test_a_taken_backend_name_is_a_clear_error() -> None:
    run("""
        import torch.distributed as dist
        dist.Backend._plugins.pop("MCCL", None)
        if hasattr(dist.Backend, "MCCL"):
            del dist.Backend.MCCL
        dist.Backend.register_backend("mccl", lambda *a: None, devices=["cpu"])
        try:
            import mccl
            mccl._register.register()
            raise SystemExit("no error")
        except RuntimeError as error:
            assert "already taken by __main__" in str(error), error
        """)


def test_version() -> None:
    assert mccl.version() == mccl.__version__
    assert [int(part) for part in mccl.version().split(".")] >= [0, 1, 0]


def test_a_missing_library_is_an_import_error_that_says_how_to_build(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"nowhere/libmccl\.so is missing.*pip install \."):
        _lib.load(tmp_path / "nowhere" / "libmccl.so")
    (tmp_path / "libmccl.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match="cannot be used"):
        _lib.load(tmp_path / "libmccl.so")


def test_precedence() -> None:
    """Environment < init < pg_options."""
    out = run(
        ALONE
        + """
import mccl
from mccl import _lib, _config
assert _config.current("chunk_bytes") == ("65536", "environment"), _config.current("chunk_bytes")
assert mccl.get_config().chunk_bytes == 65536
mccl.init(chunk_bytes=131072)
assert _config.current("chunk_bytes") == ("131072", "init")
mccl.init(small_msg_threshold=4096)      # what is not passed keeps its value
assert mccl.get_config().chunk_bytes == 131072 and mccl.get_config().small_msg_threshold == 4096
assert mccl.get_config().connect_timeout_ms == 12345      # still from the environment
alone(pg_options=mccl.MCCLOptions(chunk_bytes=262144))
import ctypes
def of_group(name):
    value, source = ctypes.create_string_buffer(100), ctypes.create_string_buffer(100)
    handle = dist.group.WORLD._comm.handle
    assert _lib.lib().mccl_setting_get(handle, name, value, 100, source, 100) == 0
    return value.value.decode(), source.value.decode()
print(of_group(b"chunk_bytes"), of_group(b"small_msg_threshold"), of_group(b"connect_timeout_ms"))
""",
        MCCL_CHUNK_BYTES="65536",
        MCCL_CONNECT_TIMEOUT_MS="12345",
    )
    assert out.strip() == "('262144', 'config') ('4096', 'init') ('12345', 'environment')"


def test_init_takes_keywords_dicts_and_configs() -> None:
    run("""
        import mccl
        config = mccl.init({"chunk_bytes": 65536}, log_level="ERROR")
        assert config.chunk_bytes == 65536 and config["log_level"] == "ERROR"
        assert config.explicit() == {"chunk_bytes": 65536, "log_level": "ERROR"}
        config.chunk_bytes = 131072
        assert mccl.get_config().chunk_bytes == 65536       # a copy
        assert mccl.init(config).chunk_bytes == 131072
        assert mccl.get_config().port_base == 29600
        assert isinstance(mccl.get_config().overlap_comm, bool)
        assert isinstance(mccl.get_config().topk_ratio, float)
        assert set(mccl.get_config().to_dict()) == set(mccl.get_config())
        """)


BAD_CALLS = [
    ("mccl.init(chunk_bytes=1)", "MCCLConfigError", ["chunk_bytes", "1", "4096"]),
    ("mccl.init(chunk_bytes='many')", "MCCLConfigError", ["chunk_bytes", "many"]),
    ("mccl.init(allreduce_algo='fastest')", "MCCLConfigError", ["allreduce_algo", "fastest", "ring"]),
    ("mccl.init(compression='fp16')", "MCCLConfigError", ["compression", "fp16"]),
    ("mccl.init(ifname='a; chunk_bytes=9999')", "ValueError", ["ifname", "';'"]),
    ("mccl.init(chunk_byte=4096)", "TypeError", ["chunk_byte", "did you mean 'chunk_bytes'"]),
    ("mccl.MCCLOptions(chunk_byte=4096)", "TypeError", ["did you mean 'chunk_bytes'"]),
    ("alone(pg_options=mccl.MCCLOptions(chunk_bytes=1))", "MCCLConfigError", ["chunk_bytes", "4096"]),
    ("alone(pg_options=3)", "TypeError", ["MCCLOptions", "int"]),
]


def test_bad_values_are_named_and_change_nothing() -> None:
    out = run(
        ALONE
        + f"""
import mccl
before = mccl.get_config().to_dict()
for call in {[call for call, _, _ in BAD_CALLS]!r}:
    try:
        exec(call)
        print("accepted")
    except Exception as error:
        print(type(error).__name__, str(error).lower())
assert mccl.get_config().to_dict() == before
"""
    )
    lines = out.splitlines()
    assert len(lines) == len(BAD_CALLS)
    for line, (call, kind, words) in zip(lines, BAD_CALLS):
        assert line.startswith(kind + " "), (call, line)
        assert all(word.lower() in line for word in words), (call, line)


def test_a_bad_environment_variable_is_an_error_when_the_group_is_made() -> None:
    out = run(
        ALONE
        + """
import mccl
try:
    alone()
except mccl.MCCLConfigError as error:
    print(error)
""",
        MCCL_CHUNK_BYTES="12x",
    )
    assert "MCCL_CHUNK_BYTES" in out and "12x" in out and "4096" in out


def test_thunderbolt_defaults_keep_what_the_user_has_set() -> None:
    code = """
        import mccl
        {before}
        mccl.apply_thunderbolt_production_defaults(training_defaults=True)
        config = mccl.get_config()
        print(config.link_profile, config.chunk_bytes, config.ddp_bucket_mb, config.overlap_comm)
        """
    assert run(code.format(before="")).split() == ["thunderbolt", str(16 * 2**20), "100", "True"]
    kept = run(code.format(before="mccl.init(chunk_bytes=65536)"), DDP_BUCKET_MB="50")
    assert kept.split() == ["thunderbolt", "65536", "50", "True"]


def test_a_group_of_one_needs_nobody() -> None:
    run(
        ALONE
        + """
import mccl
alone()
t = torch.arange(3.0)
dist.all_reduce(t, op=dist.ReduceOp.AVG)
assert t.tolist() == [0, 1, 2]
out = [torch.empty(3)]
dist.all_gather(out, t)
assert out[0].tolist() == [0, 1, 2]
dist.destroy_process_group()
try:
    dist.distributed_c10d.group.WORLD
except Exception:
    pass
"""
    )


def cli(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mccl", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_command_line() -> None:
    result = cli("version")
    assert result.stdout.strip() == mccl.version() and result.returncode == 0
    assert "| torch" not in result.stderr, "the command line imports torch"
    result = cli("env", MCCL_CHUNK_BYTES="65536")
    assert result.returncode == 0 and "| torch" not in result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "65536" in lines["MCCL_CHUNK_BYTES"] and "environment" in lines["MCCL_CHUNK_BYTES"]
    assert "29600" in lines["MCCL_PORT_BASE"] and "default" in lines["MCCL_PORT_BASE"]
    assert cli("env", MCCL_CHUNK_BYTES="x").returncode == 1
    assert cli("nonsense").returncode == 2

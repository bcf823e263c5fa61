"""`mccl bench` as users run it: every operation and library, and what it says when things go wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from mccl import _lib
from mccl.bench import suite
from mccl.bench.libraries import LIBRARIES, Library, Setup, mccl_in_c
from mccl.bench.operations import OPERATIONS
from mccl.bench.team import BenchError, Team
from mccl.cli import bench

ROOT = Path(__file__).parents[2]
KEYS = {
    *("lib", "op", "n", "bytes", "dtype", "transport", "p50_us", "min_us", "p90_us"),
    *("algbw_GBps", "busbw_GBps", "wrong"),
}


def _mccl_bench(*arguments: str, **env: str) -> tuple[int, str]:
    """Status and output, standard error included; everything is killed after five minutes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mccl", "bench", *arguments],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def test_every_operation_of_every_library(tmp_path: Path) -> None:
    rows_file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    sizes = ["-b", "1K", "-e", "1K", "--rounds", "1"]
    status, output = _mccl_bench("all", *sizes, "--json", str(rows_file), "--plot", str(picture))
    assert status == 0, output
    libraries = {"mccl", "mccl-torch", "gloo", "raw"}
    if shutil.which("mpirun"):
        libraries.add("openmpi")
    else:
        assert "without openmpi (Open MPI): install Open MPI" in output
    rows = json.loads(rows_file.read_text())["rows"]
    assert all(row.keys() >= KEYS for row in rows)
    assert {(row["lib"], row["op"], row["bytes"]) for row in rows} == {
        (library, op, 0 if op == "barrier" else 1024) for library in libraries for op in OPERATIONS
    }
    assert [row for row in rows if row["wrong"] != 0] == []
    assert all(0 < row["min_us"] <= row["p50_us"] <= row["p90_us"] for row in rows)
    assert {row["transport"] for row in rows} == {"tcp"}
    assert "Every value is exact." in output and "#wrong" in output
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_shared_memory_and_more_ranks(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    what = ["all_reduce,all_gather", "-n", "2,3", "--transport", "shm", "--dtype", "bfloat16"]
    sizes = ["-b", "64", "-e", "256", "--rounds", "1", "--against", "raw"]
    status, output = _mccl_bench(*what, *sizes, "--json", str(rows_file))
    assert status == 0, output
    rows = json.loads(rows_file.read_text())["rows"]
    assert sorted((row["lib"], row["op"], row["n"], row["bytes"]) for row in rows) == [
        ("mccl", "all_gather", 2, 64),
        ("mccl", "all_gather", 2, 256),
        ("mccl", "all_gather", 3, 60),
        ("mccl", "all_gather", 3, 252),
        ("mccl", "all_reduce", 2, 64),
        ("mccl", "all_reduce", 2, 256),
        ("mccl", "all_reduce", 3, 64),
        ("mccl", "all_reduce", 3, 256),
        ("memcpy", "all_gather", 2, 64),
        ("memcpy", "all_gather", 2, 256),
        ("memcpy", "all_reduce", 2, 64),
        ("memcpy", "all_reduce", 2, 256),
    ]
    assert [row for row in rows if row["wrong"] != 0 or row["transport"] != "shm"] == []
    assert "without memcpy (two copies): it takes two ranks" in output


def test_what_is_absent_is_named(tmp_path: Path) -> None:
    sizes = ["-b", "64", "-e", "64", "--rounds", "1", "--against", "openmpi"]
    status, output = _mccl_bench("barrier", *sizes, PATH=str(tmp_path))
    assert status == 0, output
    assert "without openmpi (Open MPI): install Open MPI (Debian, Ubuntu: openmpi-bin" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "no operation 'nothing'; there are all_reduce, reduce"),
        ([], "required: OP"),
        (["barrier", "-n", "1"], "expected numbers from 2 to 16"),
        (["barrier", "-b", "4x"], "expected bytes such as 4, 64K or 16M"),
        (["barrier", "-b", "4K", "-e", "1K"], "-e is below -b"),
        (["barrier", "-f", "1"], "expected a number from 2 on"),
        (["barrier", "--against", "raw,nccl"], "no library 'nccl'; there are mccl, mccl-torch, gloo"),
        (["barrier", "--transport", "ib"], "invalid choice: 'ib'"),
        (["suite", "--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments_give_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        bench.main(arguments)
    error = capsys.readouterr().err
    assert raised.value.code == 2 and words in error and error.count("\n") == 1, error


def test_a_wrong_value_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, wrong = _lib.default_path(), tmp_path / "libwrong.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(wrong), str(Path(__file__).with_name("wrong_mccl.c"))]
    command += [f'-DREAL="{real}"', f"-I{ROOT / 'include'}", str(real), f"-Wl,-rpath,{real.parent}"]
    subprocess.run(command, check=True)
    monkeypatch.setitem(LIBRARIES, "mccl", mccl_in_c("mccl", wrong))
    options = ["-b", "1K", "-e", "1K", "--rounds", "1", "--against", "raw", "--json", str(tmp_path / "json")]
    status = bench.main(["all_reduce,all_gather", *options])
    output = capsys.readouterr().out
    rows = {(row["lib"], row["op"]): row for row in json.loads((tmp_path / "json").read_text())["rows"]}
    calls = rows["mccl", "all_reduce"]["calls"] + 2  # those that warm up are checked as well
    assert rows["mccl", "all_reduce"]["wrong"] == 2 * calls  # an element of each rank in each call
    assert rows["mccl", "all_gather"]["wrong"] == rows["raw", "all_reduce"]["wrong"] == 0
    assert status == 1 and f"WRONG VALUES: {2 * calls}" in output


def test_a_rank_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    def commands(setup: Setup, folder: Path) -> list[list[str]]:
        return [["sh", "-c", "echo I have seen enough >&2"]] * setup.n

    library = Library("weary", "a library", lambda setup: "", commands)
    with pytest.raises(BenchError, match=r"weary: a rank ended at its start\nI have seen enough"):
        Team(library, Setup(2, "tcp"), tmp_path / "team")


def test_a_peer_that_does_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = LIBRARIES["gloo"]._replace(commands=lambda setup, folder: [["false"]] * setup.n)
    monkeypatch.setitem(LIBRARIES, "gloo", library)
    assert bench.main(["barrier", "--rounds", "1", "--against", "gloo"]) == 0
    assert "without gloo, which does not start: gloo: a rank ended" in capsys.readouterr().out
    monkeypatch.setitem(LIBRARIES, "mccl", library._replace(name="mccl"))
    assert bench.main(["barrier", "--rounds", "1", "--against", "gloo"]) == 1
    assert "mccl bench: mccl: a rank ended at its start" in capsys.readouterr().err


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    team = Team(LIBRARIES["raw"], Setup(2, "tcp"), tmp_path / "team")
    processes = list(team._processes)
    processes[1].kill()
    with pytest.raises(BenchError, match=r"raw: rank [01] ended"):
        team.run("all_reduce", "float32", 4, 0, 1)
    assert all(process.poll() is not None for process in processes)


def test_suite_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = suite.Part(["all_reduce"], (4,), 1, 0.001, ("mccl", "raw"))
    cliff = suite.Part(["all_gather"], (64, 128), 1, 0.001, ("mccl",), "cliff")
    monkeypatch.setattr(suite, "QUICK", {Setup(2, "tcp"): [part, cliff]})
    monkeypatch.setattr(suite, "_NAMES", ("mccl", "raw"))
    assert suite.main(True, tmp_path, False) == 0
    output, document = capsys.readouterr().out, (tmp_path / "report.md").read_text(encoding="utf-8")
    assert {row["lib"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]} == {
        "mccl",
        "raw",
    }
    for text in (output, document):
        lines = [line for line in text.splitlines() if "TCP n=2, 4 B, in C" in line]
        answers = [line.rstrip(" |").endswith("not measured here") for line in lines]
        assert answers == [True, True, False], lines  # Open MPI, gloo; the aim
    assert "### all_reduce, n = 2, tcp" in document and "wrong values: 0" in document


def test_ddp_is_a_module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("mccl.cli.bench_ddp")
    module.__spec__ = ModuleSpec("mccl.cli.bench_ddp", None)
    module.main = lambda arguments: len(arguments)
    monkeypatch.setitem(sys.modules, "mccl.cli.bench_ddp", module)
    assert bench.main(["ddp", "--help", "x"]) == 2

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Brings what torch's versions say about process groups: Python sources, stubs, a header, schemas.

    python tests/matrix/fetch.py

They come out of the wheels for macOS, which pip downloads: these need no CUDA packages beside them. Of each
minor version the newest patch is taken, from 2.5.1 on. Each is kept in build/matrix/<version>, the wheel is
deleted, so a later run downloads only what is new. Versions that REQUIRED names must be there.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/matrix"
REQUIRED = (
    "2.5.1 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0"  # newer ones are found
).split()

# The version of Python has wheels of all of REQUIRED; pip takes wheels for that macOS and for older ones.
WHEELS = ["--only-binary=:all:", "--platform=macosx_26_0_arm64", "--python-version=3.12"]
MEMBERS = (
    "torch/__init__.py",
    "torch/_C/*.pyi",
    "torch/_dynamo/eval_frame.py",
    "torch/_ops.py",
    "torch/autograd/__init__.py",
    "torch/autograd/profiler.py",
    "torch/distributed/*.py",  # * crosses folders
    "torch/futures/__init__.py",
    "torch/include/*/PyProcessGroup.hpp",
    "torch/library.py",
    "torch/nn/__init__.py",
    "torch/nn/modules/__init__.py",
    "torch/nn/modules/_functions.py",
    "torch/nn/modules/batchnorm.py",
    "torch/nn/parallel/*.py",
    "torch/nn/parameter.py*",
)
LIBRARY = "torch/lib/libtorch_cpu.dylib"  # holds the schemas of operators as C strings
SCHEMA_MARKS = (b" group_name", b"c10d.ProcessGroup process_group")
SCHEMA = re.compile(r"\w+\(.*\) -> .+")
_STAMP = "complete"
_DOWNLOADS = 3
_PIP_S = 600


def pip(*arguments: str) -> str:
    """Its output. A constraint on what may be installed here says nothing about wheels that are only read."""
    command = [sys.executable, "-m", "pip", *arguments]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PIP_S)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def number(version: str) -> tuple[int, ...]:
    """For sorting."""
    return tuple(int(part) for part in version.split("."))


def newest_of_each_minor(text: str) -> list[str]:
    """From what `pip index versions` prints."""
    found: dict[tuple[int, ...], str] = {}
    line = re.search(r"^Available versions: (.*)$", text, re.MULTILINE)
    for version in line[1].split(", ") if line else []:
        if re.fullmatch(r"\d+\.\d+\.\d+", version) and number(version) >= number(REQUIRED[0]):
            minor = number(version)[:2]
            found[minor] = max(version, found.get(minor, version), key=number)
    return sorted(found.values(), key=number)


def schemas(library: bytes) -> set[str]:
    """Of operators that take a group."""
    found = set()
    for mark in SCHEMA_MARKS:
        at = library.find(mark)
        while at >= 0:
            start, end = library.rfind(b"\0", 0, at) + 1, library.find(b"\0", at)
            text = library[start:end].decode("ascii", "replace")
            if SCHEMA.fullmatch(text):
                found.add(text)
            at = library.find(mark, end)
    return found


def is_there(version: str) -> bool:
    """True if it was fetched, and nothing is wanted now that was not then."""
    stamp = FOLDER / version / _STAMP
    return stamp.exists() and stamp.read_text() == _wanted()


def _wanted() -> str:
    return "\n".join([*MEMBERS, LIBRARY, SCHEMA.pattern])


def fetch(version: str) -> None:
    """Downloads the wheel, keeps what is wanted, deletes the wheel."""
    folder, part = FOLDER / version, FOLDER / f"{version}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    pip("download", "--quiet", "--no-deps", *WHEELS, "--dest", str(part), f"torch=={version}")
    (wheel,) = part.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in MEMBERS):
                archive.extract(name, part)
        (part / "schemas.txt").write_text("\n".join(sorted(schemas(archive.read(LIBRARY)))) + "\n")
    wheel.unlink()
    (part / _STAMP).write_text(_wanted())
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def versions() -> list[str]:
    """All that are to be checked, oldest first, each in FOLDER. RuntimeError if pip has not all of them."""
    try:
        listed = sorted(
            {*newest_of_each_minor(pip("index", "versions", "torch", *WHEELS)), *REQUIRED}, key=number
        )
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        listed = list(REQUIRED)  # without a network what is there will do
        if os.environ.get("CI") == "true" or not all(map(is_there, listed)):
            raise
        print(f"newer versions of torch were not looked for: {error}", file=sys.stderr)
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        list(pool.map(fetch, [version for version in listed if not is_there(version)]))
    return listed


if __name__ == "__main__":
    for version in versions():
        print(FOLDER / version)

"""The libraries that can be measured: how their ranks are started, and what is missing where they cannot."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mccl import _lib
from mccl.bench.operations import OPERATIONS

WORKER = Path(__file__).parent.parent / "mccl-bench-rank"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_OPEN_MPI = "libmpi.40.dylib" if sys.platform == "darwin" else "libmpi.so.40"


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Setup(NamedTuple):
    """What a team is for."""

    n: int
    transport: str  # "tcp" or "shm", as asked for
    sched: str = "default"  # or "rr"

    @property
    def is_crowded(self) -> bool:
        """Whether ranks outnumber processors."""
        return self.n > processors()


class Library(NamedTuple):
    """One contestant. Functions that take a Setup do not look at ranks."""

    name: str
    label: str
    absent: Callable[[Setup], str]  # why it cannot be measured, and what to install; "" if it can
    commands: Callable[[Setup, Path], list[list[str]]]  # one for each rank, or one that starts them all
    transports: tuple[str, ...] = ("tcp", "shm")
    environment: Callable[[Setup], dict[str, str]] = lambda setup: {}

    def transport(self, setup: Setup) -> str:
        """What its bytes really go over."""
        return setup.transport if setup.transport in self.transports else self.transports[0]

    def is_meant_by(self, names: Sequence[str]) -> bool:
        """Whether it is among them; a limit of the machine is meant by the name of either."""
        limits = LIMITS.values()
        return self.name in names or (self.name in limits and any(name in limits for name in names))

    def lacks(self, op: str, dtype: str) -> str:
        """Why it cannot do the operation for this type; "" if it can."""
        is_missing = self.name == "openmpi" and "float16" in dtype and OPERATIONS[op].reduces
        return f"no {dtype}" if is_missing else ""


def _tail(setup: Setup, folder: Path) -> list[str]:
    """The arguments of bench/worker.c and of mccl.bench.rank from N on."""
    schedule = "rr" if setup.sched == "rr" else "-"
    return [str(setup.n), str(folder), schedule, "yield" if setup.is_crowded else "spin"]


def _in_c(name: str, path: Path | None = None) -> Callable[[Setup, Path], list[list[str]]]:
    def commands(setup: Setup, folder: Path) -> list[list[str]]:
        tail = [*_tail(setup, folder), *([str(path)] if path else [])]
        return [[str(WORKER), name, str(rank), *tail] for rank in range(setup.n)]

    return commands


def _in_python(name: str) -> Callable[[Setup, Path], list[list[str]]]:
    def commands(setup: Setup, folder: Path) -> list[list[str]]:
        head = [sys.executable, "-m", "mccl.bench.rank", name]
        return [[*head, str(rank), *_tail(setup, folder)] for rank in range(setup.n)]

    return commands


def _mpirun(setup: Setup, folder: Path) -> list[list[str]]:
    command = ["mpirun", "-n", str(setup.n), "--bind-to", "none"]
    if setup.transport == "tcp":
        command += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        command += ["--mca", "btl_tcp_if_include", _LOOPBACK]
    if setup.is_crowded:
        command += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    return [[*command, str(WORKER), "openmpi", "-", *_tail(setup, folder), _open_mpi_path()]]


def _open_mpi_path() -> str:
    """Beside its mpirun, where that is not in the system's own folders; else by name."""
    program = shutil.which("mpirun")
    beside = Path(program).resolve().parent.parent / "lib" / _OPEN_MPI if program else Path(_OPEN_MPI)
    return str(beside) if beside.exists() else _OPEN_MPI


def _no_worker(setup: Setup) -> str:
    return "" if WORKER.exists() else f"{WORKER} is missing: install the package with `pip install .`"


def _no_torch(setup: Setup) -> str:
    return "" if importlib.util.find_spec("torch") else "install torch"


def _not_two(setup: Setup) -> str:
    return _no_worker(setup) if setup.n == 2 else "it takes two ranks"


def _no_open_mpi(setup: Setup) -> str:
    program = shutil.which("mpirun")
    if not program:
        return "install Open MPI (Debian, Ubuntu: openmpi-bin; Homebrew: open-mpi)"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
    return _no_worker(setup) if "Open MPI" in said else f"{program} is not Open MPI's"


def _mccl_environment(setup: Setup) -> dict[str, str]:
    return {"MCCL_TRANSPORT": setup.transport}


def _mpi_environment(setup: Setup) -> dict[str, str]:
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mccl_in_c(name: str, path: Path) -> Library:
    """MCCL's C library from `path`."""
    return Library(name, "MCCL", _no_worker, _in_c("mccl", path), environment=_mccl_environment)


LIBRARIES = {
    library.name: library
    for library in (
        mccl_in_c("mccl", _lib.default_path()),
        Library(
            "mccl-torch",
            "MCCL through torch",
            _no_torch,
            _in_python("mccl-torch"),
            environment=_mccl_environment,
        ),
        Library("gloo", "gloo through torch", _no_torch, _in_python("gloo"), ("tcp",)),
        Library("openmpi", "Open MPI", _no_open_mpi, _mpirun, environment=_mpi_environment),
        Library("raw", "bare sockets", _not_two, _in_c("raw"), ("tcp",)),
        Library("memcpy", "two copies", _not_two, _in_c("memcpy"), ("shm",)),
    )
}
# The limit of the machine, by what the bytes go over: `raw` means either.
LIMITS = {"tcp": "raw", "shm": "memcpy"}


def chosen(names: Iterable[str], setup: Setup) -> tuple[list[Library], list[str]]:
    """The libraries of these names that can be measured, and a line for each that cannot."""
    found: list[Library] = []
    notes = []
    for name in names:
        library = LIBRARIES[LIMITS[setup.transport] if name in LIMITS.values() else name]
        reason = library.absent(setup)
        if reason:
            notes.append(f"without {library.name} ({library.label}): {reason}")
        elif library not in found:
            found.append(library)
    return found, notes

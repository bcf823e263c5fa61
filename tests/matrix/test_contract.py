"""The contract with torch, version by version: what it asks of groups is there, and takes its arguments.

fetch.py brings the versions' sources, uses.py reads them, contract.py compares. None of the versions is run,
and none need be installed.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest

import contract
import fetch
import reasons
from contract import OURS, Names, Version
from mccl._tensor import OP_NAMES
from uses import BACKEND, GROUP, WORK

NAMES = fetch.versions()
each = pytest.mark.parametrize("name", NAMES)


@functools.cache
def version(name: str) -> Version:
    read = Version.read(fetch.FOLDER / name)
    gc.freeze()  # trees stay to the end: looking for garbage in them takes as long as reading them
    return read


def assert_none(complaints: Iterator[str]) -> None:
    found = list(complaints)
    assert not found, "\n".join(found)


@each
def test_every_use_is_served(name: str, table: dict[str, str]) -> None:
    """Methods and attributes that Python code of torch uses are ours, and take the arguments it gives."""
    this, index = version(name), NAMES.index(name)
    new = this.methods - version(NAMES[index - 1]).methods if index else set()
    said = " ".join(f"{kind}.{method}" for kind, method in sorted(new)) or "-"
    count = sum(map(len, contract.overrides(this).values()))
    table[name] = f"{name:8} {len(this.uses):5}  {len(this.methods):5}  {count:3}  {said}"
    assert len(this.uses) > 150 and {kind for kind, _ in this.methods} >= {GROUP, WORK, BACKEND}
    assert_none(contract.missing_uses(this))


@each
def test_every_method_that_cpp_calls_is_served(name: str) -> None:
    assert_none(contract.missing_overrides(version(name)))


@each
def test_every_functional_operator_reaches_a_group(name: str) -> None:
    assert_none(contract.unreached_operators(version(name)))


@each
def test_backend_can_be_registered_and_made(name: str) -> None:
    assert_none(contract.wrong_registration(version(name)))


@each
def test_torch_has_what_this_package_imports(name: str) -> None:
    names = Names(version(name))
    used = contract.used_names()
    assert "torch._C._distributed_c10d._register_work" in used and "torch.distributed.ProcessGroup" in used
    missing = {used_name: where for used_name, where in used.items() if names.has(used_name) is not True}
    optional = {name for name in missing if name in reasons.GUARDED}
    assert missing.keys() == optional, missing


@each
def test_features_are_told_apart(name: str) -> None:
    """What this package looks for with hasattr stands for what it takes it for."""
    this = version(name)
    names = Names(this)
    keeps_works = "PyWorkHolder" in this.text("PyProcessGroup.hpp")
    assert names.has("torch.distributed.ProcessGroup.abort") is keeps_works

    source = (this.folder / "torch/distributed/distributed_c10d.py").read_text()
    hooks = "FlightRecorderHook.attach(" in source
    assert names.has("torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS") is hooks

    frames = "torch._C._dynamo.eval_frame.set_code_exec_strategy"
    skip_code = re.search(r"\bskip_code\b", (this.folder / "torch/_dynamo/eval_frame.py").read_text())
    assert names.has(frames) or skip_code


@each
def test_every_reduction_is_known(name: str) -> None:
    tree = version(name).trees["torch/_C/_distributed_c10d.pyi"]
    (cls,) = [node for node in tree.body if getattr(node, "name", "") == "ReduceOp"]
    kinds = re.findall(r"^    ([A-Z_]+): RedOpType", contract.ast.unparse(cls), re.MULTILINE)
    assert set(kinds) - {"UNUSED"} == set(OP_NAMES)


def test_tables_of_reasons_hold_nothing_that_no_version_needs() -> None:
    asked = {contract.key(use) for name in NAMES for use in version(name).uses}
    assert set(reasons.LEFT_OUT) <= asked, set(reasons.LEFT_OUT) - asked
    looked_for = {method for name in NAMES for method in contract.overrides(version(name))[GROUP]}
    assert set(reasons.NOT_OVERRIDDEN) <= looked_for
    for kind, method in reasons.LEFT_OUT:
        assert method.endswith("=") or contract.own(OURS[kind], method) is None, (
            f"{kind}.{method} is there now: take the row out"
        )


# -- the checks themselves ----------------------------------------------------------------------------------


def without(cls: type, method: str) -> type:
    """A copy of a class and of what it inherits from this package, less one method."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("mccl.")]
    members: dict[str, Any] = {}
    for base in reversed(own):
        members.update(vars(base))
    assert method in members
    del members[method]
    bases = [base for base in cls.__mro__ if base.__module__.startswith("torch.")][:1]
    members = {k: v for k, v in members.items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__, tuple(bases), members)


@pytest.mark.parametrize(
    ("kind", "method", "first"),
    [(GROUP, "allreduce", 0), (GROUP, "all_gather_single", -1), (GROUP, "_allgather_base", 0),
     (GROUP, "_get_backend", 0), (WORK, "wait", 0), (WORK, "_source_rank", 0),
     (BACKEND, "supports_splitting", 0)],
)  # fmt: skip
def test_a_method_that_is_taken_away_is_missed(kind: str, method: str, first: int) -> None:
    less = {**OURS, kind: without(OURS[kind], method)}
    complaints = "\n".join(contract.missing_uses(version(NAMES[first]), less))
    assert f"{kind}.{method}: {OURS[kind].__name__} does not define it itself" in complaints
    assert all(f"{kind}.{method}:" in line for line in complaints.splitlines())


def test_a_method_that_cpp_calls_is_missed() -> None:
    less = {**OURS, GROUP: without(OURS[GROUP], "getGroupName")}
    (complaint,) = contract.missing_overrides(version(NAMES[-1]), less)
    assert "C++ looks for group.getGroupName" in complaint


def test_arguments_that_do_not_fit_are_noticed() -> None:
    class Narrow(OURS[GROUP]):  # type: ignore[misc]
        def allgather(self, outputs: Any, inputs: Any) -> None: ...

        def barrier(self) -> None: ...

    complaints = "\n".join(contract.missing_uses(version(NAMES[-1]), {**OURS, GROUP: Narrow}))
    assert "call of group.allgather: 3 arguments and [] do not fit" in complaints
    assert "call of group.barrier: 0 arguments and ['opts'] do not fit" in complaints


def test_an_operator_without_a_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The out-variant of all-gather needs ours before torch 2.14, and the newest versions do not."""
    monkeypatch.setattr(contract, "KERNELS", ())
    (complaint,) = contract.unreached_operators(version("2.13.0"))
    assert complaint.startswith("operator all_gather_into_tensor_out(")
    assert_none(contract.unreached_operators(version("2.14.1")))
    monkeypatch.delitem(reasons.OPERATORS, "irecv")
    (complaint,) = contract.unreached_operators(version("2.14.1"))
    assert complaint.startswith("operator irecv(") and "new" in complaint


def test_a_name_that_torch_lacks_is_noticed() -> None:
    old = Names(version(NAMES[0]))
    assert old.has("torch.distributed.distributed_c10d.AllgatherOptions") is True
    assert old.has("torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS") is False
    assert old.has("torch._C._distributed_c10d.ProcessGroup.abort") is False


def test_newest_patch_of_each_minor_version_is_taken() -> None:
    text = "torch (3.0.0)\nAvailable versions: 3.0.0, 2.10.1, 2.10.0, 2.9.0, 2.5.1+cpu, 2.5.1, 2.5.0, 2.4.1\n"
    assert fetch.newest_of_each_minor(text) == ["2.5.1", "2.9.0", "2.10.1", "3.0.0"]
    assert set(fetch.REQUIRED) <= set(NAMES)

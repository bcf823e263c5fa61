# SPDX-License-Identifier: MIT
"""Compares what one version of torch asks of groups with what this package has.

Each check gives complaints, sentences that name what is missing and the line of torch that asks for it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed  # noqa: F401

import mccl
import reasons
import uses
from mccl import _options
from mccl.torch import core, functional, pg, work
from uses import BACKEND, GROUP, OPTIONS, WORK, Use

PACKAGE = Path(mccl.__file__).parent
OURS: dict[str, type] = {
    GROUP: pg.ProcessGroupMCCL,
    WORK: work.WorkMCCL,
    BACKEND: core.BackendView,
    OPTIONS: _options.MCCLOptions,
}
KERNELS = (functional.all_gather_into_tensor_out.__name__, functional.batch_p2p_ops.__name__)
_HEADER = "PyProcessGroup.hpp"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class Version(NamedTuple):
    """What was kept of one version of torch."""

    name: str
    folder: Path
    trees: dict[str, ast.Module]
    uses: list[Use]

    @classmethod
    def read(cls, folder: Path) -> Version:
        trees = uses.parse(folder, tuple(reasons.OTHER_CODE))
        return cls(folder.name, folder, trees, list(uses.find(trees)))

    def text(self, name: str) -> str:
        """Of the one file of that name."""
        (path,) = self.folder.rglob(name)
        return path.read_text()

    @property
    def methods(self) -> set[tuple[str, str]]:
        """Kind and name of all that is asked for."""
        return {(use.kind, use.name) for use in self.uses}


# -- what Python code of torch asks -------------------------------------------------------------------------


def missing_uses(version: Version, ours: Mapping[str, type] = OURS) -> Iterator[str]:
    """Calls, reads and assignments that ours would not serve."""
    for use in version.uses:
        if key(use) not in reasons.LEFT_OUT and (why := _refusal(use, ours[use.kind])):
            yield f"{use.where}: {use.how} of {use.kind}.{use.name}: {why}"


def key(use: Use) -> tuple[str, str]:
    """Of LEFT_OUT."""
    return use.kind, use.name + "=" * (use.how == "write")


def _refusal(use: Use, cls: type) -> str:
    found = own(cls, use.name)
    if found is None and (use.kind, use.name) in reasons.OF_BASE_CLASS:
        return "" if hasattr(cls, use.name) else f"{cls.__name__} has it no more"
    if found is None:
        return "" if use.how == "optional" else f"{cls.__name__} does not define it itself"
    if use.how == "write" and isinstance(found, property) and found.fset is None:
        return "cannot be assigned to"
    if use.how != "call":
        return ""
    if not callable(found):
        return "is not a method"
    return _unbound(found, use.positional, use.keywords)


def own(cls: type, name: str) -> Any:
    """A member that `cls` has from this package, or None: torch's base class asks backends, of which a
    Python group has none.
    """
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != "torch" and base.__module__ != "builtins":
            if name in vars(base):
                return vars(base)[name]
            if name in _instance_attributes(base):
                return object()
    return None


@functools.cache
def _instance_attributes(cls: type) -> set[str]:
    """What methods of the class assign to self, and what the class annotates."""
    try:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls)))
    except (OSError, TypeError):
        return set()
    assigned = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    return assigned | set(vars(cls).get("__annotations__", {}))


def _unbound(function: Any, positional: int | None, keywords: tuple[str, ...]) -> str:
    """Why a call with so many arguments after self does not fit, or ""."""
    signature = inspect.signature(function)
    try:
        if positional is None:
            signature.bind_partial(None, **dict.fromkeys(keywords))
        else:
            signature.bind(None, *[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{positional} arguments and {list(keywords)} do not fit {signature}: {error}"
    return ""


# -- what C++ code of torch calls ---------------------------------------------------------------------------


def overrides(version: Version) -> dict[str, dict[str, int]]:
    """Methods that C++ looks for in Python, with the number of arguments: of groups, and of Works."""
    text = _COMMENT.sub("", version.text(_HEADER))
    found: dict[str, dict[str, int]] = {GROUP: {}, WORK: {}}
    for macro in re.finditer(r"\b(?:PYBIND11_OVERRIDE(?:_PURE)?|WORK_OVERRIDE)\(([^;]*)\);", text):
        parts = [part.strip() for part in _split(macro[1])]
        if "name" in parts:  # the definition of the macro
            continue
        at = next(
            i for i, part in enumerate(parts) if part in ("ProcessGroup", "Work") and i + 1 < len(parts)
        )
        kind = GROUP if parts[at] == "ProcessGroup" else WORK
        found[kind][parts[at + 1]] = len([part for part in parts[at + 2 :] if part])
    for lookup in re.finditer(r'get_override\(\s*static_cast<const (\w+)\*>\(this\),\s*"(\w+)"\)', text):
        call = re.compile(r"\boverride\(([^;]*)\);").search(text, lookup.end())
        kind = GROUP if lookup[1] == "ProcessGroup" else WORK
        found[kind][lookup[2]] = len([part for part in _split(call[1] if call else "") if part.strip()])
    return found


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "(<") - (letter in ")>")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def missing_overrides(version: Version, ours: Mapping[str, type] = OURS) -> Iterator[str]:
    """Methods of which C++ would take the base class's, or that it cannot call."""
    found = overrides(version)
    if len(found[GROUP]) < 10 or not found[WORK]:
        yield f"{_HEADER} of {version.name} is not understood: {found}"
    for kind, names in found.items():
        for name, count in names.items():
            function = own(ours[kind], name)
            if kind == GROUP and name in reasons.NOT_OVERRIDDEN:
                if function is not None:
                    yield f"{name} is there now: take it out of NOT_OVERRIDDEN"
            elif function is None:
                yield f"{_HEADER}: C++ looks for {kind}.{name}, which {ours[kind].__name__} does not define"
            elif why := _unbound(function, count, ()):
                yield f"{_HEADER}: {kind}.{name}: {why}"


def unreached_operators(version: Version) -> Iterator[str]:
    """Operators of compiled programs that lead to C++ methods which Python groups do not get."""
    reached = overrides(version)[GROUP]
    lines = version.text("schemas.txt").splitlines()
    names = {line.partition("(")[0]: line for line in lines if "c10d.ProcessGroup" not in line}
    if "all_reduce" not in names:
        yield f"no schema of all_reduce was found in torch {version.name}"
    for name, line in names.items():
        if name.startswith(reasons.SYMMETRIC):
            continue
        method = reasons.OPERATORS.get(name)
        if method is None:
            yield f"operator {line}: new, say in OPERATORS which method of the group C++ calls"
        elif name in KERNELS:
            if why := _kernel_refusal(line, getattr(functional, name)):
                yield f"operator {line}: {why}"
        elif method not in reached and reasons.RENAMED.get(method) not in reached:
            if name not in reasons.UNREACHED_OPERATORS:
                yield f"operator {line}: C++ calls {method}, which it does not look for in Python"


def _kernel_refusal(schema: str, kernel: Any) -> str:
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    plain, _, keyword = inside.partition("*")
    count = len([part for part in _split(plain) if part.strip()])
    signature = inspect.signature(kernel)
    try:
        signature.bind(
            *[None] * count, **{part.split()[-1]: None for part in keyword.split(",") if part.strip()}
        )
    except TypeError as error:
        return f"our kernel {kernel.__name__}{signature}: {error}"
    return ""


# -- registration -------------------------------------------------------------------------------------------


def wrong_registration(version: Version) -> Iterator[str]:
    """Whether register_backend takes our call, and the creator gets what it reads."""
    tree = version.trees["torch/distributed/distributed_c10d.py"]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    register = [node for node in functions if node.name == "register_backend"]
    names = {argument.arg for node in register for argument in node.args.args + node.args.kwonlyargs}
    for name in ("name", "extended_api", "devices"):
        if name not in names:
            yield f"register_backend has no argument {name}, only {sorted(names)}"
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_name(node.func, "creator_fn")
    ]
    extended = [call for call in calls if len(call.args) == 2]
    if not extended:
        yield "no call of creator_fn with two arguments, the extended form"
    for call in extended:
        if why := _unbound(pg.create_process_group, len(call.args) - 1, ()):
            yield f"line {call.lineno}: creator_fn: {why}"
        options = ast.unparse(call.args[0])
        given = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == options
        }
        for name in sorted(creator_reads() - given):
            yield f"the creator reads opts.{name}, which torch does not set on {options}: {sorted(given)}"


def creator_reads() -> set[str]:
    """Attributes that our creator takes from torch's options without a default."""
    tree = ast.parse(inspect.getsource(pg.create_process_group) + inspect.getsource(pg._members))
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_name(n.value, "opts")}


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


# -- names of torch that this package uses ------------------------------------------------------------------


def used_names() -> dict[str, str]:
    """Dotted names below torch, with the place of use, that are imported or read without a guard."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree, aliases = ast.parse(path.read_text()), {"torch": "torch"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "torch":
                        aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                for alias in node.names:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        where = path.relative_to(PACKAGE.parent).as_posix()
        for full in aliases.values():
            found.setdefault(full, where)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                root, _, rest = ast.unparse(node).partition(".")
                if root in aliases and re.fullmatch(r"[\w.]+", rest):
                    found.setdefault(f"{aliases[root]}.{rest}", f"{where}:{node.lineno}")
    return found


class Names:
    """Which names the modules of one version define."""

    def __init__(self, version: Version) -> None:
        self._trees = version.trees
        self._asked: set[str] = set()  # modules import each other

    def has(self, dotted: str) -> bool | None:
        """Whether it is defined; None if that cannot be said, since its module was not kept."""
        if dotted in self._asked:
            return False
        self._asked.add(dotted)
        try:
            return True if dotted in reasons.MADE_LATER else self._has(dotted)
        finally:
            self._asked.discard(dotted)

    def _has(self, dotted: str) -> bool | None:
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            module = "/".join(parts[:cut])
            if tree := self._tree(module):
                return self._defines(module, tree.body, parts[cut:])
        return None

    def _tree(self, module: str) -> ast.Module | None:
        for ending in (".py", ".pyi", "/__init__.py", "/__init__.pyi"):
            if module + ending in self._trees:
                return self._trees[module + ending]
        return None

    def _defines(self, module: str, body: list[ast.stmt], parts: list[str]) -> bool | None:
        if not parts:
            return True
        rest = ".".join(parts[1:])
        for node in _statements(body):
            if isinstance(node, ast.ClassDef) and node.name == parts[0]:
                parents = [*node.bases, *(keyword.value for keyword in node.keywords)]
                return self._defines(module, node.body, parts[1:]) or any(
                    self._defines(module, body, [parent.id, *parts[1:]])
                    for parent in parents
                    if isinstance(parent, ast.Name) and parent.id != node.name
                )
            if isinstance(node, ast.FunctionDef) and node.name == parts[0]:
                return True
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(_is_name(target, parts[0]) for target in targets):
                    return True  # what a value has is a matter of its class
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    if (alias.asname or alias.name.split(".")[0]) == parts[0]:
                        return len(parts) == 1 or self.has(
                            f"{self._source(module, node)}{alias.name}." + rest
                        )
        stars = [self._source(module, node) for node in _statements(body) if _is_star(node)]
        if module in ("torch", "torch/__init__"):
            stars.append("torch._C._VariableFunctions.")  # by a loop over its names
        found = [self.has(star + ".".join(parts)) for star in stars]
        return True if True in found else None if None in found else False

    def _source(self, module: str, node: ast.stmt) -> str:
        """Of an import: its module and a dot."""
        if isinstance(node, ast.Import):
            return ""
        assert isinstance(node, ast.ImportFrom)
        if not node.level:
            return f"{node.module}."
        is_package = module + ".py" not in self._trees and module + ".pyi" not in self._trees
        package = module.split("/")[: len(module.split("/")) - node.level + is_package]
        return ".".join([*package, *filter(None, [node.module])]) + "."


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """With those inside if, try and with."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _is_star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)

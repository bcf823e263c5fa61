# SPDX-License-Identifier: MIT
"""Finds what Python code of torch asks of process groups, of their Works, backends and options.

Kinds are inferred, not proven: from annotations, from what functions and methods return, from assignments,
and, for what is left, from names of variables that torch uses for nothing else. Each file is read once for
annotations, then for uses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUP, WORK, BACKEND, OPTIONS = "group", "work", "backend", "options"

CLASSES = {"ProcessGroup": GROUP, "Work": WORK, "C10DBackend": BACKEND}
# Not annotated in every version.
RETURNS = {
    "_get_default_group": GROUP,
    "_group_or_default_group": GROUP,
    "_resolve_process_group": GROUP,
    "_resolve_group": GROUP,
    "_find_pg_by_ranks_and_tag": GROUP,
    "_get_process_group": GROUP,
    "get_group": GROUP,
    "new_group": GROUP,
    "split_group": GROUP,
    "_end_coalescing": WORK,
    "_get_backend": BACKEND,
}
NAMES = {
    "default_pg": GROUP,
    "parent_pg": GROUP,
    "pg": GROUP,
    "process_group": GROUP,
    "work": WORK,
    "eager_backend": BACKEND,
    "device_backend": BACKEND,
    "backend_options": OPTIONS,
    "pg_options": OPTIONS,
}
# Parameters alone: as variables the names stand for other things too.
PARAMETERS = {"group": GROUP, "my_group": GROUP}
# These take an element out of a container, or pass one on.
PASSING = {
    "list",
    "sorted",
    "reversed",
    "set",
    "tuple",
    "not_none",
    "cast",
    "keys",
    "items",
    "values",
    "copy",
    "pop",
}
# A variable that holds a list first and its element later, or the other way round, is taken for the element.
OF_CONTAINERS = {"append", "clear", "copy", "extend", "items", "keys", "pop", "remove", "update", "values"}


class Use(NamedTuple):
    """One call, read or assignment."""

    kind: str  # of the object
    name: str  # of its attribute
    where: str
    how: str  # call, read, write, or optional: getattr with a default, hasattr
    positional: int | None = None  # arguments of a call; None: not known, it has *arguments
    keywords: tuple[str, ...] = ()


class Kinds:
    """What one version's annotations say: kinds by name of a function, of an attribute."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.returned: dict[str, set[str]] = {}
        self.local: dict[tuple[str, str], set[str]] = {}  # by file and name
        self.attributes: dict[str, set[str]] = {}
        for file, tree in trees.items():
            for node in _statements(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self._add(file, node)
                elif isinstance(node, ast.AnnAssign):
                    name = _attribute(node.target)
                    if name:
                        self.attributes.setdefault(name, set()).add(of_annotation(node.annotation))

    def _add(self, file: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.returns is None:
            self.local.setdefault((file, node.name), set()).add("")
            return
        kind = of_annotation(node.returns)
        if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
            self.attributes.setdefault(node.name, set()).add(kind)
        else:
            self.returned.setdefault(node.name, set()).add(kind)
            self.local.setdefault((file, node.name), set()).add(kind)

    def returns(self, file: str, name: str) -> str:
        """Of a function of that name: the one in the file, else all agree."""
        found = self.local.get((file, name)) or self.returned.get(name, {""})
        return RETURNS.get(name, "") or (next(iter(found)) if len(found) == 1 else "")

    def attribute(self, name: str) -> str:
        """Of an attribute of that name."""
        found = self.attributes.get(name, {""})
        kind = next(iter(found)) if len(found) == 1 else ""
        is_group = name in ("WORLD", "group", "pg") or name.endswith(("process_group", "_pg"))
        return kind or (GROUP if is_group else "")


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All, without the expressions in them, which are most of a tree."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        for node in getattr(tree, name, ()):
            yield node
            yield from _statements(node)


def _attribute(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def of_annotation(node: ast.expr | None) -> str:
    """The kind that an annotation names. Containers of it are "many", "keys" or "values" of it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp):  # A | B
        found = [of_annotation(node.left), of_annotation(node.right)]
        return GROUP if GROUP in found else "".join(found)  # of a group or a backend, ours is the group
    if isinstance(node, ast.Subscript):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        found = [of_annotation(part) for part in inside]
        container = _attribute(node.value)
        if container in ("Optional", "Union", "Final", "ClassVar"):
            return GROUP if GROUP in found else "".join(found)
        if container.lower() in ("dict", "defaultdict", "mapping"):
            return f"keys {found[0]}" if found[0] else f"values {found[-1]}" if found[-1] else ""
        return f"many {found[0]}" if found[0] and container not in ("Callable", "type", "Type") else ""
    return CLASSES.get(_attribute(node), "") if node is not None else ""


class _Function(ast.NodeVisitor):
    """The uses in one function, or at the top of a module or class. Functions inside see its names."""

    def __init__(self, kinds: Kinds, file: str, names: dict[str, str], declared: set[str]) -> None:
        self.kinds, self.file, self.names = kinds, file, names
        self.declared = declared  # names with annotations, which assignments do not change
        self.uses: list[Use] = []

    # -- kinds --------------------------------------------------------------------------------------------

    def of(self, node: ast.expr | None) -> str:
        """The kind of an expression, or ""."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, NAMES.get(node.id, ""))
        if isinstance(node, ast.Attribute):
            return self.kinds.attribute(node.attr)
        if isinstance(node, (ast.BoolOp, ast.IfExp)):
            values = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return next(filter(None, map(self.of, values)), "")
        if isinstance(node, (ast.NamedExpr, ast.Starred, ast.Await)):
            return self.of(node.value)
        if isinstance(node, ast.Subscript):
            return _one(self.of(node.value), "many ", "values ")
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
            return _many(self.of(node.elts[0]))
        if isinstance(node, ast.ListComp):
            for generator in node.generators:
                self._bind_element(generator.target, generator.iter)
            return _many(self.of(node.elt))
        return self._of_call(node) if isinstance(node, ast.Call) else ""

    def _of_call(self, node: ast.Call) -> str:
        name = _attribute(node.func)
        if name in PASSING:
            kind = self.of(node.args[-1] if node.args else getattr(node.func, "value", None))
            if name in ("pop", "values"):
                found = _one(kind, "many ", "values ")
                return found if name == "pop" else _many(found)
            return kind
        if isinstance(node.func, ast.Attribute) and name in ("get_future", "size", "rank"):
            return ""
        return self.kinds.returns(self.file, name)

    def bind(self, target: ast.expr, kind: str) -> None:
        """An assignment."""
        if isinstance(target, ast.Name) and kind and target.id not in self.declared:
            self.names[target.id] = kind
        elif isinstance(target, (ast.Tuple, ast.List)) and target.elts:
            self.bind(target.elts[0], _one(kind, "many ", "keys ") or kind)
            self.bind(target.elts[-1], _one(kind, "values "))

    # -- visits -------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        inner = _Function(self.kinds, self.file, dict(self.names), set(self.declared))
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        for argument in arguments:
            kind = of_annotation(argument.annotation)
            if not kind and argument.annotation is None:
                kind = PARAMETERS.get(argument.arg, NAMES.get(argument.arg, ""))
            inner.names[argument.arg] = kind or (
                NAMES.get(argument.arg, "") if NAMES.get(argument.arg) == OPTIONS else ""
            )
        for expression in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(expression)
        for statement in node.body:
            inner.visit(statement)
        self.uses += inner.uses

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.bind(target, self.of(node.value))
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        kind = of_annotation(node.annotation)
        self.bind(node.target, kind)
        if kind and isinstance(node.target, ast.Name):
            self.declared.add(node.target.id)
        self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.bind(node.target, self.of(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind_element(node.target, node.iter)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    def _bind_element(self, target: ast.expr, iterable: ast.expr) -> None:
        kind = self.of(iterable)
        is_items = isinstance(iterable, ast.Call) and _attribute(iterable.func) == "items"
        self.bind(target, kind if is_items else _one(kind))

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind_element(node.target, node.iter)
        self.generic_visit(node)

    def _visit_comprehension(self, node: ast.expr) -> None:
        for generator in node.generators:  # type: ignore[attr-defined]
            self.visit(generator)
        for name in ("elt", "key", "value"):
            if hasattr(node, name):
                self.visit(getattr(node, name))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and (kind := self.of(function.value)):
            open_ended = any(isinstance(a, ast.Starred) for a in node.args) or any(
                k.arg is None for k in node.keywords
            )
            self._note(
                kind,
                function,
                function.attr,
                "call",
                None if open_ended else len(node.args),
                tuple(k.arg for k in node.keywords if k.arg),
            )
            self.visit(function.value)
        elif isinstance(function, ast.Name) and function.id in ("getattr", "hasattr") and len(node.args) > 1:
            kind, wanted = self.of(node.args[0]), node.args[1]
            if kind and isinstance(wanted, ast.Constant):
                sure = function.id == "getattr" and len(node.args) == 2
                self._note(kind, node, str(wanted.value), "read" if sure else "optional")
        else:
            self.visit(function)
        for argument in [*node.args, *(k.value for k in node.keywords)]:
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if kind := self.of(node.value):
            self._note(kind, node, node.attr, "write" if isinstance(node.ctx, ast.Store) else "read")
        self.visit(node.value)

    def _note(
        self,
        kind: str,
        node: ast.expr,
        name: str,
        how: str,
        positional: int | None = None,
        keywords: tuple[str, ...] = (),
    ) -> None:
        if " " not in kind and name not in OF_CONTAINERS:
            where = f"{self.file}:{node.lineno}"
            self.uses.append(Use(kind, name, where, how, positional, keywords))


def _one(kind: str, *containers: str) -> str:
    """The kind of an element."""
    for container in containers or ("many ", "keys "):
        if kind.startswith(container):
            return kind[len(container) :]
    return ""


def _many(kind: str) -> str:
    return f"many {kind}" if kind and " " not in kind else kind


def parse(folder: Path, leave_out: tuple[str, ...]) -> dict[str, ast.Module]:
    """Python files and stubs by path, but those whose path begins with one of `leave_out`."""
    files = sorted(path for path in folder.rglob("*.py*") if path.suffix in (".py", ".pyi"))
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        name: ast.parse(path.read_bytes()) for name, path in names.items() if not name.startswith(leave_out)
    }


def find(trees: dict[str, ast.Module]) -> Iterator[Use]:
    """Of all files but stubs."""
    kinds = Kinds(trees)
    for file, tree in trees.items():
        if file.endswith(".py"):
            visitor = _Function(kinds, file, {}, set())
            visitor.visit(tree)
            yield from visitor.uses

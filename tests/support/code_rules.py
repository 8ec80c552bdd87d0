"""Check private names, errors, variable names and sizes from the source alone."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from tests.support.import_rules import ADAPTERS, Module, parsed, read_package

PUBLIC_IN_SPITE = ("_replace", "_asdict", "_fields", "_Unpickler")
"""Names that begin with an underscore so as not to be fields, and the one unpickler in Python."""
EFFECTS = ("register", "register_backend", "register_module_forward_hook")
"""Functions that change what others see: exit handlers, backends, global hooks."""
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
"""Functions that reach an attribute by a string."""
CREATING_GROUPS = (
    "DeviceMesh",
    "init_device_mesh",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
)
"""torch's functions that create process groups."""
GROUPS_FILE = "comms/groups.py"
GROUP_CREATORS = ("comms.groups", "cost.measuring.collectives", "programs.cluster.self_check")
"""The modules that may create groups: the library's one place, and programs that destroy theirs."""
BROAD = ("Exception", "BaseException")
"""The exceptions by which a handler catches everything."""


def private_violations(package: Path) -> list[str]:
    """List accesses to private attributes that the file doesn't define, outside the adapters.

    Both dots and strings, as in ``getattr(x, "_name")``, are checked. Inherited attributes are
    reached through ``self``, and aren't seen here.
    """
    violations = []
    for module in read_package(package).values():
        if module.part == ADAPTERS:
            continue
        own_names = _assigned_names(module.tree)
        violations += [
            f"{module.path}:{node.lineno}: {ast.unparse(node)} is private; reach it by a function "
            f"of {ADAPTERS}, or make it public where it is ours"
            for node in ast.walk(module.tree)
            for owner, name in _reached(node)
            if isinstance(node, ast.expr)
            and name.startswith("_")
            and not name.startswith("__")
            and name not in PUBLIC_IN_SPITE
            and name not in own_names
            and not _is_own_object(owner)
        ]
    return violations


def _reached(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield the object and the attribute name that an expression accesses."""
    if isinstance(node, ast.Attribute):
        yield node.value, node.attr
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in BY_NAME
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    ):
        yield node.args[0], str(node.args[1].value)


def _is_own_object(value: ast.expr) -> bool:
    """Tell whether an expression is ``self``, ``cls`` or ``super()``."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _assigned_names(tree: ast.Module) -> set[str]:
    """Return attribute names that a file's classes define, by assignment to ``self`` or ``def``.

    Another library's attribute with the same name can't be distinguished.
    """
    names = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _is_own_object(node.value):
                names.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def inherited_violations(package: Path) -> list[str]:
    """List private attributes accessed through ``self`` that none of our classes defines."""
    modules = read_package(package)
    classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
    for module in modules.values():
        for kind in _classes(module):
            classes[kind.name].append(kind)
    return [
        f"{module.path}:{node.lineno}: {kind.name} inherits {ast.unparse(node)}, which is private; "
        f"give it a public name in {ADAPTERS}"
        for module in modules.values()
        if module.part != ADAPTERS
        for kind in _classes(module)
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC_IN_SPITE
        and not any(node.attr in _given_names(base) for base in _own_bases(kind, classes))
    ]


def _classes(module: Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]


def _own_bases(
    kind: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]
) -> Iterator[ast.ClassDef]:
    """Yield a class and our classes that it inherits from, found by name."""
    yield kind
    for base in kind.bases:
        called = base.value if isinstance(base, ast.Subscript) else base
        for other in classes[ast.unparse(called).rpartition(".")[2]]:
            yield from _own_bases(other, classes)


def _given_names(kind: ast.ClassDef) -> set[str]:
    """Return the names to which a class assigns, in its body or through ``self``.

    Outside dataclasses a bare annotation doesn't count: another class may set that attribute.
    """
    names = set()
    for node in ast.walk(kind):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif _is_stored_in_self(node):
            names.add(node.attr)
    if not kind.decorator_list:
        names -= {
            node.target.id
            for node in kind.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is None
        }
    return names


def _is_stored_in_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
        return False
    return _is_own_object(node.value)


def swallowed_errors(package: Path) -> list[str]:
    """List broad exception handlers that neither raise an error nor use the one they caught."""
    return [
        f"{module.path}:{handler.lineno}: catches all errors and drops them; raise an error of "
        "ours, or name those that may be ignored"
        for module in read_package(package).values()
        for handler in ast.walk(module.tree)
        if isinstance(handler, ast.ExceptHandler)
        and (handler.type is None or _is_broad(handler.type))
        and not any(_keeps(node, handler.name) for node in ast.walk(handler))
    ]


def _is_broad(caught: ast.expr) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(kind, ast.Name) and kind.id in BROAD for kind in kinds)


def _keeps(node: ast.AST, name: str | None) -> bool:
    """Tell whether this part in a handler raises, or uses the error."""
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and node.id == name)


def import_effects(package: Path) -> list[str]:
    """List registrations and exit handlers at the top level: imports must have no effect."""
    return [
        f"{module.path}:{node.lineno}: {ast.unparse(node)[:60]} runs when the file is imported; "
        "do it where it is first needed"
        for module in read_package(package).values()
        for statement in module.tree.body
        for node in _run_at_import(statement)
        if isinstance(node, ast.Attribute) and node.attr in EFFECTS
    ]


def group_creations(package: Path) -> list[str]:
    """List calls that create process groups outside the modules that track them for release."""
    return [
        f"{module.path}:{node.lineno}: {ast.unparse(node.func)} creates process groups that "
        f"release_groups() doesn't know; use a function of {GROUPS_FILE}"
        for module in read_package(package).values()
        if module.name.split(".", 1)[-1] not in GROUP_CREATORS
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and _called_name(node) in CREATING_GROUPS
    ]


def _called_name(call: ast.Call) -> str:
    """Return the called function's name, without the object that it belongs to."""
    return ast.unparse(call.func).split(".")[-1]


def _run_at_import(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement's nodes that run at import: functions' decorators, but not their bodies."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        for decorator in statement.decorator_list:
            yield from ast.walk(decorator)
    elif isinstance(statement, ast.ClassDef):
        for inner in statement.body:
            yield from _run_at_import(inner)
    else:
        yield from ast.walk(statement)


FILLERS = frozenset(
    [
        "one",
        "its",
        "some",
        "found",
        "made",
        "mine",
        "told",
        "known",
        "asked",
        "wanted",
        "taken",
        "left",
        "kept",
        "said",
    ]
)
"""Names that don't say what a variable holds."""


def filler_violations(package: Path, rooms: Sequence[str]) -> list[str]:
    """List variables and arguments whose names are fillers."""
    return [
        f"{path}:{line}: a variable is named {name!r}; say what it holds"
        for path, tree in _files(package, rooms)
        for line, name in _variables(tree)
        if name in FILLERS
    ]


def twin_violations(package: Path, rooms: Sequence[str]) -> list[str]:
    """List these rooms' public classes that share their name with another class."""
    checked = {path for path, _ in _files(package, rooms)}
    places: dict[str, list[Path]] = defaultdict(list)
    for path, tree in _files(package, [""]):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return [
        f"{paths[0]}: {', '.join(map(str, paths[1:]))} has a class {name}, too; rename one of them"
        for name, paths in places.items()
        if len(paths) > 1 and checked & set(paths)
    ]


def _files(package: Path, rooms: Sequence[str]) -> Iterator[tuple[Path, ast.Module]]:
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            yield path, parsed(path)


def _variables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    fields = {
        id(node.target)
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [] if id(node) in fields else [node.id]
            yield from ((node.lineno, name) for name in names)


MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_FILES = 268
MAX_LINES = {"the library": 43_413, "the programs": 22_573, "tests": 61_338}
"""Slightly above the current sizes: a feature pays for its lines by the code that it replaces."""


def size_violations(folder: Path) -> list[str]:
    """List files and functions that are too long."""
    violations = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES:
            violations.append(
                f"{path}: {num_lines} lines, over {MAX_FILE_LINES}; split it by topic"
            )
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = _num_code_lines(node)
                if num_lines > MAX_FUNCTION_LINES:
                    violations.append(
                        f"{path}:{node.lineno}: {node.name} has {num_lines} lines, over "
                        f"{MAX_FUNCTION_LINES}; take its steps out into functions"
                    )
    return violations


def budget_violations(package: Path, tests: Path) -> list[str]:
    """List parts that exceed their budget for files or lines."""
    programs = package / "programs"
    files = sorted(package.rglob("*.py"))
    parts = {
        "the library": [path for path in files if programs not in path.parents],
        "the programs": [path for path in files if programs in path.parents],
        "tests": sorted(tests.rglob("*.py")),
    }
    violations = []
    if len(files) > MAX_FILES:
        violations.append(
            f"the package has {len(files)} files, over {MAX_FILES}; merge what is one topic"
        )
    for name, paths in parts.items():
        num_lines = sum(len(path.read_text().splitlines()) for path in paths)
        if num_lines > MAX_LINES[name]:
            violations.append(
                f"{name}: {num_lines} lines, over {MAX_LINES[name]}; delete as many as you add"
            )
    return violations


def _num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    docstring = 0
    if ast.get_docstring(function, clean=False) is not None:
        docstring = (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - docstring

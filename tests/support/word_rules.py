"""Checks words from the source alone: how docstrings begin, loop variables, and twin classes."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.parsing import parsed

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

_FRAGMENT = re.compile(r"(Of|By|As of|The same|As in|That|Whose|Those|Their)\b(?!-)")


def fragment_violations(package: Path, rooms: Sequence[str]) -> list[str]:
    """Docstrings that lean on the words around them instead of having a subject."""
    return [
        f"{path}:{line}: the docstring begins with {start[0]!r}; begin with what it speaks of"
        for path, tree in _files(package, rooms)
        for line, text in _docstrings(tree)
        if (start := _FRAGMENT.match(text.strip()))
    ]


def filler_violations(package: Path, rooms: Sequence[str]) -> list[str]:
    """Variables of functions and comprehensions, and arguments, that are fillers."""
    return [
        f"{path}:{line}: a variable is named {name!r}; say what it holds"
        for path, tree in _files(package, rooms)
        for line, name in _variables(tree)
        if name in FILLERS
    ]


def twin_violations(package: Path, rooms: Sequence[str]) -> list[str]:
    """Public classes of these rooms that share their name with another one of the package."""
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


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts that stand alone: of modules, classes, functions, constants and attributes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


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

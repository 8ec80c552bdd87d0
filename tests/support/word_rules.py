"""Check names from the source alone: variables that say nothing, and twin classes."""

import ast
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


def filler_violations(package: Path, rooms: Sequence[str]) -> list[str]:
    """List variables and arguments whose names are fillers."""
    return [
        f"{path}:{line}: a variable is named {name!r}; say what it holds"
        for path, tree in _files(package, rooms)
        for line, name in _variables(tree)
        if name in FILLERS
    ]


def twin_violations(package: Path, rooms: Sequence[str]) -> list[str]:
    """List public classes of these rooms that share their name with another class."""
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

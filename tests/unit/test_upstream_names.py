"""Private attributes that the plugin uses in TorchRec, FBGEMM and torch exist.

An upgrade that renames an attribute fails here, in one readable place. Names that are imported
from there exist if all the plugin's modules can be imported.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache, reduce
from operator import or_
from pathlib import Path
from pkgutil import walk_packages
from textwrap import dedent
from types import UnionType
from typing import Any

import pytest

import torchrec_2dsp
from tests.support.import_rules import parsed

PACKAGE = Path(torchrec_2dsp.__file__).parent
UPSTREAM = ("torch", "torchrec", "fbgemm_gpu")
NAMES = "torchrec_2dsp._compat.torchrec"
ATTACHED = {
    "_optimizer_classes": "torchrec.distributed.embeddingbag",
    "_optimizer_kwargs": "torchrec.distributed.embeddingbag",
}
"""Attributes that an upstream module looks for on objects of other classes."""
NAMEDTUPLE_API = {"_replace", "_asdict", "_fields", "_make"}


def is_upstream(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in UPSTREAM


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMEDTUPLE_API


def upstream_scope(path: Path) -> dict[str, object]:
    """Return the upstream modules and classes in a file, by its names for them.

    The file may import them through the adapters' list of TorchRec's names.
    """
    scope: dict[str, object] = {}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (is_upstream(node.module) or node.module == NAMES):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                scope[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_upstream(alias.name):
                    top = alias.asname or alias.name.split(".")[0]
                    scope[top] = importlib.import_module(alias.name if alias.asname else top)
    return scope


def private_attributes(path: Path) -> Iterator[tuple[str, object, str]]:
    """Yield ``(text, owner, attribute)`` for every ``x._attribute`` where ``x`` is upstream's.

    ``x`` is an imported module, an instance whose class has an upstream base, or an argument
    annotated with an upstream class, with a union of such classes, or with the file's alias for
    such a union.
    """
    scope = upstream_scope(path)
    names = {**vars(importlib.import_module(f"{torchrec_2dsp.__name__}._compat.{path.stem}"))}
    for function in ast.walk(parsed(path)):
        if not isinstance(function, ast.FunctionDef):
            continue
        owners: dict[str, Any] = dict(scope)
        for argument in function.args.args:
            classes = ast.unparse(argument.annotation or argument).split(" | ")
            if isinstance(alias := names.get(classes[0]), UnionType):
                owners[argument.arg] = alias
            elif all(kind.split(".")[0] in scope for kind in classes):
                owners[argument.arg] = reduce(or_, (resolved(kind, scope) for kind in classes))
        owners |= held_modules(path, function, scope)
        for kind in ast.walk(parsed(path)):
            if not isinstance(kind, ast.ClassDef) or function not in kind.body:
                continue
            if any(map(is_upstream_class, names[kind.name].__mro__)):
                owners["self"] = names[kind.name]
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                owner = ast.unparse(node.value)
                if owner in owners or owner not in ("self", "cls"):
                    yield ast.unparse(node), owners.get(owner), node.attr


def held_modules(
    path: Path, function: ast.FunctionDef, scope: dict[str, object]
) -> dict[str, object]:
    """Return the classes of annotated names, ``self.module`` and variables assigned from it."""
    nodes = list(ast.walk(function))
    held: dict[str, object] = {}
    for kind in ast.walk(parsed(path)):
        if isinstance(kind, ast.ClassDef) and function in kind.body:
            nodes += kind.body
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) in scope:
            name = ast.unparse(node.target)
            name = "self.module" if name == "module" else name
            held[name] = scope[ast.unparse(node.annotation)]
    for node in nodes:
        if isinstance(node, ast.Assign):
            names, values = node.targets[0], node.value
            pairs = zip(
                getattr(names, "elts", [names]), getattr(values, "elts", [values]), strict=False
            )
            held |= {
                ast.unparse(name): held["self.module"]
                for name, value in pairs
                if ast.unparse(value) == "self.module" and "self.module" in held
            }
    return held


def resolved(dotted: str, scope: dict[str, object]) -> Any:
    """Resolve a dotted name."""
    top, *rest = dotted.split(".")
    return reduce(getattr, rest, scope[top])


def has_attribute(owner: object, name: str) -> bool:
    """Tell whether ``owner``, or for a class the instances that its code sets up, has this name.

    All classes in a union must have it.
    """
    if isinstance(owner, UnionType):
        return all(has_attribute(kind, name) for kind in owner.__args__)
    if name in ATTACHED:
        return name in inspect.getsource(importlib.import_module(ATTACHED[name]))
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    return any(name in set_on_self(base) for base in owner.__mro__ if is_upstream_class(base))


_SETTERS = ("self.register_buffer", "super().__setattr__")


@cache
def set_on_self(kind: type) -> set[str]:
    """Return the attributes and buffers that a class's code sets on instances."""
    names = set()
    for node in ast.walk(ast.parse(dedent(inspect.getsource(kind)))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(ast.unparse(node).removeprefix("self."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _SETTERS:
            names.add(ast.unparse(node.args[0]).strip("'"))
    return names


def is_upstream_class(kind: type) -> bool:
    return is_upstream(kind.__module__)


COMPAT = sorted((PACKAGE / "_compat").glob("*.py"))
PRIVATE = sorted(
    {
        (text, path.name): (owner, name)
        for path in COMPAT
        for text, owner, name in private_attributes(path)
    }.items()
)


def test_something_is_checked() -> None:
    assert PRIVATE


@pytest.mark.parametrize(
    ("owner", "name"),
    [value for _, value in PRIVATE],
    ids=[f"{path}:{text}" for (text, path), _ in PRIVATE],
)
def test_a_private_attribute_exists(owner: object, name: str) -> None:
    assert owner is not None, (
        "this test can't tell whose attribute this is: annotate the argument with its class"
    )
    assert has_attribute(owner, name)


@pytest.mark.dealt_suite
def test_all_modules_can_be_imported() -> None:
    names = [module.name for module in walk_packages([str(PACKAGE)], f"{torchrec_2dsp.__name__}.")]
    assert len(names) > 200
    for name in names:
        importlib.import_module(name)

"""Python files as trees, which all rules of the house share."""

import ast
from functools import cache
from pathlib import Path


def parsed(path: Path) -> ast.Module:
    """The tree of a file, which is parsed once as long as it stays the same."""
    return _parsed_text(path.read_text())


@cache
def _parsed_text(text: str) -> ast.Module:
    return ast.parse(text)

"""Checks the sizes of files and functions from the source alone."""

import ast
from pathlib import Path

from tests.support.parsing import parsed

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def size_violations(folder: Path) -> list[str]:
    """Files and functions that are too long."""
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


def _num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    docstring = 0
    if ast.get_docstring(function, clean=False) is not None:
        docstring = (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - docstring

"""Check sizes from the source alone: files, functions, and the budget of lines."""

import ast
from pathlib import Path

from tests.support.parsing import parsed

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_FILES = 560
MAX_LINES = {"the library": 38_500, "the programs": 26_000, "tests": 51_500}
"""A little above what there is: a feature pays for its lines by what it replaces."""


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
    """List what exceeds the budget of files and lines."""
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

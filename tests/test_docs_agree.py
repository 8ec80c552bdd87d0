"""Pages agree with the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import torchrec_2dsp
from tests.support.import_rules import LAYERS, PROGRAMS, parsed

ROOT = Path(__file__).parents[1]
PACKAGE = Path(torchrec_2dsp.__file__).parent
DOCS = ROOT / "docs"


def drawn_layers(text: str) -> list[frozenset[str]]:
    """Return the rooms on each line in the layer drawing, from the bottom up.

    Each line has room names with ``|`` between them, and, after two or more spaces, the rooms'
    purpose. Lines that begin with a space continue the text of the line above.
    """
    (drawing,) = re.findall(r"^```text layers\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in drawing.splitlines() if line and line[0] not in " -"]
    names = [re.split(r"\s{2,}", line)[0] for line in lines]
    return [frozenset(re.split(r"\s*\|\s*", line)) for line in reversed(names)]


def test_the_drawing_of_layers_is_the_one_that_is_enforced() -> None:
    drawn = drawn_layers((DOCS / "architecture.md").read_text())
    assert drawn == [
        frozenset(room.replace(f"{PROGRAMS}.", f"{PROGRAMS}/") for room in layer)
        for layer in LAYERS
    ]


def test_a_drawing_is_read() -> None:
    text = "```text layers\nshard | planner   verbs,\n                  and more\n---\nplan\n```\n"
    assert drawn_layers(text) == [{"plan"}, {"shard", "planner"}]


def texts_of(tree: ast.AST) -> list[str]:
    """Return a module's string literals; ``...`` stands for an f-string's placeholders."""
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            ]
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.sub(r"%[sdr]|\{\}", "...", node.value))
    return texts


@cache
def package_texts() -> str:
    """Return all the package's string literals, one per line."""
    trees = (parsed(path) for path in sorted(PACKAGE.rglob("*.py")))
    return "\n".join(text for tree in trees for text in texts_of(tree))


def error_texts() -> list[str]:
    """Return the error texts in the troubleshooting page's table."""
    page = (DOCS / "guides" / "troubleshooting.md").read_text()
    table = page.partition("## Errors and warnings of this package")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


@pytest.mark.parametrize("text", error_texts())
def test_errors_that_are_explained_exist(text: str) -> None:
    """Each piece of text between gaps occurs in one of the package's strings."""
    for piece in text.split("..."):
        assert piece.strip(" ,") in package_texts()


def test_errors_are_in_the_order_of_the_alphabet() -> None:
    texts = [text.lower() for text in error_texts()]
    assert len(texts) > 40
    assert texts == sorted(texts)


def test_an_error_that_nobody_raises_is_noticed() -> None:
    assert "the plan has no table" in package_texts()
    assert "the plan has no chair" not in package_texts()


def test_the_reference_lists_the_public_names() -> None:
    page = (DOCS / "api" / "README.md").read_text()
    names = re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert sorted(name for name, _ in names) == sorted(torchrec_2dsp.__all__)
    for name, room in names:
        module = getattr(torchrec_2dsp, name).__module__
        assert module.split(".")[1] == room, f"{name} is of {module}"

"""Examples in docstrings and pages run, links lead somewhere, and every public name is explained.

In Markdown, a block that starts with ```` ```python run ```` is executed; a page's blocks run one
after another in one namespace. A plain ```` ```python ```` block is only compiled. Blocks with
``>>>`` are checked as doctests.
"""

import ast
import builtins
import doctest
import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import torchrec_2dsp

PACKAGE = Path(torchrec_2dsp.__file__).parent
ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path.name != "__main__.py"
)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


@dataclass(frozen=True)
class Block:
    """A page's fenced Python block."""

    source: str
    line: int
    is_run: bool


def python_blocks(text: str) -> list[Block]:
    """Return a Markdown text's Python blocks, including ones inside lists."""
    pattern = r"^(?P<indent> *)```python(?P<info>[^\n]*)\n(?P<source>.*?)^(?P=indent)```"
    blocks = []
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        indent = len(match["indent"])
        source = "".join(line[indent:] or "\n" for line in match["source"].splitlines(True))
        line = text.count("\n", 0, match.start()) + 2
        blocks.append(Block(source, line, match["info"].split() == ["run"]))
    return blocks


def relative_links(text: str) -> list[str]:
    """Return the paths to which a Markdown text links, without anchors; skip links in code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    targets += re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
    paths = (target.split("#")[0] for target in targets if "://" not in target)
    return [path for path in paths if path and not path.startswith("mailto:")]


def run_doctest(test: doctest.DocTest) -> str:
    output: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(test, out=output.append)
    return "".join(output)


def missing_imports(source: str) -> list[str]:
    """Return modules that a block uses without importing them, if it begins with an import."""
    body = ast.parse(source).body
    if not body or not isinstance(body[0], ast.Import | ast.ImportFrom):
        return []
    nodes = [node for statement in body for node in ast.walk(statement)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    unknown = {node.id for node in names} - known - set(dir(builtins))
    return sorted(name for name in unknown if importlib.util.find_spec(name))


def run_blocks(text: str, name: str) -> list[str]:
    """Run a page's Python blocks; return their failures."""
    failures = []
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in python_blocks(text):
        where = f"{name}:{block.line}"
        if ">>>" in block.source:
            test = doctest.DocTestParser().get_doctest(
                block.source, dict(namespace), where, name, block.line - 1
            )
            if block.is_run:
                failures += [failure] if (failure := run_doctest(test)) else []
                continue
            source = "".join(example.source for example in test.examples)
        else:
            source = block.source
        try:
            code = compile("\n" * (block.line - 1) + source, name, "exec", dont_inherit=True)
            if block.is_run:
                exec(code, namespace)
            else:
                failures += [f"{where}: {name} isn't imported" for name in missing_imports(source)]
        except Exception as error:
            failures.append(f"{where}: {type(error).__name__}: {error}")
    return failures


def folder_with_configs(folder: Path) -> Path:
    """Return a separate folder where examples can write, with the configs that they read."""
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(name)
    monkeypatch.chdir(folder_with_configs(tmp_path))
    failures = [
        failure
        for test in doctest.DocTestFinder().find(module)
        if test.examples and (failure := run_doctest(test))
    ]
    assert not failures, "\n".join(failures)


def test_there_are_docstring_examples() -> None:
    finder = doctest.DocTestFinder()
    tests = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    assert sum(len(test.examples) for test in tests) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    monkeypatch.chdir(folder_with_configs(tmp_path))
    failures = run_blocks(text, page.name)
    failures += [
        f"{page.name}: link to {link}, which doesn't exist"
        for link in relative_links(text)
        if not (page.parent / link).exists()
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.skipif(not list((ROOT / "docs").rglob("*.md")), reason="there are no pages yet")
def test_every_public_name_is_in_the_docs() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    missing = [name for name in torchrec_2dsp.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"no page mentions {', '.join(missing)}"


GOOD_PAGE = """
```python run
x = 2
```
- a list
  ```python run
  if x == 2:
      y = x + 1
  ```
```python
undefined_name + 1
```
```python run
>>> x + y
5
```
[a](page.md#top), [b](https://example.org/none.md), `[c](none.md)`

[d]: other.md
"""


def test_a_good_page() -> None:
    assert run_blocks(GOOD_PAGE, "page.md") == []
    assert [block.line for block in python_blocks(GOOD_PAGE)] == [3, 7, 11, 14]
    assert relative_links(GOOD_PAGE) == ["page.md", "other.md"]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("python run\nundefined_name", "page.md:2: NameError: name 'undefined_name'"),
        ("python\nx = = 1", "page.md:2: SyntaxError"),
        ("python run\nassert 1 == 2, 'no'", "page.md:2: AssertionError: no"),
        ("python run\n>>> 1 + 1\n3", "Expected:\n    3\nGot:\n    2\n"),
        ("python\n>>> 1 +", "page.md:2: SyntaxError"),
        ("python\nimport math\ntorch.save(model, math.e)", "page.md:2: torch isn't imported"),
    ],
)
def test_bad_blocks_are_reported(block: str, message: str) -> None:
    (failure,) = run_blocks(f"```{block}\n```\n", "page.md")
    assert message in failure

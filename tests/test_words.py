"""Names make sense on their own, as far as rules can check."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import torchrec_2dsp
from tests.support.code_rules import filler_violations, twin_violations

PACKAGE = Path(torchrec_2dsp.__file__).parent
ROOMS = tuple(sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()))
"""All rooms of the package."""

Checker = Callable[[Path, Sequence[str]], list[str]]
CHECKERS: list[Checker] = [filler_violations, twin_violations]


@pytest.mark.parametrize("check", CHECKERS)
def test_rooms_use_plain_words(check: Checker) -> None:
    assert all(any((PACKAGE / room).rglob("*.py")) for room in ROOMS)
    violations = check(PACKAGE, ROOMS)
    assert not violations, "\n" + "\n".join(violations)


GOOD = """
class Rows:
    kept: int

    def first(self, rows: list[int]) -> int:
        return next(row for row in rows)
"""


def package_of(folder: Path, source: str) -> Path:
    (folder / "room").mkdir()
    (folder / "room" / "a.py").write_text(source)
    (folder / "other").mkdir()
    (folder / "other" / "b.py").write_text("class Held: ...\nclass _Rows: ...\n")
    return folder


@pytest.mark.parametrize("check", CHECKERS)
def test_a_good_file_passes(tmp_path: Path, check: Checker) -> None:
    assert check(package_of(tmp_path, GOOD), ["room"]) == []


@pytest.mark.parametrize(
    ("source", "check", "message"),
    [
        ("for one in range(3): ...", filler_violations, "a.py:1: a variable is named 'one'; say"),
        ("x = [some for some in ()]", filler_violations, "a variable is named 'some'"),
        ("def f():\n    for a, its in (): ...", filler_violations, "a.py:2: a variable is named"),
        ("def f(one: int): ...", filler_violations, "a variable is named 'one'"),
    ],
)
def test_a_bad_file_is_named_with_rule_and_remedy(
    tmp_path: Path, source: str, check: Checker, message: str
) -> None:
    (violation,) = check(package_of(tmp_path, source), ["room"])
    assert message in violation


def test_twin_classes_are_named(tmp_path: Path) -> None:
    (violation,) = twin_violations(package_of(tmp_path, "class Held: ..."), ["room"])
    assert "other/b.py" in violation
    assert "room/a.py has a class Held, too; rename one of them" in violation


def test_rooms_that_are_not_listed_are_free(tmp_path: Path) -> None:
    package = package_of(tmp_path, "class Held: ...\nfor one in (): ...\n")
    assert filler_violations(package, ["other"]) == []
    assert filler_violations(package, ["room"])

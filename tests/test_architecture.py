"""Imports point down without cycles, internals stay in `_compat`, files stay small."""

from collections.abc import Callable
from pathlib import Path

import pytest

import torchrec_2dsp
from tests.support.code_rules import (
    budget_violations,
    group_creations,
    import_effects,
    inherited_violations,
    private_violations,
    size_violations,
    swallowed_errors,
)
from tests.support.import_rules import (
    LAYERS,
    cycle_violations,
    drawing_violations,
    layer_violations,
    unchecked_rooms,
    upstream_violations,
)

PACKAGE = Path(torchrec_2dsp.__file__).parent
TESTS = Path(__file__).parent
Checker = Callable[[Path], list[str]]


@pytest.mark.parametrize(
    "check",
    [
        layer_violations,
        cycle_violations,
        upstream_violations,
        drawing_violations,
        private_violations,
        inherited_violations,
        swallowed_errors,
        import_effects,
        group_creations,
        unchecked_rooms,
    ],
)
def test_fences(check: Checker) -> None:
    violations = check(PACKAGE)
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize("folder", [PACKAGE, TESTS], ids=["package", "tests"])
def test_sizes(folder: Path) -> None:
    violations = size_violations(folder)
    assert not violations, "\n" + "\n".join(violations)


def test_the_budget_of_lines() -> None:
    violations = budget_violations(PACKAGE, TESTS)
    assert not violations, "\n" + "\n".join(violations)


def test_what_exceeds_the_budget_is_named(tmp_path: Path) -> None:
    package, tests = package_of(tmp_path, mesh__a="x = 1\n" * 99_999), tmp_path / "tests"
    tests.mkdir()
    (violation,) = budget_violations(package, tests)
    assert violation.startswith("the library: 100000 lines, over ")


def test_parts_have_one_layer() -> None:
    parts = [part for layer in LAYERS for part in layer]
    assert len(parts) == len(set(parts))


def package_of(folder: Path, **sources: str) -> Path:
    """Return a package with one file per keyword; ``__`` in a keyword is a folder."""
    package = folder / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from pkg.mesh import a\n")
    for name, source in sources.items():
        path = package.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(source)
    return package


GOOD = {
    "errors": "import os",
    "mesh__a": "import torchrec\nfrom pkg.errors import MeshError",
    "mesh__b": "from pkg.mesh import a\nfrom . import a\nfrom ..errors import MeshError",
    "programs__cli__app": "def run():\n    from pkg.mesh.b import x\n    import rich",
    "mesh__c": "class A:\n    def __init__(self):\n        self._x = 1",
    "mesh__d": "from pkg.mesh.c import A\nclass B(A):\n    def f(self):\n        return self._x",
    "comms__groups": "def f():\n    return dist.new_group()",
    "optim__c": "try:\n    f()\nexcept Exception as error:\n    print(error)",
    "report__svg": "def draw():\n    from matplotlib.figure import Figure",
}


def test_a_good_package_passes(tmp_path: Path) -> None:
    package = package_of(tmp_path, **GOOD)
    for check in (
        layer_violations,
        cycle_violations,
        upstream_violations,
        drawing_violations,
        private_violations,
        inherited_violations,
        swallowed_errors,
        import_effects,
        group_creations,
        size_violations,
    ):
        assert check(package) == []


@pytest.mark.parametrize(
    ("source", "check", "message"),
    [
        (
            "from pkg.replicas import x",
            layer_violations,
            "mesh/a.py:1: mesh is below replicas: imports",
        ),
        (
            "import pkg.replicas.point",
            layer_violations,
            "mesh is below replicas: imports point down; move",
        ),
        (
            "def f():\n    from ..replicas import x",
            layer_violations,
            "mesh/a.py:2: mesh is below replicas",
        ),
        ("from pkg.optim import x", layer_violations, "mesh and optim are siblings, which don't"),
        ("from pkg import optim", layer_violations, "mesh and optim are siblings"),
        ("from pkg import Mesh2D", layer_violations, "import from the defining module"),
        ("from pkg.mesh.b import x", cycle_violations, "import cycle pkg.mesh.a -> pkg.mesh.b -> "),
        ("from torchrec.distributed.comm import x", upstream_violations, "comm.x is internal to t"),
        ("from torchrec.distributed import comm", upstream_violations, "import it in _compat and"),
        ("import torchrec.distributed.sharding.rw_sharding", upstream_violations, "is internal"),
        ("from torchrec.distributed.types import _x", upstream_violations, "types._x is internal"),
        ("import fbgemm_gpu", upstream_violations, "fbgemm_gpu is internal to fbgemm_gpu; import"),
        (
            "from pkg.programs.cli import app",
            layer_violations,
            "mesh is below programs.cli: imports point down",
        ),
        (
            "def f(module):\n    return module._lookups",
            private_violations,
            "a.py:2: module._lookups is private; reach it by a function of _compat",
        ),
        (
            'def f(module):\n    return getattr(module, "_lookups", None)',
            private_violations,
            "a.py:2: getattr(module, '_lookups', None) is private; reach it by a function of",
        ),
        (
            "import torch\nclass A(torch.nn.Module):\n    def f(self):\n        return self._hooks",
            inherited_violations,
            "a.py:4: A inherits self._hooks, which is private; give it a public name in _compat",
        ),
        (
            "class A:\n    _x: int\n    def f(self):\n        return self._x",
            inherited_violations,
            "a.py:4: A inherits self._x",
        ),
        (
            "try:\n    f()\nexcept Exception as error:\n    pass",
            swallowed_errors,
            "a.py:3: catches all errors and drops them; raise an error of ours",
        ),
        ("try:\n    f()\nexcept:\n    pass", swallowed_errors, "a.py:3: catches all errors"),
        (
            "try:\n    f()\nexcept (OSError, BaseException):\n    pass",
            swallowed_errors,
            "a.py:3: catches all errors",
        ),
        (
            "def f():\n    from matplotlib.figure import Figure",
            drawing_violations,
            "a.py:2: matplotlib.figure.Figure draws; hand a chart or a table to report",
        ),
        ("import plotly", drawing_violations, "a.py:1: plotly draws; hand a chart"),
        ("from rich.table import Table", drawing_violations, "rich.table.Table draws; hand"),
        ("import torchrec", unchecked_rooms, "pkg/mesh/__init__.py: call require_upstream()"),
        (
            "import atexit\natexit.register(print)",
            import_effects,
            "a.py:2: atexit.register runs when the file is imported",
        ),
        (
            "@atexit.register\ndef f():\n    pass",
            import_effects,
            "a.py:1: atexit.register runs when the file is imported",
        ),
        (
            "def f():\n    return torch.distributed.new_group([0])",
            group_creations,
            "a.py:2: torch.distributed.new_group creates process groups that release_groups()",
        ),
        ("x = 1\n" * 501, size_violations, "mesh/a.py: 501 lines, over 500; split it by topic"),
        (
            "def f():\n" + "    x = 1\n" * 60,
            size_violations,
            "a.py:1: f has 61 lines, over 60; take",
        ),
    ],
)
def test_a_bad_file_is_named_with_rule_and_remedy(
    tmp_path: Path, source: str, check: Checker, message: str
) -> None:
    others = {
        "mesh__b": "from pkg.mesh import a",
        "replicas__point": "",
        "optim__steps": "",
        "programs__cli__app": "",
    }
    (violation,) = check(package_of(tmp_path, mesh__a=source, **others))
    assert message in violation


def test_a_part_without_a_layer_is_named(tmp_path: Path) -> None:
    (violation,) = layer_violations(package_of(tmp_path, mesh__a="", magic__a=""))[1:]
    assert "no layer has 'magic'; add it to LAYERS" in violation


@pytest.mark.parametrize(
    "source",
    [
        "from fbgemm_gpu.split_embedding_configs import EmbOptimType",
        "from torchrec.distributed.types import ShardingEnv2D",
        "from torchrec.distributed.comment import x",
        "from torchrec import __version__",
    ],
)
def test_public_upstream_names_are_free(tmp_path: Path, source: str) -> None:
    assert upstream_violations(package_of(tmp_path, mesh__a=source)) == []


def test_the_adapters_may_import_internals(tmp_path: Path) -> None:
    source = "from torchrec.distributed.comm import _x"
    assert upstream_violations(package_of(tmp_path, _compat__a=source)) == []


def test_docstrings_do_not_count(tmp_path: Path) -> None:
    source = 'def f():\n    """' + "\n" * 50 + '"""\n' + "    x = 1\n" * 59
    assert size_violations(package_of(tmp_path, mesh__a=source)) == []

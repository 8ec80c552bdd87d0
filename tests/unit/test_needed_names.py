"""The check of names: what an untried torchrec lacks is named in one error."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.versions import NEW, OLD, UNKNOWN, on_cpu
from torchrec_2dsp._compat import upstream_names
from torchrec_2dsp._compat.upstream_names import (
    check_upstream_names,
    missing_names,
    needed_names,
    require_upstream_names,
)
from torchrec_2dsp._compat.versions import Status, VersionSet
from torchrec_2dsp.errors import VersionError

COMM = "torchrec.distributed.comm"
UNTRIED = replace(on_cpu(OLD), torchrec=UNKNOWN)


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package seems to need names that no torchrec has."""
    names = [(COMM, "get_local_size"), (COMM, "get_lost"), ("torchrec.nowhere", "thing")]
    monkeypatch.setattr(upstream_names, "needed_names", lambda: names)
    upstream_names._missing_here.cache_clear()
    yield
    upstream_names._missing_here.cache_clear()


def test_names_are_read_from_the_sources(tmp_path: Path) -> None:
    (tmp_path / "_compat").mkdir()
    (tmp_path / "_compat" / "adapter.py").write_text(
        "from torch._C import Private\nfrom torchrec.distributed.comm import get_local_size\n"
    )
    (tmp_path / "user.py").write_text(
        "from torch import nn\nfrom .torchrec import ours\nimport os\n"
        "def late():\n    from fbgemm_gpu.split_embedding_configs import SparseType, EmbOptimType\n"
    )
    configs = "fbgemm_gpu.split_embedding_configs"
    assert needed_names(tmp_path) == [
        (configs, "EmbOptimType"),
        (configs, "SparseType"),
        ("torch._C", "Private"),
        (COMM, "get_local_size"),
    ]


@pytest.mark.dealt_suite
def test_nothing_is_missing_here() -> None:
    names = needed_names()
    assert (COMM, "get_local_size") in names
    assert ("torchrec.distributed", "comm") in names  # a module, not an attribute
    assert len(names) > 100
    assert missing_names(names) == []
    assert check_upstream_names().status is Status.OK


def test_missing_names_and_modules_are_told_apart() -> None:
    names = [("torchrec.nowhere", "a"), ("torchrec.nowhere", "b"), (COMM, "c"), (COMM, "_c")]
    module, *attributes = missing_names(names)
    assert module.startswith("torchrec.nowhere can't be imported: ModuleNotFoundError: ")
    assert attributes == [f"{COMM}.c", f"{COMM}._c"]


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("tried", [OLD, NEW], ids=str)
def test_tried_versions_are_not_looked_into(tried: VersionSet) -> None:
    require_upstream_names(on_cpu(tried))


def test_an_untried_version_that_has_all_names_passes() -> None:
    require_upstream_names(UNTRIED)


@pytest.mark.usefixtures("lacking")
def test_an_untried_version_without_a_name_is_refused() -> None:
    with pytest.raises(VersionError) as raised:
        require_upstream_names(UNTRIED)
    message = str(raised.value)
    assert message.startswith(f"torchrec {UNKNOWN}: torchrec_2dsp is not tried with that")
    assert f"\n  {COMM}.get_lost\n" in message
    assert "torchrec.nowhere can't be imported" in message
    assert "get_local_size" not in message
    assert str(OLD) in message
    assert str(NEW) in message


@pytest.mark.usefixtures("lacking")
def test_the_doctor_names_what_is_missing() -> None:
    check = check_upstream_names()
    assert check.status is Status.FAILED
    assert f"{COMM}.get_lost" in check.found
    assert any("torchrec==" in line for line in check.remedy)

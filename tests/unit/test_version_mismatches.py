"""Versions that don't belong together: each is named, with the commands that repair it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.versions import NEW, OLD, UNKNOWN, on_cpu, on_cuda
from torchrec_2dsp._compat.versions import (
    TRIED,
    FoundVersions,
    Status,
    check_versions,
    require_supported_versions,
)
from torchrec_2dsp.errors import TwoDError, VersionError

CPU, CUDA = on_cpu(OLD), on_cuda(OLD)
BOTH_AWAY = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"
INSTALL_CPU = OLD.install_fbgemm("fbgemm-gpu-cpu")
INSTALL_CUDA = OLD.install_fbgemm("fbgemm-gpu")


@pytest.mark.parametrize(
    ("found", "named", "commands"),
    [
        pytest.param(
            replace(CPU, torch="2.12.1+cpu"),
            "torch     2.12.1+cpu (supported: 2.13.x)",
            OLD.install_torch(),
            id="old-torch",
        ),
        pytest.param(
            replace(CPU, torch=None),
            "torch     not installed (supported: 2.13.x)",
            OLD.install_torch(),
            id="no-torch",
        ),
        pytest.param(
            replace(CPU, torchrec="1.9.0"),
            "torchrec  1.9.0: belongs to torch 2.14.x and fbgemm 1.9.x (supported: 1.8.x)",
            OLD.install_torchrec(),
            id="new-torchrec",
        ),
        pytest.param(
            replace(on_cpu(NEW), torchrec="1.8.0"),
            "torchrec  1.8.0: belongs to torch 2.13.x and fbgemm 1.8.x (supported: 1.9.x)",
            NEW.install_torchrec(),
            id="old-torchrec",
        ),
        pytest.param(
            replace(CPU, fbgemm_gpu_cpu="1.9.0"),
            "fbgemm    fbgemm-gpu-cpu 1.9.0: belongs to torch 2.14.x and torchrec 1.9.x"
            " (supported: 1.8.x)",
            INSTALL_CPU,
            id="new-fbgemm",
        ),
        pytest.param(
            replace(on_cpu(NEW), fbgemm_gpu_cpu=None, torchrec="1.8.0"),
            "torchrec  1.8.0: belongs to torch 2.13.x",
            [*NEW.install_torchrec(), *NEW.install_fbgemm("fbgemm-gpu-cpu")],
            id="torch-decides-between-two",
        ),
        pytest.param(
            replace(CPU, torchrec=None),
            "torchrec  not installed (supported: 1.8.x)",
            OLD.install_torchrec(),
            id="no-torchrec",
        ),
        pytest.param(
            replace(CPU, fbgemm_gpu_cpu=None),
            "fbgemm    not installed (supported: 1.8.x)",
            INSTALL_CPU,
            id="no-fbgemm-on-cpu",
        ),
        pytest.param(
            replace(CUDA, fbgemm_gpu=None),
            "fbgemm    not installed (supported: 1.8.x)",
            INSTALL_CUDA,
            id="no-fbgemm-on-cuda",
        ),
        pytest.param(
            replace(CPU, fbgemm_gpu_cpu="1.7.0"),
            "fbgemm    fbgemm-gpu-cpu 1.7.0 (supported: 1.8.x)",
            INSTALL_CPU,
            id="old-fbgemm",
        ),
        pytest.param(
            replace(on_cpu(NEW), torch=UNKNOWN),
            f"torch     {UNKNOWN} (supported: 2.14.x)",
            NEW.install_torch(),
            id="untried-torch-beside-a-tried-fbgemm",
        ),
        pytest.param(
            replace(CPU, fbgemm_gpu="1.8.0"),
            "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0: both own the same import package",
            [BOTH_AWAY, *INSTALL_CPU],
            id="both-on-cpu",
        ),
        pytest.param(
            replace(CUDA, fbgemm_gpu_cpu="1.8.0"),
            "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0: both own the same import package",
            [BOTH_AWAY, *INSTALL_CUDA],
            id="both-on-cuda",
        ),
        pytest.param(
            replace(CUDA, torch="2.13.0+cpu"),
            "fbgemm-gpu 1.8.0: the CUDA build can't be loaded beside the CPU build 2.13.0+cpu",
            ["pip uninstall -y fbgemm-gpu", *INSTALL_CPU],
            id="cuda-fbgemm-beside-cpu-torch",
        ),
        pytest.param(
            replace(CUDA, has_nvidia_driver=False),
            "fbgemm-gpu 1.8.0: the CUDA build can't be loaded without an NVIDIA driver",
            ["pip uninstall -y fbgemm-gpu", *INSTALL_CPU],
            id="cuda-fbgemm-without-driver",
        ),
    ],
)
def test_each_mismatch_is_named_with_its_fix(
    found: FoundVersions, named: str, commands: Sequence[str]
) -> None:
    with pytest.raises(VersionError) as raised:
        require_supported_versions(found)
    message = str(raised.value)
    assert named in message
    for tried in TRIED:
        assert str(tried) in message
    # Nothing but the fix, in order: a supported package gets no command.
    assert [line.strip() for line in message.splitlines() if "  pip " in line] == list(commands)


def test_one_error_names_all_that_is_wrong() -> None:
    nothing = FoundVersions(
        torch=None,
        torchrec=None,
        fbgemm_gpu=None,
        fbgemm_gpu_cpu=None,
        torchmetrics=None,
        has_nvidia_driver=False,
    )
    with pytest.raises(VersionError, match=r"(?s)torch .*torchrec .*fbgemm ") as raised:
        require_supported_versions(nothing)
    assert isinstance(raised.value, TwoDError)
    assert isinstance(raised.value, ImportError)
    assert str(raised.value).count("not installed") == 3


@pytest.mark.parametrize(
    ("found", "named", "remedy"),
    [
        pytest.param(
            replace(CPU, torchmetrics="1.4.0"),
            "1.4.0",
            ('pip install --no-deps "torchmetrics==1.0.3"',),
            id="torchmetrics",
        ),
        pytest.param(
            replace(CUDA, fbgemm_gpu=None, fbgemm_gpu_cpu="1.8.0"),
            "does not use the NVIDIA devices",
            ("pip uninstall -y fbgemm-gpu-cpu", *INSTALL_CUDA),
            id="cpu-fbgemm-on-a-gpu-machine",
        ),
    ],
)
def test_what_still_works_is_only_a_warning(
    found: FoundVersions, named: str, remedy: tuple[str, ...]
) -> None:
    require_supported_versions(found)
    (warning,) = [c for c in check_versions(found).checks if c.status is not Status.OK]
    assert warning.status is Status.WARNING
    assert named in warning.found
    assert warning.remedy == remedy

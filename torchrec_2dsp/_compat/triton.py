"""`runs_triton`: Triton comes with torch for CUDA, and compiles a kernel at first use."""

import logging
from functools import cache
from typing import Any, cast

import torch

logger = logging.getLogger(__name__)


@cache
def runs_triton(device: torch.device) -> bool:
    """Tell whether ``device`` is a GPU on which Triton's kernels run, by running one.

    Logs the reason if not, as FBGEMM's and torch's slower kernels then do the work.
    """
    if device.type != "cuda":
        return False
    try:
        import triton
        from triton import knobs

        if knobs.runtime.interpret:
            raise RuntimeError("TRITON_INTERPRET is set, which takes minutes for a kernel")
        with torch.cuda.device(device):
            cast(Any, triton.jit(_nothing))[1,]()
    except Exception as error:  # Compilers and drivers fail in many ways.
        logger.warning(
            "rows are updated and encoded by slower kernels, because Triton doesn't run here (%s); "
            "it needs the package triton, a C compiler and Python's headers",
            error,
        )
        return False
    return True


def _nothing() -> None:
    """Do nothing, as a kernel."""

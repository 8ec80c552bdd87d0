"""`DenseProgress`: what became of dense gradients that are thresholded."""

from dataclasses import dataclass

from torch import nn

from torchrec_2dsp.dense.gradient_report import GradientReport
from torchrec_2dsp.programs.models.dense import thresholded_gradients


@dataclass(frozen=True, kw_only=True)
class DenseProgress:
    """What became of this rank's dense gradients in some steps, if they are thresholded."""

    density: float
    """The share of elements that were chosen; 0 if all steps were dense."""

    bytes_per_step: float
    """Bytes that the rank sent to others."""

    fp32_bytes_per_step: float
    """Bytes like `bytes_per_step`, had all elements been added up in fp32 by a ring."""

    residual_norm: float
    """The Euclidean norm of what it hadn't sent yet after the last step."""


def dense_progress(
    model: nn.Module, before: GradientReport, num_steps: int
) -> DenseProgress | None:
    """What became of this rank's dense gradients in some steps; `None` if all are sent.

    Args:
        model: the sharded model.
        before: what was sent before these steps.
        num_steps: how many steps there were.
    """
    wrapper = thresholded_gradients(model)
    if wrapper is None:
        return None
    sent = wrapper.total - before
    return DenseProgress(
        density=sent.density,
        bytes_per_step=sent.num_bytes / num_steps,
        fp32_bytes_per_step=sent.dense_bytes / num_steps,
        residual_norm=wrapper.residual_norm(),
    )

"""Row gradients as tensors, without process groups: summed by row, looked up, applied."""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

"""Row gradients of one rank as tensors: summed by row and applied to a TBE. No process groups."""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

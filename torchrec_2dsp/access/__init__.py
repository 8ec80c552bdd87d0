"""Which rows are used how often, and which of them are hot."""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

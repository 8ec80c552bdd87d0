"""The wrapper around the user's model."""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

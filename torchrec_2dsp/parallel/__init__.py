"""The wrapper around the user's model, its pipelines, failures, checkpoints and train state."""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

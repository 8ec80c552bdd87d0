"""Process groups, collectives, and how ranks agree and tell each other of failures."""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

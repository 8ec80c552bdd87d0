"""Search a plan for one sharding group, in which replicas and their sync have a cost."""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

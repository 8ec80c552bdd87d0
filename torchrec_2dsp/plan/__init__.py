"""What runs where, as plain data: searched by `planner`, run by `shard`."""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

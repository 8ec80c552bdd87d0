"""Running a plan: sharders, sharded modules and their kernels.

`sharders` turn a plan into sharded modules, which are TorchRec's plus what the plan asks for: a
folder each for row exchange, hot rows, exchange of non-empty bags and prefetched rows.
"""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

"""Running a plan: sharders, sharded modules and their kernels.

`sharders` turn a plan into sharded modules, which are TorchRec's (`embedding_bag`, `embedding`) and
a list of stages (`tables`, `stages`). Row exchange, hot rows, the exchange of non-empty bags and
prefetched rows have a folder each; `batch` has what is done with any batch.
"""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

"""Which rank trains which samples of the global batch.

What deals the samples of all ranks' batches anew lives here: what a sample costs, who gets which,
and how they travel. The global batch stays what it is. How ranks run the dense part lives in
`dense`, which ranks hold which rows in `shard`.

    rank 0: samples 0 1 2 3  costs 9 1 1 1     deal     0 2 5 7  costs 9 1 2 1
    rank 1: samples 4 5 6 7  costs 2 2 8 1    ------>   1 3 4 6  costs 1 1 2 8
"""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

"""Load balancing: which rank trains which samples of the global batch.

`balanced_batches` is the iterator that a user wraps around a loader; `deal` decides, from costs
alone, who gets which sample; `dealer` deals one global batch in step with the other ranks;
`sample_rows` takes batches apart and sends samples. The global batch stays the same. How ranks run
the dense part lives in `dense`, which ranks hold which rows in `shard`.

    rank 0: samples 0 1 2 3  costs 9 1 1 1     deal     0 2 5 7  costs 9 1 2 1
    rank 1: samples 4 5 6 7  costs 2 2 8 1    ------>   1 3 4 6  costs 1 1 2 8
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()

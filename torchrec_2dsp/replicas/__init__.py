"""Keeps copies of rows equal: what the copies' ranks send each other, and when.

`GradientSync` and hot rows merge row gradients before one update on every copy. `capture` holds
a lookup's update back, `exchange` sums the gradients over the ranks that hold the same rows, hop by
hop, and `gradient_sync` applies the sums:

    rank 0: backward -> captured rows 1, 4  \\              / rows 1, 4, 7 -> one update
                                             sums by row
    rank 1: backward -> captured rows 4, 7  /              \\ rows 1, 4, 7 -> the same update

`WeightSync` averages weights and optimizer state after local updates. `synced_shard` notes which
rows change, `row_average` averages these, `whole_shard` averages all:

    rank 0: row 4 = a, base b  \\              / row 4 = (a + c) / 2
                                changed rows
    rank 1: row 4 = c, base b  /              \\ row 4 = (a + c) / 2

`sync_point` is the one place where a program does either, `sync_action` defines its actions and
reports, and `drift` compares the copies afterwards. Tensor work without peers is in
`torchrec_2dsp.rows`, process groups are in `torchrec_2dsp.comms`.
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()

"""How copies of a row are kept equal: what they send each other, and when.

Row gradients: `capture` holds back the update of a lookup, `exchange` adds the gradients up over
the ranks that hold the same rows, by the `hops` of a route, and `gradient_sync` applies them once:

    backward -> captured -> sending -> (on other hosts) -> arrived -> updated on every rank

Averages: `row_average` and `whole_shard` average weights and optimizer state, `weight_sync` when
its policy wants it. `sync_point` is the one place where a program does either; `drift` compares
the copies afterwards. The tensor work without peers is in `torchrec_2dsp.rows`.
"""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

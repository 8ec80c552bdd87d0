"""Ways to run the dense part of a model, beside sharded tables.

What takes the place of TorchRec's data-parallel wrapper lives here: `DataParallelWrapper`s that
a stock `DistributedModelParallel` and `ModelParallel2D` take alike; and `Thresholded`, a module
that leaves out the small numbers of an activation where a model is split; and `LayerStack`, the
layers that `pipelined` runs on one rank after the other. Tables live in `shard`.

    gradients of a rank   --threshold-->   entries   --gather, or owners-->   the sum on all ranks
            ^                  |
            +---- residual ----+   what wasn't sent is added to the next step's gradients
"""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()

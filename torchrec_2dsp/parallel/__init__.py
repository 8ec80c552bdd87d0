"""The wrapper around a model, and the calls of a training loop.

- `model_parallel2d`: `ModelParallel2D` checks a plan on all ranks, shards by it, and syncs;
- `pipelines`: a plan's train pipeline and optimizer, and the pipeline that also prefetches rows;
- `loop`: gradient accumulation, failing together, hot set refreshes;
- `checkpoint` and `train_state`: model, optimizers and everything else that a run resumes from.

The sharded modules themselves are in `shard`, dense wrappers in `dense`.
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()

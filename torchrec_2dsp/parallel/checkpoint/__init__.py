"""Checkpoints in the format of torch.distributed.checkpoint (DCP), for any mesh and stock TorchRec.

A checkpoint holds whole tables under stock TorchRec's names, whatever the mesh, the hot rows and
the sharding types. Other column shards of a table with row-wise moments are refused by name,
because TorchRec keeps such moments once per column shard.

Begin with `save` and `load`; `parts` says what a checkpoint consists of, `latest` which one is the
newest. The other files:

- what is written: `writer` (DCP's, with checksums), `planner` (what may be stored, and copies for
  asynchronous saves), `pending` (a save that goes on while the model trains), `checksums`;
- what is read: `stored` (a folder, verified), `metadata` (without running code in it), `reader`,
  `fit` (whether it fits a model), `dense_state` (how a dense optimizer gets its state);
- how ranks agree, over which process group: `group`, `failure`.
"""

from torchrec_2dsp.parallel.checkpoint.load import load_checkpoint
from torchrec_2dsp.parallel.checkpoint.save import PendingSave, save_checkpoint

__all__ = ["PendingSave", "load_checkpoint", "save_checkpoint"]

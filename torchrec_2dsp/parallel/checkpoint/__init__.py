"""Checkpoints in the format of torch.distributed.checkpoint (DCP), for any mesh and for stock.

A checkpoint holds whole tables under stock TorchRec's names, whatever the mesh, the hot rows and
the sharding types. One difference is refused by name: TorchRec keeps row-wise moments once per
column shard of a table.

`save` and `load` tell the story; `parts` says what a checkpoint consists of, `latest` which one is
the newest. The other files each know one thing:

- what is written: `writer` (DCP's, with checksums), `planner` (what may be stored, and copies for
  asynchronous saves), `pending` (a save that goes on while the model trains), `checksums`;
- what is read: `stored` (a folder, verified), `metadata` (without running what stands in it),
  `reader`, `fit` (whether it fits a model), `dense_state` (how a dense optimizer gets its state);
- who agrees on what over which process group: `group`, `failure`.
"""

from torchrec_2dsp.parallel.checkpoint.load import load_checkpoint
from torchrec_2dsp.parallel.checkpoint.pending import PendingSave
from torchrec_2dsp.parallel.checkpoint.save import save_checkpoint

__all__ = ["PendingSave", "load_checkpoint", "save_checkpoint"]

"""Checkpoints in the format of torch.distributed.checkpoint (DCP), for any mesh and for stock.

A checkpoint holds whole tables under stock TorchRec's names, whatever the mesh, the hot rows and
the sharding types. One difference is refused by name: TorchRec keeps row-wise moments once per
column shard of a table.

`save` and `load` tell the story; `parts` says what a checkpoint consists of. The other files each
know one thing: how a model's dense optimizer gets its state (`dense_state`), whether a checkpoint
fits a model (`fit`), and who agrees on what over which process group (`group`).
"""

from torchrec_2dsp.parallel.checkpoint.load import load_checkpoint
from torchrec_2dsp.parallel.checkpoint.pending import PendingSave
from torchrec_2dsp.parallel.checkpoint.save import save_checkpoint

__all__ = ["PendingSave", "load_checkpoint", "save_checkpoint"]

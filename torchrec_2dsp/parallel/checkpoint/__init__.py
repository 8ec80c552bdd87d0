"""Checkpoints in the format of torch.distributed.checkpoint (DCP), for any mesh and stock TorchRec.

A checkpoint holds whole tables under TorchRec's names, for any mesh, hot rows and sharding
types. Different column shards of a table with row-wise moments are refused by name,
because TorchRec keeps such moments once per column shard.

In the order data flows:

    parts -> save, writer -> [shards, checksums.json, .metadata] -> metadata, stored -> load

- `parts`: the model's and optimizers' tensors in a checkpoint;
- `save` and `writer`: one run at a time writes a folder, each shard once, with checksums;
- `metadata` and `stored`: reading and verifying without running code from the folder;
- `load`: fit checks, dense optimizer state, and the read in place;
- `address`: folders of object stores, which the others use like paths;
- `coordination`: gloo groups, and DCP's errors as typed ones.
"""

from torchrec_2dsp.parallel.checkpoint.load import load_checkpoint
from torchrec_2dsp.parallel.checkpoint.save import PendingSave, save_checkpoint

__all__ = ["PendingSave", "load_checkpoint", "save_checkpoint"]

"""Hot rows: replicas on every rank beside TorchRec's own path.

`split` takes hot ids out of a batch, `tables` holds the replicas and looks them up, `sets` knows
which rows are hot, now and after a refresh, and `hot_rows` moves rows between replicas and their
homes in the shards. Replicas stay equal by the gradients that `torchrec_2dsp.replicas` exchanges.
"""

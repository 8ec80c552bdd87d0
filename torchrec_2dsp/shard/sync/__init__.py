"""Where a sharded module meets `torchrec_2dsp.replicas`.

`replication` says how a module is repeated, `replica_sync` is the stage that syncs its copies,
`averaging` the averages that it takes, `synced_optimizer` the optimizer that waits for syncs.
"""

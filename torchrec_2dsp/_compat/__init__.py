"""Adapters: the only room that touches TorchRec's, FBGEMM's and torch's internals.

One file per upstream part: `torchrec` (names, node groups, in-backward optimizers, the planner),
`shardings` (inside sharded modules, and the sparse pipeline), `fbgemm` (inside a TBE), `c10d`,
`ddp`, `dcp` and `pipelining` (inside torch.distributed). `versions` checks that they belong
together; it needs neither torch nor TorchRec.

Nothing here makes decisions: an adapter names a private attribute once, so that an upgrade fails
in one readable place.
"""

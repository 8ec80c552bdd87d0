"""Moves tensors between ranks, and makes ranks fail together.

`groups` creates a mesh's process groups, and releases all groups:

    Mesh2D(2, 2), strided          "shard" ->
                               shard 0   shard 1
    "replicate"   group 0       rank 0    rank 2     <- a sharding group holds all tables once
        |         group 1       rank 1    rank 3
        v                         ^ replica peers hold the same shard

    everyone: alarm, hot rows      peers: replica rows, once more inside and across hosts

`collectives` sends tensors of different sizes, in one message if they are small; `full_duplex` is a
gloo backend that sends while it receives; `row_wire` encodes rows on the wire; `counting` counts
the traffic:

    rank 0  [for 0 | for 1]  \\ /  [from 0 | from 1]
    rank 1  [for 0 | for 1]  / \\  [from 0 | from 1]

When a rank fails, the others would wait forever:

    error on rank 1 -> alarm (8 bytes) -> all ranks raise it
    rank 1 killed   -> a collective times out -> failure_detection asks -> all raise RankError(1)

`alarm` provides agreement between ranks. `failure_detection` finds out which rank failed: one that
doesn't answer for `ANSWER_S` is silent. The process group's timeout limits how late a rank may be.
NCCL's collectives don't break when a rank fails; the `Watch` of `breaking` ends them:

    rank 1 raises   -> posts it -> all abort -> all raise RankError(1)
    rank 1 is silent for 30 s   -> rank 0 asks -> all abort -> all raise RankError(1)

`shard` and `replicas` decide what is sent and when; `codecs` encodes it.
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()

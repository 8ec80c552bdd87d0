"""Runs a plan: sharders, sharded modules, and the kernels that train their tables.

A sharded module is TorchRec's, with a list of stages around its exchanges. In the order a
batch passes through them:

    sharders          a `Plan2D` becomes sharded modules (`optimizers`, `initial_tables`)
    sharded_modules   bags and sequences; `parted` joins modules on several meshes
    tables, stages    the stages, their order, and their notes on a batch
    batch             a batch's form, ids and batch sizes are checked
    hot_rows          hot ids leave the batch for replicas on every rank
    shardings         TorchRec's exchanges, or ours: `row_exchange`, `nonempty` (`codecs`)
    kernels           FBGEMM's kernels, whose backward can be captured
    replica_sync      copies stay equal over the mesh; rows get one update in a step

A table with 6 rows and two copies, on a mesh with two groups of two ranks:

    rank 0   rows 0-2       rank 1   rows 3-5       group 0
    rank 2   rows 0-2       rank 3   rows 3-5       group 1
    ids and rows travel between 0 and 1, and between 2 and 3; row gradients between 0 and 2, and
    between 1 and 3; hot rows' gradients, which every rank has, between all

`planner` searches for a plan, and `replicas` exchanges gradients between copies.
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()

"""Search a plan: sharding types, exchanges, hot rows, copies, shard ranks and the mesh.

In data order::

    planner2d        `Planner2D`: checks the arguments, then plans by cost
    search/          by cost:
      choices          constraints and sharders -> candidates: each table's allowed choices
      space            candidates x mesh -> loads and prices; choose as if shards were dealt evenly
      place            deal shards to ranks, within memory
      placement        change single tables while steps get shorter; add hot rows; make the plan
      cost_search      everything on every mesh, and for tables with one copy in the world
    explanation      the reasons for the plan, as text or as a page
    torchrec/        parts for TorchRec's own `EmbeddingShardingPlanner`: enumerator, proposers,
                     partitioners, stats, and plans as its options
    topology         a sharding group's topology, and the missing memory if nothing fits
    dense_search     `search_dense`: the fastest way to run a dense part

A plan itself is data (`plan`), its cost is predicted in `cost`, and `shard` runs it.
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()

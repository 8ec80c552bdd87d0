"""Predict a plan's step time and memory, from a calibration of the network and its machines.

A step's cost has named parts that add up. Each table adds *loads* to every rank in its sharding
group: ids, rows and bytes to look up, move and send. A part is the slowest rank's loads times
measured constants; exchanges that may overlap with compute are subtracted again as ``hidden``::

    Workload   tables, ids per sample, row frequencies    }
    Placed     a table's type, shards, exchange, hot rows }  ->  Loads: kinds of work x ranks
    Span       groups, peers and world on their hosts     }       |  times Calibration
    StepCost   input exchange + lookup + host memory + rows + forward exchange + dense
               + backward exchange + dense exchange + update + hot rows + id maps + sync
               + imbalance + stragglers - hidden
    MemoryCost weights + optimizer state + hot rows + dense gradients + batches + vectors + copies;
               tables in the host's memory beside them

=============== ==================================================================================
file            content
=============== ==================================================================================
`workload`      `Workload` and `TableWork`: a step's work, independent of the plan
`collectives`   `Span`, `Traffic`, `CollectiveCost`: the price of every all-to-all, ring and merge
`calibration`   `Calibration`: measured constants, as a checked TOML file; `KernelCost`
`loads`         `Loads`: each rank's work; `Placed`: a table on its ranks
`table_loads`   the loads that a table adds, by sharding type, exchange, hot rows and sync
`step_cost`     `StepCost`, and its parts from loads: phases, and keeping replicas equal
`model`         `CostModel` and `CostSetting`: a plan's step time and memory; what overlaps
`dense`         `DenseCostModel`: the dense part, layer by layer, for each way to run it
=============== ==================================================================================

`measuring` times collectives and row work on all ranks, and fits the constants. Nothing else here
needs a process group, and nothing searches (`planner` does).
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()

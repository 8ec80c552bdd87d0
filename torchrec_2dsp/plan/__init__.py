"""The plan as plain data: `planner` searches for it, `shard` runs it.

- `parameter_sharding`: one table's sharding, exchange, row owners and hot rows;
- `plan2d`: all tables, their mesh and sync; `pin`, and a world rank's own plan;
- `sync`: how and when replicas are kept equal;
- `dense_plan`: the dense part;
- `serialize`: plan files;
- `fits_mesh`, `fits_module`: checks that a mesh, or a module, can run a plan.
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()

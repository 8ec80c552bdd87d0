"""Ways to run a model's dense part, alongside sharded tables.

Each is a `DataParallelWrapper` that both a stock `DistributedModelParallel` and `ModelParallel2D`
accept. Tables are in `shard`, pipelined layers in `pipelined`. In reading order: `dense_parts`
finds the modules without tables; `sharded_dense` runs them by FSDP2 and tensor parallelism;
`thresholded_data_parallel`, `hooked_data_parallel` and `delayed_dense` run DDP with other
gradients, `local_dense` without any; `gradient_sums` sums few elements from all ranks;
`thresholded` is a module that drops an activation's small elements. Give one to a model:

    dense = tdsp.ThresholdedDataParallel(density=0.005, warm_up=500)
    model = tdsp.ModelParallel2D(model, plan=plan, sharders=sharders, data_parallel_wrapper=dense)

    a rank's gradients   --threshold-->   entries   --gather, or owners-->   sum over all ranks
            ^                  |
            +---- residual ----+   unsent elements are added to the next step's gradients
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()

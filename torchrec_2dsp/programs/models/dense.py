"""The data-parallel wrapper of a config."""

from torchrec.distributed.model_parallel import DataParallelWrapper

from torchrec_2dsp.dense.hooked_data_parallel import HookedDataParallel
from torchrec_2dsp.dense.thresholded_data_parallel import ThresholdedDataParallel
from torchrec_2dsp.programs.config.dense import DenseGradientsConfig


def dense_wrapper(config: DenseGradientsConfig) -> DataParallelWrapper | None:
    """What runs the dense part; `None` for TorchRec's own wrapper, which is DDP."""
    if config.kind == "ddp":
        return None
    if config.kind == "thresholded":
        return ThresholdedDataParallel(
            config.density, values=config.values, route=config.route, warm_up=config.warm_up
        )
    return HookedDataParallel(config.kind, rank=config.rank, warm_up=config.warm_up)

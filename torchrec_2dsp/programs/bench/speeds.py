"""Measure the network before planning for it, and the model before predicting it."""

from datetime import timedelta

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.bench.control import Control, contestant_store
from torchrec_2dsp.programs.bench.process import ContestantProcess, How
from torchrec_2dsp.programs.bench.worker import MeasuredPlace, Place
from torchrec_2dsp.programs.bench.workload import measure_dense
from torchrec_2dsp.programs.calibrate.link_speed import measure_link_speeds
from torchrec_2dsp.programs.config.sections import ModelConfig


def measured_place(config: BenchConfig, place: Place, control: Control) -> MeasuredPlace:
    """The speeds of links and of the model, measured in a process that ends with it."""
    process = ContestantProcess(lambda: _Measurer(config, place))
    try:
        answer = process.ask("measure", deadline_s=config.schedule.deadline_s)
    finally:
        process.kill()
    failed = [reply for reply in control.exchange(answer) if reply.how is not How.ANSWERED]
    if failed:
        raise ConfigError(f"the network can't be measured: {failed[0].report}")
    return answer.value


class _Measurer:
    def __init__(self, config: BenchConfig, place: Place) -> None:
        self._config = config
        self._place = place

    def measure(self) -> MeasuredPlace:
        """Collectives: those of `measure_link_speeds` and `measure_dense`."""
        torch.set_num_threads(1)
        schedule = self._config.schedule
        if schedule.device == "cuda":
            torch.cuda.set_device(self._place.rank % self._place.local_world_size)
        dist.init_process_group(
            "nccl" if schedule.device == "cuda" else "gloo",
            store=contestant_store(len(self._config.contestants), schedule.deadline_s),
            rank=self._place.rank,
            world_size=self._place.world_size,
            timeout=timedelta(seconds=schedule.deadline_s),
        )
        world = world_group()
        speeds = measure_link_speeds(world, local_world_size=self._place.local_world_size)
        is_predicted = self._config.calibration and isinstance(self._config.model, ModelConfig)
        dense = measure_dense(self._config, world) if is_predicted else None
        return MeasuredPlace(speeds, dense)

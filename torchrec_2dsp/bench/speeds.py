"""Measure the network before planning for it."""

from datetime import timedelta

import torch
import torch.distributed as dist

from torchrec_2dsp.bench.config import BenchConfig
from torchrec_2dsp.bench.control import Control, contestant_store
from torchrec_2dsp.bench.process import ContestantProcess, How
from torchrec_2dsp.bench.worker import Place
from torchrec_2dsp.cost.measure.link_speed import LinkSpeeds, measure_link_speeds
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh.groups import world_group


def measured_speeds(config: BenchConfig, place: Place, control: Control) -> LinkSpeeds:
    """What the links give, measured in a process that ends with it."""
    process = ContestantProcess(lambda: _Measurer(config, place))
    try:
        answer = process.ask("measure", deadline_s=config.schedule.deadline_s)
    finally:
        process.kill()
    failed = [one for one in control.exchange(answer) if one.how is not How.ANSWERED]
    if failed:
        raise ConfigError(f"the network can't be measured: {failed[0].report}")
    return answer.value


class _Measurer:
    def __init__(self, config: BenchConfig, place: Place) -> None:
        self._config = config
        self._place = place

    def measure(self) -> LinkSpeeds:
        """Collectives: those of `measure_link_speeds`."""
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
        return measure_link_speeds(world_group(), local_world_size=self._place.local_world_size)

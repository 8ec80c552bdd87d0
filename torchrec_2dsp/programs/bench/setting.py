"""The place and the circumstances of a benchmark, with which its report starts."""

import os
import shlex
import sys
from datetime import datetime

from torchrec_2dsp.programs.bench.machine import describe_machine, describe_versions
from torchrec_2dsp.programs.bench.results import BenchSetting
from torchrec_2dsp.programs.bench.worker import Place
from torchrec_2dsp.programs.calibrate.link_speed import LinkSpeeds
from torchrec_2dsp.programs.config.section import Section


def describe_setting(
    config: Section,
    *,
    title: str,
    network: str,
    place: Place,
    speeds: LinkSpeeds,
    started: datetime,
) -> BenchSetting:
    """The place and the circumstances of a benchmark.

    Args:
        config: all of it.
        title: of the benchmark.
        network: in words, if any.
        place: which rank this is.
        speeds: of the links.
        started: when.
    """
    return BenchSetting(
        title=title,
        when=started.strftime("%Y-%m-%d %H:%M"),
        command=_command(place),
        hosts=place.world_size // place.local_world_size,
        ranks_per_host=place.local_world_size,
        network=network or "network as it is",
        cluster=os.environ.get("EMULATED_CLUSTER", ""),
        machine=describe_machine(),
        versions=describe_versions(),
        link_speeds={
            "in a host, all-to-all": speeds.intra_host_all_to_all_bytes_per_s,
            "in a host, all-reduce": speeds.intra_host_all_reduce_bytes_per_s,
            "to other hosts, all-to-all": speeds.cross_host_all_to_all_bytes_per_s,
            "to other hosts, all-reduce": speeds.cross_host_all_reduce_bytes_per_s,
        },
        config=config.model_dump(mode="json"),
    )


def _command(place: Place) -> str:
    hosts = place.world_size // place.local_world_size
    launcher = os.environ.get(
        "EMULATED_CLUSTER_LAUNCHER",
        f"torchrun --nnodes {hosts} --nproc-per-node {place.local_world_size}",
    )
    return f"{launcher} -m torchrec_2dsp {shlex.join(sys.argv[1:])}"

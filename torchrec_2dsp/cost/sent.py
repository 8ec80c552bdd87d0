"""How many bytes a rank sends for what it has to do. Pure."""

import numpy as np

from torchrec_2dsp.cost.loads import LOADS, Ranks
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.plan.sync import WeightSync


def sent_weights(setting: CostSetting) -> Ranks:
    """Bytes that a rank sends to others for each unit of `LOADS`, if all have as much to do."""
    group, peers, world = setting.group, setting.peers, setting.world
    others = group.num_ranks - 1
    in_host = group.ranks_per_host - 1
    ring = others / group.num_ranks
    host_ring = in_host / group.ranks_per_host
    per_unit = {
        **dict.fromkeys(("ids_to", "pooled_from", "pooled_to", "rows_from", "rows_to"), others),
        "scattered": ring,
        "gathered": others,
        "host_scattered": host_ring,
        "host_gathered": in_host,
        "host_rows_from": in_host,
        "host_rows_to": in_host,
        "across_from": group.num_hosts - 1,
        "across_to": group.num_hosts - 1,
        "all_reduced_bytes": 2 * (world.num_ranks - 1) / world.num_ranks,
        "hot_bytes_of_rank": world.num_ranks - 1,
        "peer_bytes_of_rank": peers.num_ranks - 1,
    }
    if isinstance(setting.sync, WeightSync):
        steps = setting.sync.policy.steps_per_sync
        per_unit["averaged_bytes"] = (peers.num_ranks - 1) / steps
        moments = setting.sync.moments_policy
        if moments is not None:
            per_unit["moment_bytes"] = (peers.num_ranks - 1) / moments.steps_per_sync
    return np.array([float(per_unit.get(name, 0.0)) for name in LOADS])

"""What each layer of a cut `LayerStack` took in training, and which cuts would be better."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch.distributed as dist

from torchrec_2dsp.dense.pipelined.engine import BusyTime, LayerStage
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.dense_plan import cut_layers


def own_layer_seconds(
    stages: Mapping[int, LayerStage], firsts: Mapping[int, int], busy: BusyTime
) -> dict[int, float]:
    """What a batch took in each layer of this rank, by the layer's number.

    Only forwards are timed layer by layer; a stage's whole time is divided as they are.

    Args:
        stages: of this rank, by their numbers.
        firsts: the number of each stage's first layer.
        busy: how long the rank has worked.
    """
    seconds = {}
    for number, stage in stages.items():
        whole = busy.seconds_of_stage.get(number, 0.0) / max(1, busy.num_steps)
        forward = sum(stage.forward_seconds)
        for place, of_layer in enumerate(stage.forward_seconds):
            seconds[firsts[number] + place] = whole * of_layer / forward if forward else 0.0
    return seconds


def gather_layer_seconds(
    own: Mapping[int, float], num_layers: int, group: dist.ProcessGroup
) -> list[float]:
    """What a batch took in each layer, as a mean over the ranks that have it.

    Args:
        own: from `own_layer_seconds`.
        num_layers: of the stack.
        group: all ranks.

    Collectives:
        An all-gather of objects.
    """
    gathered: list[Mapping[int, float]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    times = [[of_rank[n] for of_rank in gathered if n in of_rank] for n in range(num_layers)]
    if not any(map(sum, times)):
        raise ConfigError(
            "no layer has been timed since the model was cut, so no cuts can be chosen; train a "
            "batch, or give cuts"
        )
    return [sum(of_layer) / len(of_layer) for of_layer in times]


def better_cuts(
    seconds: Sequence[float], cuts: Sequence[int], least_gain: float
) -> tuple[int, ...]:
    """Cuts whose slowest stage takes less time, or those that there are.

    Args:
        seconds: what each layer takes.
        cuts: the first layer of each stage but the first.
        least_gain: the share of its time that the slowest stage has to lose.

    Example:
        >>> from torchrec_2dsp.dense.pipelined.layer_times import better_cuts
        >>> better_cuts([1.0, 1.0, 1.0, 3.0], [2], least_gain=0.05)
        (3,)
        >>> better_cuts([1.0, 1.0, 1.0, 1.01], [2], least_gain=0.05)
        (2,)
    """
    num_layers, num_stages = len(seconds), len(cuts) + 1
    best = cut_layers(seconds, [0.0] * num_layers, num_stages)
    is_better = _slowest(seconds, best) <= (1 - least_gain) * _slowest(seconds, cuts)
    return best if is_better else tuple(cuts)


def _slowest(seconds: Sequence[float], cuts: Sequence[int]) -> float:
    ends = (0, *cuts, len(seconds))
    return max(sum(seconds[first:last]) for first, last in pairwise(ends))

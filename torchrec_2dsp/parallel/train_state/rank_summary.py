"""`RankSummary`: what ranks tell each other of their share of a train state."""

from collections.abc import Iterable
from dataclasses import dataclass

from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.train_state.hyper_parameters import HyperParameters


@dataclass(frozen=True)
class RankSummary:
    """What a rank tells the others of its share of a train state at a save."""

    digests: dict[str, str]
    """A digest of each member's state."""
    hyper_parameters: dict[str, HyperParameters]
    """The hyper-parameters of the parameters that the rank has."""
    iterations: dict[str, int]
    """How many forwards the kernel of each table has counted."""


def joined_hyper_parameters(summaries: Iterable[RankSummary]) -> dict[str, HyperParameters]:
    """The hyper-parameters of all ranks' parameters, of which each rank has some."""
    joined: dict[str, HyperParameters] = {"fused": {}, "dense": {}}
    for rank, summary in enumerate(summaries):
        for kind, by_key in summary.hyper_parameters.items():
            for key, values in by_key.items():
                if joined[kind].setdefault(key, values) != values:
                    raise CheckpointError(
                        f"rank {rank} has the hyper-parameters {values} for {key!r}, and another "
                        f"rank {joined[kind][key]}; set the same schedule on every rank"
                    )
    return joined


def largest_iterations(summaries: Iterable[RankSummary]) -> dict[str, int]:
    """For each table, the largest number of forwards that a rank has counted."""
    largest: dict[str, int] = {}
    for summary in summaries:
        for name, count in summary.iterations.items():
            largest[name] = max(count, largest.get(name, 0))
    return largest

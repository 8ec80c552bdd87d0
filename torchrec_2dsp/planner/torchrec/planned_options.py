"""A plan of the search by cost, and what it was chosen from, as TorchRec's planners show theirs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import Shard, ShardingOption

from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.planner.search.result import Found
from torchrec_2dsp.planner.search.space import Space
from torchrec_2dsp.planner.torchrec.proposals import Draft, KnownOptions, known_options


@dataclass(frozen=True)
class PlannedOptions:
    """The options of a plan. TorchRec's objects for them are made when they are asked for."""

    found: Found
    """The placement that became the plan."""

    module: nn.Module
    """The unsharded model."""

    batch_size: int
    """Samples per rank and step."""

    device: str
    """"cpu" or "cuda"."""

    def selected(self) -> list[ShardingOption]:
        """One option for each table, whose shards have ranks, storage and a rating.

        Ranks are positions in a sharding group, as in the plan. Where some tables have one copy in
        the world, they are ranks of the world instead, and the other tables list the shards of
        every group, so that what a rank stores adds up.
        """
        once = self.found.once
        if once is None:
            return self._selected(self.found)
        options = self._selected(self.found)
        for option in options:
            option.shards = list(_in_every_group(option.shards, self.found.setting.mesh))
        return [*options, *self._selected(once)]

    def search_space(self) -> list[ShardingOption]:
        """An option for each way in which each table may be sharded on the plan's mesh.

        Their shards have no ranks. Hot rows are chosen afterwards and aren't in them.
        """
        parts = [self.found] if self.found.once is None else [self.found, self.found.once]
        return [
            option
            for part in parts
            for option in _draft(part).all_options(self._known(part), self.device)
        ]

    def _selected(self, placed: Found) -> list[ShardingOption]:
        options = _draft(placed).options(self._known(placed), self.device)
        placement, every_rank = placed.placement, range(placed.setting.group.num_ranks)
        for option, choice, ranks in zip(options, placement.choices, placement.ranks, strict=True):
            _give_ranks(option.shards, ranks if choice.is_free else every_rank)
        return options

    def _known(self, placed: Found) -> KnownOptions:
        """What each option says of its table, whichever way the table is sharded."""
        return known_options(
            ShardingOption(
                name=candidate.name,
                tensor=candidate.weight,
                module=(candidate.path, self.module.get_submodule(candidate.path)),
                input_lengths=[candidate.work.ids_per_sample / candidate.work.num_features]
                * candidate.work.num_features,
                batch_size=self.batch_size,
                sharding_type=kind.value,
                partition_by=get_partition_by_type(kind.value),
                compute_kernel=kernel,
                shards=[],
            )
            for candidate in placed.candidates
            for kind, kernel in candidate.kernels.items()
        )


def _draft(placed: Found) -> Draft:
    # What other tables take is in their own options.
    setting = replace(placed.setting, beside=None)
    return Draft(Space.of(placed.candidates, setting), placed.placement)


def _give_ranks(shards: Sequence[Shard], ranks: Sequence[int]) -> None:
    for shard, rank in zip(shards, ranks, strict=True):
        shard.rank = rank


def _in_every_group(shards: Sequence[Shard], mesh: Mesh2D) -> Iterator[Shard]:
    """The copies of a group's shards, on the ranks of the world."""
    for ranks in mesh.rank_matrix():
        for shard in shards:
            assert shard.rank is not None
            yield replace(shard, rank=ranks[shard.rank])

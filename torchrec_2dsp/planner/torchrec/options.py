"""The search's choices and plans as options of TorchRec's planner."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import nn
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption, Storage
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.loads import LOADS, Floats
from torchrec_2dsp.cost.model import kept_bytes
from torchrec_2dsp.cost.step_cost import StepCost, rated
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import ProposedType, base_type
from torchrec_2dsp.planner.search.choices import Candidate, Choice
from torchrec_2dsp.planner.search.placement import MeshPlacement, Placement
from torchrec_2dsp.planner.search.space import Space

_PARTS = {
    "fwd_compute": ("lookup", "rows"),
    "fwd_comms": ("input_exchange", "forward_exchange"),
    "bwd_compute": ("update",),
    "bwd_comms": ("backward_exchange", "dense_exchange", "hot_rows", "sync"),
}
"""The parts of `StepCost` by TorchRec's names in `Perf`, which doesn't add ``input_dist_comms``."""

KnownOptions = Mapping[tuple[str, ShardingType, str], ShardingOption]
"""The enumerated options, by table, type and kernel."""


def known_options(options: Iterable[ShardingOption]) -> KnownOptions:
    """Index options by table, type and kernel, as in a choice."""
    return {
        (option.name, ShardingType(base_type(option.sharding_type)), option.compute_kernel): option
        for option in options
    }


@dataclass(frozen=True)
class Draft:
    """A placement on a mesh, to whose shards TorchRec's planner assigns ranks once more."""

    space: Space
    placement: Placement

    @cached_property
    def loads(self) -> Floats:
        """A rank's loads for each table, if all ranks had an equal part of it: tables, loads."""
        setting = self.space.setting
        loads = [
            setting.loads([candidate.somewhere(choice, setting.group)]).values.mean(axis=1)
            for candidate, choice in self._tables()
        ]
        return np.array(loads, np.float64).reshape(len(loads), len(LOADS))

    @cached_property
    def rated_s(self) -> float:
        """The step's rating, if all ranks had equal work."""
        types = {choice.message_type for choice in self.placement.choices}
        return rated(self.space.step_cost(self.loads.sum(axis=0), types), types)

    def options(self, stock_options: KnownOptions, device: str) -> list[ShardingOption]:
        """Return an option for each table, rated so that the ratings add up to the step.

        They exclude the dense part. A shard that may be anywhere is rated with an equal part of
        its table's work on all ranks; a shard of a table that is everywhere, with its rank's
        work.
        """
        prices = self._prices()
        return [
            self._option(stock_options, candidate, choice, prices, device)
            for candidate, choice in self._tables()
        ]

    def all_options(self, stock_options: KnownOptions, device: str) -> list[ShardingOption]:
        """Return an option for each choice, rated as if all other tables stayed as they are."""
        prices = self._prices()
        return [
            self._option(stock_options, candidate, choice, prices, device)
            for candidate, choices in zip(self.space.candidates, self.space.choices, strict=True)
            for choice in choices
        ]

    def _tables(self) -> Iterable[tuple[Candidate, Choice]]:
        return zip(self.space.candidates, self.placement.choices, strict=True)

    def _prices(self) -> Floats:
        """Return milliseconds for each load, separately for each part of `Perf`: loads, parts."""
        sums = self.loads.sum(axis=0)
        by_part = self.space.prices_by_part(sums)
        names = [name for name, _ in StepCost().parts()]
        by_field = np.stack(
            [
                by_part[:, [names.index(part) for part in parts]].sum(axis=1)
                for parts in _PARTS.values()
            ],
            axis=1,
        ).clip(min=0.0)
        # Hidden seconds are in the whole, but in no part.
        visible = by_part.sum(axis=1, keepdims=True).clip(min=0.0)
        whole = by_field.sum(axis=1, keepdims=True)
        prices = by_field * visible / np.where(whole > 0, whole, 1.0)
        # Costs that are paid once for all tables are in no price.
        dense = self.space.setting.workload.dense
        rest_s = self.rated_s - dense.forward_s - dense.backward_s
        priced_s = float((sums @ prices).sum())
        return 1e3 * prices * (rest_s / priced_s if priced_s else 0.0)

    def _option(
        self,
        stock_options: KnownOptions,
        candidate: Candidate,
        choice: Choice,
        prices: Floats,
        device: str,
    ) -> ShardingOption:
        setting = self.space.setting
        group = setting.group
        option = copy.copy(stock_options[candidate.name, choice.kind, choice.kernel])
        option.sharding_type = ProposedType.of(
            choice.kind, setting.mesh, setting.sync, **candidate.additions(choice, group)
        )
        option.partition_by = get_partition_by_type(choice.kind.value)
        sizes, offsets = candidate.shapes(choice, group)
        placed = candidate.somewhere(choice, group)
        loads = setting.loads([placed]).values
        on_device, in_host = kept_bytes(placed, group.num_ranks)
        on_device += setting.buffer_bytes @ loads
        by_kind = np.ceil([in_host, on_device] if device == "cpu" else [on_device, in_host])
        milliseconds = prices.T @ loads
        if choice.is_free:
            milliseconds = _in_equal_parts(milliseconds, len(sizes))
            by_kind = _in_equal_parts(by_kind, len(sizes))
        option.shards = [
            Shard(
                size=size,
                offset=offset,
                storage=Storage(hbm=int(hbm), ddr=int(ddr)),
                perf=Perf(*(float(part_ms) for part_ms in parts)),
            )
            for size, offset, (hbm, ddr), parts in zip(
                sizes, offsets, by_kind.T, milliseconds.T, strict=True
            )
        ]
        return option


def _in_equal_parts(by_rank: Floats, num_parts: int) -> Floats:
    """Deal all ranks' numbers evenly to ``num_parts`` shards."""
    return np.repeat(by_rank.sum(axis=-1, keepdims=True), num_parts, axis=-1) / num_parts


@dataclass(frozen=True)
class PlannedOptions:
    """A plan's options, and those from which they were chosen; created on request."""

    best: MeshPlacement
    """The placement that became the plan."""

    module: nn.Module
    """The unsharded model."""

    batch_size: int
    device: str

    def selected(self) -> list[ShardingOption]:
        """Return one option for each table, whose shards have ranks, storage and a rating.

        Ranks are positions in a sharding group, as in the plan. If some tables have one copy in
        the world, ranks are the world's instead, and the other tables list every group's
        shards, so that the bytes on a rank add up.
        """
        once = self.best.once
        options = self._selected(self.best)
        if once is None:
            return options
        for option in options:
            option.shards = list(_in_every_group(option.shards, self.best.setting.mesh))
        return [*options, *self._selected(once)]

    def search_space(self) -> list[ShardingOption]:
        """Return an option for each way of sharding each table on the plan's mesh.

        Their shards have no ranks. Hot rows are chosen afterwards and aren't included.
        """
        parts = [self.best] if self.best.once is None else [self.best, self.best.once]
        return [
            option
            for part in parts
            for option in _draft(part).all_options(self._known(part), self.device)
        ]

    def _selected(self, placed: MeshPlacement) -> list[ShardingOption]:
        options = _draft(placed).options(self._known(placed), self.device)
        placement, every_rank = placed.placement, range(placed.setting.group.num_ranks)
        for option, choice, ranks in zip(options, placement.choices, placement.ranks, strict=True):
            on_ranks = ranks if choice.is_free else every_rank
            for shard, rank in zip(option.shards, on_ranks, strict=True):
                shard.rank = rank
        return options

    def _known(self, placed: MeshPlacement) -> KnownOptions:
        """Return options without shards, for all types of each table."""
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
            for kind, kernel in dict.fromkeys(
                (choice.kind, choice.kernel) for choice in candidate.choices
            )
        )


def _draft(placed: MeshPlacement) -> Draft:
    # The other tables' costs are in their own options.
    setting = replace(placed.setting, beside=None)
    return Draft(Space.of(placed.candidates, setting), placed.placement)


def _in_every_group(shards: Sequence[Shard], mesh: Mesh2D) -> Iterator[Shard]:
    """Yield the copies of a group's shards, on the ranks of the world."""
    for ranks in mesh.rank_matrix():
        for shard in shards:
            assert shard.rank is not None
            yield replace(shard, rank=ranks[shard.rank])

"""The search's choices as options of TorchRec's planner."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption, Storage
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.memory import table_bytes
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.plan.parameter_sharding import ProposedType, base_type
from torchrec_2dsp.planner.balance import Floats
from torchrec_2dsp.planner.search.choices import Candidate, Choice, rated
from torchrec_2dsp.planner.search.descent import Placement
from torchrec_2dsp.planner.search.space import Space

_PARTS = {
    "fwd_compute": ("lookup", "rows"),
    "fwd_comms": ("input_exchange", "forward_exchange"),
    "bwd_compute": ("update",),
    "bwd_comms": ("backward_exchange", "dense_exchange", "hot_rows", "sync"),
}
"""The parts of `StepCost` by TorchRec's names in `Perf`; it doesn't add ``input_dist_comms``."""

KnownOptions = Mapping[tuple[str, ShardingType, str], ShardingOption]
"""The enumerated options, by table, type and kernel."""


def known_options(options: Iterable[ShardingOption]) -> KnownOptions:
    """The options by table, type and kernel, as a choice names them."""
    return {
        (option.name, ShardingType(base_type(option.sharding_type)), option.compute_kernel): option
        for option in options
    }


@dataclass(frozen=True)
class Draft:
    """A placement of the search on a mesh; TorchRec's planner gives its shards ranks once more."""

    space: Space
    placement: Placement

    @cached_property
    def loads(self) -> Floats:
        """A rank's loads of each table, if all had an equal part of it: tables, loads."""
        setting = self.space.setting
        return np.array(
            [
                setting.loads([candidate.somewhere(choice, setting.group)]).values.mean(axis=1)
                for candidate, choice in self._tables()
            ]
        )

    @cached_property
    def rated_s(self) -> float:
        """The rating of a step, if all ranks had the same to do."""
        choices = self.placement.choices
        cost = self.space.step_cost(self.loads.sum(axis=0), choices)
        return rated(cost, {choice.message_type for choice in choices})

    def options(self, options: KnownOptions, device: str) -> list[ShardingOption]:
        """An option for each table, rated so that they add up to the step, but for its dense part.

        A shard of a table that may lie anywhere is rated with all that the table makes any rank do,
        in equal parts; one of a table that lies everywhere, with what its rank has to do.

        Args:
            options: are copied, with other shards.
            device: "cpu" or "cuda".
        """
        prices = self._prices()
        return [
            self._option(options, candidate, choice, prices, device)
            for candidate, choice in self._tables()
        ]

    def all_options(self, rated_options: KnownOptions, device: str) -> list[ShardingOption]:
        """One for each choice of each table, rated as if all other tables stayed as they are.

        Args:
            rated_options: as in `options`.
            device: "cpu" or "cuda".
        """
        prices = self._prices()
        return [
            self._option(rated_options, candidate, choice, prices, device)
            for candidate, choices in zip(self.space.candidates, self.space.choices, strict=True)
            for choice in choices
        ]

    def _tables(self) -> Iterable[tuple[Candidate, Choice]]:
        return zip(self.space.candidates, self.placement.choices, strict=True)

    def _prices(self) -> Floats:
        """Milliseconds for each load, apart for each part of `Perf`: loads, parts."""
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
        # What is hidden behind something else is in the whole, and in no part.
        visible = by_part.sum(axis=1, keepdims=True).clip(min=0.0)
        whole = by_field.sum(axis=1, keepdims=True)
        prices = by_field * visible / np.where(whole > 0, whole, 1.0)
        # What is paid once for all tables is in no price.
        dense = self.space.setting.workload.dense
        rest_s = self.rated_s - dense.forward_s - dense.backward_s
        priced_s = float((sums @ prices).sum())
        return 1e3 * prices * (rest_s / priced_s if priced_s else 0.0)

    def _option(
        self,
        options: KnownOptions,
        candidate: Candidate,
        choice: Choice,
        prices: Floats,
        device: str,
    ) -> ShardingOption:
        setting = self.space.setting
        group, kernel = setting.group, candidate.kernels[choice.kind]
        option = copy.copy(options[candidate.name, choice.kind, kernel])
        option.sharding_type = ProposedType.of(
            choice.kind,
            setting.mesh,
            setting.sync,
            choice.exchange,
            candidate.owners(choice, group),
            candidate.hot_set(choice),
            choice.transport,
        )
        option.partition_by = get_partition_by_type(choice.kind.value)
        sizes, offsets = candidate.shapes(choice, group)
        placed = candidate.somewhere(choice, group)
        loads = setting.loads([placed]).values
        by_rank = table_bytes(placed, group.num_ranks) + setting.buffer_bytes @ loads
        milliseconds = prices.T @ loads
        if choice.is_free:
            milliseconds = _in_equal_parts(milliseconds, len(sizes))
            by_rank = _in_equal_parts(by_rank, len(sizes))
        option.shards = [
            Shard(
                size=size,
                offset=offset,
                storage=_storage(math.ceil(num_bytes), device),
                perf=Perf(*(float(part_ms) for part_ms in parts)),
            )
            for size, offset, num_bytes, parts in zip(
                sizes, offsets, by_rank, milliseconds.T, strict=True
            )
        ]
        return option


def _in_equal_parts(by_rank: Floats, num_parts: int) -> Floats:
    """The bytes of all ranks, in equal parts for so many shards."""
    return np.repeat(by_rank.sum(axis=-1, keepdims=True), num_parts, axis=-1) / num_parts


def _storage(num_bytes: int, device: str) -> Storage:
    on_cpu = device == "cpu"
    return Storage(hbm=0 if on_cpu else num_bytes, ddr=num_bytes if on_cpu else 0)

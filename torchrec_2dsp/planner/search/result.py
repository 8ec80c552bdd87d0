"""`Found`: a placement, which becomes a plan; `SearchResult`: all that a search has found."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.loads import Ranks
from torchrec_2dsp.cost.memory import MemoryCost
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.placed import Placed
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.table_loads import exchanges_rows
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D, type_2d
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.search.choices import Candidate, Choice, rated_beside
from torchrec_2dsp.planner.search.descent import Placement, RanksOf


@dataclass(frozen=True)
class Found:
    """The best placement on a mesh."""

    setting: CostSetting
    """The mesh, and all else that its cost depends on."""

    candidates: Sequence[Candidate]
    placement: Placement

    cost: StepCost
    """The cost of a step."""

    bytes_by_rank: Ranks
    """The bytes that each rank of a group keeps."""

    once: "Found | None" = None
    """Tables with one copy in the world beside those; cost and memory count them."""

    @property
    def where(self) -> str:
        """The mesh, and how many tables have one copy beside it."""
        mesh = str(self.setting.mesh)
        return mesh if self.once is None else f"{mesh}, {len(self.once.candidates)} in the world"

    @cached_property
    def memory(self) -> MemoryCost:
        """The memory of the fullest rank."""
        cost = self.setting.memory_cost(self._placed)
        return cost if self.once is None else cost + self.once.memory

    def prefetching(self, room: float) -> StepCost | None:
        """A step in which rows travel beside computing; none if they do already or can't.

        Args:
            room: bytes that a rank has.
        """
        setting = self.setting
        exchanges = any(exchanges_rows(message_type) for message_type in self._types())
        if setting.workload.prefetches_rows or setting.mesh.num_groups > 1 or not exchanges:
            return None
        workload = replace(setting.workload, prefetches_rows=True, is_pipelined=True)
        setting = replace(setting, workload=workload)
        if setting.memory_cost(self._placed).total_bytes > room:
            return None
        return setting.step_cost(setting.loads(self._placed))

    @cached_property
    def _placed(self) -> list[Placed]:
        placement, group = self.placement, self.setting.group
        chosen = zip(self.candidates, placement.choices, placement.ranks, strict=True)
        return [candidate.placed(choice, ranks, group) for candidate, choice, ranks in chosen]

    @property
    def rated_s(self) -> float:
        """The rating by which it is compared with others."""
        in_world = set() if self.once is None else self.once._types()
        return rated_beside(self.cost, self._types(), in_world)

    def _types(self) -> set[str]:
        return {choice.message_type for choice in self.placement.choices}

    def plan(self, device: str) -> Plan2D:
        """The plan, with TorchRec's objects for each shard.

        Args:
            device: "cpu" or "cuda".
        """
        mesh, sync = self.setting.mesh, self.setting.sync
        tables: dict[str, dict[str, ParameterSharding2D]] = {}
        for candidate, sharding in self._shardings(device):
            tables.setdefault(candidate.path, {})[candidate.name] = sharding
        if self.once is not None:
            for candidate, sharding in self.once._shardings(device):
                once = replace(sharding, num_groups=1)
                tables.setdefault(candidate.path, {})[candidate.name] = once
        return Plan2D.of_tables(tables, mesh=mesh, sync=sync)

    def _shardings(self, device: str) -> Iterator[tuple[Candidate, ParameterSharding2D]]:
        for candidate, choice, ranks in zip(
            self.candidates, self.placement.choices, self.placement.ranks, strict=True
        ):
            yield candidate, self._sharding(candidate, choice, ranks, device)

    def _sharding(
        self, candidate: Candidate, choice: Choice, ranks: RanksOf, device: str
    ) -> ParameterSharding2D:
        group = self.setting.group
        if not choice.is_free:
            ranks = tuple(range(group.num_ranks))
        constraint = candidate.constraint or ParameterConstraints()
        return ParameterSharding2D(
            sharding_type=type_2d(choice.kind.value),
            compute_kernel=candidate.kernels[choice.kind],
            ranks=list(ranks),
            sharding_spec=_spec(candidate, choice, ranks, group, device),
            cache_params=constraint.cache_params,
            enforce_hbm=constraint.enforce_hbm,
            stochastic_rounding=constraint.stochastic_rounding,
            bounds_check_mode=constraint.bounds_check_mode,
            output_dtype=constraint.output_dtype,
            key_value_params=constraint.key_value_params,
            exchange=choice.exchange,
            owners=candidate.owners(choice, group),
            hot_set=candidate.hot_set(choice),
            transport=choice.transport,
        )


@dataclass(frozen=True)
class Tried:
    """A choice for all tables on a mesh, as if their shards were dealt evenly."""

    mesh: Mesh2D
    seconds: float
    """Seconds of a step."""
    bytes_of_rank: float
    """Bytes of a rank, buffers included."""
    ways: str = ""
    """How many tables are sharded in which way, in words."""


@dataclass(frozen=True)
class SearchResult:
    """The placements that a search has found, and all that it has tried."""

    found: Sequence[Found]
    """The placements, the best first; empty if nothing fits."""

    tried: Sequence[Tried]
    """All choices that fit, as if shards were dealt evenly."""

    room: float
    """Bytes that a rank has for tables and buffers."""


def _spec(
    candidate: Candidate, choice: Choice, ranks: RanksOf, group: Span, device: str
) -> EnumerableShardingSpec | None:
    if choice.kind is ShardingType.DATA_PARALLEL:
        return None
    sizes, offsets = candidate.shapes(choice, group)
    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_sizes=size,
                shard_offsets=offset,
                placement=placement(device, rank, group.ranks_per_host),
            )
            for size, offset, rank in zip(sizes, offsets, ranks, strict=True)
        ]
    )

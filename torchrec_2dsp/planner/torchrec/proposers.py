"""Proposers for TorchRec's planner: exchanges, group sizes and hot rows, by predicted cost."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from torch import nn
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Proposer,
    SharderDataMap,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import CommOp

from torchrec_2dsp._compat.torchrec import sharder_data_of
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.plan.sync import EXACT_SYNC, SyncConfig
from torchrec_2dsp.planner.search.best_placements import placements
from torchrec_2dsp.planner.search.candidates import candidates_of_options
from torchrec_2dsp.planner.search.choices import Candidate
from torchrec_2dsp.planner.search.cost_search import CostSearch, room_of
from torchrec_2dsp.planner.search.placement import Descent, with_hot_rows
from torchrec_2dsp.planner.search.space import Room, chosen_on_each, effort_for
from torchrec_2dsp.planner.torchrec.adapters import base_constraints
from torchrec_2dsp.planner.torchrec.options import Draft, KnownOptions, known_options

_UNLIMITED = Room(float("inf"))
_MAX_PROPOSALS = 36
"""The most plans to draft."""


class Loaded(NamedTuple):
    """The enumerated tables, meshes and options, as the search's objects."""

    candidates: list[Candidate]
    settings: list[CostSetting]
    options: KnownOptions


class ExchangeProposer(Proposer):
    """Proposes a sharding type and an exchange for each table, on one mesh.

    It drafts plans by predicted cost, and learns from feedback how much memory there is. Each draft
    is rated by its predicted step, so the planner compares drafts correctly with each other, but
    not with stock proposals, which the enumerator rates.

    Example:
        >>> from torchrec.distributed.planner import EmbeddingShardingPlanner
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec_2dsp.planner.torchrec.adapters import Stats2D
        >>> calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
        >>> topology = calibration.topology(world_size=4, local_world_size=2)
        >>> planner = EmbeddingShardingPlanner(
        ...     topology=topology,
        ...     proposer=tdsp.ExchangeProposer(topology, calibration),
        ...     partitioner=tdsp.BalancedPartitioner(),
        ...     stats=Stats2D(),
        ... )
    """

    _tries_all_meshes = False
    """True to draft for all meshes if none is given."""

    _loaded: Loaded | None = None
    _is_room_known = False
    _drafts: Iterator[Draft] = iter(())

    def __init__(
        self,
        topology: Topology,
        calibration: Calibration | None = None,
        *,
        mesh: Mesh2D | None = None,
        sync: SyncConfig = EXACT_SYNC,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        access: AccessStats | None = None,
        workload: Workload | None = None,
    ) -> None:
        """Take what is known of mesh, network and log.

        Args:
            topology: the whole world's topology.
            calibration: the constants of network and machines; by default the topology's figures.
            mesh: the ranks that repeat the plan; by default all ranks are one group, or, for
                `GroupSizeProposer`, all meshes are tried.
            sync: how replicas stay equal.
            constraints: per table, the same as the planner's.
            access: row frequencies.
            workload: a step's work, instead of that of options, constraints and ``access``.
        """
        self.topology = topology
        """The whole world's topology."""
        if mesh is None and not self._tries_all_meshes:
            mesh = Mesh2D(1, topology.world_size)
        if mesh is not None:
            mesh.check_world(topology.world_size)
        self._search = CostSearch(
            calibration or Calibration.of_topology(topology),
            mesh,
            sync,
            batch_size=1,
            constraints=base_constraints(constraints),
            access=access,
            workload=workload,
            # TorchRec's plans can't ask for others.
            pipelines=(Pipeline.SPARSE_DIST,),
            full_duplex=(False,),
        )

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Load the search space; the enumerator knows the optimizers."""
        if not search_space:
            raise ConfigError("there is nothing to propose for: the search space is empty")
        sharders = sharder_data_of(enumerator)
        modules = nn.ModuleList(
            {id(option.module[1]): option.module[1] for option in search_space}.values()
        )
        search = replace(self._search, batch_size=search_space[0].batch_size)
        workload = search.workload_of(modules, _enumerated_wire_bytes(sharders))
        params = {key: data.fused_params for key, data in sharders.items()}
        candidates = candidates_of_options(
            search_space, params, search.constraints, workload, self.topology.compute_device
        )
        for candidate in candidates:
            if candidate.num_groups not in (None, "each"):
                raise ConfigError(
                    f"table {candidate.name!r} has num_groups={candidate.num_groups}, but "
                    "TorchRec's planner places all tables on the ranks of one group: use Planner2D"
                )
        settings = search.settings(workload, self.topology)
        self._loaded = Loaded(candidates, settings, known_options(search_space))
        self._is_room_known = False
        self._draft(_UNLIMITED)

    def drafts(self, loaded: Loaded, room: Room) -> Iterator[Draft]:
        """Yield drafts for each mesh, most promising mesh first."""
        effort = effort_for(loaded.candidates)
        for space, selected in chosen_on_each(loaded.candidates, loaded.settings, room):
            for placement, _ in placements(space, selected, room, effort):
                yield Draft(space, placement)

    def propose(self) -> list[ShardingOption] | None:
        """Return the next plan, without ranks; `None` if there is no other."""
        draft = next(self._drafts, None)
        if draft is None or self._loaded is None:
            return None
        return draft.options(self._loaded.options, self.topology.compute_device)

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Draft again for the memory that the first feedback reports."""
        if storage_constraint is not None and not self._is_room_known:
            self._is_room_known = True
            self._draft(room_of(storage_constraint))

    def _draft(self, room: Room) -> None:
        assert self._loaded is not None
        self._drafts = islice(self.drafts(self._loaded, room), _MAX_PROPOSALS)


class GroupSizeProposer(ExchangeProposer):
    """Proposes what `ExchangeProposer` does, on every mesh with groups of up to 128 ranks.

    The plan has ranks of one sharding group; `Plan2D.from_stock` and this package's sharders
    know its mesh.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> calibration = tdsp.Calibration.load("configs/hardware/h100_8_datasheet.toml")
        >>> topology = calibration.topology(world_size=256, local_world_size=8)
        >>> proposer = tdsp.GroupSizeProposer(topology, calibration)
    """

    _tries_all_meshes = True


class HotRowProposer(ExchangeProposer):
    """Adds the hot rows that pay off to another proposer's plans.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec.distributed.planner import Topology
        >>> topology = Topology(world_size=4, local_world_size=2, compute_device="cpu")
        >>> counted = tdsp.AccessStats({})
        >>> proposer = tdsp.HotRowProposer(tdsp.ExchangeProposer(topology, access=counted))
    """

    def __init__(self, inner: ExchangeProposer) -> None:
        """Leave everything else to ``inner``, which must know row frequencies."""
        if inner._search.access is None and inner._search.workload is None:
            raise ConfigError(
                "nothing says which rows are hot: give the inner proposer access=AccessStats(...)"
            )
        self.topology = inner.topology
        self._search = inner._search
        self.inner = inner
        """The wrapped proposer."""

    def drafts(self, loaded: Loaded, room: Room) -> Iterator[Draft]:
        """Yield the inner proposer's drafts, with hot rows if they pay off."""
        for draft in self.inner.drafts(loaded, room):
            space = draft.space
            descent = Descent(space, space.prices(draft.loads.sum(axis=0)), room)
            yield Draft(space, with_hot_rows(space, draft.placement, descent, room))


def _enumerated_wire_bytes(sharders: SharderDataMap) -> tuple[float, float]:
    """Return the bytes per number on the wire, including the sharders' quantised communication."""
    for data in sharders.values():
        sizes = data.qcomm_dtype_sizes.get(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name)
        if sizes is not None:
            return sizes
    return 4.0, 4.0

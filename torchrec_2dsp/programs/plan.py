"""Plan a model for machines; neither has to be present."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.types import ModuleSharder

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.cost.calibration import Calibration, KernelCost, Kernels
from torchrec_2dsp.cost.collectives import CollectiveCost
from torchrec_2dsp.cost.dense import DenseLayers, Transformer
from torchrec_2dsp.cost.model import CostModel, CostSetting
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGrad
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.dense_search import DenseChoices, search_dense
from torchrec_2dsp.planner.explanation import Explanation
from torchrec_2dsp.planner.planner2d import ParameterConstraints2D, Planner2D
from torchrec_2dsp.programs.config.config_file import CalibrationPath, PathBesideConfig
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.config.sections import ModelConfig, ReplicationConfig
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.models.model import build_model, table_name
from torchrec_2dsp.programs.models.planned import true_access
from torchrec_2dsp.shard.sharders import EmbeddingBagCollectionSharder2D


class Slower(BaseModel):
    """Factors by which things take longer than in a calibration; below 1 they are quicker.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec_2dsp.programs.plan import Slower
        >>> calibration = tdsp.Calibration.load("configs/hardware/h100_8_datasheet.toml")
        >>> other = Slower(link=4.0).than(calibration)
        >>> other.collectives.all_reduce.link_s_per_byte
        1e-11
        >>> other.hardware.name
        'h100_8_datasheet with link x 4'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    link: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor for a byte on its way to another host."""

    host: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor for a byte on its way inside a host."""

    latency: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor for times without bytes: starts, other ranks, and turns."""

    kernels: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor for a row that is looked up, sorted, copied, added or updated."""

    def than(self, calibration: Calibration) -> Calibration:
        """Return the calibration of such machines, whose name says so."""
        factors = {name: value for name, value in self.model_dump().items() if value != 1.0}
        if not factors:
            return calibration
        changes = ", ".join(f"{name} x {value:g}" for name, value in factors.items())
        hardware = calibration.hardware
        name = f"{hardware.name} with {changes}"
        collectives, kernels = calibration.collectives, calibration.kernels
        return calibration.model_copy(
            update={
                "hardware": hardware.model_copy(update={"name": name}),
                "collectives": collectives.model_copy(
                    update={what: self._collective(cost) for what, cost in collectives if cost}
                ),
                "kernels": kernels.model_copy(
                    update={what: self._kernel(cost) for what, cost in kernels if cost}
                ),
                "turn_s": calibration.turn_s * self.latency,
            }
        )

    def _collective(self, cost: CollectiveCost) -> CollectiveCost:
        return cost.model_copy(
            update={
                "base_s": cost.base_s * self.latency,
                "per_peer_s": cost.per_peer_s * self.latency,
                "local_s_per_byte": _times(cost.local_s_per_byte, self.host),
                "link_s_per_byte": _times(cost.link_s_per_byte, self.link),
            }
        )

    def _kernel(self, cost: KernelCost) -> KernelCost:
        per_unit = (name for name in type(cost).model_fields if name.startswith("per_"))
        slower = {name: getattr(cost, name) * self.kernels for name in per_unit}
        return cost.model_copy(update={"base_s": cost.base_s * self.latency} | slower)


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor


class TransformerConfig(Section):
    """A transformer over sequences of items, whose layers ranks may share."""

    num_blocks: int = Field(ge=1)
    """Blocks."""

    dim: int = Field(ge=1)
    """An item's width between blocks."""

    length: int = Field(ge=1)
    """Items per sample."""

    expansion: int = Field(default=4, ge=1)
    """The factor by which the feed-forward part is wider inside."""

    num_targets: int = Field(default=1, ge=0)
    """Vectors that the loss is given for each item."""

    def layers(self, kernels: Kernels) -> DenseLayers:
        """Return the blocks, timed by the calibrated matrix products."""
        return Transformer(**self.model_dump()).layers(kernels)


class DenseConfig(Section):
    """A step's work beside its tables, on one rank."""

    forward_ms: float = Field(default=0.0, ge=0)
    backward_ms: float = Field(default=0.0, ge=0)
    gradient_mb: float = Field(default=0.0, ge=0)
    """Megabytes that are all-reduced over the world in each step."""

    transformer: TransformerConfig | None = None
    """The model's other layers, in place of the numbers above; then ways to run them are compared,
    too."""

    @model_validator(mode="after")
    def _check_one_description(self) -> Self:
        if self.transformer and (self.forward_ms or self.backward_ms or self.gradient_mb):
            raise ValueError(
                "dense.transformer takes the place of forward_ms, backward_ms and gradient_mb; "
                "leave those out"
            )
        return self

    def work(self, kernels: Kernels, batch_size: int) -> DenseWork:
        """Return a rank's dense work, which a search of the tables' plan takes as it is."""
        if self.transformer is None:
            return DenseWork(
                forward_s=self.forward_ms / 1e3,
                backward_s=self.backward_ms / 1e3,
                gradient_bytes=self.gradient_mb * 1e6,
            )
        layers = self.transformer.layers(kernels)
        return DenseWork(
            forward_s=sum(batch_size * layer.forward_s for layer in layers.layers),
            backward_s=sum(batch_size * layer.backward_s for layer in layers.layers),
        )


def torchrec_cost(
    setting: CostSetting,
    model: nn.Module,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints],
) -> StepCost | None:
    """Predict a step with TorchRec's own plan for one group; `None` if it finds none."""
    pooling_constraints = {
        name: ParameterConstraints(pooling_factors=constraint.pooling_factors)
        for name, constraint in constraints.items()
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=setting.workload.batch_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=pooling_constraints,
        debug=False,
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    try:
        stock = planner.plan(model, sharders)
    except PlannerError:
        return None
    plan = Plan2D.from_stock(stock, Mesh2D(1, topology.world_size), setting.sync)
    costs = CostModel(setting.calibration, setting.local_world_size)
    return costs.step_cost(plan, setting.workload)


_GIB = 2**30
_MOST_COMPARED = 10_000
"""Ranks times tables, for which TorchRec's planner takes seconds."""


class MachinesConfig(Section):
    """The machines that a model would be trained on."""

    calibration: CalibrationPath
    """A file from the calibrate command, relative to the config file, or the name of one that
    ships, such as `emulated_1gbit`."""

    slower: Slower = Slower()
    """The factors by which things take longer than there."""

    num_ranks: int = Field(default=4, ge=1)
    """Ranks in the world."""

    ranks_per_host: int = Field(default=2, ge=1)
    """Ranks that share a host's link."""

    memory_gib: float = Field(default=0.0, ge=0)
    """A rank's memory in GiB; 0 takes the calibration's."""

    reserved: float = Field(default=0.15, ge=0, lt=1)
    """The share of memory that tables and their exchanges don't get."""

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        ranks, per_host = self.num_ranks, self.ranks_per_host
        if ranks > per_host and ranks % per_host:
            below = ranks - ranks % per_host
            raise ValueError(
                f"num_ranks={ranks} is no multiple of ranks_per_host={per_host}, and all hosts "
                f"have as many ranks; use num_ranks={below} or {below + per_host}, or another "
                "ranks_per_host"
            )
        return self


class PlanConfig(Section):
    """The config for the plan and simulate commands."""

    data: SyntheticConfig
    model: ModelConfig = ModelConfig()
    machines: MachinesConfig
    """The machines that it would be trained on."""

    replicas: ReplicationConfig = ReplicationConfig()
    """The way to keep table copies equal."""

    dense: DenseConfig = DenseConfig()
    batch_size: int = Field(default=1024, ge=1)
    """Samples per rank and step."""

    group_size: int = Field(default=0, ge=0)
    """Ranks in a sharding group; 0 for the best size."""

    layout: RankLayout = RankLayout.CONTIGUOUS
    """Group placement, if the size is given."""

    sharding_types: tuple[str, ...] = ()
    """The sharding types that tables may have; empty for all that train alike."""

    exchanges: tuple[str, ...] = ()
    """The ways in which rows may travel; empty for all."""

    one_copy: tuple[str, ...] | Literal["best"] = "best"
    """The features whose tables have one copy in the world; others have one in each group."""

    access: PathBesideConfig = ""
    """A file of access statistics; empty for what the data's own probabilities say."""

    @model_validator(mode="after")
    def _check_features(self) -> Self:
        feature_names = [feature.name for feature in self.data.features]
        demanded = () if self.one_copy == "best" else self.one_copy
        if unknown := set(demanded) - set(feature_names):
            raise ValueError(
                f"one_copy: no features {sorted(unknown)} in the data; there are {feature_names}"
            )
        return self


@dataclass(frozen=True)
class Planning:
    """A planner and what it plans."""

    planner: Planner2D
    model: nn.Module
    sharders: list[ModuleSharder[nn.Module]]
    topology: Topology
    constraints: Mapping[str, ParameterConstraints2D]
    dense: DenseChoices | None
    """The ways to run the dense part, if the config says what layers it has."""

    def explained(self) -> Explanation:
        """Explain the plan, and compare it with TorchRec's where that is quick."""
        explanation = self.planner.explain()
        if self.topology.world_size * len(explanation.tables) > _MOST_COMPARED:
            return explanation
        cost = torchrec_cost(explanation.setting, self.model, self.topology, self.constraints)
        return replace(explanation, torchrec_s=None if cost is None else cost.total_s)


def planning(config: PlanConfig) -> Planning:
    """Build a config's planner, and what it plans; no process group is needed."""
    machines = config.machines
    calibration = machines.slower.than(Calibration.load(machines.calibration))
    calibration.check_covers(
        world_size=machines.num_ranks, local_world_size=machines.ranks_per_host
    )
    model = build_model(config.data, config.model, tables_device="meta")
    constraints = _constraints(config)
    access = AccessStats.load(config.access) if config.access else true_access(config.data)
    workload = replace(
        Workload.of_model(
            model, batch_size=config.batch_size, constraints=constraints, access=access
        ),
        dense=config.dense.work(calibration.kernels, config.batch_size),
    )
    topology = calibration.topology(
        machines.num_ranks, machines.ranks_per_host, **_memory(machines, calibration)
    )
    planner = Planner2D(
        topology=topology,
        batch_size=config.batch_size,
        storage_reservation=FixedPercentageStorageReservation(machines.reserved),
        constraints=constraints,
        debug=False,
        mesh=_mesh(config),
        sync=config.replicas.sync_config,
        calibration=calibration,
        workload=workload,
    )
    # Its learning rate doesn't matter here; that there is one moment per row does.
    sharder = EmbeddingBagCollectionSharder2D(MomentScaledRowWiseAdaGrad(lr=1.0))
    sharders = cast(list[ModuleSharder[nn.Module]], [sharder])
    dense = _dense_choices(config, calibration)
    return Planning(planner, model, sharders, topology, constraints, dense)


def _dense_choices(config: PlanConfig, calibration: Calibration) -> DenseChoices | None:
    """Search ways to run the dense part in the memory that the tables leave."""
    if config.dense.transformer is None:
        return None
    machines = config.machines
    (num_bytes,) = _memory(machines, calibration).values()
    return search_dense(
        config.dense.transformer.layers(calibration.kernels),
        calibration=calibration,
        world_size=machines.num_ranks,
        local_world_size=min(machines.ranks_per_host, machines.num_ranks),
        batch_size=config.batch_size,
        memory_bytes=machines.reserved * num_bytes,
    )


def _constraints(config: PlanConfig) -> dict[str, ParameterConstraints2D]:
    return {
        table_name(feature.name): ParameterConstraints2D(
            sharding_types=list(config.sharding_types) or None,
            exchange=list(config.exchanges) or None,
            pooling_factors=[feature.mean_ids],
            num_groups=_num_groups(config, feature.name),
        )
        for feature in config.data.features
    }


def _num_groups(config: PlanConfig, feature: str) -> Literal[1, "each"] | None:
    if config.one_copy == "best":
        return None
    return 1 if feature in config.one_copy else "each"


def _mesh(config: PlanConfig) -> Mesh2D | None:
    if not config.group_size:
        return None
    return Mesh2D.for_world(
        config.machines.num_ranks, group_size=config.group_size, layout=config.layout
    )


def _memory(machines: MachinesConfig, calibration: Calibration) -> Mapping[str, int]:
    num_bytes = int(machines.memory_gib * _GIB) or calibration.hardware.memory_bytes
    if not num_bytes:
        raise ConfigError(
            f"{machines.calibration} doesn't say how much memory a rank has; set "
            "machines.memory_gib"
        )
    return {f"{'ddr' if calibration.hardware.device == 'cpu' else 'hbm'}_cap_bytes": num_bytes}

"""`PlanConfig`: a model, and machines that it is planned for; nothing of both has to be there."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, cast

from pydantic import Field, model_validator
from torch import nn
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ModuleSharder

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGrad
from torchrec_2dsp.planner.constraints import ParameterConstraints2D
from torchrec_2dsp.planner.dense_search import DenseChoices, search_dense
from torchrec_2dsp.planner.explanation.explanation import Explanation
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.programs.config.config_file import CalibrationPath, PathBesideConfig
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.config.sections import ModelConfig, ReplicationConfig
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.models.model import build_model, table_name
from torchrec_2dsp.programs.models.planned import true_access
from torchrec_2dsp.programs.plan.dense_config import DenseConfig
from torchrec_2dsp.programs.plan.slower import Slower
from torchrec_2dsp.programs.plan.torchrec_cost import torchrec_cost
from torchrec_2dsp.shard.sharders import EmbeddingBagCollectionSharder2D

_GIB = 2**30
_MOST_COMPARED = 10_000
"""Ranks times tables, for which TorchRec's planner takes seconds."""


class MachinesConfig(Section):
    """The machines that a model would be trained on."""

    calibration: CalibrationPath
    """A file of the calibrate command, relative to the config file if that names it; or the name of
    one that ships, such as `emulated_1gbit`."""

    slower: Slower = Slower()
    """How many times as long things take as there."""

    num_ranks: int = Field(default=4, ge=1)
    """How many ranks the world has."""

    ranks_per_host: int = Field(default=2, ge=1)
    """How many ranks share a host's link."""

    memory_gib: float = Field(default=0.0, ge=0)
    """Memory of a rank in GiB; 0 takes the calibration's."""

    reserved: float = Field(default=0.15, ge=0, lt=1)
    """The share of the memory that isn't for tables and what they exchange."""

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
    """The config of the plan and simulate commands."""

    data: SyntheticConfig
    """The data, with one table for each of its features."""

    model: ModelConfig = ModelConfig()
    """The sizes of the model."""

    machines: MachinesConfig
    """The machines that it would be trained on."""

    replicas: ReplicationConfig = ReplicationConfig()
    """How copies of the tables would be kept equal."""

    dense: DenseConfig = DenseConfig()
    """The rest of the model."""

    batch_size: int = Field(default=1024, ge=1)
    """Samples per rank and step."""

    group_size: int = Field(default=0, ge=0)
    """Ranks of a sharding group; 0 for what is best."""

    layout: RankLayout = RankLayout.CONTIGUOUS
    """How ranks are dealt to groups, if their size is given."""

    sharding_types: tuple[str, ...] = ()
    """The sharding types that tables may have; empty for all that train alike."""

    exchanges: tuple[str, ...] = ()
    """The ways in which rows may travel; empty for all."""

    one_copy: tuple[str, ...] | Literal["best"] = "best"
    """The features whose tables have one copy in the world; others have one in each group."""

    access: PathBesideConfig = ""
    """A file of access statistics; empty for what the data's own probabilities say."""

    full_duplex: bool = False
    """Whether all-to-alls receive and send at once (gloo alone)."""

    prefetch_rows: bool = False
    """Whether rows travel beside computing, by `TrainPipelineRowPrefetch`."""

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
    """The machines as the planner knows them."""
    constraints: Mapping[str, ParameterConstraints2D]
    """The demands of the config on each table."""
    dense: DenseChoices | None
    """The ways to run the dense part, if the config says what layers it has."""

    def explained(self) -> Explanation:
        """Why the plan is as it is, and how it compares with TorchRec's where that is quick."""
        explanation = self.planner.explain()
        if self.topology.world_size * len(explanation.tables) > _MOST_COMPARED:
            return explanation
        cost = torchrec_cost(explanation.setting, self.model, self.topology, self.constraints)
        return replace(explanation, torchrec_s=None if cost is None else cost.total_s)


def planning(config: PlanConfig) -> Planning:
    """The planner of a config, and what it plans; no process group is needed."""
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
        prefetches_rows=config.prefetch_rows,
        full_duplex=config.full_duplex,
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
    """The ways to run the dense part, in what the tables leave of the memory."""
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

"""Plan a model for machines; neither has to be present."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.types import ModuleSharder

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.cost.calibration import Calibration, Kernels
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
from torchrec_2dsp.planner.search.candidates import ANYWHERE
from torchrec_2dsp.programs.config.config_file import (
    PathBesideConfig,
    find_config,
    kind_of,
    load_config,
    make_config,
    overridden,
    shipped_configs,
)
from torchrec_2dsp.programs.config.machines import MachinesConfig
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.config.sections import ModelConfig, ReplicationConfig
from torchrec_2dsp.programs.data.dataset import Dataset, Progress
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.models.kinds import dataset_for, transformer_of
from torchrec_2dsp.programs.models.model import build_model, table_name
from torchrec_2dsp.programs.models.optimizer import STATE_PER_WEIGHT
from torchrec_2dsp.programs.models.planned import ReservedShare, StockSequenceSharder, true_access
from torchrec_2dsp.programs.train.config import RunConfig, TrainConfig
from torchrec_2dsp.programs.train.sharded import (
    access_of,
    make_model,
    make_sharders,
    planner_by_cost,
)
from torchrec_2dsp.shard.sharders import EmbeddingBagCollectionSharder2D


class DenseConfig(Section):
    """A step's work outside the tables, on one rank."""

    forward_ms: float = Field(default=0.0, ge=0)
    backward_ms: float = Field(default=0.0, ge=0)
    gradient_mb: float = Field(default=0.0, ge=0)
    """Megabytes that are all-reduced over the world in each step."""

    transformer: Transformer | None = None
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
        """Return a rank's dense work, which the search for the tables' plan takes as given."""
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


class PlanConfig(Section):
    """The config for the plan and simulate commands."""

    data: SyntheticConfig
    model: ModelConfig = ModelConfig()
    machines: MachinesConfig
    """The machines to train on."""

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
    """The exchanges that tables may use; empty for all."""

    one_copy: tuple[str, ...] | Literal["best"] = "best"
    """The features whose tables have one copy in the world; others have one in each group."""

    access: PathBesideConfig = ""
    """A file of access statistics; empty for the data's own probabilities."""

    @model_validator(mode="after")
    def _check_features(self) -> Self:
        feature_names = [feature.name for feature in self.data.features]
        demanded = () if self.one_copy == "best" else self.one_copy
        if unknown := set(demanded) - set(feature_names):
            raise ValueError(
                f"one_copy: no features {sorted(unknown)} in the data; there are {feature_names}"
            )
        return self


def torchrec_cost(setting: CostSetting, model: nn.Module, topology: Topology) -> StepCost | None:
    """Predict a step with TorchRec's own plan for one group.

    `None` if it finds none, or one with kernels whose time isn't known: those with caches.
    """
    constraints = {
        name: ParameterConstraints(pooling_factors=[table.ids_per_sample / table.num_features])
        for name, table in setting.workload.tables.items()
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=setting.workload.batch_size,
        storage_reservation=ReservedShare(0.0),
        constraints=constraints,
        debug=False,
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), StockSequenceSharder()]
    try:
        stock = planner.plan(model, sharders)
    except PlannerError:
        return None
    plan = Plan2D.from_stock(stock, Mesh2D(1, topology.world_size), setting.sync)
    kernels = {table.compute_kernel for _, module in plan.modules() for _, table in module.tables()}
    if not kernels.issubset(ANYWHERE):
        return None
    costs = CostModel(setting.calibration, setting.local_world_size)
    return costs.step_cost(plan, setting.workload)


_MOST_COMPARED = 10_000
"""The most ranks times tables to compare, for which TorchRec's planner takes seconds."""


@dataclass(frozen=True)
class Planning:
    """A planner, and the model to plan."""

    planner: Planner2D
    model: nn.Module
    sharders: list[ModuleSharder[nn.Module]]
    topology: Topology
    dense: DenseChoices | None
    """The ways to run the dense part, if the config describes its layers."""

    title: str = ""
    """The planned part of a config, in words, if the config has more than that."""

    def explained(self) -> Explanation:
        """Explain the plan, and compare it with TorchRec's if that is quick."""
        explanation = self.planner.explain()
        if self.topology.world_size * len(explanation.tables) > _MOST_COMPARED:
            return explanation
        cost = torchrec_cost(explanation.setting, self.model, self.topology)
        return replace(explanation, torchrec_s=None if cost is None else cost.total_s)


@dataclass(frozen=True, kw_only=True)
class RunToPlan:
    """A training program's run, and the machines to train it on."""

    config: TrainConfig
    """The training program's config, with only this run."""

    machines: MachinesConfig
    """The machines."""

    dataset: Dataset
    """The data, for its features."""

    access: AccessStats
    """Row frequencies in the data."""

    title: str
    """The run, in words."""


OPEN_RUN = "planned"
"""The name of a run that leaves everything to the planner."""


def to_plan(
    name: str, overrides: Sequence[str], *, run: str = "", progress: Progress | None = None
) -> PlanConfig | RunToPlan:
    """Read a config of the plan program, or a training program's config and its log.

    Args:
        name: the file, or the name of a config that ships with the package.
        overrides: ``key.sub=value``; with ``machines.`` as the first part for all configs.
        run: the training program's run to plan; by default the only one, or one that leaves
            everything to the planner.
        progress: called while the log is read.

    Raises:
        ConfigError: it is neither, or doesn't name the machines.
    """
    if kind_of(name, (TrainConfig, PlanConfig)) is PlanConfig:
        if run:
            raise ConfigError(f"{name} is a config for plan, which has no runs; leave {run!r} out")
        return load_config(PlanConfig, name, overrides)
    of_machines = [text for text in overrides if text.startswith(_MACHINES)]
    config = load_config(TrainConfig, name, of_training(overrides))
    chosen, section = _chosen_run(config, run)
    machines = _machines(name, of_machines, [section, *config.runs.values()])
    # As if the run named it, so that the planner chooses what the run leaves open.
    num_groups = section.num_groups if "num_groups" in section.model_fields_set else 0
    update = {"calibration": machines.calibration, "num_groups": num_groups}
    section = section.model_copy(update=update)
    title, runs = f"The run {chosen!r}", _searched(config)
    if chosen not in runs:
        hint = f" (--only {next(iter(runs))} plans that run)" if runs else ""
        title = f"Nothing is pinned: the planner chooses everything{hint}"
    config = config.model_copy(update={"runs": {chosen: section}})
    config.check_world(machines.num_ranks)
    dataset = dataset_for(config.model, config.data.dataset(progress))
    access = access_of(config, section, make_model(config, section, dataset), dataset, progress)
    return RunToPlan(config=config, machines=machines, dataset=dataset, access=access, title=title)


_MACHINES = "machines."


def of_training(overrides: Sequence[str]) -> list[str]:
    """Return a training program's overrides, without the machines'."""
    return [text for text in overrides if not text.startswith(_MACHINES)]


def _chosen_run(config: TrainConfig, name: str) -> tuple[str, RunConfig]:
    """Return a run of this name, or the only one; otherwise one that leaves everything open."""
    searched = _searched(config.only([name]) if name else config)
    if name and not searched:
        run = config.runs[name]
        why = "TorchRec alone" if run.stock else f"trained by the plan {run.plan}"
        raise ConfigError(f"runs.{name} is {why}, so there is nothing to search; choose another")
    if len(searched) == 1:
        return next(iter(searched.items()))
    return OPEN_RUN, RunConfig(num_groups=0)


def _searched(config: TrainConfig) -> dict[str, RunConfig]:
    """Return the runs whose plans this package searches."""
    return {name: run for name, run in config.runs.items() if not run.stock and not run.plan}


def _machines(source: str, overrides: Sequence[str], runs: Sequence[RunConfig]) -> MachinesConfig:
    """Return the machines that the command line, or else a run's calibration, describes."""
    tree: dict[str, Any] = {}
    for calibration in [run.calibration for run in runs if run.calibration][:1]:
        tree["calibration"] = calibration
    for override in overrides:
        tree = overridden(tree, override.removeprefix(_MACHINES))
    if "calibration" not in tree:
        raise ConfigError(
            f"{source} doesn't say on which machines it would be trained: give --calibration, a "
            f"file from the calibrate command or one of {', '.join(shipped_configs('hardware'))}"
        )
    hardware = Calibration.load(find_config(str(tree["calibration"]), "hardware")).hardware
    per_host = tree.setdefault("ranks_per_host", hardware.ranks_per_host)
    tree.setdefault("num_ranks", hardware.num_hosts * per_host)
    return make_config(MachinesConfig, tree, f"{source}: machines")


def on_ranks(source: PlanConfig | RunToPlan, num_ranks: int) -> PlanConfig | RunToPlan:
    """Return the source with another number of ranks."""
    tree = source.machines.model_dump() | {"num_ranks": num_ranks}
    machines = make_config(MachinesConfig, tree, "--ranks")
    if isinstance(source, PlanConfig):
        return source.model_copy(update={"machines": machines})
    source.config.check_world(num_ranks)
    return replace(source, machines=machines)


def planning(source: PlanConfig | RunToPlan) -> Planning:
    """Build a planner and the model to plan; no process group is needed."""
    calibration = source.machines.calibrated()
    topology = calibration.topology(source.machines.num_ranks, source.machines.local_size)
    if isinstance(source, PlanConfig):
        return _planning_of_config(source, calibration, topology)
    return _planning_of_run(source, calibration, topology)


def _planning_of_run(source: RunToPlan, calibration: Calibration, topology: Topology) -> Planning:
    config, dataset, world_size = source.config, source.dataset, topology.world_size
    ((name, run),) = config.runs.items()
    model = make_model(config, run, dataset)
    planner = planner_by_cost(
        config,
        name,
        dataset,
        model,
        topology,
        calibration,
        source.access,
        reserved=source.machines.reserved,
    )
    transformer, dense = transformer_of(config.model), None
    if transformer is not None and calibration.kernels.matmul is not None:
        state = STATE_PER_WEIGHT[config.optimizer.dense_optimizer]
        layers = transformer.layers(calibration.kernels, state_per_weight=state)
        batch_size = config.loop.batch_size // world_size
        dense = _dense_choices(layers, source.machines, calibration, batch_size)
    title = (
        f"{source.title}: {config.loop.global_batch_size:,} samples per step on {world_size:,} "
        f"ranks, {topology.local_world_size} per host."
    )
    return Planning(planner, model, make_sharders(config, run), topology, dense, title)


def _planning_of_config(
    config: PlanConfig, calibration: Calibration, topology: Topology
) -> Planning:
    model = build_model(config.data.dataset(), config.model, tables_device="meta")
    constraints = _constraints(config)
    access = AccessStats.load(config.access) if config.access else true_access(config.data)
    workload = replace(
        Workload.of_model(
            model, batch_size=config.batch_size, constraints=constraints, access=access
        ),
        dense=config.dense.work(calibration.kernels, config.batch_size),
    )
    mesh = None
    if config.group_size:
        mesh = Mesh2D.for_world(
            config.machines.num_ranks, group_size=config.group_size, layout=config.layout
        )
    planner = Planner2D(
        topology=topology,
        batch_size=config.batch_size,
        storage_reservation=ReservedShare(config.machines.reserved),
        constraints=constraints,
        mesh=mesh,
        sync=config.replicas.sync_config,
        calibration=calibration,
        workload=workload,
    )
    # Its learning rate doesn't matter here; its one moment per row does.
    sharder = EmbeddingBagCollectionSharder2D(MomentScaledRowWiseAdaGrad(lr=1.0))
    sharders = cast(list[ModuleSharder[nn.Module]], [sharder])
    dense = None
    if config.dense.transformer is not None:
        layers = config.dense.transformer.layers(calibration.kernels)
        dense = _dense_choices(layers, config.machines, calibration, config.batch_size)
    return Planning(planner, model, sharders, topology, dense)


def _dense_choices(
    layers: DenseLayers, machines: MachinesConfig, calibration: Calibration, batch_size: int
) -> DenseChoices:
    """Search ways to run the dense part in the memory that the tables leave."""
    return search_dense(
        layers,
        calibration=calibration,
        world_size=machines.num_ranks,
        local_world_size=machines.local_size,
        batch_size=batch_size,
        memory_bytes=machines.reserved * calibration.hardware.memory_bytes,
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

"""Models that the sharders can't fully handle are refused by name, on all ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_modules import ManagedCollisionCollection

import torchrec_2dsp as tdsp
from tests.support.managed_collisions import behind_maps, sorting_map
from tests.support.models import SEQUENCES, BagModel, ModelSpec, SequenceModel, build
from tests.support.parity import TWO
from tests.support.ranks import RankPool, error_of
from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.plan.fits_module import check_managed, check_model, check_processed

BAGS, WEIGHTED = ModelSpec(), ModelSpec(weighted=True)
LR = 0.01


def managed_bags() -> nn.Module:
    return behind_maps(BagModel(BAGS).ebc, sorting_map)


def managed_sequences() -> nn.Module:
    return behind_maps(SequenceModel(SEQUENCES).ec, sorting_map)


def mapped_by_hand() -> nn.Module:
    """Return bags behind an id map that isn't part of a collection."""
    ebc = BagModel(BAGS).ebc
    configs = ebc.embedding_bag_configs()
    modules: Any = {config.name: sorting_map(config) for config in configs}
    return nn.ModuleDict({"maps": ManagedCollisionCollection(modules, configs), "ebc": ebc})


def one_map_far_away() -> nn.Module:
    model: Any = mapped_by_hand()
    id_map = model.maps._managed_collision_modules["t0"]
    return nn.ModuleDict({"user": nn.ModuleDict({"map": id_map}), "ebc": model.ebc})


def pruned_by_hand() -> nn.Module:
    itep = GenericITEPModule(table_name_to_unpruned_hash_sizes={}, lookups=None)
    return nn.ModuleDict({"itep": itep, "ebc": BagModel(BAGS).ebc})


def pruned_bags() -> nn.Module:
    itep = GenericITEPModule(table_name_to_unpruned_hash_sizes={}, lookups=None)
    return ITEPEmbeddingBagCollection(BagModel(BAGS).ebc, itep)


def processed_bags() -> FeatureProcessedEmbeddingBagCollection:
    processors = PositionWeightedModuleCollection(dict.fromkeys(BagModel(WEIGHTED).features, 4))
    return FeatureProcessedEmbeddingBagCollection(BagModel(WEIGHTED).ebc, processors)


def fused_bags() -> nn.Module:
    configs = BagModel(BAGS).ebc.embedding_bag_configs()
    return FusedEmbeddingBagCollection(
        configs, torch.optim.SGD, {"lr": 0.1}, device=torch.device("meta")
    )


def two_names() -> nn.Module:
    model: Any = build(BAGS)
    model.again = model.ebc
    return model


def two_names_behind_maps() -> nn.Module:
    managed = managed_bags()
    return nn.ModuleDict({"ebc": managed, "again": managed})


def two_names_behind_positions() -> nn.Module:
    processed = processed_bags()
    return nn.ModuleDict({"ebc": processed, "again": processed})


def tied_tables() -> nn.Module:
    model: Any = nn.ModuleDict({"a": BagModel(BAGS).ebc, "b": BagModel(BAGS).ebc})
    for config in model.b.embedding_bag_configs():
        config.name += "_b"
    bags = model.b.embedding_bags
    model.b.embedding_bags = nn.ModuleDict({f"{name}_b": bag for name, bag in bags.items()})
    model.b.embedding_bags["t0_b"].weight = model.a.embedding_bags["t0"].weight
    return model


def tied_to_a_dense_layer() -> nn.Module:
    model: Any = build(BAGS)
    model.scores = nn.Linear(8, 40, bias=False)
    model.scores.weight = model.ebc.embedding_bags["t0"].weight
    return model


def tied_sequences() -> nn.Module:
    model: Any = SequenceModel(SEQUENCES)
    first, second = list(model.ec.embeddings.values())[:2]
    second.weight = first.weight
    return model


def test_frozen_tables_behind_id_maps() -> None:
    model: Any = managed_bags()
    model._embedding_module.embedding_bags["t1"].requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"table 't1' .* has requires_grad=False, but manag"):
        check_managed(model, "sparse")


def with_own_forward(collection: Any, _: Any) -> None:
    forward = collection.forward
    collection.forward = lambda features: forward(features)


CARRIED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "forward_hook": (lambda ebc, _: ebc.register_forward_hook(print), "EmbeddingBagCollection "),
    "pre_hook": (lambda ebc, _: ebc.register_forward_pre_hook(print), "EmbeddingBagCollection "),
    "backward_hook": (lambda ebc, _: ebc.register_full_backward_hook(print), "EmbeddingBagColl"),
    "own_forward": (with_own_forward, "EmbeddingBagCollection has a forward set on the instance"),
    "table_hook": (lambda _, bag: bag.register_forward_hook(print), "table 't0' has hooks on"),
    "gradient_hook": (lambda _, bag: bag.weight.register_hook(print), "'t0' has hooks on its wei"),
    "accumulation_hook": (
        lambda _, bag: bag.weight.register_post_accumulate_grad_hook(print),
        "table 't0' has hooks on its weight",
    ),
    "padding": (lambda _, bag: setattr(bag, "padding_idx", 0), "table 't0' has padding_idx=0"),
    "bounded": (lambda _, bag: setattr(bag, "max_norm", 1.0), "table 't0' has max_norm=1.0"),
    "by_frequency": (
        lambda _, bag: setattr(bag, "scale_grad_by_freq", True),
        "table 't0' has scale_grad_by_freq=True",
    ),
    "parametrized": (lambda _, bag: spectral_norm(bag), "table 't0' has a parametrization, wh"),
}
"""Changes to a collection and its first table, and the owner and setting that the error names."""


def carrying(change: Callable[[Any, Any], Any]) -> nn.Module:
    model: Any = build(BAGS)
    change(model.ebc, model.ebc.embedding_bags["t0"])
    return model


@pytest.mark.parametrize(
    ("make", "check"), [(managed_bags, check_managed), (processed_bags, check_processed)]
)
def test_hooks_around_a_collection(make: Callable[[], nn.Module], check: Any) -> None:
    outer, inner = make(), make()
    outer.register_forward_hook(print)
    next(part for part in inner.modules() if isinstance(part, nn.EmbeddingBag)).padding_idx = 0
    for module, text in ((outer, f"{type(outer).__name__} has hooks on"), (inner, "padding_idx")):
        with pytest.raises(UnsupportedError, match=text):
            check(module, "sparse")
        with pytest.raises(UnsupportedError, match=text):
            check_model(nn.ModuleDict({"sparse": module}))


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    make.__name__: (make, text)
    for make, text in (
        (
            managed_bags,
            "ManagedCollisionEmbeddingBagCollection, which maps raw ids to rows by what",
        ),
        (
            managed_sequences,
            "ManagedCollisionEmbeddingCollection, which maps raw ids to rows by what",
        ),
        (
            pruned_bags,
            "ITEPEmbeddingBagCollection, which prunes rows by what each rank has seen; use",
        ),
        (
            mapped_by_hand,
            "ManagedCollisionCollection, which maps raw ids to rows by what each rank",
        ),
        (
            one_map_far_away,
            "MCHManagedCollisionModule, which maps raw ids to rows by what each rank",
        ),
        (pruned_by_hand, "GenericITEPModule, which prunes rows by what each rank has seen; use"),
        (
            processed_bags,
            "FeatureProcessedEmbeddingBagCollection, which trains feature processors, whose",
        ),
        (
            fused_bags,
            "FusedEmbeddingBagCollection, which updates its tables by an optimizer of its own",
        ),
        *(
            (make, "has one collection under two names, 'ebc' and 'again', of which")
            for make in (two_names, two_names_behind_maps, two_names_behind_positions)
        ),
        (tied_tables, "'sparse.a.embedding_bags.t0.weight' and 'sparse.b.embedding_bags.t0_b.weig"),
        (tied_to_a_dense_layer, "'sparse.ebc.embedding_bags.t0.weight' and 'sparse.scores.weight'"),
        (
            tied_sequences,
            "are tied, which sharding undoes; use one table with the features of both",
        ),
    )
}
CASES |= {case: (partial(carrying, change), text) for case, (change, text) in CARRIED.items()}
ONLY_OF_A_WHOLE_MODEL = ("tied_tables", "tied_to_a_dense_layer", "fused_bags", "one_map_far_away")
"""A sharder sees a collection and where it is set; these show in the model only."""


class Holder(nn.Module):
    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse
        self.dense = nn.Linear(4, 1)


def sharders(*, more: bool = False) -> list[Any]:
    """Return sharders for plain collections and, if ``more``, ones behind maps or positions."""
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
    bags = tdsp.EmbeddingBagCollectionSharder2D(fused_params)
    behind = [
        tdsp.ManagedCollisionEmbeddingBagCollectionSharder2D(bags),
        tdsp.FeatureProcessedEmbeddingBagCollectionSharder2D(bags),
    ]
    return [bags, tdsp.EmbeddingCollectionSharder2D(fused_params), *(behind if more else ())]


def plan_of(model: nn.Module, known: list[Any]) -> tdsp.Plan2D:
    """Make a plan by TorchRec's planner, which doesn't check models."""
    topology = Topology(world_size=TWO.group_size, compute_device="cpu")
    stock = EmbeddingShardingPlanner(topology).plan(model, known)
    return tdsp.Plan2D.from_stock(stock, TWO)


def refusals(rank: int, world_size: int, case: str) -> list[str]:
    make, _ = CASES[case]
    planned = BagModel(BAGS) if case in ("fused_bags", *CARRIED) else make()
    is_behind = case.startswith("two_names_")
    known = sharders(more=is_behind)
    planner = tdsp.Planner2D(Topology(world_size=world_size, compute_device="cpu"), mesh=TWO)
    if is_behind:
        # TorchRec can't plan such a map for two ranks, and a plan for one name is the same.
        del cast(Any, planned)["again"]
        plan = cast(tdsp.Plan2D, planner.collective_plan(Holder(planned), known))
    else:
        plan = plan_of(Holder(planned), known)
    ways: list[Callable[[], Any]] = [
        lambda: tdsp.ModelParallel2D(Holder(make()), plan=plan, sharders=known),
        lambda: tdsp.ModelParallel2D(Holder(make()), sharders=known),
        lambda: planner.collective_plan(Holder(make()), known),
        lambda: DistributedModelParallel(Holder(make()), plan=plan, sharders=known),
    ]
    if case in ONLY_OF_A_WHOLE_MODEL:
        del ways[-1]
    if case == "fused_bags":
        # No planner plans them, so no plan names them.
        ways[0] = lambda: tdsp.ModelParallel2D(
            Holder(make()),
            plan=tdsp.Plan2D({}, mesh=TWO, sync=tdsp.GradientSync()),
            sharders=known,
        )
    return [error_of(way) for way in ways]


@pytest.mark.parametrize("case", CASES)
def test_models_that_would_be_sharded_in_part(ranks4: RankPool, case: str) -> None:
    _, text = CASES[case]
    for answers in ranks4.run(refusals, case, timeout_s=60):
        for message in answers:
            assert message.startswith("UnsupportedError: "), answers
            assert text in message, answers


LEFT_WHOLE = {
    "mapped_by_hand": "maps",
    "one_map_far_away": "user.map",
    "pruned_by_hand": "itep",
    "pruned_bags": "",
    "processed_bags": "",
}
"""The module in each case that may be left whole."""


def left_whole(rank: int, world_size: int, case: str) -> list[str]:
    """Return the planned paths, the left-out module's type, and errors: other ranks and plans."""
    make, _ = CASES[case]

    def model(*, is_left: bool = True) -> nn.Module:
        # Its tables have other names.
        whole = Holder(nn.ModuleDict({"beside": SequenceModel(renamed()), "case": make()}))
        if is_left:
            tdsp.leave_whole(cast(Any, whole.sparse)["case"].get_submodule(LEFT_WHOLE[case]))
        return whole

    topology = Topology(world_size=world_size, compute_device="cpu")
    plan = tdsp.Planner2D(topology, mesh=TWO).collective_plan(model(), sharders())
    parallel = tdsp.ModelParallel2D(model(), plan=plan, sharders=sharders())
    path = f"sparse.case.{LEFT_WHOLE[case]}".rstrip(".")
    inside = tdsp.Plan2D.from_stock(
        EmbeddingShardingPlanner(Topology(TWO.group_size, "cpu")).plan(model(), sharders()), TWO
    )
    return [
        ",".join(name for name, _ in plan.modules()),
        type(cast(Any, parallel).module.get_submodule(path)).__name__,
        error_of(
            lambda: tdsp.ModelParallel2D(model(is_left=rank != 1), plan=plan, sharders=sharders())
        ),
        error_of(lambda: tdsp.ModelParallel2D(model(), plan=inside, sharders=sharders())),
    ]


def renamed() -> ModelSpec:
    tables = [replace(table, name=f"s_{table.name}") for table in SEQUENCES.tables]
    return replace(SEQUENCES, tables=tuple(tables))


@pytest.mark.dealt
@pytest.mark.parametrize("case", LEFT_WHOLE)
def test_what_learns_from_ids_may_be_left_whole(ranks4: RankPool, case: str) -> None:
    is_collection = not LEFT_WHOLE[case]
    make, _ = CASES[case]
    whole = make().get_submodule(LEFT_WHOLE[case])
    for paths, kind, of_one_rank, of_inside in ranks4.run(left_whole, case, timeout_s=60):
        assert ("sparse.case" in paths) != is_collection
        assert "sparse.beside.ec" in paths
        assert kind == type(whole).__name__
        # Processed bags that no plan names are left whole in any case.
        may_differ = case == "processed_bags"
        assert may_differ or "or leave it whole on each rank by leave_whole(m" in of_one_rank
        assert ("given to leave_whole()" in of_inside) == is_collection


@pytest.mark.parametrize("make", [fused_bags, two_names, lambda: nn.Linear(4, 1)])
def test_nothing_else_may_be_left_whole(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"leave_whole\(\) got a \w+, which isn't refused for"):
        tdsp.leave_whole(make())


def test_what_is_inside_stays_refused() -> None:
    pruned: Any = pruned_bags()
    tdsp.leave_whole(pruned)
    inside = next(child for child in pruned.children() if isinstance(child, EmbeddingBagCollection))
    with pytest.raises(UnsupportedError, match=r"shards 'ebc', given to leave_whole\(\)"):
        check_model(nn.ModuleDict({"pruned": pruned, "ebc": inside}), ["ebc"])
    pruned.fused = fused_bags()
    with pytest.raises(UnsupportedError, match="an optimizer of its own"):
        check_model(pruned)

"""Models, arguments and batches that all ranks must reject with the same error.

Where TorchRec silently trains something else, the package trains correctly or raises an error. Each
entry in `REFUSALS` adds one such problem to a valid case.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from tests.fuzz.case import Case, ModuleCase
from tests.fuzz.id_maps import id_map
from tests.support.managed_collisions import behind_maps

BUILD_ERRORS = ("ConfigError", "PlanError", "UnsupportedError")


def _unchanged(model: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Something that must be refused."""

    applies: Callable[[Case], bool]
    """Tell whether a case can have it."""
    change: Callable[[Any], None] = _unchanged
    """Change the model in place; its first module is ``m0``."""
    path: str = "m0"
    """Where the plan finds the first module afterwards."""
    fused_params: tuple[tuple[str, Any], ...] = ()
    """More parameters for the sharders."""
    errors: tuple[str, ...] = BUILD_ERRORS


def _is_bags(case: Case) -> bool:
    return case.modules[0].kind == "bags"


def _is_plain(case: Case) -> bool:
    return case.loop == "plain" and case.dense.kind == "ddp" and not case.events


def _has_replicas(case: Case) -> bool:
    """Tell whether row gradients of every rank reach a replica peer in the step they come from."""
    tables = case.modules[0].tables
    is_exact = case.sync.kind == "gradient" and case.sync.delay == 0 and case.groups > 1
    are_replicated = all(
        not (table.once or table.frozen) and table.sharding != "data_parallel" for table in tables
    )
    return is_exact and are_replicated and not case.has_bad_ids


def _manage_collisions(model: Any) -> None:
    model.m0 = behind_maps(model.m0, partial(id_map, ModuleCase(evicts="distance")))


class _OfAUser(PositionWeightedModule):
    """A processor that a user derives, which may do anything."""


def _process_features(model: Any) -> None:
    configs = model.m0.embedding_bag_configs()
    module = EmbeddingBagCollection(configs, is_weighted=True, device=torch.device("meta"))
    processors: Any = {name: _OfAUser(9) for config in configs for name in config.feature_names}
    model.m0 = FeatureProcessedEmbeddingBagCollection(module, processors)


def _fuse(model: Any) -> None:
    configs = model.m0.embedding_bag_configs()
    model.m0 = FusedEmbeddingBagCollection(
        configs, torch.optim.SGD, {"lr": 0.1}, device=torch.device("meta")
    )


def _name_twice(model: Any) -> None:
    model.second = model.m0


def _tie(model: Any) -> None:
    first, second = list(_tables_of(model.m0).values())[:2]
    second.weight = first.weight


def _tables_of(module: Any) -> Any:
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        module = module._embedding_bag_collection
    return module.embeddings if isinstance(module, EmbeddingCollection) else module.embedding_bags


def _has_equal_tables(case: Case) -> bool:
    first, *others = case.modules[0].tables
    return bool(others) and all(
        (first.rows, first.dim, first.dtype) == (t.rows, t.dim, t.dtype) for t in others[:1]
    )


REFUSALS: dict[str, Refusal] = {
    "managed_collisions": Refusal(
        applies=lambda case: case.modules[0].kind in ("bags", "sequences"),
        change=_manage_collisions,
        path="m0._embedding_module",
    ),
    "feature_processors": Refusal(applies=_is_bags, change=_process_features),
    # Stock TorchRec misses the sharder of a planned module by itself, in its own words.
    "fused_module": Refusal(
        applies=lambda case: _is_bags(case) and case.wrapper == "2d", change=_fuse
    ),
    "two_names": Refusal(applies=lambda case: True, change=_name_twice),
    "tied_tables": Refusal(applies=_has_equal_tables, change=_tie),
    "momentum": Refusal(
        # Tables that aren't trained have no optimizer.
        applies=lambda case: (
            case.optimizer == "sgd" and not all(table.frozen for table in case.tables.values())
        ),
        fused_params=(("momentum", 0.9),),
    ),
    "no_weights": Refusal(
        applies=lambda case: (
            _is_plain(case) and case.modules[0].kind == "weighted" and not case.joined
        ),
        errors=("InputError",),
    ),
    "nan": Refusal(
        applies=lambda case: _is_plain(case) and _has_replicas(case), errors=("SyncError",)
    ),
}
"""By name. With ``"nan"``, the last rank's last loss isn't a number."""

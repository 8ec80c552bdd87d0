"""Checks that the sharders can take over a model's embedding collections completely.

The sharders replace collections and leave the rest of a model on every rank. That goes wrong where
TorchRec wraps a collection in a module that learns something about ids, where a table is tied or
frozen, and where one collection has two names.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from torchrec_2dsp.errors import UnsupportedError

COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)
"""The modules that the sharders replace."""

_FUSED = (FusedEmbeddingBagCollection, FusedEmbeddingCollection)
_PROCESSED = FeatureProcessedEmbeddingBagCollection
_REASONS: dict[type[nn.Module], str] = dict.fromkeys(
    _FUSED,
    "updates its tables by an optimizer of its own; use EmbeddingBagCollection or "
    "EmbeddingCollection, and give the optimizer to the sharder",
)
_REASONS |= dict.fromkeys(
    (ITEPEmbeddingBagCollection, ITEPEmbeddingCollection),
    "prunes rows by what each rank has seen; use its collection alone",
)
_REASONS[BaseManagedCollisionEmbeddingCollection] = (
    "maps raw ids to rows by what each rank has seen; map ids to rows before the model, by hashing "
    "or a vocabulary, and use its collection alone"
)
_REASONS[_PROCESSED] = (
    "trains weights of ids, whose gradients are lost where ids travel; freeze its feature "
    "processors with requires_grad_(False), or use its collection alone and give it weights with "
    "each batch"
)


def check_model(model: nn.Module, paths: Iterable[str] | None = None) -> None:
    """Raise `UnsupportedError` for the first module that can't be sharded as a whole.

    Args:
        model: an unsharded model.
        paths: the collections that are sharded, all of them by default.

    Example:
        >>> from torch import nn
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> from torchrec_2dsp.plan.checks.models import check_model
        >>> table = EmbeddingBagConfig(
        ...     name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"]
        ... )
        >>> model = nn.ModuleDict({"a": EmbeddingBagCollection(tables=[table])})
        >>> check_model(model)
        >>> model["b"] = model["a"]
        >>> check_model(model)
        Traceback (most recent call last):
            ...
        torchrec_2dsp.errors.UnsupportedError: module '' has one collection under two names, ...
    """
    chosen = None if paths is None else set(paths)
    sharded: dict[nn.Module, str] = {
        module: path
        for path, module in model.named_modules()
        if isinstance(module, COLLECTIONS) and (chosen is None or path in chosen)
    }
    for path, module in model.named_modules():
        if isinstance(module, _FUSED) or any(child in sharded for child in module.children()):
            check_holder(module, path)
    for module, path in sharded.items():
        check_trained(module, path)
    _check_tied(model, sharded)


def check_holder(holder: nn.Module, path: str | None = None) -> None:
    """Raise `UnsupportedError` unless sharded collections can replace those in a module.

    Args:
        holder: a module of which some children are collections.
        path: its path in the model, if known.
    """
    kind_name = type(holder).__name__
    for kind, reason in _REASONS.items():
        if isinstance(holder, kind) and (kind is not _PROCESSED or _trains_processors(holder)):
            subject = "the model has" if path is None else f"module {path!r} is"
            raise UnsupportedError(f"{subject} a {kind_name}, which {reason}")
    first_names: dict[nn.Module, str] = {}
    for name, child in holder.named_modules(remove_duplicate=False):
        if "." in name or child is holder or not isinstance(child, COLLECTIONS):
            continue
        if child in first_names:
            raise UnsupportedError(
                f"{kind_name if path is None else f'module {path!r}'} has one collection under two "
                f"names, {first_names[child]!r} and {name!r}, of which TorchRec shards the first "
                "only; keep one of the names"
            )
        first_names[child] = name


def check_trained(collection: nn.Module, path: str) -> None:
    """Raise `UnsupportedError` if a table of a collection is frozen, which the kernels ignore."""
    for name, table in _tables_of(collection):
        if not table.weight.requires_grad:
            raise UnsupportedError(
                f"table {name!r} of module {path!r} has requires_grad=False, but the fused kernels "
                "would train it; give it a learning rate of 0, or leave its module out of the plan"
            )


def _trains_processors(holder: nn.Module) -> bool:
    others = (child for child in holder.children() if not isinstance(child, COLLECTIONS))
    return any(param.requires_grad for child in others for param in child.parameters())


def _check_tied(model: nn.Module, sharded: dict[nn.Module, str]) -> None:
    owners: dict[int, str] = {}
    sharded_tables = {
        id(table.weight): name for module in sharded for name, table in _tables_of(module)
    }
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in sharded_tables:
                continue
            owner = f"{path}.{name}"
            if id(param) in owners:
                raise UnsupportedError(
                    f"the parameters {owners[id(param)]!r} and {owner!r} are tied, which sharding "
                    "undoes; use one table with the features of both, or untie them"
                )
            owners[id(param)] = owner


def _tables_of(collection: Any) -> Iterator[tuple[str, Any]]:
    is_bags = isinstance(collection, EmbeddingBagCollection)
    yield from (collection.embedding_bags if is_bags else collection.embeddings).items()

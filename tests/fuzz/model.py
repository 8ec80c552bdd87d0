"""A case's model: its embedding modules and dense part, in a form that pipelines can trace."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import torchrec_2dsp as tdsp
from tests.fuzz.batches import LocalBatch
from tests.fuzz.case import Case, ModuleCase, feature_name, table_name
from tests.fuzz.id_maps import id_map
from tests.fuzz.oracle import POSITION_WEIGHT, losses_of, output_names
from tests.fuzz.state import (
    initial_layers,
    initial_positions,
    initial_tables,
    position_name,
)
from tests.support.managed_collisions import behind_maps

_TYPES = {
    "fp32": DataType.FP32,
    "fp16": DataType.FP16,
    "bf16": DataType.BF16,
    "int8": DataType.FP32,
}


@dataclass
class Batch(Pipelineable):
    """A loader's batch: jagged tensors per module or shared by modules, and targets."""

    targets: torch.Tensor
    m0: KeyedJaggedTensor | None = None
    m1: KeyedJaggedTensor | None = None
    m2: KeyedJaggedTensor | None = None
    ids: KeyedJaggedTensor | None = None
    weighted_ids: KeyedJaggedTensor | None = None
    uses_shortcut: bool = True
    left_out: int = 0

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return a copy of the batch on another device."""
        inputs = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor | KeyedJaggedTensor)
        }
        return replace(self, **inputs)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep GPU tensors alive until ``stream`` is done with them."""
        for value in vars(self).values():
            if isinstance(value, KeyedJaggedTensor) or (
                isinstance(value, torch.Tensor) and value.is_cuda
            ):
                value.record_stream(cast(Any, stream))

    def pin_memory(self) -> "Batch":
        return self


class BatchBuiltAnew(Batch):
    """A batch that rebuilds its features at each access."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return deepcopy(value) if isinstance(value, KeyedJaggedTensor) else value


def input_of(case: Case, module: int) -> str:
    """Return the name of the `Batch` field that a module looks up."""
    if not case.joined:
        return f"m{module}"
    return "weighted_ids" if case.modules[module].kind == "weighted" else "ids"


FORMS = ("plain", "column", "cut", "offsets", "expanded", "int32", "rotated")
"""The forms of a batch's tensors in memory: whole, a matrix column, a part of a longer tensor, with
offsets in place of lengths, with weights expanded from one number, with int32 lengths, or with the
last feature first."""


def formed(values: torch.Tensor, form: str) -> torch.Tensor:
    """Return equal values in the memory layout that a form names."""
    if form == "column":
        return torch.stack([values, values.flip(0)], dim=1)[:, 0]
    if form == "cut":
        return torch.cat([values[:1], values, values[:1]])[len(values[:1]) :][: len(values)]
    return values


def to_batch(case: Case, local: LocalBatch, *, is_reversed: bool = False) -> Batch:
    """Return a rank's batch in TorchRec's form, optionally with its features reversed."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for module, feature in local.features:
        parts.setdefault(input_of(case, module), []).append((module, feature))
    inputs = {}
    for name, in_order in parts.items():
        features = in_order[-1:] + in_order[:-1] if case.form == "rotated" else in_order
        features = features[::-1] if is_reversed else features
        lookups = [local.sent[key] for key in features]
        names, sizes = [feature_name(*key) for key in features], dict[str, Any]()
        if local.shared:
            # They name features in their own order.
            bags = [local.shared[key].of_samples for key in features[::-1]]
            sizes["inverse_indices"] = (names[::-1], torch.stack(bags))
            by_feature = [part.lengths.numel() for part in lookups]
            kinds = {case.modules[module].kind for module, _ in features}
            # In a batch with one size only bags are shared.
            if len(set(by_feature)) > 1 or not kinds <= {"bags", "weighted"}:
                sizes["stride_per_key_per_rank"] = [[size] for size in by_feature]
        is_weighted = case.stray_weights or any(
            case.modules[module].kind == "weighted" for module, _ in features
        )
        weights = torch.cat([part.weights for part in lookups]) if is_weighted else None
        if weights is not None:
            # A copy of one number, with none of our numbers behind it in memory.
            is_expanded = case.form == "expanded" and len(weights)
            weights = weights[:1].clone().expand(len(weights)) if is_expanded else weights
            weights = formed(weights, case.form)
        lengths = torch.cat([part.lengths for part in lookups])
        if case.form == "offsets":
            sizes["offsets"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        else:
            is_short = case.form == "int32"
            sizes["lengths"] = formed(lengths.int() if is_short else lengths, case.form)
        inputs[name] = KeyedJaggedTensor(
            keys=names,
            values=formed(torch.cat([part.ids for part in lookups]), case.form),
            weights=weights,
            **sizes,
        )
    kind = BatchBuiltAnew if case.built_anew else Batch
    return kind(local.targets, uses_shortcut=local.uses_shortcut, left_out=local.left_out, **inputs)


torch.fx.wrap("losses_of")


@torch.fx.wrap
def sums_of_sequences(sequences: JaggedTensor) -> torch.Tensor:
    """Return each sample's weighted sum; later rows weigh more."""
    lengths = sequences.lengths().long()
    samples = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    shares = 1 + POSITION_WEIGHT * (torch.arange(samples.numel(), device=starts.device) - starts)
    values = sequences.values().float() * shares[:, None]
    return values.new_zeros(lengths.numel(), values.shape[1]).index_add(0, samples, values)


@torch.fx.wrap
def unless_left_out(
    vectors: torch.Tensor, place: int, num_outputs: int, left_out: int
) -> torch.Tensor:
    """Return a module's output, or zeros if the batch's loss leaves it out."""
    return torch.zeros_like(vectors) if place == left_out % num_outputs else vectors


@torch.fx.wrap
def plus_shortcut(
    scores: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, uses_shortcut: bool
) -> torch.Tensor:
    """Return the scores, plus the shortcut layer's output if it is used."""
    return scores + inputs @ weight.T if uses_shortcut else scores


class DenseLayers(nn.Module):
    """The dense part: layers with an activation between any two, and an optional shortcut."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        params = initial_layers(case)
        weights = [param for name, param in params.items() if name.startswith("layers")][::2]
        layers: list[nn.Module] = []
        for weight in weights:
            layers += [nn.Linear(weight.shape[1], weight.shape[0]), nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Linear | None = None
        if case.dense.has_shortcut:
            self.shortcut = nn.Linear(weights[0].shape[1], 1, bias=False)

    def forward(self, inputs: torch.Tensor, uses_shortcut: bool) -> torch.Tensor:
        scores = self.layers(inputs)
        if self.shortcut is not None:
            scores = plus_shortcut(scores, inputs, self.shortcut.weight, uses_shortcut)
        return scores.squeeze(1)


class SampleLosses(nn.Module):
    """Computes losses from the last layer's outputs in a pipeline."""

    def forward(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return losses_of(scores.squeeze(1), targets)


class FuzzModel(nn.Module):
    """Returns the loss and the scores; in training, pipelined layers give losses instead."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._inputs = [input_of(case, number) for number in range(len(case.modules))]
        self._outputs = [output_names(*numbered) for numbered in enumerate(case.modules)]
        self._have_maps = [bool(module.evicts) for module in case.modules]
        self._look_up_again = [module.again for module in case.modules]
        self._change_in_place = [module.in_place for module in case.modules]
        self._leave_out = [module.leaves_out * module.num_outputs for module in case.modules]
        self._are_sequences = [module.kind == "sequences" for module in case.modules]
        for number, module in enumerate(case.modules):
            embeddings = embedding_module(number, module)
            if module.kind == "positions":
                embeddings = _weighted_by_positions(case, number, embeddings)
            self.add_module(f"m{number}", embeddings)
        self._is_pipelined = case.dense.kind == "pipelined"
        self.over: Any = DenseLayers(case)
        if self._is_pipelined:
            self.over = tdsp.LayerStack(self.over.layers, SampleLosses())

    def _looked_up(self, number: int, features: Any, left_out: int) -> Iterator[torch.Tensor]:
        """Yield a module's outputs, a vector for each sample."""
        outputs = getattr(self, f"m{number}")(features)
        outputs = outputs[0] if self._have_maps[number] else outputs
        if self._change_in_place[number]:
            outputs.values().mul_(2)
        share = 0.5 if self._change_in_place[number] else 1
        for place, name in enumerate(self._outputs[number]):
            is_sequence = self._are_sequences[number]
            rows = sums_of_sequences(outputs[name]) if is_sequence else outputs[name].float()
            if num_outputs := self._leave_out[number]:
                rows = unless_left_out(rows, place, num_outputs, left_out)
            yield rows * share

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        columns: list[torch.Tensor] = []
        for number, field in enumerate(self._inputs):
            features = getattr(batch, field)
            rows = list(self._looked_up(number, features, batch.left_out))
            if self._look_up_again[number]:
                again = self._looked_up(number, features, batch.left_out)
                rows = [(first + other) / 2 for first, other in zip(rows, again, strict=True)]
            columns += rows
        inputs = torch.cat(columns, dim=1).tanh()
        if self._is_pipelined and self.training:
            losses = self.over(inputs, batch.targets)
            return losses.sum(), losses.detach()
        if self._is_pipelined:
            # Without samples on any rank, layers don't know how many numbers they give for each.
            scores = self.over(inputs.detach()).flatten()
        else:
            scores = self.over(inputs, batch.uses_shortcut)
        return losses_of(scores, batch.targets).sum(), scores.detach()


def embedding_module(number: int, module: ModuleCase) -> nn.Module:
    """Return a module without weights, which `load_state_dict` fills in."""
    configs = list(_configs(number, module))
    tables: dict[str, Any] = {"device": torch.device("meta"), "tables": configs}
    collection: Any = (
        EmbeddingCollection(**tables)
        if module.kind == "sequences"
        else EmbeddingBagCollection(**tables, is_weighted=module.kind in ("weighted", "positions"))
    )
    by_name = collection.embeddings if module.kind == "sequences" else collection.embedding_bags
    for index, table in enumerate(module.tables):
        by_name[table_name(number, index)].requires_grad_(not table.frozen)
    return behind_maps(collection, partial(id_map, module)) if module.evicts else collection


def _weighted_by_positions(case: Case, number: int, collection: Any) -> nn.Module:
    """Wrap a collection in position weights, which `load_state_dict` fills in, too."""
    lengths = {
        feature_name(*key): weights.numel()
        for key, weights in initial_positions(case).items()
        if key[0] == number
    }
    processors: Any = PositionWeightedModuleCollection(lengths)
    if case.modules[number].by_feature:
        processors = {name: PositionWeightedModule(length) for name, length in lengths.items()}
    weighted = FeatureProcessedEmbeddingBagCollection(collection, processors)
    weighted._feature_processors.requires_grad_(case.modules[number].trains_positions)
    return weighted


def tables_path(case: Case, number: int) -> str:
    """Return the path to the collection in a module."""
    module = case.modules[number]
    inside = "._embedding_module" if module.evicts else ""
    return f"m{number}" + ("._embedding_bag_collection" if module.kind == "positions" else inside)


def initial_state(case: Case) -> dict[str, torch.Tensor]:
    """Return tables and position weights in the state dict that all ranks load."""
    positions = initial_positions(case).items()
    state = {position_name(case, *key): weights for key, weights in positions}
    for name, table in initial_tables(case).items():
        module = case.module_of(name)
        kind = "embeddings" if case.modules[module].kind == "sequences" else "embedding_bags"
        state[f"{tables_path(case, module)}.{kind}.{name}.weight"] = table
    return state


def _configs(number: int, module: ModuleCase) -> Iterator[Any]:
    for index, table in enumerate(module.tables):
        known: dict[str, Any] = {
            "name": table_name(number, index),
            "num_embeddings": table.rows,
            "embedding_dim": table.dim,
            "feature_names": [feature_name(number, feature) for feature in table.features],
            "data_type": _TYPES[table.dtype],
        }
        if module.kind == "sequences":
            yield EmbeddingConfig(**known)
        else:
            yield EmbeddingBagConfig(**known, pooling=PoolingType(table.pooling.upper()))

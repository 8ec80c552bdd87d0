"""`serving_script`: an inference model with int8 tables, as TorchScript over plain tensors.

TorchScript, although torch calls it deprecated, because it takes TorchRec's quantised modules whole
and its files load with nothing but torch and FBGEMM's operators, from Python and from C++. What
`torch.export` makes of the same models is bound to batches of several samples.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.fx import Tracer
from torchrec.inference.modules import quantize_embeddings
from torchrec.models.dlrm import DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.programs.models.two_tower import TwoTowerModel

Scores = dict[str, torch.Tensor]
"""What a served model gives: tensors with a row for each sample, by name."""

_NO_NEWS = (
    (DeprecationWarning, r"`torch\.jit\.\w+` is deprecated"),
    # TorchRec's `quantize_embeddings` is built on it.
    (DeprecationWarning, "torch.ao.quantization is deprecated"),
    # TorchRec's jagged tensors are annotated as no script takes them literally.
    (UserWarning, "The TorchScript type system doesn't support instance-level annotations"),
    (UserWarning, "TorchScript will treat type annotations of Tensor dtype-specific subtypes"),
)
"""What torch says of every script of TorchRec's quantised modules."""


@contextmanager
def _without_news() -> Iterator[None]:
    with warnings.catch_warnings():
        for category, text in _NO_NEWS:
            warnings.filterwarnings("ignore", text, category)
        yield


def served_tables(model: nn.Module) -> list[EmbeddingBagConfig]:
    """The tables of a trained model, in the order in which a request gives their ids.

    Raises:
        UnsupportedError: it isn't known how models of this kind are served.
    """
    if not isinstance(model, DLRMTrain | TwoTowerModel):
        raise UnsupportedError(
            f"a {type(model).__name__} can't be exported, because only kind='dlrm', 'dcn' and "
            "'two_tower' are known by their inputs and outputs; quantise yours with "
            "torchrec.inference.modules.quantize_embeddings"
        )
    collection = next(
        module for module in model.modules() if isinstance(module, EmbeddingBagCollection)
    )
    return collection.embedding_bag_configs()


def scores_module(model: nn.Module, features: list[str]) -> nn.Module:
    """A module that scores requests by a trained model, whatever its tables look like.

    Args:
        model: a DLRM, a DCN or two towers.
        features: the names of the features, in the order of `served_tables`.
    """
    if isinstance(model, TwoTowerModel):
        return _TwoTowerScores(model, features)
    return _ClickScores(model, features)


def quantize_(model: nn.Module) -> nn.Module:
    """Replace the tables of a model by TorchRec's with one byte for each number, in place.

    Each row has a scale and an offset of its own, in half precision, so that a number is about half
    of a 255th of its row's range away from what it was, at most.
    """
    with _without_news():
        return quantize_embeddings(model, dtype=torch.qint8, inplace=True)


def serving_script(model: nn.Module, tables: list[EmbeddingBagConfig]) -> torch.jit.ScriptModule:
    """The file's content: a script that checks requests and scores them.

    It has a copy of none of the weights: they are those of ``model``.

    Args:
        model: with quantised tables.
        tables: what `served_tables` said before they were quantised.
    """
    features = [name for table in tables for name in table.feature_names]
    scores = scores_module(model, features).eval()
    # TorchRec's tracer knows which of its functions TorchScript has to see whole.
    traced = torch.fx.GraphModule(scores, Tracer(leaf_modules=[]).trace(scores))
    with _without_news():
        checked = _CheckedRequests(torch.jit.script(traced), tables, _num_dense(model))
        return torch.jit.script(checked.eval())


def load_script(path: Path) -> torch.jit.ScriptModule:
    """A script as it was saved; a process that serves calls `torch.jit.load` itself."""
    with _without_news():
        return torch.jit.load(path)


def _num_dense(model: Any) -> int:
    """How many dense features a model takes."""
    if isinstance(model, TwoTowerModel):
        return model.num_dense
    return next(
        module.in_features
        for module in model.model.dense_arch.modules()
        if isinstance(module, nn.Linear)
    )


class _ClickScores(nn.Module):
    """Scores of a DLRM or a DCN."""

    def __init__(self, model: Any, features: list[str]) -> None:
        super().__init__()
        self.model: nn.Module = model.model
        self._features = features

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        ids = KeyedJaggedTensor(keys=self._features, values=values, lengths=lengths)
        scores = self.model(dense, ids).squeeze(1)
        return {"scores": scores, "probabilities": torch.sigmoid(scores)}


class _TwoTowerScores(nn.Module):
    """Scores of two towers, and the vectors that they are products of."""

    def __init__(self, model: TwoTowerModel, features: list[str]) -> None:
        super().__init__()
        self.model = model
        self._features = features

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        ids = KeyedJaggedTensor(keys=self._features, values=values, lengths=lengths)
        users, items = self.model.vectors(ids, dense)
        return {
            "scores": (users * items).sum(dim=1),
            "user_vectors": users,
            "item_vectors": items,
        }


class _CheckedRequests(nn.Module):
    """Refuses requests that FBGEMM would answer with other rows than those that are meant."""

    def __init__(self, scores: nn.Module, tables: list[EmbeddingBagConfig], num_dense: int) -> None:
        super().__init__()
        self.scores = scores
        num_rows = [table.num_embeddings for table in tables for _ in table.feature_names]
        self.num_features, self.num_dense = len(num_rows), num_dense
        self.register_buffer("num_rows", torch.tensor(num_rows))
        self.num_rows: torch.Tensor

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        num_samples = dense.size(0)
        if num_samples == 0 or dense.dim() != 2 or dense.size(1) != self.num_dense:
            raise ValueError(
                f"dense has the shape {dense.size()}; give a row for each sample, one at least, "
                f"and {self.num_dense} numbers in each row"
            )
        if lengths.dim() != 1 or lengths.numel() != self.num_features * num_samples:
            raise ValueError(
                f"lengths has the shape {lengths.size()}; give {self.num_features * num_samples} "
                f"numbers: one for each of {num_samples} samples, feature by feature"
            )
        if int(lengths.sum()) != values.numel() or bool((lengths < 0).any()):
            raise ValueError(
                f"lengths add up to {int(lengths.sum())}, and there are {values.numel()} values; "
                "give the values of all samples, feature by feature, and no negative length"
            )
        counts = lengths.view(self.num_features, num_samples).sum(dim=1)
        bounds = torch.repeat_interleave(self.num_rows, counts.long())
        if bool(((values < 0) | (values >= bounds)).any()):
            raise ValueError("an id is negative, or its feature has fewer rows; see features.json")
        return self.scores(dense, values, lengths)

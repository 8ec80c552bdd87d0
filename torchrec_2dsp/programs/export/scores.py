"""`ServedScores`: models that give each sample of a request one score."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRMTrain
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.programs.export.checked import CheckedRequests, RequestCheck
from torchrec_2dsp.programs.export.served import (
    Answer,
    Request,
    ServedFeature,
    request_of,
    tables_of,
)
from torchrec_2dsp.programs.export.serving import script_of, traced_script
from torchrec_2dsp.programs.models.two_tower import TwoTowerModel


class ServedScores:
    """A `ServedModel` whose answers have a tensor ``scores``."""

    functions: tuple[str, ...] = ()
    """There are none beside the call."""

    def __init__(
        self, answers: nn.Module, features: Sequence[ServedFeature], num_dense: int
    ) -> None:
        """
        Args:
            answers: gives ``scores`` for dense features, values and lengths.
            features: those of a request, in its order.
            num_dense: how many dense features a sample has.
        """
        self._answers = answers.eval()
        self.features, self.num_dense = tuple(features), num_dense

    def module(self) -> nn.Module:
        """A module that answers requests, by the tables as they are now."""
        return self._answers

    def script(self) -> torch.jit.ScriptModule:
        """The module as a script, which also checks requests."""
        check = RequestCheck(self.features, self.num_dense)
        return script_of(CheckedRequests(check, traced_script(self._answers)))

    def request(self, batch: Batch) -> Request:
        """The request for a batch of held-out samples."""
        names = [feature.name for feature in self.features]
        return request_of(batch.dense_features, batch.sparse_features, names)

    def scores(self, answers: Callable[..., Answer], batch: Batch) -> torch.Tensor:
        """The scores of a batch's samples.

        Raises:
            UnsupportedError: the model gives another number of scores than there are samples.
        """
        scores, num_samples = answers(*self.request(batch))["scores"], len(batch.labels)
        if scores.numel() != num_samples:
            raise UnsupportedError(
                f"the model gives {scores.numel()} scores for {num_samples} samples; return one "
                "for each sample"
            )
        return scores


def served_clicks(model: DLRMTrain) -> ServedScores:
    """A DLRM or a DCN, which gives logits and probabilities of clicks."""
    dlrm: Any = model.model
    num_dense = next(
        module.in_features for module in dlrm.dense_arch.modules() if isinstance(module, nn.Linear)
    )
    features = _features_of_tables(model)
    return ServedScores(_ClickScores(dlrm, _names(features)), features, num_dense)


def served_towers(model: TwoTowerModel) -> ServedScores:
    """Two towers, which give dot products and the vectors that are multiplied."""
    features = _features_of_tables(model)
    return ServedScores(_TwoTowerScores(model, _names(features)), features, model.num_dense)


def _features_of_tables(model: nn.Module) -> list[ServedFeature]:
    """The features of a model's tables, table by table."""
    return [
        ServedFeature(
            name=name, table=table.name, num_rows=table.num_embeddings, dim=table.embedding_dim
        )
        for table in tables_of(model)
        for name in table.feature_names
    ]


def _names(features: Sequence[ServedFeature]) -> list[str]:
    return [feature.name for feature in features]


class _ClickScores(nn.Module):
    """Scores of a DLRM or a DCN."""

    def __init__(self, model: nn.Module, features: list[str]) -> None:
        super().__init__()
        self.model = model
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

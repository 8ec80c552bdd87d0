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
)
from torchrec_2dsp.programs.export.serving import script_of, traced_script
from torchrec_2dsp.programs.models.model import tables_of
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
            answers: gives ``scores`` for dense features and a `KeyedJaggedTensor`.
            features: those of a request, in its order.
            num_dense: how many dense features a sample has.
        """
        self.features, self.num_dense = tuple(features), num_dense
        self._names = [feature.name for feature in features]
        self._answers = _Answers(answers, self._names).eval()

    def module(self) -> nn.Module:
        """A module that answers requests, by the tables as they are now."""
        return self._answers

    def script(self) -> torch.jit.ScriptModule:
        """The module as a script, which also checks requests."""
        check = RequestCheck(self.features, self.num_dense)
        return script_of(CheckedRequests(check, traced_script(self._answers)))

    def request(self, batch: Batch) -> Request:
        """The request for a batch of held-out samples."""
        return request_of(batch.dense_features, batch.sparse_features, self._names)

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
    return ServedScores(_ClickScores(dlrm), _features_of_tables(model), num_dense)


def served_towers(model: TwoTowerModel) -> ServedScores:
    """Two towers, which give dot products and the vectors that are multiplied."""
    return ServedScores(_TwoTowerScores(model), _features_of_tables(model), model.num_dense)


def _features_of_tables(model: nn.Module) -> list[ServedFeature]:
    """The features of a model's tables, table by table."""
    return [
        ServedFeature(
            name=name, table=table.name, num_rows=table.num_embeddings, dim=table.embedding_dim
        )
        for table in tables_of(model)
        for name in table.feature_names
    ]


class _Answers(nn.Module):
    """Answers requests by a module that takes their ids together."""

    def __init__(self, answers: nn.Module, features: list[str]) -> None:
        super().__init__()
        self.answers = answers
        self._features = features

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        ids = KeyedJaggedTensor(keys=self._features, values=values, lengths=lengths)
        return self.answers(dense, ids)


class _ClickScores(nn.Module):
    """Scores of a DLRM or a DCN."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        scores = self.model(dense, ids).squeeze(1)
        return {"scores": scores, "probabilities": torch.sigmoid(scores)}


class _TwoTowerScores(nn.Module):
    """Scores of two towers, and the vectors that they are products of."""

    def __init__(self, model: TwoTowerModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        users, items = self.model.vectors(ids, dense)
        return {
            "scores": (users * items).sum(dim=1),
            "user_vectors": users,
            "item_vectors": items,
        }

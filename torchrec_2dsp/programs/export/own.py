"""`served_own_model`: a user's own model, whose scores are those that its forward returns."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import TwoDError, UnsupportedError
from torchrec_2dsp.programs.data.dataset import BatchShape
from torchrec_2dsp.programs.export.scores import ServedScores
from torchrec_2dsp.programs.export.served import ServedFeature
from torchrec_2dsp.programs.models.model import tables_of

_COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)


def served_own_model(model: nn.Module, data: BatchShape, factory: str) -> ServedScores:
    """The model that a factory made, which gives logits and probabilities of clicks.

    A request has all features of the data, as a batch has, since the model may use any of them.

    Args:
        model: called with a batch, it gives what the training program asks of models.
        data: the features of a batch.
        factory: the factory's name, for errors.

    Raises:
        UnsupportedError: tables aren't in the collections that TorchRec quantises.
    """
    _check_collections(model, factory)
    tables = {name: table for table in tables_of(model) for name in table.feature_names}
    features = [
        ServedFeature(
            name=feature.name,
            table=tables[feature.name].name if feature.name in tables else "",
            # A model may change ids before it looks them up, so its tables may have other rows.
            num_rows=feature.num_rows,
            dim=tables[feature.name].embedding_dim if feature.name in tables else 0,
        )
        for feature in data.features
    ]
    return ServedScores(_BatchScores(model), features, data.num_dense)


@contextmanager
def saying_what_stops(factory: str) -> Iterator[None]:
    """Raise an error that names the factory, where its model can't be quantised or scripted.

    Args:
        factory: the factory's name; empty for the models of this package, whose errors stay.

    Raises:
        UnsupportedError: something else than this package failed inside.
    """
    try:
        yield
    except TwoDError:
        raise
    # What a model of a user does while it is recorded, and what TorchScript says, may be anything.
    except Exception as error:
        if not factory:
            raise
        raise UnsupportedError(
            f"the model of factory={factory!r} can't be exported: {type(error).__name__}: "
            f"{str(error).strip()}\nThe forward is recorded without a batch, and has to be the "
            "same for all of them: let it call torch's functions and modules, and let no number "
            "of a batch decide what it does"
        ) from error


def _check_collections(model: nn.Module, factory: str) -> None:
    collections = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _COLLECTIONS)
    ]
    if not collections:
        raise UnsupportedError(
            f"the model of factory={factory!r} can't be exported: it has no "
            "EmbeddingBagCollection and no EmbeddingCollection to quantise"
        )
    for name, module in collections:
        if type(module) not in _COLLECTIONS or not name:
            raise UnsupportedError(
                f"the model of factory={factory!r} can't be exported: {name or 'it'} is a "
                f"{type(module).__name__}, which TorchRec doesn't quantise; use an "
                "EmbeddingBagCollection or an EmbeddingCollection"
            )


class _BatchScores(nn.Module):
    """Scores of a model that takes batches and returns the logits beside its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        # Nobody knows the labels of a request, and the loss isn't asked for.
        batch = Batch(dense, ids, dense.new_zeros(dense.size(0)))
        _, (_, logits, _) = self.model(batch)
        scores = logits.reshape(-1)
        return {"scores": scores, "probabilities": torch.sigmoid(scores)}

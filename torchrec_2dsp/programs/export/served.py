"""`ServedModel`: what the export of a model needs to know of it, whatever kind it is of."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.programs.config.section import Section

Request = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What a served model is given: dense features, values and lengths."""

Answer = dict[str, torch.Tensor]
"""What a served model gives: tensors with a row for each sample, by name."""


class ServedFeature(Section):
    """A sparse feature of a request."""

    name: str
    """The feature's name in the data."""

    table: str
    """The table that its ids are rows of; empty for a feature that no table has."""

    num_rows: int
    """How many rows the table has: ids are 0 to ``num_rows - 1``."""

    dim: int
    """The embedding dimension; 0 without a table."""


class ServedModel(Protocol):
    """A trained model, and how it answers requests.

    It holds on to the model, whose tables may be quantised in place at any time.
    """

    features: tuple[ServedFeature, ...]
    """The sparse features, in the order in which a request gives their ids."""

    num_dense: int
    """How many dense features a sample of a request has."""

    functions: tuple[str, ...]
    """The functions that the file has beside the call that answers a request."""

    def module(self) -> nn.Module:
        """A module that answers requests, by the tables as they are now."""
        ...

    def script(self) -> torch.jit.ScriptModule:
        """The file's content: `module` as a script, which also checks requests.

        It has no copies of the weights: they are those of the model.
        """
        ...

    def request(self, batch: Batch) -> Request | None:
        """The request for a batch of held-out samples; none if no sample is one."""
        ...

    def scores(self, answers: Callable[..., Answer], batch: Batch) -> torch.Tensor:
        """The scores of a batch's samples, by which two models are compared.

        Args:
            answers: a module or a script of this model.
            batch: of held-out samples.
        """
        ...


def request_of(dense: torch.Tensor, features: KeyedJaggedTensor, names: Sequence[str]) -> Request:
    """The request for some samples.

    Args:
        dense: the dense features that a request has.
        features: the ids of the samples.
        names: the features that a request has, in its order.
    """
    bags = [features[name] for name in names]
    values = torch.cat([bag.values() for bag in bags])
    return dense, values, torch.cat([bag.lengths() for bag in bags])


def first_sample(request: Request, num_features: int) -> Request:
    """The request for the first sample of a request alone.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.programs.export.served import first_sample
        >>> ids, lengths = torch.tensor([1, 2, 3, 7, 8]), torch.tensor([2, 1, 0, 2])
        >>> first_sample((torch.ones(2, 1), ids, lengths), num_features=2)
        (tensor([[1.]]), tensor([1, 2]), tensor([2, 0]))
    """
    dense, values, lengths = request
    by_feature = lengths.view(num_features, -1)
    bags = values.split(by_feature.sum(dim=1).tolist())
    counts = by_feature[:, 0].tolist()
    first_ids = [bag[:count] for bag, count in zip(bags, counts, strict=True)]
    return dense[:1], torch.cat(first_ids), by_feature[:, 0]

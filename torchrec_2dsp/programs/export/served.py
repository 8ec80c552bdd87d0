"""Serve models: requests, their check, int8 tables, and TorchScript.

TorchScript, although torch calls it deprecated, because it takes TorchRec's quantised modules whole
and its files load with nothing but torch and FBGEMM's operators, from Python and from C++. Models
that `torch.export` writes are bound to batches of several samples.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import nn
from torchrec.fx import Tracer
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantizedBags,
    EmbeddingCollection as QuantizedRows,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.programs.config.section import JsonFile, Section

Request = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A served model's input: dense features, values and lengths."""

Answer = dict[str, torch.Tensor]
"""A served model's output: tensors with a row for each sample, by name."""


class ServedFeature(Section):
    """A sparse feature of a request."""

    name: str
    """The feature's name in the data."""

    table: str
    """The table with its ids' rows; empty for a feature without one."""

    num_rows: int
    """The table's rows: ids are 0 to ``num_rows - 1``."""

    dim: int
    """The embedding dimension; 0 without a table."""


def request_of(dense: torch.Tensor, features: KeyedJaggedTensor, names: Sequence[str]) -> Request:
    """Return the request for some samples, with these features in this order."""
    bags = [features[name] for name in names]
    values = torch.cat([bag.values() for bag in bags])
    return dense, values, torch.cat([bag.lengths() for bag in bags])


def first_sample(request: Request, num_features: int) -> Request:
    """Return the request for the first sample alone.

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


def is_integer(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may hold ids or lengths."""
    return tensor.dtype == torch.int64 or tensor.dtype == torch.int32


class RequestCheck(nn.Module):
    """Refuses requests that FBGEMM would answer with the wrong rows.

    It is written for TorchScript, so errors are `ValueError`s, which a script can raise.
    """

    def __init__(self, features: Sequence[ServedFeature], num_dense: int) -> None:
        super().__init__()
        self.num_features, self.num_dense = len(features), num_dense
        self.register_buffer("num_rows", torch.tensor([feature.num_rows for feature in features]))
        self.num_rows: torch.Tensor

    def forward(self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Raise unless the three tensors are a request."""
        if dense.dtype != torch.float32:
            raise ValueError("dense isn't float32; convert it with dense.float()")
        if not is_integer(values):
            raise ValueError("values isn't int64 or int32; give ids, which are whole numbers")
        if not is_integer(lengths):
            raise ValueError("lengths isn't int64 or int32; give numbers of ids")
        if dense.dim() != 2 or dense.size(0) == 0 or dense.size(1) != self.num_dense:
            raise ValueError(
                f"dense has the shape {dense.size()}; give a row for each sample, one at least, "
                f"and {self.num_dense} numbers in each row"
            )
        if values.dim() != 1:
            raise ValueError(f"values has the shape {values.size()}; give all ids in one row")
        num_samples = dense.size(0)
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


class CheckedRequests(nn.Module):
    """Answers requests that pass a check."""

    def __init__(self, check: RequestCheck, answers: nn.Module) -> None:
        super().__init__()
        self.check, self.answers = check, answers

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Answer a request."""
        self.check(dense, values, lengths)
        return self.answers(dense, values, lengths)


_NO_NEWS = (
    (DeprecationWarning, r"`torch\.jit\.\w+` is deprecated"),
    # TorchRec's `quantize_embeddings` is built on it.
    (DeprecationWarning, "torch.ao.quantization is deprecated"),
    # TorchRec annotates jagged tensors in a way that no script takes literally.
    (UserWarning, "The TorchScript type system doesn't support instance-level annotations"),
    (UserWarning, "TorchScript will treat type annotations of Tensor dtype-specific subtypes"),
)
"""Warnings that torch emits for every script of TorchRec's quantised modules."""


@contextmanager
def _without_news() -> Iterator[None]:
    with warnings.catch_warnings():
        for category, text in _NO_NEWS:
            warnings.filterwarnings("ignore", text, category)
        yield


def quantize_(model: nn.Module) -> None:
    """Replace a model's tables with TorchRec's int8 ones, in place.

    Each row has a scale and an offset in half precision, so a number moves by about half of a 255th
    of its row's range, at most.
    """
    with _without_news():
        quantize_embeddings(
            model,
            dtype=torch.qint8,
            inplace=True,
            # TorchRec's list has only bags.
            additional_qconfig_spec_keys=[EmbeddingCollection],
            additional_mapping={EmbeddingCollection: QuantizedRows},
        )


def quantized_bytes(model: nn.Module) -> int:
    """Count the bytes in a model's quantised tables, with each row's scale and offset."""
    return sum(
        buffer.nbytes
        for module in model.modules()
        if isinstance(module, QuantizedBags | QuantizedRows)
        for buffer in module.buffers()
    )


def traced_script(module: nn.Module) -> torch.jit.ScriptModule:
    """Script a module with quantised tables, recorded without a batch, so for any batch size."""
    # TorchRec's tracer knows which of its functions TorchScript has to see whole.
    return script_of(torch.fx.GraphModule(module, Tracer(leaf_modules=[]).trace(module)))


def script_of(module: nn.Module) -> torch.jit.ScriptModule:
    """Script a module's source."""
    with _without_news():
        return torch.jit.script(module.eval())


def load_script(path: Path) -> torch.jit.ScriptModule:
    """Load a script; a process that serves calls `torch.jit.load` itself."""
    with _without_news():
        return torch.jit.load(path)


MODEL_FILE, FEATURES_FILE, EXPORT_FILE = "model.pt", "features.json", "export.json"
"""The files with the model, its inputs, and its comparison with the trained model."""


class ServingInputs(JsonFile):
    """An exported model's inputs and outputs."""

    what_it_is: ClassVar[str] = "the features.json of an exported model"
    format: Literal[1] = 1
    kind: str
    num_dense: int
    """Dense features per sample."""

    dense: tuple[str, ...]
    """Their columns in a log, in order; empty for data without columns."""

    features: tuple[ServedFeature, ...]
    """The sparse features, in the order of their ids in a request."""

    outputs: tuple[str, ...]
    """The output tensors' names."""

    functions: tuple[str, ...] = ()
    """The names of functions besides the call."""

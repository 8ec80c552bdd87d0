"""`quantize_` and `scripted`: int8 tables, and modules over them as TorchScript.

TorchScript, although torch calls it deprecated, because it takes TorchRec's quantised modules whole
and its files load with nothing but torch and FBGEMM's operators, from Python and from C++. What
`torch.export` makes of the same models is bound to batches of several samples.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torchrec.fx import Tracer
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantizedBags,
    EmbeddingCollection as QuantizedRows,
)

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


def quantize_(model: nn.Module) -> None:
    """Replace the tables of a model by TorchRec's with one byte for each number, in place.

    Each row has a scale and an offset of its own, in half precision, so that a number is about half
    of a 255th of its row's range away from what it was, at most.
    """
    with _without_news():
        quantize_embeddings(
            model,
            dtype=torch.qint8,
            inplace=True,
            # Its own list has bags alone.
            additional_qconfig_spec_keys=[EmbeddingCollection],
            additional_mapping={EmbeddingCollection: QuantizedRows},
        )


def quantized_bytes(model: nn.Module) -> int:
    """The bytes of the quantised tables of a model, with the scale and the offset of each row."""
    return sum(
        buffer.nbytes
        for module in model.modules()
        if isinstance(module, QuantizedBags | QuantizedRows)
        for buffer in module.buffers()
    )


def traced_script(module: nn.Module) -> torch.jit.ScriptModule:
    """A module as a script of what it does, recorded without a batch, so for batches of any size.

    Args:
        module: with quantised tables, in evaluation mode.
    """
    # TorchRec's tracer knows which of its functions TorchScript has to see whole.
    return script_of(torch.fx.GraphModule(module, Tracer(leaf_modules=[]).trace(module)))


def script_of(module: nn.Module) -> torch.jit.ScriptModule:
    """A module as the script of its source."""
    with _without_news():
        return torch.jit.script(module.eval())


def load_script(path: Path) -> torch.jit.ScriptModule:
    """A script as it was saved; a process that serves calls `torch.jit.load` itself."""
    with _without_news():
        return torch.jit.load(path)

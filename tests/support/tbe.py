"""FBGEMM kernels (TBEs) without TorchRec around them, and batches for them."""

from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    PoolingMode,
    SparseType,
    Tbe,
    table_tensors,
)

SGD, ADAGRAD = EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD
ROW_WISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD
SUM, MEAN, SEQUENCE = PoolingMode.SUM, PoolingMode.MEAN, PoolingMode.NONE


@dataclass(frozen=True)
class Case:
    """A kernel and its batches' shape."""

    tables: tuple[tuple[int, int], ...] = ((11, 8), (7, 16))
    feature_tables: tuple[int, ...] = (0, 1)
    pooling: PoolingMode = SUM
    optimizer: EmbOptimType = ROW_WISE
    precision: SparseType = SparseType.FP32
    output: SparseType = SparseType.FP32
    weighted: bool = False
    max_gradient: float | None = None
    eps: float = 1e-8
    id_type: torch.dtype = torch.int64
    batch_size: int = 6
    max_length: int = 5

    @property
    def is_exact(self) -> bool:
        """True if both implementations add the same numbers in the same order."""
        one_feature_per_table = len(set(self.feature_tables)) == len(self.feature_tables)
        return self.pooling is SUM and not self.weighted and one_feature_per_table


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Ids, offsets and per-sample weights, as a kernel takes them."""


CPU = torch.device("cpu")


def make_tbe(case: Case, device: torch.device = CPU, **options: Any) -> Tbe:
    """Build the kernel, by default on the CPU, with the same weights in 0..1."""
    is_cpu = device.type == "cpu"
    location = EmbeddingLocation.HOST if is_cpu else EmbeddingLocation.DEVICE
    compute = ComputeDevice.CPU if is_cpu else ComputeDevice.CUDA
    settings: dict[str, Any] = {"stochastic_rounding": False, "device": device, **options}
    tbe = Tbe(
        [(rows, dim, location, compute) for rows, dim in case.tables],
        feature_table_map=list(case.feature_tables),
        pooling_mode=case.pooling,
        optimizer=case.optimizer,
        weights_precision=case.precision,
        output_dtype=case.output,
        learning_rate=0.1,
        eps=case.eps,
        bounds_check_mode=BoundsCheckMode.WARNING,
        gradient_clipping=case.max_gradient is not None,
        max_gradient=case.max_gradient or 1.0,
        **settings,
    )
    for index, weight in enumerate(tbe.split_embedding_weights()):
        values = torch.rand(weight.shape, generator=torch.Generator().manual_seed(index))
        weight.copy_(values)
    return tbe


def make_ids(case: Case, seed: int) -> Batch:
    """Draw few distinct ids, so there are many duplicates, in bags of 0 to ``max_length`` ids."""
    generator = torch.Generator().manual_seed(seed)
    num_bags = len(case.feature_tables) * case.batch_size
    lengths = torch.randint(0, case.max_length + 1, (num_bags,), generator=generator)
    rows = [case.tables[table][0] for table in case.feature_tables]
    highest = torch.tensor(rows).repeat_interleave(case.batch_size).repeat_interleave(lengths)
    ids = (torch.rand(highest.numel(), generator=generator).square() * highest).long()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    weights = torch.rand(ids.numel(), generator=generator) if case.weighted else None
    return ids.to(case.id_type), offsets.to(case.id_type), weights


def upstream_gradient(output: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw a gradient to start a backward with."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1000 + seed))


def tensors_of(tbe: Tbe) -> list[torch.Tensor]:
    """Copy all weights and optimizer state."""
    return [tensor.clone() for table in table_tensors(tbe) for tensor in table.values()]

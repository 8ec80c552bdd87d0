"""Rows that are captured and updated by the plugin itself, against the rule on dense tensors."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    WeightDecayMode,
)

from tests.support.tbe import Case, make_ids, make_tbe, tensors_of, upstream_gradient
from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    SparseType,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.replicas.gradient_sync import quickest_updater
from torchrec_2dsp.rows.direct_update import RULES, DirectUpdater
from torchrec_2dsp.rows.update import RowUpdater

ROUNDING = 1e-6
"""Row gradients are added in another order: a few float32 roundings of values near 1."""
HALF_ROUNDING = 1e-3
"""The same for fp16 tables: such a difference can tip a weight near 1 to its fp16 neighbour."""


def trained(case: Case, direct: bool) -> list[torch.Tensor]:
    """Weights and state after some steps, updated by the rule or by FBGEMM's kernel."""
    tbe = make_tbe(case)
    capture = RowCapture(tbe, [f"t{table}" for table in range(len(case.tables))])
    updater = DirectUpdater(tbe, RULES[case.optimizer]) if direct else RowUpdater(tbe)
    for seed in range(4):
        ids, offsets, _ = make_ids(case, seed)
        output = capture.lookup(lambda: tbe(ids, offsets), None)  # noqa: B023
        output.backward(upstream_gradient(output, seed))
        (backward,) = capture.take()
        updater.apply(backward.gradients())
    return tensors_of(tbe)


@pytest.mark.parametrize("optimizer", RULES, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("precision", [SparseType.FP32, SparseType.FP16])
@pytest.mark.parametrize("feature_tables", [(0, 1), (0, 0, 1)], ids=str)
def test_a_rule_does_what_the_kernel_does(
    optimizer: EmbOptimType, precision: SparseType, feature_tables: tuple[int, ...]
) -> None:
    case = Case(feature_tables=feature_tables, optimizer=optimizer, precision=precision, eps=0.01)
    rounding = ROUNDING if precision is SparseType.FP32 else HALF_ROUNDING
    for direct, fused in zip(trained(case, True), trained(case, False), strict=True):
        torch.testing.assert_close(direct, fused, rtol=rounding, atol=rounding)


ROW_WISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD
OTHERS: list[tuple[EmbOptimType, dict[str, Any]]] = [
    (EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD, {}),
    # Rows are bytes with a scale; the kernel counts how often each is seen.
    (ROW_WISE, {"weights_precision": SparseType.INT8}),
    (
        ROW_WISE,
        {
            "weight_decay_mode": WeightDecayMode.COUNTER,
            "counter_based_regularization": CounterBasedRegularizationDefinition(),
        },
    ),
]


def test_a_rule_is_used_where_there_is_one() -> None:
    assert isinstance(quickest_updater(make_tbe(Case())), DirectUpdater)
    for optimizer, options in OTHERS:
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(10, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=optimizer, **options
        )
        assert isinstance(quickest_updater(tbe), RowUpdater), (optimizer, options)

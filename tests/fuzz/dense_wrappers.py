"""How ranks train the dense part of a case: its wrapper, its optimizer, and its values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.optim import SemisyncOptimizer
from torchrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper

import torchrec_2dsp as tdsp
from tests.fuzz.case import Case, DenseCase
from tests.fuzz.weights import EPS, LR, OUTER_LR, OUTER_MOMENTUM, initial_dense
from tests.support.rank_device import copied

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LR),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=LR, eps=EPS),
    "adam": lambda params: torch.optim.Adam(params, lr=LR, eps=EPS),
}


class NotedLocalDense(tdsp.LocalDense):
    """Notes what ranks sent when they met."""

    met: torch.Tensor | None = None
    """The mean of all changes at the last meeting, flat; ``None`` when it was read."""

    def mean(self, changes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        means = super().mean(changes)
        self.met = torch.cat([mean.flatten() for mean in means])
        return means


def make_dense(dense: DenseCase) -> DataParallelWrapper | None:
    """The wrapper; `None` for the one that TorchRec takes by itself."""
    # DDP has to be told of parameters without a gradient.
    in_ddp: dict[str, Any] = (
        {"static_graph": False, "find_unused_parameters": True} if dense.has_shortcut else {}
    )
    makers: dict[str, Callable[[], DataParallelWrapper | None]] = {
        "ddp": lambda: DefaultDataParallelWrapper(**in_ddp) if in_ddp else None,
        "fp16": lambda: tdsp.HookedDataParallel("fp16", **in_ddp),
        "thresholded": lambda: tdsp.ThresholdedDataParallel(
            dense.density,
            warm_up=dense.warm_up,
            values=dense.values,
            dense_below=0,
            route=dense.route,
            **in_ddp,
        ),
        "fully_sharded": lambda: tdsp.FullyShardedDense(num_copies=dense.num_copies),
        "tensor_parallel": lambda: tdsp.TensorParallelDense(
            _splits(dense), tp=dense.tp, num_copies=dense.num_copies
        ),
        "pipelined": lambda: tdsp.PipelinedDense(
            2,
            num_micro_batches=dense.num_micro_batches,
            schedule=dense.schedule,
            reduction="sum",
            layout=tdsp.RankLayout(dense.layout),
            fully_shard=dense.fully_shard,
        ),
        "delayed": lambda: tdsp.DelayedDense(warm_up=dense.warm_up, **in_ddp),
        "local": lambda: NotedLocalDense(
            density=dense.density, values=dense.values, residual_decay=dense.residual_decay
        ),
    }
    return makers[dense.kind]()


def _splits(dense: DenseCase) -> dict[str, ParallelStyle]:
    """Layers split by outputs and by inputs in turns; a last one without a next is whole."""
    num_split = (len(dense.hidden) + 1) // 2 * 2
    return {
        f"over.layers.{2 * number}": RowwiseParallel() if number % 2 else ColwiseParallel()
        for number in range(num_split)
    }


def make_dense_optimizer(
    case: Case,
    params: dict[str, Any],
    wrapper: DataParallelWrapper | None,
    seen: Callable[[], None],
) -> KeyedOptimizer:
    """The optimizer of the dense part.

    Args:
        case: says which one.
        params: of the dense part.
        wrapper: that runs it.
        seen: is called in each step before gradients are clipped.
    """
    inner = _OPTIMIZERS[case.dense.optimizer](list(params.values()))

    def before_step(*_: Any) -> None:
        seen()
        if case.dense.max_norm and isinstance(wrapper, tdsp.PipelinedDense):
            wrapper.clip_grad_norm_(case.dense.max_norm)
        elif case.dense.max_norm:
            torch.nn.utils.clip_grad_norm_(params.values(), case.dense.max_norm)

    inner.register_step_pre_hook(before_step)
    keyed = KeyedOptimizerWrapper(params, lambda _: inner)
    if not isinstance(wrapper, tdsp.LocalDense):
        return keyed
    outer = KeyedOptimizerWrapper(
        params, lambda values: tdsp.DiLoCo(values, wrapper, OUTER_LR, momentum=OUTER_MOMENTUM)
    )
    return SemisyncOptimizer(
        list(params.values()), keyed, outer, num_local_steps=case.dense.local_steps
    )


def whole(value: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter, or of a gradient, flat.

    Collectives:
        An all-gather, if ranks hold shares.
    """
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return copied(full).flatten()


def gathered(case: Case, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All parameters of the dense part, flat, of which ranks have some each.

    Collectives:
        An all-gather of objects.
    """
    of_ranks: list[Mapping[str, torch.Tensor]] = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    parts = []
    for name in initial_dense(case):
        first, *others = [held[f"over.{name}"] for held in of_ranks if f"over.{name}" in held]
        assert all(torch.equal(first, other) for other in others), f"copies of {name} differ"
        parts.append(first)
    return torch.cat(parts)

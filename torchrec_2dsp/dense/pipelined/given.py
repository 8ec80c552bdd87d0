"""`Given`: what the ranks of a pipeline are given for a batch, as all of them know it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.dense.pipelined.links import TensorKind
from torchrec_2dsp.errors import InputError, UnsupportedError


@dataclass(frozen=True)
class Given:
    """What a `LayerStack` is called with on a rank."""

    num_samples: int
    """How many samples the rank's batch has."""

    kinds: tuple[TensorKind, ...]
    """What the inputs, then the targets look like."""

    need_gradients: tuple[bool, ...]
    """Which of these need a gradient."""

    trains: bool
    """Whether gradients are enabled."""

    problem: str = ""
    """Why the call can't be run, if it can't."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, trains: bool) -> "Given":
        """The description of inputs and targets.

        Args:
            tensors: the inputs, then the targets.
            trains: whether gradients are enabled.
        """
        num_samples = tensors[0].shape[0] if tensors[0].dim() else 0
        problem = ""
        for number, tensor in enumerate(tensors):
            name = f"target {number}" if number else "the input"
            if not tensor.dim() or tensor.shape[0] != num_samples:
                problem = (
                    f"{name} of a LayerStack has the shape {tuple(tensor.shape)}, for "
                    f"{num_samples} samples; give tensors whose first dimension is the batch"
                )
                break
        return cls(
            num_samples,
            tuple(TensorKind.of(tensor) for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            trains,
            problem,
        )

    @property
    def signature(self) -> tuple[object, ...]:
        """What has to be equal on all ranks of a pipeline."""
        return self.kinds, self.trains


@dataclass(frozen=True)
class GivenTogether:
    """What all ranks of a pipeline are given, in their order."""

    ranks: tuple[Given, ...]
    """What each rank is given."""

    @property
    def sizes(self) -> list[int]:
        """How many samples each rank has."""
        return [given.num_samples for given in self.ranks]

    @property
    def num_samples(self) -> int:
        """How many samples all ranks have together."""
        return sum(self.sizes)

    @property
    def need_gradients(self) -> list[bool]:
        """Whether a rank needs the gradient, for the inputs and each target."""
        return [
            any(needs)
            for needs in zip(*(given.need_gradients for given in self.ranks), strict=True)
        ]

    @property
    def first(self) -> Given:
        """What the first rank is given, which is like that of the others but for its size."""
        return self.ranks[0]

    def rows_of(self, rank: int) -> slice:
        """Where a rank's samples are among those of all."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


def exchange(own: Given, group: dist.ProcessGroup) -> GivenTogether:
    """Tell the ranks of a pipeline what this one is given, and learn what they are.

    Raises:
        InputError: on all ranks, if batches don't fit together, or a tensor isn't one of samples.
        UnsupportedError: on all ranks, if gradients of outputs would be needed.

    Collectives:
        An all-gather of objects.
    """
    gathered: list[Given] = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    together = GivenTogether(tuple(gathered))
    ranks = dist.get_process_group_ranks(group)
    for rank, given in zip(ranks, gathered, strict=True):
        if given.problem:
            raise InputError(f"{given.problem} (found on rank {rank})")
        if given.signature != together.first.signature:
            raise InputError(
                f"rank {rank} calls a LayerStack with {_text(given)}, but rank {ranks[0]} of its "
                f"pipeline with {_text(together.first)}; give all ranks of a pipeline tensors of "
                "one shape, but for the number of samples, and call it on all of them alike"
            )
    if own.trains and len(own.kinds) == 1 and together.need_gradients[0]:
        raise UnsupportedError(
            "a pipelined LayerStack gives losses gradients, but no outputs; call it with targets, "
            "or under torch.no_grad()"
        )
    return together


def _text(given: Given) -> str:
    tensors = [
        f"{str(kind.dtype).removeprefix('torch.')}[{', '.join(map(str, ('batch', *kind.shape)))}]"
        for kind in given.kinds
    ]
    return f"{' and '.join(tensors)} {'with' if given.trains else 'without'} gradients"

"""`GlooGroup`: gloo as a Python class, of which a subclass can replace operations."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.c10d import pass_on_to, tensors_in
from torchrec_2dsp.comms.counting import note


class GlooGroup(dist.ProcessGroup):
    """Passes every operation on to gloo.

    Every operation that torch calls on a Python class is passed on by Python. `ProcessGroup`'s own
    ones hold the interpreter's lock, and sometimes wait forever for a gloo thread that needs this
    lock to free a tensor.

    Args:
        gloo: the group that does the work. It must not be used otherwise.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        self._gloo: Any = gloo  # torch's stubs leave out its send and recv
        pass_on_to(self, gloo)

    def getBackendName(self) -> str:
        """The name in logs and profiles."""
        return "gloo"


def _input_bytes(self: GlooGroup, name: str, arguments: tuple[Any, ...]) -> int:
    """The size of this rank's input."""
    if name in ("barrier", "recv"):
        return 0
    if name == "broadcast" and arguments[1].rootRank != self.rank():
        return 0
    inputs = arguments[1] if name in ("allgather", "reduce_scatter") else arguments[0]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(inputs))


def _passed_on(name: str, op: str) -> Callable[..., dist.Work]:
    def operation(self: GlooGroup, *arguments: Any, **options: Any) -> dist.Work:
        note(op, self, _input_bytes(self, name, arguments))
        return getattr(self._gloo, name)(*arguments, **options)

    return operation


for _name, _op in {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "recv": "recv",
    "reduce_scatter": "reduce_scatter",
    "send": "send",
}.items():
    setattr(GlooGroup, _name, _passed_on(_name, _op))


def _all_to_all_single(
    self: GlooGroup,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any,
    input_split_sizes: Any,
    opts: Any = None,
) -> dist.Work:
    note("all_to_all_single", self, input.numel() * input.element_size())
    opts = dist.AllToAllOptions() if opts is None else opts
    return self._gloo.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)


# Callers that are written for torch before 2.13 use the second name.
for _name in ("all_to_all_single", "alltoall_base"):
    setattr(GlooGroup, _name, _all_to_all_single)

"""A pipeline's process groups, and everything that travels in them.

    rank 0: rows 0 to 5   --together-->  rank 0: rows 0 to 9  --stages-->  rank 1: rows 0 to 9
    rank 1: rows 6 to 9   ----------->
    rank 0: rows 0 to 5   <-------------own rows of the losses-----------  rank 1: rows 0 to 9
    rank 1: rows 6 to 9   <----------------------------------------------

Inputs go to all ranks of the first stage, targets to all ranks of the last one.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchrec_2dsp._compat.tensors import is_checkpointed
from torchrec_2dsp.comms.groups import own_mesh, own_subgroup
from torchrec_2dsp.dense.dense_parts import check_called_alike, draw_seed, in_words, state_in_words
from torchrec_2dsp.dense.pipelined.activations import TensorKind
from torchrec_2dsp.errors import InputError, UnsupportedError
from torchrec_2dsp.mesh import DenseMesh


class PipelineGroups:
    """The process groups of this rank's pipeline, and of the ranks that hold the same layers.

    Collectives:
        Building it creates process groups, so all ranks must do it, in the same order relative to
        other group creations.
    """

    def __init__(self, mesh: DenseMesh, everyone: dist.ProcessGroup, device: torch.device) -> None:
        self.mesh, self.everyone, self.device = mesh, everyone, device
        self._ranks = dist.get_process_group_ranks(everyone)
        _, self.rank = mesh.place_of(dist.get_rank(everyone))
        self.position, self.tp_rank = divmod(self.rank, mesh.tp)
        # Activations and gradients travel in separate groups, in which one rank's messages
        # for another have one order, and which can be broken without losing the third group.
        self.agreements = self._new("pipeline_agreements", mesh.pipelines())
        """For agreements on inputs and errors."""
        self.forward = self._new("pipeline_forward", mesh.pipelines())
        """For messages from the first stage towards the last."""
        self.backward = self._new("pipeline_backward", mesh.pipelines())
        """For messages back."""
        self.copies = self._new("pipeline_copies", mesh.copies())
        """The ranks that hold the same part of the same layers."""

    @property
    def size(self) -> int:
        """The number of ranks in the pipeline."""
        return self.mesh.pipeline_size

    def rank_at(self, position: int) -> int:
        """Return the pipeline rank at a position, with this rank's tensor-parallel rank."""
        return position * self.mesh.tp + self.tp_rank

    def ranks_at(self, position: int) -> range:
        """Return all pipeline ranks at a position."""
        return range(position * self.mesh.tp, (position + 1) * self.mesh.tp)

    def layers_mesh(self) -> DeviceMesh:
        """Build a mesh of all ranks by pipeline, position and tensor-parallel rank.

        The axis "copy" has the ranks that hold the same part of the same layers; the axis "tp"
        has those that compute this rank's layers together.

        Collectives:
            Creates process groups.
        """
        mesh = self.mesh
        ranks = [[self._ranks[rank] for rank in pipeline] for pipeline in mesh.pipelines()]
        by_place = torch.tensor(ranks).view(mesh.dp, mesh.pp, mesh.tp)
        return own_mesh(by_place, self.device.type, ("copy", "stage", "tp"))

    def _new(self, name: str, sets: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        global_sets = [[self._ranks[rank] for rank in ranks] for ranks in sets]
        return own_subgroup(global_sets, self.device.type, name)


_SHORTEST = timedelta(milliseconds=1)
_UNUSED_TAG = 1
"""Messages have torch's default tag, 0."""


class Links:
    """Sends and receives in one direction, between a pipeline's ranks.

    A rank's messages to another arrive in sending order, so the receiver must ask for them in that
    order. Nothing waits for a send before `finish`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor, unless it is empty; it must not change before `finish`.

        Collectives:
            A send, not waited for.
        """
        if tensor.numel():
            tensor = tensor.detach().contiguous()
            work = dist.isend(tensor, group=self._group, group_dst=rank)
            assert work is not None
            self._sent.append((work, tensor))

    def receive(self, tensor: torch.Tensor, rank: int) -> dist.Work | None:
        """Receive into a contiguous tensor; return the work, or `None` for an empty tensor.

        Collectives:
            A receive, not waited for.
        """
        if not tensor.numel():
            return None
        work = dist.irecv(tensor, group=self._group, group_src=rank)
        assert work is not None
        return work

    def send_kind(self, kind: TensorKind, rank: int) -> None:
        """Send a kind to a rank that waits for it."""
        self.send(kind.header(self._device), rank)

    def receive_kind(self, rank: int) -> TensorKind:
        """Wait for a kind."""
        header = TensorKind.empty_header(self._device)
        work = self.receive(header, rank)
        assert work is not None
        work.wait()
        return TensorKind.from_header(header)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def close(self) -> None:
        """Break all connections, so that ranks waiting for this one fail immediately.

        A gloo receive that times out does this. Tensors in flight are kept alive.
        """
        rank = dist.get_rank(self._group)
        nothing = torch.zeros(1, device=self._device)
        # One timeout breaks all connections, but an already broken one fails without it.
        for peer in range(dist.get_world_size(self._group)):
            if peer != rank:
                # With a tag that nobody sends: a message in flight must not end the wait.
                with suppress(RuntimeError):
                    work = dist.irecv(nothing, group=self._group, group_src=peer, tag=_UNUSED_TAG)
                    if work is not None:
                        work.wait(_SHORTEST)


class Inbox:
    """One rank's messages to this one during a schedule, in the sender's order."""

    def __init__(
        self,
        links: Links,
        rank: int,
        expected: Iterable[tuple[Any, int]],
        kinds: dict[Any, TensorKind],
        wire: torch.dtype | None,
        device: torch.device,
        *,
        is_gradient: bool,
    ) -> None:
        self._links, self._rank, self._kinds = links, rank, kinds
        self._wire, self._device, self._is_gradient = wire, device, is_gradient
        self._expected = deque(expected)
        self._arriving: dict[Any, tuple[dist.Work | None, torch.Tensor]] = {}

    def take(self, key: Any) -> torch.Tensor:
        """Wait for a message; the next one may arrive meanwhile."""
        while key not in self._arriving:
            self._ask_for_next()
        if self._expected and self._expected[0][0][0] in self._kinds:
            self._ask_for_next()
        work, tensor = self._arriving.pop(key)
        if work is not None:
            work.wait()
        return tensor

    def _ask_for_next(self) -> None:
        key, num_samples = self._expected.popleft()
        name = key[0]
        if name not in self._kinds:
            self._kinds[name] = self._links.receive_kind(self._rank)
        on_wire = self._kinds[name].on_wire(self._wire, is_gradient=self._is_gradient)
        tensor = on_wire.empty(num_samples, self._device)
        self._arriving[key] = self._links.receive(tensor, self._rank), tensor


@dataclass(frozen=True)
class Given:
    """A description of a `LayerStack` call's inputs and targets on one rank."""

    num_samples: int
    kinds: tuple[TensorKind, ...]
    """The input's kind, then the targets'."""

    need_gradients: tuple[bool, ...]
    trains: bool
    """True if gradients are enabled."""

    call: str | InputError
    """A text of everything that must be equal on all ranks of a pipeline, or why it can't run."""

    trains_layers: bool = False
    """True if this rank has layers in training mode with trained parameters."""

    seed: int = 0
    """In training, the seed of the layers' random numbers; the first rank's counts."""

    is_checkpointed: bool = False
    """True if a checkpoint around the call would rerun it in the backward."""

    densities: tuple[float, ...] = ()
    """The densities of this rank's layers, which may change between calls."""

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        *,
        trains: bool,
        trains_layers: bool = False,
        densities: Sequence[float] = (),
    ) -> "Given":
        """Describe inputs and targets, and the state in which they are given."""
        num_samples = tensors[0].shape[0] if tensors[0].dim() else 0
        state = state_in_words(tensors[0].device.type)
        call: str | InputError = f"{' and '.join(map(in_words, tensors))} {state}"
        for number, tensor in enumerate(tensors):
            name = f"target {number}" if number else "the input"
            if not tensor.dim() or tensor.shape[0] != num_samples:
                call = InputError(
                    f"{name} of a LayerStack has the shape {tuple(tensor.shape)}, for "
                    f"{num_samples} samples; give tensors whose first dimension is the batch"
                )
                break
        return cls(
            num_samples,
            tuple(TensorKind.of(tensor) for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            trains,
            call,
            trains_layers,
            draw_seed() if trains else 0,
            trains and is_checkpointed(),
            tuple(densities),
        )


@dataclass(frozen=True)
class GivenTogether:
    """The calls on all ranks of a pipeline, by rank."""

    ranks: tuple[Given, ...]

    @property
    def sizes(self) -> list[int]:
        """Each rank's number of samples."""
        return [given.num_samples for given in self.ranks]

    @property
    def num_samples(self) -> int:
        """All ranks' number of samples."""
        return sum(self.sizes)

    @property
    def need_gradients(self) -> list[bool]:
        """True where any rank needs the gradient, for the input and each target."""
        return [
            any(needs)
            for needs in zip(*(given.need_gradients for given in self.ranks), strict=True)
        ]

    @property
    def first(self) -> Given:
        """The first rank's call, which equals the others' except for its size."""
        return self.ranks[0]

    def rows_of(self, rank: int) -> slice:
        """Return a rank's rows among all ranks' rows."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


def exchange(own: Given, group: dist.ProcessGroup) -> GivenTogether:
    """Exchange descriptions with the pipeline's other ranks.

    Raises:
        InputError: on all ranks, if batches don't fit together, or a tensor has no batch dim.
        UnsupportedError: on all ranks, if outputs' gradients would be needed, or a checkpoint is
            around the call.

    Collectives:
        An object all-gather.
    """
    gathered: list[Given] = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    together = GivenTogether(tuple(gathered))
    check_called_alike("a LayerStack", [given.call for given in gathered], group, "pipeline")
    is_trained = together.need_gradients[0] or any(given.trains_layers for given in gathered)
    if own.trains and len(own.kinds) == 1 and is_trained:
        raise UnsupportedError(
            "a pipelined LayerStack gives losses gradients, but no outputs; call it with targets, "
            "or under torch.no_grad()"
        )
    if any(given.is_checkpointed for given in gathered):
        raise UnsupportedError(
            "a pipelined LayerStack is called inside torch.utils.checkpoint, which would run the "
            "pipeline again in the backward; checkpoint layers inside the stack, and leave out "
            "what is around it"
        )
    return together


def send_together(
    own: Sequence[torch.Tensor],
    kinds: Sequence[TensorKind],
    given: GivenTogether,
    position: int,
    groups: PipelineGroups,
    links: Links,
) -> list[torch.Tensor] | None:
    """Send this rank's samples to the ranks at a position; return all samples there, else `None`.

    Collectives:
        Each tensor's send to each rank at the position, and its receive there.
    """
    for rank in groups.ranks_at(position):
        if rank != groups.rank:
            for tensor in own:
                links.send(tensor, rank)
    if groups.position != position:
        return None
    together = [kind.empty(given.num_samples, groups.device) for kind in kinds]
    arriving = []
    for rank in range(groups.size):
        for joined, tensor in zip(together, own, strict=True):
            rows = joined[given.rows_of(rank)]
            if rank == groups.rank:
                rows.copy_(tensor.detach())
            else:
                arriving.append(links.receive(rows, rank))
    for work in arriving:
        if work is not None:
            work.wait()
    return together


def send_back(
    together: torch.Tensor | None,
    kind: TensorKind | None,
    given: GivenTogether,
    position: int,
    groups: PipelineGroups,
    links: Links,
) -> tuple[torch.Tensor, TensorKind]:
    """Give each rank its own rows of a result at a position; return them and the result's kind.

    Collectives:
        Each rank's rows sent to it, after their kind if it is still `None`.
    """
    source = groups.rank_at(position)
    if groups.rank != source:
        if kind is None:
            kind = links.receive_kind(source)
        rows = kind.empty(given.sizes[groups.rank], groups.device)
        work = links.receive(rows, source)
        if work is not None:
            work.wait()
        return rows, kind
    assert together is not None
    own_kind = TensorKind.of(together)
    own_kind.check_like(kind or own_kind, "the last stage")
    for other in range(groups.mesh.pp):
        rank = groups.rank_at(other)
        if rank != source:
            if kind is None:
                links.send_kind(own_kind, rank)
            links.send(together[given.rows_of(rank)], rank)
    return together[given.rows_of(source)].clone(), own_kind

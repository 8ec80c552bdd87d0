"""`PipelineGroups`: the process groups of the pipelines of a `DenseMesh`."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchrec_2dsp._compat.c10d import timeout_of
from torchrec_2dsp.comms.own_group import own_mesh, own_subgroup
from torchrec_2dsp.mesh.dense_mesh import DenseMesh


class PipelineGroups:
    """The process groups of this rank's pipeline, and of the ranks that hold the same layers.

    Collectives:
        Building it creates process groups, so all ranks must do it, in the same order relative to
        other group creations.
    """

    def __init__(self, mesh: DenseMesh, everyone: dist.ProcessGroup, device: torch.device) -> None:
        """
        Args:
            mesh: the arithmetic.
            everyone: all ranks.
            device: this rank's device.
        """
        self.mesh, self.everyone, self.device = mesh, everyone, device
        self._ranks = dist.get_process_group_ranks(everyone)
        number, self.rank = mesh.place_of(dist.get_rank(everyone))
        self.global_ranks = [self._ranks[rank] for rank in mesh.pipelines()[number]]
        """The ranks of the pipeline, in the world."""
        self.position, self.tp_rank = divmod(self.rank, mesh.tp)
        # Activations and gradients travel in groups of their own, in which messages of one rank
        # for another have one order, and which can be broken without losing the third group.
        self.agreements = self._new("pipeline_agreements", mesh.pipelines())
        """The ranks of the pipeline, to agree on what they are given and on errors."""
        self.forward = self._new("pipeline_forward", mesh.pipelines())
        """The ranks of the pipeline, for what goes from the first stage towards the last one."""
        self.backward = self._new("pipeline_backward", mesh.pipelines())
        """The ranks of the pipeline, for what goes back."""
        self.copies = self._new("pipeline_copies", mesh.copies())
        """The ranks that hold the same part of the same layers."""

    @property
    def size(self) -> int:
        """How many ranks the pipeline has."""
        return self.mesh.pipeline_size

    def rank_at(self, position: int) -> int:
        """The rank of the pipeline at a position, in this rank's tensor-parallel place."""
        return position * self.mesh.tp + self.tp_rank

    def ranks_at(self, position: int) -> range:
        """All ranks of the pipeline at a position."""
        return range(position * self.mesh.tp, (position + 1) * self.mesh.tp)

    def layers_mesh(self) -> DeviceMesh:
        """The ranks by pipeline, position and place in their tensor-parallel group.

        The axis "copy" has those that hold the same part of the same layers; the axis "tp" those
        that compute this rank's layers together.

        Collectives:
            Creates process groups.
        """
        mesh = self.mesh
        ranks = [[self._ranks[rank] for rank in pipeline] for pipeline in mesh.pipelines()]
        by_place = torch.tensor(ranks).view(mesh.dp, mesh.pp, mesh.tp)
        return own_mesh(by_place, self.device.type, ("copy", "stage", "tp"))

    def _new(self, name: str, sets: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        global_sets = [[self._ranks[rank] for rank in ranks] for ranks in sets]
        return own_subgroup(global_sets, timeout_of(self.everyone, self.device.type), name)

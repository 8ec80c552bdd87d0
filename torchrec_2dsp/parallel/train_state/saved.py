"""`Saved`: a stored train state, as one rank reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.train_state.members import read_member
from torchrec_2dsp.parallel.train_state.plain import from_plain

FORMAT = 1
MEMBER = "member."
"""The beginning of the names of members, which users give."""


@dataclass(frozen=True)
class Saved:
    """A train state as this rank reads it."""

    header: dict[str, Any]
    own: dict[str, Any] | None
    """What the rank with this number stored, if there was one."""
    ranks: dict[int, dict[str, Any]]
    """What was stored by each rank that this one takes over from."""
    members: dict[str, list[dict[str, Any]]]
    """The states of each member: a single one, or one for each rank in `ranks`."""
    is_same_world: bool
    """Whether the save had as many ranks as there are now."""

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> "Saved":
        """Decode what a rank needs; a `CheckpointError` for tensors of another format."""
        header = from_plain(tensors, "")
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise CheckpointError(
                f"the train state isn't of format {FORMAT}, which this release reads; load it with "
                "the release that saved it"
            )
        saved_ranks = range(rank, header["num_ranks"], num_ranks)
        ranks = {number: from_plain(tensors, f"rank{number}.") for number in saved_ranks}
        members = {}
        for name, is_whole in header["is_whole"].items():
            places = [MEMBER] if is_whole else [f"rank{number}.{MEMBER}" for number in saved_ranks]
            members[name] = [read_member(name, tensors, place) for place in places]
        return cls(header, ranks.get(rank), ranks, members, header["num_ranks"] == num_ranks)

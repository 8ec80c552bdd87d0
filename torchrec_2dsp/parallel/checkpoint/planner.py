"""DCP's planner of a save, which refuses pickled objects and can copy before training goes on."""

import io
import threading
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torchrec_2dsp.errors import CheckpointError


class PlainDataSavePlanner(DefaultSavePlanner):
    """Refuses to store what `load_checkpoint` wouldn't load: all but tensors and plain data."""

    def create_local_plan(self) -> SavePlan:
        """The plan of what this rank could write."""
        plan = super().create_local_plan()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                _check_plain(item.index.fqn, self.lookup_object(item.index))
        return plan


class StagingPlanner(PlainDataSavePlanner):
    """Copies all that this rank is to write, as soon as the ranks have shared out the work."""

    def __init__(self) -> None:
        super().__init__()
        self.is_staged = threading.Event()
        """Set when the state may change again."""
        self._copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Copy all that the plan names to this host's memory."""
        plan = super().finish_plan(new_plan)
        try:
            for item in plan.items:
                self._copies[item.index] = _copy(super().resolve_data(item))
            self.state_dict = {}
        finally:
            self.is_staged.set()
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The copy that is to be written, which is then forgotten here."""
        return self._copies.pop(write_item.index)


def _copy(data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    # Bytes are a fresh copy of an object, which nothing else refers to.
    return data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data


def _check_plain(name: str, value: Any) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except Exception as error:  # whatever unpickling can raise
        raise CheckpointError(
            f"{name!r} is a {type(value).__name__}, which can't be loaded without running code; "
            "an optimizer's state may hold tensors, numbers, texts, and lists and dicts of them"
        ) from error

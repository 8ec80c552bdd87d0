"""DCP's reader for a checkpoint whose metadata are known, which unpickles no objects."""

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from torchrec_2dsp._compat.dcp import set_element


class KnownMetadataReader(dcp.FileSystemReader):
    """Reads tensors from a folder; the metadata are given, because DCP would unpickle them."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that the reader was given."""
        return self._metadata


class PlainDataPlanner(DefaultLoadPlanner):
    """Loads tensors in place, and beside them only what `torch.load` takes for plain data."""

    def create_local_plan(self) -> LoadPlan:
        """The plan of what this rank reads, under current names only and not those of old torch."""
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a number, a text or the like into the state dict."""
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)

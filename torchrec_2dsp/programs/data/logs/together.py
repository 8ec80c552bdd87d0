"""`open_together`: a log that all ranks read, prepared by one of them."""

from typing import Protocol, TypeVar

import torch.distributed as dist

from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.programs.data.dataset import Dataset

Opened = TypeVar("Opened", bound=Dataset, covariant=True)


class DataSection(Protocol[Opened]):
    """A section ``[data]`` of a config."""

    def dataset(self) -> Opened:
        """The batches that the section describes."""
        ...


def open_together(section: DataSection[Opened], group: dist.ProcessGroup) -> Opened:
    """The batches that a section describes, on every rank.

    Rank 0 opens them first, so that a pass over the files is made once where the section keeps what
    the pass finds.

    Args:
        section: equal on all ranks.
        group: all ranks.

    Raises:
        TwoDError: a rank can't open the files, or they differ between ranks; all ranks raise it.

    Collectives:
        Two all-gathers of objects.
    """
    opened = None
    with agreeing(group):
        if dist.get_rank(group) == 0:
            opened = section.dataset()
    with agreeing(group) as facts:
        if opened is None:
            opened = section.dataset()
        features = [f"{feature.name}: {feature.num_rows} rows" for feature in opened.features]
        facts["the log"] = "\n".join(features)
    assert opened is not None
    return opened

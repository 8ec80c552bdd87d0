"""The newest checkpoint of a folder, from which a run resumes, and the removal of old ones."""

import re
import shutil
from os import PathLike
from pathlib import Path

import torch.distributed as dist

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.checkpoint.group import coordination_group

_FINISHED = ".metadata"
"""The file that a save writes last."""


def latest_checkpoint(folder: str | PathLike[str]) -> Path | None:
    """The newest finished checkpoint of a folder, `None` if there is none.

    Checkpoints are sub-folders whose names end in a number, such as ``1000`` or ``step_1000``; the
    largest number is the newest. Saves that didn't finish don't count.

    With a process group, call it on all ranks: all get what rank 0 sees.

    Args:
        folder: the folder of all checkpoints; it needn't exist yet.

    Collectives:
        A broadcast of the name, if there is a process group.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torchrec_2dsp as tdsp
        >>> folder = Path(tempfile.mkdtemp())
        >>> for step in (5, 10, 15):
        ...     (folder / str(step)).mkdir()
        >>> for step in (5, 10):
        ...     (folder / str(step) / ".metadata").touch()
        >>> tdsp.latest_checkpoint(folder).name
        '10'
    """
    names: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        finished = [path for path in _numbered(Path(folder)) if (path / _FINISHED).exists()]
        names = [finished[-1].name if finished else None]
    if dist.is_initialized():
        dist.broadcast_object_list(names, group_src=0, group=coordination_group())
    return None if names[0] is None else Path(folder) / names[0]


def drop_old_checkpoints(folder: str | PathLike[str], *, keep: int) -> None:
    """Delete all but the newest finished checkpoints of a folder.

    Call it after a save, on all ranks: rank 0 deletes. Unfinished saves that are older than the
    newest kept checkpoint go as well. Nothing else in the folder is touched.

    Args:
        folder: the folder of all checkpoints, which are named as `latest_checkpoint` says.
        keep: how many checkpoints stay.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torchrec_2dsp as tdsp
        >>> folder = Path(tempfile.mkdtemp())
        >>> for step in (5, 10, 15):
        ...     (folder / str(step)).mkdir()
        ...     (folder / str(step) / ".metadata").touch()
        >>> tdsp.drop_old_checkpoints(folder, keep=2)
        >>> sorted(path.name for path in folder.iterdir())
        ['10', '15']
    """
    if keep < 1:
        raise ConfigError(f"keep={keep} would leave no checkpoint to go on from; keep 1 or more")
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    numbered = _numbered(Path(folder))
    finished = [path for path in numbered if (path / _FINISHED).exists()]
    newest = finished[-keep:]
    for path in numbered[: numbered.index(newest[-1])] if newest else ():
        if path not in newest:
            # The file that makes it a checkpoint goes first, in case that deleting is cut short.
            (path / _FINISHED).unlink(missing_ok=True)
            shutil.rmtree(path)


def _numbered(folder: Path) -> list[Path]:
    """The sub-folders whose names end in a number, the smallest first."""
    if not folder.is_dir():
        return []
    numbers = {
        path: int(number[0])
        for path in folder.iterdir()
        if path.is_dir() and (number := re.search(r"\d+$", path.name))
    }
    return sorted(numbers, key=lambda path: (numbers[path], path.name))

"""`RowIndex`: how many rows each block has, remembered in a file until the log changes."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.section import replace_whole
from torchrec_2dsp.programs.data.logs.blocks import LogBlock
from torchrec_2dsp.programs.data.logs.files import fingerprint

_NAME = "row_counts.json"


class RowIndex:
    """Counts of rows by file, for as long as the file's size and time stay as they are."""

    def __init__(self, folder: str) -> None:
        """
        Args:
            folder: where counts are kept; empty to keep them in this process alone.
        """
        self._path = Path(folder, _NAME) if folder else None
        self._counted: dict[str, dict[str, Any]] = {}
        if self._path is not None and self._path.exists():
            try:
                self._counted = json.loads(self._path.read_text())
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{self._path} can't be read: {error}; delete it, and rows are counted again"
                ) from error

    def blocks(self, file: str, how: str, count: Callable[[], list[LogBlock]]) -> list[LogBlock]:
        """The blocks of a file, counted if they aren't known.

        Args:
            file: the path.
            how: what the blocks depend on, beside the file.
            count: finds the blocks.
        """
        rows = self.remembered(file, how, lambda: [_plain(block) for block in count()])
        return [LogBlock(file, *values) for values in rows]

    def remembered(self, file: str, how: str, count: Callable[[], list[Any]]) -> list[Any]:
        """What was counted of a file; see `blocks`."""
        state = {"file": fingerprint(file), "how": how}
        key = f"{os.path.abspath(file)}: {how}"
        entry = self._counted.get(key)
        if entry is None or {name: entry[name] for name in state} != state:
            entry = {**state, "counted": count()}
            self._counted[key] = entry
            self._save()
        return entry["counted"]

    def _save(self) -> None:
        if self._path is not None:
            write_prepared(self._path, json.dumps(self._counted).encode())


def _plain(block: LogBlock) -> list[int]:
    return [value for name, value in asdict(block).items() if name != "file"]


def write_prepared(path: Path, content: bytes) -> None:
    """Write a file of what was prepared as a whole, whoever writes it at the same time.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, content, suffix=f"{os.getpid()}.draft")
    except OSError as error:
        raise ConfigError(
            f"prepared: {path} can't be written: {error.strerror}; give a folder that can, or "
            "leave it out"
        ) from error

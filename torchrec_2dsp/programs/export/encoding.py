"""`write_encoding` and `read_encoding`: how values of a log become the ids of an exported model."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import tomli_w
from pydantic import Field

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.config_file import load_config, with_absolute_paths
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.data.logs.config import LogConfig
from torchrec_2dsp.programs.data.logs.ids import read_vocabulary, write_vocabulary
from torchrec_2dsp.programs.data.logs.sections import (
    AvazuConfig,
    CriteoConfig,
    InteractionsConfig,
    TableConfig,
)
from torchrec_2dsp.programs.data.logs.sequence_data import SequenceData
from torchrec_2dsp.programs.train.config import TrainConfig

DATA_FILE, PREPARED_FOLDER = "data.toml", "prepared"
"""How values of a log become ids: the section of the config, and what was prepared for it."""
_ENCODING_FILES = ("vocabulary_*.parquet", "scales.json")
_ITEM_RULES = "the items of a log of interactions, by their numbers from 0 on"


class _ServedData(Section):
    """The content of an export's data.toml."""

    data: Annotated[
        TableConfig | CriteoConfig | AvazuConfig | InteractionsConfig, Field(discriminator="kind")
    ]


def write_encoding(config: TrainConfig, dataset: Dataset, folder: Path) -> None:
    """Write how values of a log become ids, if the data is a log: its section of the config, and
    the vocabularies and scales that it uses.

    Args:
        config: of the training program.
        dataset: the data of the config.
        folder: of the export.
    """
    data = config.data
    if not isinstance(data, LogConfig | InteractionsConfig):
        return
    section: dict[str, Any] = _without_none(with_absolute_paths(config)["data"])
    copies = folder / PREPARED_FOLDER
    if isinstance(dataset, SequenceData):
        items = pa.table({"value": dataset.log.item_values})
        write_vocabulary(_items_path(folder, dataset.features[0].name), items, _ITEM_RULES)
    elif isinstance(data, LogConfig) and data.prepared:
        section["prepared"] = PREPARED_FOLDER
        copies.mkdir()
        for pattern in _ENCODING_FILES:
            for path in sorted(Path(data.prepared).glob(pattern)):
                shutil.copyfile(path, copies / path.name)
    (folder / DATA_FILE).write_text(tomli_w.dumps({"data": section}))


def read_encoding(folder: Path) -> TableConfig | InteractionsConfig:
    """The section of the log whose values an export's folder encodes.

    Raises:
        ConfigError: the folder has none.
    """
    if not (folder / DATA_FILE).exists():
        raise ConfigError(
            f"{folder} has no {DATA_FILE}; only exports of models that were trained on a log say "
            "how values become ids"
        )
    data = load_config(_ServedData, folder / DATA_FILE).data
    return data.table() if isinstance(data, CriteoConfig | AvazuConfig) else data


def read_items(folder: Path, feature: str) -> pa.BinaryArray:
    """The names of the items of a log of interactions, in the order of their numbers.

    Args:
        folder: of the export.
        feature: the feature of the items.

    Raises:
        ConfigError: they are missing.
    """
    path = _items_path(folder, feature)
    if not path.exists():
        raise ConfigError(f"{folder} lacks {path}; copy it whole")
    return read_vocabulary(path, _ITEM_RULES)


def _items_path(folder: Path, feature: str) -> Path:
    return folder / PREPARED_FOLDER / f"vocabulary_{feature}.parquet"


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without the values for which TOML has no word."""
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value is not None
    }

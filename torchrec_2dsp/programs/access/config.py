"""`AccessConfig`: the log whose rows are counted."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from torchrec_2dsp.programs.data.logs.sections import (
    AvazuConfig,
    CriteoConfig,
    InteractionsConfig,
    TableConfig,
)

LoggedData = Annotated[
    TableConfig | CriteoConfig | AvazuConfig | InteractionsConfig, Field(discriminator="kind")
]
"""The sections of logs in files."""


class AccessConfig(BaseModel):
    """The section ``[data]`` of a config to train by; its other sections are ignored.

    Example:
        >>> from torchrec_2dsp.programs.access.config import AccessConfig
        >>> from torchrec_2dsp.programs.config.config_file import make_config
        >>> tree = {"data": {"kind": "criteo", "files": ["day_0.gz"]}, "loop": {"steps": 100}}
        >>> make_config(AccessConfig, tree).data.kind
        'criteo'
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    data: LoggedData
    """The log."""

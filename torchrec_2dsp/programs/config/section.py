"""`Section`: what all parts of config files and of result files are.

This module needs neither torch nor TorchRec, so that results can be read quickly.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a config file: values of a fixed set of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

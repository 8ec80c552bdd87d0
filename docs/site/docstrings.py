"""Adapt this package's docstrings to the reference's parser."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Reads `Example:` as `Examples:`, so that lines with ``>>>`` are shown as code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object that was just read."""
        if obj.docstring:
            value = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", value, flags=re.MULTILINE
            )

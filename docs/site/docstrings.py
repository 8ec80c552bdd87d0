"""What this package's docstrings write otherwise than the parser of the reference expects."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """`Example:` is read as `Examples:`, so that what begins with ``>>>`` is shown as code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object that was just read."""
        if obj.docstring:
            value = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", value, flags=re.MULTILINE
            )

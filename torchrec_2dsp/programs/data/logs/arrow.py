"""pyarrow's functions on columns."""

from typing import Any

import pyarrow.compute

compute: Any = pyarrow.compute
"""The functions, which pyarrow makes when it is imported, so that type checkers don't see them."""

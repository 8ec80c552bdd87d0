"""The folder of real logs, which no licence lets this repository hold; tests of them are skipped
without it."""

import os
from pathlib import Path

REAL_LOGS = Path(os.environ.get("REAL_LOGS", "real_logs"))
"""The environment names it: ``REAL_LOGS=~/logs make test``."""

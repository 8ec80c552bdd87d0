"""The version of the package, which `pyproject.toml` reads from here, and what ships with it."""

from pathlib import Path

__version__ = "0.1.0"

SHIPPED_CONFIGS = Path(__file__).with_name("configs")
"""In a checkout a link to the folder `configs` beside the package; in a wheel the files."""

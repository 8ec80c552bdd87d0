"""`find_config`: the file of a config, by its name if it ships with the package, or by its path."""

from importlib.resources import files
from pathlib import Path

from torchrec_2dsp.errors import ConfigError

# In a checkout a link to the folder `configs` beside the package; in a wheel the files themselves.
_SHIPPED = Path(str(files("torchrec_2dsp"))) / "configs"
_FOLDERS = ("hardware", "runs", "workloads")


def shipped_configs(folder: str = "runs") -> dict[str, Path]:
    """The configs of one folder that ship with the package: their files by name."""
    return {path.stem: path for path in sorted((_SHIPPED / folder).glob("*.toml"))}


def shipped_config(name: str, folder: str = "runs") -> Path | None:
    """The file of a name such as ``demo`` or ``hardware/emulated_1gbit``; none if none ships.

    Args:
        name: what is looked for.
        folder: the folder of a name that has none.
    """
    named_folder, slash, stem = name.rpartition("/")
    folder = named_folder if slash else folder
    return shipped_configs(folder).get(stem) if folder in _FOLDERS else None


def find_config(name: str | Path, folder: str = "runs", *, beside: str | Path = "") -> Path:
    """The file of a config, by the name under which it ships with the package, or by its path.

    What ends as files do (``demo.toml``) is a path. Anything else is a name if a config of that
    name ships, and a path if not.

    Args:
        name: such as ``demo``, ``hardware/emulated_1gbit`` or ``mine/run.toml``.
        folder: the folder of a name that has none.
        beside: the folder that paths are relative to; by default the process's own.

    Raises:
        ConfigError: there is neither; the text lists the names of the folder.

    Example:
        >>> from torchrec_2dsp.programs.config.shipped import find_config
        >>> find_config("demo").name, find_config("hardware/emulated_1gbit").name
        ('demo.toml', 'emulated_1gbit.toml')
    """
    path = Path(beside, name)
    if path.suffix:
        return path
    if shipped := shipped_config(str(name), folder):
        return shipped
    if path.is_file():
        return path
    raise ConfigError(
        f"{str(name)!r} is no file, and no config of that name ships with the package; use a "
        f"path, or one of {', '.join(shipped_configs(folder))}"
    )

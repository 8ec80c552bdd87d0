"""`Section`: what all parts of config files and of result files are.

This module needs neither torch nor TorchRec, so that results can be read quickly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from torchrec_2dsp.errors import ConfigError, OutputError, TwoDError


class Section(BaseModel):
    """A part of a config file: values of a fixed set of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A context that writes to a file or a folder, and says so if it can't.

    Raises:
        OutputError: the block raised an `OSError`.

    Example:
        >>> from torchrec_2dsp.programs.config.section import writing
        >>> with writing("/no/such/folder/record.json"):
        ...     open("/no/such/folder/record.json", "w")
        Traceback (most recent call last):
        torchrec_2dsp.errors.OutputError: /no/such/folder/record.json can't be written: No such file
        or directory; make room there, or write elsewhere
    """
    try:
        yield
    except TwoDError:
        raise
    except OSError as error:
        raise OutputError(
            f"{path} can't be written: {error.strerror or error}; make room there, or write "
            "elsewhere"
        ) from error


def write_whole(path: str | Path, text: str) -> None:
    """Write a file as a whole or not at all: what was there before stays if the disk is full.

    Raises:
        OutputError: it can't be written.
    """
    with writing(path):
        replace_whole(Path(path), text.encode())


def replace_whole(path: Path, content: bytes, *, suffix: str = "draft") -> None:
    """Write a file so that others see all of it or nothing.

    Args:
        path: the file.
        content: its bytes.
        suffix: names the draft beside it; processes that write at the same time need others each.

    Raises:
        OSError: it can't be written; what was there before stays.
    """
    draft = path.with_name(f"{path.name}.{suffix}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


class JsonFile(Section):
    """A section that is a file of its own."""

    what_it_is: ClassVar[str] = "a file of this program"
    """How an error calls such a file."""

    def save(self, path: str | Path) -> None:
        """Write the file as JSON, as a whole or not at all.

        Raises:
            OutputError: it can't be written.
        """
        write_whole(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ConfigError: it can't be read, or it is something else.
        """
        try:
            return cls.model_validate_json(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
        except (ValidationError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not {cls.what_it_is}: {error}") from error

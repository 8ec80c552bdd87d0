"""`JsonFile`: results that are written to JSON and read again."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import ValidationError

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.output_file import write_whole
from torchrec_2dsp.programs.config.section import Section


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

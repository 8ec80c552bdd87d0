"""`Section`: a part of a config or result file. Files are written atomically.

This module needs neither torch nor TorchRec, so that results can be read quickly.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import core_schema

from torchrec_2dsp.errors import ConfigError, OutputError, TwoDError

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed that torch and NumPy accept."""


class Section(BaseModel):
    """A part of a config file: values for a fixed set of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, tree: Any) -> Any:
        """Refuse booleans where numbers belong, which pydantic would take for 0 and 1."""
        for name, value in tree.items() if isinstance(tree, Mapping) else ():
            kind = cls.model_fields[name].annotation if name in cls.model_fields else None
            if (
                isinstance(value, bool)
                and {int, float} & {kind, *get_args(kind)}
                and kind is not bool
            ):
                raise ValueError(f"{name}={str(value).lower()} is no number")
        return tree

    def refuse_unread(self, names: Sequence[str], why: str, *, key: str = "") -> None:
        """Raise `ValueError` at the first key that differs from its default but is never read.

        Args:
            names: keys that other values leave unread.
            why: the key's use and the remedy; it follows ``key=value`` in the text.
            key: the prefix for a key in the text, for checks in other sections.
        """
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{key}{name}={getattr(value, 'value', value)!r} {why}")


class Kinds:
    """Annotates a union of sections, which are told apart by their field ``kind``.

    The first class's kind is the default. Keys of other kinds are refused by name.
    """

    def __get_pydantic_core_schema__(
        self, union: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        sections = handler.generate_schema(Annotated[union, Field(discriminator="kind")])
        return core_schema.no_info_before_validator_function(
            lambda tree: self._prepared(tree, get_args(union)), sections
        )

    def _prepared(self, tree: Any, kinds: Sequence[type[BaseModel]]) -> Any:
        """Add the default kind to a section as a user writes it, and look for other kinds' keys."""
        if not isinstance(tree, Mapping):
            return tree
        tree = {"kind": kinds[0].model_fields["kind"].get_default(), **tree}
        own = next((kind for kind in kinds if tree["kind"] in _names(kind)), None)
        if own is None:
            return tree  # pydantic's error lists the kinds.
        for name, value in tree.items():
            readers = [kind for kind in kinds if name in kind.model_fields]
            if readers and name not in own.model_fields:
                texts = " or ".join(repr(text) for kind in readers for text in _names(kind))
                raise ValueError(
                    f"{name}={value!r} is for kind={texts}, and kind is {tree['kind']!r}; set "
                    f"kind, or leave {name} out"
                )
        return tree


def named_in_config(name: str, key: str) -> Callable[..., Any]:
    """Import the function or class that a config names, such as ``"package.module:function"``.

    Raises:
        ConfigError: the name isn't of this form, or there is nothing to call under it.

    Example:
        >>> from torchrec_2dsp.programs.config.section import named_in_config
        >>> named_in_config("math:sqrt", "factory")(9)
        3.0
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(
            f"{key}={name!r} is not of the form 'package.module:function'; name a function or class"
        )
    try:
        value: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}={name!r}: {module_name!r} can't be imported: {error}; install it, or put its "
            "folder into PYTHONPATH"
        ) from error
    for part in path.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{key}={name!r}: {module_name!r} has no {path!r}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(
            f"{key}={name!r} is a {type(value).__name__}, which can't be called; name a function "
            "or class"
        )
    return value


def _names(kind: type[BaseModel]) -> tuple[str, ...]:
    return get_args(kind.model_fields["kind"].annotation)


def flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    """Flatten nested dicts and lists to dotted keys and JSON values."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return [(prefix, json.dumps(value))]
    return [
        leaf for key, item in items for leaf in flat(f"{prefix}.{key}" if prefix else key, item)
    ]


class JsonFile(Section):
    """A section that is a JSON file of its own."""

    what_it_is: ClassVar[str] = "a file of this program"
    """The file's name in errors."""

    def save(self, path: str | Path) -> None:
        """Write the file as JSON, atomically.

        Raises:
            OutputError: it can't be written.
        """
        write_whole(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: it can't be read, or it is something else.
        """
        with reading(path, cls.what_it_is):
            return cls.model_validate_json(Path(path).read_text())


@contextmanager
def reading(path: str | Path, what_it_is: str) -> Iterator[None]:
    """Turn errors of a block that reads and parses a file into one that names the file.

    Raises:
        ConfigError: the block raised an `OSError`, or a `ValueError`, as parsers do.

    Example:
        >>> from torchrec_2dsp.programs.config.section import reading
        >>> with reading("record.json", "JSON"):
        ...     float("seven")
        Traceback (most recent call last):
        torchrec_2dsp.errors.ConfigError: record.json is not JSON: could not convert string to
        float: 'seven'
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except ValidationError as error:
        first, *others = error.errors()
        reason = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        rest = f", and {len(others)} more" if others else ""
        raise ConfigError(f"{path} is not {what_it_is}: {reason}{rest}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not {what_it_is}: {error}") from error


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn an `OSError` in the block into an error that names the file or folder.

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
    """Write a file atomically: its former content stays if the disk is full.

    Raises:
        OutputError: it can't be written.
    """
    with writing(path):
        replace_whole(Path(path), text.encode())


def replace_whole(path: Path, content: bytes, *, suffix: str = "draft") -> None:
    """Write a file atomically, so that other processes never see a part.

    Args:
        path: the file.
        content: its bytes.
        suffix: names the draft beside it; concurrent writers need different ones.

    Raises:
        OSError: it can't be written; the former content stays.
    """
    draft = path.with_name(f"{path.name}.{suffix}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise

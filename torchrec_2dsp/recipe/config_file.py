"""Read a config from a TOML file and the command line; say what is wrong with it."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from torchrec_2dsp.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)


def load_config(kind: type[Config], path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a TOML file, with ``key.sub=value`` overrides.

    Raises:
        ConfigError: the file can't be read, or a key or value is wrong; it names which.
    """
    try:
        tree = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        tree = overridden(tree, override)
    return make_config(kind, tree, source=str(path))


def make_config(kind: type[Config], tree: Mapping[str, Any], source: str = "config") -> Config:
    """The config that plain data describes; ``source`` is named in errors."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(kind, dict(found)) for found in error.errors()]
        raise ConfigError(f"{source}: " + "\n  ".join(lines)) from None


def overridden(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    """A copy of ``tree`` with one ``key.sub=value`` applied; list items go by their number.

    The value is TOML; what isn't TOML is a string.

    Example:
        >>> from torchrec_2dsp.recipe.config_file import overridden
        >>> overridden({"loop": {"steps": 5}}, "loop.steps=7")
        {'loop': {'steps': 7}}
    """
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {override!r} is not of the form key.sub=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return _with(dict(tree), parts, value, override)


def _with(node: Any, parts: list[str], value: Any, override: str) -> Any:
    if not parts:
        return value
    head, *rest = parts
    if isinstance(node, list):
        if not (head.isdecimal() and int(head) < len(node)):
            raise ConfigError(
                f"--set {override!r}: {head!r} is no item of a list of {len(node)}; "
                f"use a number in 0..{len(node) - 1}"
            )
        index = int(head)
        return [*node[:index], _with(node[index], rest, value, override), *node[index + 1 :]]
    if not isinstance(node, dict):
        raise ConfigError(f"--set {override!r}: {node!r} has no key {head!r}")
    return {**node, head: _with(node.get(head, {}), rest, value, override)}


def _explain(kind: type[BaseModel], found: Mapping[str, Any]) -> str:
    """One validation error as key, value and rule."""
    location = tuple(found["loc"])
    key = ".".join(str(part) for part in location)
    rule = str(found["msg"]).removeprefix("Value error, ")
    rule = rule[:1].lower() + rule[1:]
    if found["type"] == "extra_forbidden":
        return f"{key} is unknown; use one of {', '.join(_known_keys(kind, location[:-1]))}"
    if found["type"] == "missing":
        return f"{key} is missing"
    if isinstance(found["input"], Mapping):
        return f"{key}: {rule}" if key else rule
    return f"{key}={found['input']!r}: {rule}"


def _known_keys(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys of the section at ``location``."""
    schema = kind.model_json_schema()
    node = schema
    for part in location:
        below = node.get("items") or node.get("additionalProperties") or node["properties"][part]
        reference = below.get("$ref", "")
        node = schema["$defs"][reference.rpartition("/")[2]] if reference else below
    return list(node.get("properties", {}))

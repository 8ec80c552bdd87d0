"""Read a config from a TOML file and the command line; explain errors.

```text
file (and the one it includes) --> tree --overrides--> tree --sections--> config
```
A string from a file knows the file's folder, to which the sections' paths are relative.
"""

import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError, ValidationInfo

from torchrec_2dsp._version import SHIPPED_CONFIGS
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.section import reading

_RUNS, _HARDWARE, _WORKLOADS = "runs", "hardware", "workloads"


def shipped_configs(folder: str = _RUNS) -> dict[str, Path]:
    """Return a folder's configs that ship with the package: their files by name."""
    return {path.stem: path for path in sorted((SHIPPED_CONFIGS / folder).glob("*.toml"))}


def _shipped_config(name: str, folder: str) -> Path | None:
    """Return the shipped file with this name, such as ``hardware/emulated_1gbit``, if any."""
    named_folder, slash, stem = name.rpartition("/")
    folder = named_folder if slash else folder
    if folder not in (_RUNS, _HARDWARE, _WORKLOADS):
        return None
    return shipped_configs(folder).get(stem)


def find_config(
    name: str | Path,
    folder: str = _RUNS,
    *,
    beside: str | Path = "",
    sections: Collection[str] = (),
) -> Path:
    """Find a config by path, or by its name among those that ship with the package.

    A name with a file extension (``demo.toml``) is a path. Anything else is a shipped config's name
    if there is one, and a path if not.

    Args:
        name: such as ``demo``, ``hardware/emulated_1gbit`` or ``mine/run.toml``.
        folder: the default folder for names.
        beside: the folder that paths are relative to; by default the process's own.
        sections: errors name only configs that have one of these; by default all.

    Raises:
        ConfigError: neither exists; the text has the closest of the folder's names, and all.

    Example:
        >>> from torchrec_2dsp.programs.config.config_file import find_config
        >>> find_config("demo").name, find_config("hardware/emulated_1gbit").name
        ('demo.toml', 'emulated_1gbit.toml')
    """
    path = Path(beside, name)
    if path.suffix:
        return path
    if shipped := _shipped_config(str(name), folder):
        return shipped
    if path.is_file():
        return path
    shipped = shipped_configs(folder)
    if sections:
        shipped = [name for name, path in shipped.items() if _read(path).keys() & set(sections)]
    closest = get_close_matches(str(name), shipped, n=1)
    hint = f"did you mean {closest[0]!r}? Otherwise " if closest else ""
    raise ConfigError(
        f"{str(name)!r} is no file, and no config of that name ships with the package; {hint}"
        f"use a path, or one of {', '.join(shipped)}"
    )


Config = TypeVar("Config", bound=BaseModel)
_COMMANDS = {"runs": "train", "contestants": "bench", "machines": "plan"}
"""The commands that take configs, by a section that only that command's configs have."""


class _FileText(str):
    """A string in a config file."""

    folder: Path
    """The file's folder."""


def _with_folder(value: Any, folder: Path) -> Any:
    """Copy a file's tree, so that its strings know the file's folder."""
    if isinstance(value, Mapping):
        return {key: _with_folder(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_folder(item, folder) for item in value]
    if not isinstance(value, str):
        return value
    text = _FileText(value)
    text.folder = folder
    return text


def _resolved(path: Any) -> Any:
    """Return a file's path as one relative to this process."""
    if not isinstance(path, _FileText) or not path or "://" in path:
        return path
    return os.path.normpath(path.folder / os.path.expanduser(path))


_WRITTEN = "to a file"
"""The validation context of a config that is written."""


def _written_to(path: str, info: ValidationInfo) -> str:
    """Return a path to write to; absolute in a config that is itself written to a file."""
    path = os.path.expanduser(path)
    return (
        os.path.abspath(path) if info.context == _WRITTEN and path and "://" not in path else path
    )


PathBesideConfig = Annotated[str, BeforeValidator(_resolved), AfterValidator(os.path.expanduser)]
"""A path that a config file gives relative to itself; on the command line it is relative to the
process. Empty for none."""
OutputPath = Annotated[str, AfterValidator(_written_to)]
"""A path to write to, always relative to the process. Empty for none."""
PathsBesideConfig = Annotated[
    tuple[PathBesideConfig, ...],
    BeforeValidator(lambda paths: (paths,) if isinstance(paths, str) else paths),
]
"""Several such paths, or patterns; a single string is one path."""
CalibrationPath = Annotated[
    str,
    BeforeValidator(lambda name: name if _is_shipped_hardware(name) else _resolved(name)),
    AfterValidator(lambda name: name and str(find_config(name, _HARDWARE))),
]
"""A calibration's path, or a shipped calibration's name, such as ``emulated_1gbit``."""


def _is_shipped_hardware(name: Any) -> bool:
    return isinstance(name, str) and _shipped_config(name, _HARDWARE) is not None


def load_config(
    kind: type[Config],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    include: str | Path | None = None,
) -> Config:
    """Read a config from a TOML file, with ``key.sub=value`` overrides.

    A file may have ``include = "other.toml"``, relative to itself: its own values override the
    other file's, section by section. Other paths in it are relative to it as well.

    Args:
        kind: the config's class.
        path: the file, or the name of a config that ships with the package; see `find_config`.
        overrides: applied last.
        include: replaces the file's own include; relative to this process, or a shipped workload's
            name.

    Raises:
        ConfigError: the file can't be read, or a key or value is wrong; the message names it.
    """
    file = find_config(path, sections=_own_sections(kind))
    tree = _read(file)
    named = tree.pop("include", None)
    included = None
    if include is not None:
        included = find_config(include, _WORKLOADS)
    elif named is not None:
        included = find_config(str(named), _WORKLOADS, beside=file.parent)
    if included is not None:
        tree = _merged(_read(included), tree)
    _check_command(kind, tree, str(path))
    for override in overrides:
        tree = overridden(tree, override)
    return make_config(kind, tree, source=str(path))


def kind_of(path: str | Path, kinds: Sequence[type[BaseModel]]) -> type[BaseModel]:
    """Determine a config file's kind by the section that only this kind has.

    Raises:
        ConfigError: it is of none of these kinds, or of several; the text names them.
    """
    sections = {section: kind for kind in kinds for section in _own_sections(kind)}
    file = find_config(path, sections=sections)
    tree = _read(file)
    if (named := tree.get("include")) is not None:
        tree |= _read(find_config(str(named), _WORKLOADS, beside=file.parent))
    given = [section for section in sections if section in tree]
    if len(given) == 1:
        return sections[given[0]]
    choices = " or ".join(f"[{name}] for {_COMMANDS[name]}" for name in sections)
    raise ConfigError(
        f"{path} has {'both' if given else 'neither'} of the sections that say what a config is "
        f"for; give one with {choices}"
    )


def _own_sections(kind: type[BaseModel]) -> list[str]:
    """Return the section that only this kind of config has; none for other kinds."""
    return [section for section in _COMMANDS if section in kind.model_fields]


def _check_command(kind: type[BaseModel], tree: Mapping[str, Any], source: str) -> None:
    """Raise `ConfigError` if a config is for another command."""
    given = next((section for section in _COMMANDS if section in tree), None)
    for own in _own_sections(kind):
        if given and own not in tree:
            raise ConfigError(
                f"{source} is a config for {_COMMANDS[given]}, with [{given}]; give one for "
                f"{_COMMANDS[own]}, with [{own}]"
            )


def _read(path: Path) -> dict[str, Any]:
    with reading(path, "TOML"):
        return _with_folder(tomllib.loads(path.read_text(encoding="utf-8-sig")), path.parent)


def with_absolute_paths(config: BaseModel) -> dict[str, Any]:
    """Return a config as plain data with absolute paths, without `None`, which TOML lacks."""
    tree = _with_folder(config.model_dump(mode="json", exclude_none=True), Path.cwd())
    written = type(config).model_validate(tree, context=_WRITTEN)
    return written.model_dump(mode="json", exclude_none=True)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Join two trees section by section; ``above`` wins."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
        merged[key] = _merged(below[key], value) if both else value
    return merged


def make_config(kind: type[Config], tree: Mapping[str, Any], source: str = "config") -> Config:
    """Build a config from plain data; ``source`` is named in errors."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        errors: list[Any] = error.errors()
        # pydantic doesn't count items with errors, so that their list seems too short.
        places = {details["loc"][:end] for details in errors for end in range(len(details["loc"]))}
        lines = [
            _explain(kind, details)
            for details in errors
            if details["type"] != "too_short" or details["loc"] not in places
        ]
        raise ConfigError(f"{source}: " + "\n  ".join(lines)) from None


def overridden(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Copy ``tree`` with one ``key.sub=value`` applied; list items go by their index.

    The value is TOML; anything else is a string, without blanks around it unless it has
    nothing else.

    Example:
        >>> from torchrec_2dsp.programs.config.config_file import overridden
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
        value = text.strip() or text
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


def _explain(kind: type[BaseModel], details: Mapping[str, Any]) -> str:
    """Describe one validation error by key, value and rule."""
    parts, allowed_keys = _located(kind, details["loc"])
    key = ".".join(parts)
    rule = str(details["msg"]).removeprefix("Value error, ")
    rule = rule[:1].lower() + rule[1:]
    if details["type"] == "extra_forbidden":
        nearest = get_close_matches(parts[-1], allowed_keys, n=1)
        hint = f" (the nearest is {nearest[0]!r})" if nearest else ""
        return f"{key} is unknown; use one of {', '.join(allowed_keys)}{hint}"
    if details["type"] == "missing":
        return f"{key} is missing; write it into the config, or use --set {key}=..."
    if details["type"] == "too_short":
        return f"{key} is too short; name at least {details['ctx']['min_length']}"
    if details["type"] == "union_tag_invalid":
        kind_key, tag = details["ctx"]["discriminator"].strip("'"), details["ctx"]["tag"]
        return f"{key}.{kind_key}={tag!r}: use one of {details['ctx']['expected_tags']}"
    if details["type"] == "union_tag_not_found":
        kind_key = details["ctx"]["discriminator"].strip("'")
        return f"{key}.{kind_key} is missing; use one of {', '.join(allowed_keys)}"
    if isinstance(details["input"], Mapping):
        return f"{key}: {rule}" if key else rule
    return f"{key}={details['input']!r}: {rule}"


def _located(kind: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], list[str]]:
    """Locate an error in the config: its key as a user writes it, and its section's keys.

    For a section that doesn't name its kind, these are the kinds.
    """
    schema = kind.model_json_schema()
    node, parts, allowed_keys = schema, [], list(schema["properties"])
    for part in location:
        allowed_keys = list(node.get("properties", allowed_keys))
        if "oneOf" in node:
            # The discriminator that pydantic adds for a section with several kinds.
            below = {"$ref": node["discriminator"]["mapping"][part]}
        else:
            parts.append(str(part))
            below = node.get("items") or node.get("additionalProperties")
            below = below or node.get("properties", {}).get(part, {})
            # An optional section is a union of two choices.
            sections = [choice for choice in below.get("anyOf", ()) if "$ref" in choice]
            below = sections[0] if len(sections) == 1 else below
        reference = below.get("$ref", "")
        node = schema["$defs"][reference.rpartition("/")[2]] if reference else below
    if "oneOf" in node:
        allowed_keys = list(node["discriminator"]["mapping"])
    return parts, allowed_keys

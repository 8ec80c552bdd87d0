"""Extend mkdocs: a reference page for each room of the library.

The pages are made from the source tree, so a module that is added, moved or removed needs no
change here. Public names come first, then the modules of the room.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).parents[2] / "torchrec_2dsp"
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)(#[^)]*)?\)")
NO_ROOMS = ("_compat", "programs")
"""Rooms without a page: upstream adapters and programs."""


def public_names() -> dict[str, str]:
    """Return the package's public names, each with its defining module."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (modules,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_MODULE_OF"
    )
    return dict(ast.literal_eval(modules))


def modules_of_rooms() -> dict[str, list[str]]:
    """Return the dotted names of the library's modules by room."""
    rooms: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        room = parts[0]
        is_private = any(part.startswith("_") and part != "__init__" for part in parts)
        if room in (*NO_ROOMS, "__init__") or is_private:
            continue
        names = parts[:-1] if parts[-1] == "__init__" else parts
        rooms[room].append(".".join((PACKAGE.name, *names)))
    return dict(rooms)


def room_page(room: str, modules: list[str], names: dict[str, str]) -> str:
    """Return a room's page in Markdown, with mkdocstrings directives."""
    lines = [f"# {room}", ""]
    if f"{PACKAGE.name}.{room}" in modules and (PACKAGE / room / "__init__.py").exists():
        text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
        lines += [text, ""]
    is_public = {module for name, module in names.items() if module in modules}
    if is_public:
        shown = [f"[`{name}`][{names[name]}.{name}]" for name in names if names[name] in is_public]
        lines += ["Public names: " + ", ".join(shown) + ".", ""]
    inside = [module for module in modules if module != f"{PACKAGE.name}.{room}"] or modules
    for module in sorted(inside, key=lambda module: module not in is_public):
        lines += [f"::: {module}", "    options:", "      show_root_full_path: true", ""]
    return "\n".join(lines)


def on_config(config: Any) -> Any:
    """List the pages of the rooms in the navigation."""
    for entry in config.nav:
        if isinstance(entry, dict) and "Reference" in entry:
            entry["Reference"] = [
                "api/README.md",
                *(f"api/{room}.md" for room in modules_of_rooms()),
            ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the page of each room."""
    names = public_names()
    for room, modules in modules_of_rooms().items():
        text = room_page(room, modules, names)
        files.append(File.generated(config, f"api/{room}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Simplify info strings for the highlighter, and link public names to their reference."""
    markdown = re.sub(r"^( *)```(python|text) \w+$", r"\1```\2", markdown, flags=re.MULTILINE)
    markdown = LINK.sub(lambda link: _inside(link, page.file.src_uri), markdown)
    if page.file.src_uri == "api/README.md":
        for name, module in public_names().items():
            markdown = markdown.replace(f"| `{name}` |", f"| [`{name}`][{module}.{name}] |")
    return markdown


def _inside(link: re.Match[str], page: str) -> str:
    """Return the link, or its text alone where it leads from the docs into the repository."""
    depth = page.count("/")
    climbs = link[2].split("/").count("..")
    return link[1] if climbs > depth else link[0]

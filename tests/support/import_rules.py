"""Check the import graph from the source alone."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree, parsed only once while the file is unchanged."""
    return _parsed_text(path.read_text())


@cache
def _parsed_text(text: str) -> ast.Module:
    return ast.parse(text)


PROGRAMS = "programs"
"""The package of command line programs; the rest is the library."""

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"_version", "errors"}),
    frozenset({"_compat"}),
    frozenset({"codecs", "mesh", "optim"}),
    frozenset({"comms", "report"}),
    frozenset({"access", "rows"}),
    frozenset({"plan"}),
    frozenset({"cost", "replicas"}),
    frozenset({"dense", "planner", "shard"}),
    frozenset({"parallel"}),
    frozenset({"programs.config", "programs.doctor", "programs.launch", "programs.traces"}),
    frozenset({"programs.dilation"}),
    frozenset({"programs.data"}),
    frozenset({"programs.link_speeds", "programs.models"}),
    frozenset({"programs.access"}),
    frozenset({"programs.bench", "programs.cluster", "programs.train"}),
    frozenset({"programs.export", "programs.plan", "programs.run_report", "programs.study"}),
    frozenset({"programs.cli"}),
    frozenset({"__main__"}),
)
"""The rooms of the package, from the bottom up. Rooms on one line never import each other."""

UPSTREAM = ("torchrec", "fbgemm_gpu")
ADAPTERS = "_compat"
INTERNALS = tuple(
    f"torchrec.distributed.{name}"
    for name in (
        "batched_embedding_kernel",
        "comm",
        "comm_ops",
        "dist_data",
        "embedding_lookup",
        "sharding",
    )
)
PUBLIC_FBGEMM = (
    "fbgemm_gpu.split_embedding_configs",
    "fbgemm_gpu.split_table_batched_embeddings_ops_common",
)
DRAWING = ("matplotlib", "plotly", "rich")
DRAWING_ROOMS = ("report", f"{PROGRAMS}.cli")
"""The rooms that draw, to files, pages and terminals; others only provide the content."""


@dataclass(frozen=True)
class Module:
    """A source file in the package under test."""

    path: Path
    name: str
    """Dotted, without ``.__init__``."""
    tree: ast.Module

    @property
    def part(self) -> str:
        """Return the part that `LAYERS` ranks: the name below the package, or below its programs.

        It doesn't rank the package itself and the programs' common package.
        """
        names = self.name.split(".")[1:]
        return ".".join(names[:2]) if names[:1] == [PROGRAMS] else ".".join(names[:1])


def read_package(package: Path) -> dict[str, Module]:
    """Return a package's modules by dotted name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(path, name, parsed(path))
    return modules


def imported(module: Module) -> Iterator[tuple[int, str]]:
    """Yield ``(line, dotted name)`` for each import in a file, inside functions as well."""
    package = module.name.split(".")
    if module.path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def layer_violations(package: Path) -> list[str]:
    """List imports that point up or sideways, and parts that no layer names."""
    results = []
    modules = read_package(package)
    ranks = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
    for module in modules.values():
        if module.part in ("", PROGRAMS):
            continue  # The package's own names may come from anywhere.
        if module.part not in ranks:
            results.append(f"{module.path}: no layer has {module.part!r}; add it to LAYERS")
            continue
        for line, name in imported(module):
            where = f"{module.path}:{line}"
            target = _resolve(name, modules)
            if target is None:
                continue
            if not target.part:
                results.append(
                    f"{where}: imports from the package itself; import from the defining module"
                )
            elif target.part in ranks and target.part != module.part:
                if ranks[target.part] > ranks[module.part]:
                    results.append(
                        f"{where}: {module.part} is below {target.part}: imports point down; "
                        "move the code up, or what it needs down"
                    )
                elif ranks[target.part] == ranks[module.part]:
                    results.append(
                        f"{where}: {module.part} and {target.part} are siblings, which don't "
                        "import each other; move what they share to a layer below"
                    )
    return results


def cycle_violations(package: Path) -> list[str]:
    """List modules that import each other, directly or indirectly."""
    modules = read_package(package)
    graph = {
        name: {
            target.name
            for _, imported_name in imported(module)
            if (target := _resolve(imported_name, modules)) and target.name != name
        }
        for name, module in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        return [f"{package}: import cycle {cycle}; move what they share to a module of its own"]
    return []


def upstream_violations(package: Path) -> list[str]:
    """List imports of TorchRec or FBGEMM internals outside the adapters."""
    return [
        f"{module.path}:{line}: {name} is internal to {name.split('.')[0]}; "
        f"import it in {ADAPTERS} and take it from there"
        for module in read_package(package).values()
        if module.part != ADAPTERS
        for line, name in imported(module)
        if _is_internal(name)
    ]


def drawing_violations(package: Path) -> list[str]:
    """List imports of drawing libraries outside the rooms that draw."""
    return [
        f"{module.path}:{line}: {name} draws; hand a chart or a table to {DRAWING_ROOMS[0]}"
        for module in read_package(package).values()
        if module.part not in DRAWING_ROOMS
        for line, name in imported(module)
        if _is_in(name, DRAWING)
    ]


def unchecked_rooms(package: Path) -> list[str]:
    """List rooms that need TorchRec or FBGEMM and don't check their versions first."""
    modules = read_package(package)
    needing = {
        module.part
        for module in modules.values()
        for _, name in imported(module)
        if name.split(".")[0] in UPSTREAM and not module.part.startswith((ADAPTERS, PROGRAMS))
    }
    return [
        f"{package.name}/{part}/__init__.py: call require_upstream(): {part} needs TorchRec"
        for part in sorted(needing)
        if "require_upstream()" not in map(ast.unparse, modules[f"{package.name}.{part}"].tree.body)
    ]


def _resolve(name: str, modules: dict[str, Module]) -> Module | None:
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return modules.get(name)


def _is_internal(name: str) -> bool:
    parts = name.split(".")
    if parts[0] not in UPSTREAM:
        return False
    if any(part.startswith("_") and not part.startswith("__") for part in parts):
        return True
    if parts[0] == "fbgemm_gpu":
        return not _is_in(name, PUBLIC_FBGEMM)
    return _is_in(name, INTERNALS)


def _is_in(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)

"""`with_kinds`: sections of a config that come in several kinds."""

from typing import Any

_USUAL_KINDS = {"data": "synthetic", "model": "dlrm"}


def with_kinds(tree: Any) -> Any:
    """A config's tree, whose sections that don't say their kind are of clicks, and of a DLRM."""
    if not isinstance(tree, dict):
        return tree
    named = {
        name: {"kind": kind, **tree[name]}
        for name, kind in _USUAL_KINDS.items()
        if isinstance(tree.get(name), dict)
    }
    return {**tree, **named}

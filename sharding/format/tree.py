"""Names for the leaves of a parameter tree: `flatten` to names joined by "/", `unflatten` back to the same tree."""

from collections.abc import Callable
from typing import Any

from sharding.format import journal

MAX_NAME_LENGTH = 800


def flatten(tree: Any, check: Callable[[str, Any], None]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns (leaves by name, containers by name). `check(name, leaf)` raises for a leaf that cannot be published.

    Containers are the lists, tuples, empty dicts and Nones: names alone do not determine these. Raises ValueError for a
    key that cannot be part of a name.
    """
    leaves, containers = {}, {}

    def visit(node: Any, name: str) -> None:
        kind = type(node)
        if node is None:
            containers[name] = "none"
            return
        for key in node if kind is dict else ():
            if not is_name(key) or "/" in key:
                raise ValueError(
                    f"key {key!r} under {name!r} must have 1 to 200 letters, digits, '_', '-' or '.', and not begin with "
                    "'.': rename it"
                )
        if kind in (list, tuple) or (kind is dict and not node):
            containers[name] = kind.__name__
        if kind in (dict, list, tuple):
            for key, child in node.items() if kind is dict else enumerate(node):
                visit(child, f"{name}/{key}" if name else str(key))
        else:
            if not name:
                raise ValueError(f"params is a {kind.__name__}, not a tree: wrap it in a dict")
            if len(name) > MAX_NAME_LENGTH:
                raise ValueError(f"leaf {name[:80]!r}... has a name of {len(name)} characters: nest less deeply")
            check(name, node)
            leaves[name] = node

    visit(tree, "")
    return leaves, containers


def unflatten(leaves: dict[str, Any], containers: dict[str, str]) -> Any:
    """Returns the tree that `flatten` took apart. Raises CorruptSource if the names do not form a tree."""
    root: dict = {}
    for name in filter(None, containers):
        node = root
        for key in name.split("/"):
            node = node.setdefault(key, {})
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = root
        for key in parents:
            node = node.setdefault(key, {})
            _require(type(node) is dict, f"tensor {name!r} is inside another tensor")
        _require(last not in node, f"tensor {name!r} is also a container")
        node[last] = leaf

    def build(node: Any, name: str) -> Any:
        if type(node) is not dict:
            return node
        children = {key: build(child, f"{name}/{key}" if name else key) for key, child in node.items()}
        kind = containers.get(name, "dict")
        if kind == "dict":
            return children
        if kind == "none":
            _require(not children, f"None at {name!r} has children {sorted(children)}")
            return None
        indices = [str(i) for i in range(len(children))]
        _require(set(children) == set(indices), f"the {kind} at {name!r} has indices {sorted(children)}")
        return {"list": list, "tuple": tuple}[kind](children[i] for i in indices)

    return build(root, "")


def is_name(name: Any) -> bool:
    """Returns True for a name that a leaf can have: plain segments joined by "/"."""
    return isinstance(name, str) and len(name) <= MAX_NAME_LENGTH and journal.is_object_path(f"tensors/{name}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise journal.CorruptSource(message)

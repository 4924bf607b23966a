"""Names for the leaves of a parameter tree: `flatten` to names joined by "/", `unflatten` back to the same tree."""

from collections.abc import Callable
from typing import Any

from sharding.weights.format import journal

MAX_NAME_LENGTH = 800
_require = journal.require


def flatten(tree: Any, check: Callable[[str, Any], None]) -> tuple[dict[str, Any], dict[str, str]]:
    """Flattens a tree of parameters. Returns (leaves by name, kinds of containers by name).

    A name joins the keys by "/". Recorded containers are lists, tuples, empty dicts and Nones, which names of leaves do
    not determine. Calls `check(name, leaf)`, which raises for a bad leaf. Raises ValueError for a key that is not allowed.
    """
    containers = {}

    # It refers to itself: leaves that were its variable would be kept until a garbage collection.
    def visit(node: Any, name: str, leaves: dict) -> None:
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
                visit(child, f"{name}/{key}" if name else str(key), leaves)
        else:
            if not name:
                raise ValueError(f"params is a {kind.__name__}, not a tree of arrays; wrap it in a dict")
            if len(name) > MAX_NAME_LENGTH:
                raise ValueError(f"name {name[:80]!r}... is longer than {MAX_NAME_LENGTH} characters; nest less deeply")
            check(name, node)
            leaves[name] = node

    leaves = {}
    visit(tree, "", leaves)
    return leaves, containers


def unflatten(leaves: dict[str, Any], containers: dict[str, str]) -> Any:
    """Rebuilds the tree of parameters from the two results of `flatten`. Raises CorruptSource if the names do not form a tree."""
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
    """Returns True if `name` may be the name of a leaf: segments of letters, digits, `_`, `-` and `.`, joined by "/"."""
    return isinstance(name, str) and len(name) <= MAX_NAME_LENGTH and journal.is_object_path(f"tensors/{name}")

"""The fields of configs/base.py as text: names, defaults, and comments, read from its source."""

import ast
import io
import pathlib
import runpy
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import config_dict

FILE = pathlib.Path(__file__).resolve().parents[2] / "configs" / "base.py"


def config() -> config_dict.ConfigDict:
    """Returns the default config."""
    return runpy.run_path(str(FILE))["get_config"]()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested dicts as one flat dict with dotted names as keys; an empty dict is a value."""
    found = {}
    for name, value in tree.items():
        is_section = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return found


def names(config: config_dict.ConfigDict) -> list[str]:
    """Returns the dotted names of all fields and sections of a config."""
    paths = [name.split(".") for name in flat(config.to_dict())]
    return sorted({".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)})


def listing() -> str:
    """Returns all fields for `--help`, a line each: `NAME = DEFAULT  # COMMENT`, in the order and with the headings of the file."""
    values = flat(config().to_dict())
    source = FILE.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    (function,) = (x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef) and x.name == "get_config")
    lines, done = [], function.body[0].end_lineno or 0  # the docstring
    for node, fields in _statements(function.body[1:]):
        first, last = node.lineno, node.end_lineno or node.lineno
        lines += [f"  {comments.get(number, '')}".rstrip() for number in range(done + 1, first)]
        comment = "  ".join(comments[number] for number in range(first, last + 1) if number in comments)
        own = [f"  {name} = {values[name]!r}" for name in fields if name in values]
        if len(own) == 1:
            lines.append(f"{own[0]}  {comment}".rstrip())
        else:  # a comment on several fields precedes them
            lines += [*[f"  {comment}"] * bool(comment), *own]
        done = last
    return "\n".join(lines)


def _statements(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, list[str]]]:
    """Yields each statement that sets fields, with their dotted names; some of the names may be of sections."""
    sections = {}  # {variable of the function: name of the section}

    def name_of(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{name_of(node.value)}.{node.attr}".lstrip(".")
        return sections.get(node.id, "") if isinstance(node, ast.Name) else ""

    for node in body:
        if isinstance(node, ast.Assign):
            name = next((name_of(target) for target in node.targets if isinstance(target, ast.Attribute)), "")
            sections |= {target.id: name for target in node.targets if isinstance(target, ast.Name)}
            inner = (call for call in ast.walk(node.value) if isinstance(call, ast.Call))
            yield node, [name, *(f"{name}.{word.arg}" for call in inner for word in call.keywords)]
        elif isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            assert isinstance(call.func, ast.Attribute)  # SECTION.update(...), or c.lock() without keywords
            yield node, [f"{name_of(call.func.value)}.{word.arg}".lstrip(".") for word in call.keywords]

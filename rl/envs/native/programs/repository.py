"""Makes small Python packages with one bug, for the environment "swe_toy".

A package has three modules with functions drawn from FUNCTIONS, and a file of tests. The bug is one change of an operator, a number, a
name, or a key. It makes a visible test fail. The package is a function of a random generator, and is run in this process: no part of it
comes from a model.
"""

import ast
import dataclasses
import random

# {module: {function: (source, arguments of visible tests, arguments of hidden tests)}}; %d is a number drawn for the package.
FUNCTIONS: dict[str, dict[str, tuple[str, list[str], list[str]]]] = {
    "prices": {
        "total": (
            "def total(items):\n    result = 0\n    for item in items:\n        result = result + item['price'] * item['count']\n    return result",
            ["[{'price': 3, 'count': 2}, {'price': 5, 'count': 1}]"],
            ["[]", "[{'price': 7, 'count': 0}]", "[{'price': 4, 'count': 9}]"],
        ),
        "discount": (
            "def discount(price, count):\n    if count >= %d:\n        return price - price // 10\n    return price",
            ["100, %d", "100, %d - 1"],
            ["50, 0", "57, %d + 1", "90, %d"],
        ),
        "cheapest": (
            "def cheapest(items):\n    best = items[0]\n    for item in items[1:]:\n        if item['price'] < best['price']:\n            best = item\n    return best['name']",
            ["[{'name': 'a', 'price': 3}, {'name': 'b', 'price': 2}]"],
            [
                "[{'name': 'a', 'price': 1}]",
                "[{'name': 'x', 'price': 5}, {'name': 'y', 'price': 9}, {'name': 'z', 'price': 4}]",
            ],
        ),
    },
    "words": {
        "initials": (
            "def initials(name):\n    return ''.join(part[0].upper() for part in name.split())",
            ["'ada lovelace'"],
            ["''", "'Kurt Gödel'", "'a b c'"],
        ),
        "longest": (
            "def longest(words):\n    best = ''\n    for word in words:\n        if len(word) > len(best):\n            best = word\n    return best",
            ["['a', 'abc', 'ab', 'xyz']"],
            ["[]", "['same', 'size']", "['a', 'bb']"],
        ),
        "pad": (
            "def pad(text, width=%d):\n    if len(text) >= width:\n        return text\n    return text + '.' * (width - len(text))",
            ["'ab'", "'x' * %d"],
            ["''", "'abcdefghijklmnop'", "'ab', 3"],
        ),
    },
    "tables": {
        "column": (
            "def column(rows, number):\n    return [row[number - 1] for row in rows if len(row) >= number]",
            ["[[1, 2], [3, 4]], 2", "[[1], [3, 4]], 2"],
            ["[], 1", "[[5, 6, 7]], 1", "[[5], [6, 7]], 1"],
        ),
        "counts": (
            "def counts(values):\n    found = {}\n    for value in values:\n        found[value] = found.get(value, 0) + 1\n    return found",
            ["['a', 'b', 'a']"],
            ["[]", "[1, 1, 1]"],
        ),
        "window": (
            "def window(values, size=%d):\n    return [sum(values[i : i + size]) for i in range(len(values) - size + 1)]",
            ["[1, 2, 3, 4, 5, 6, 7, 8, 9]"],
            ["[]", "[1, 2, 3], 2", "[4, 4, 4, 4], 1"],
        ),
    },
}
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.GtE: ast.Gt, ast.Gt: ast.GtE, ast.Lt: ast.LtE, ast.FloorDiv: ast.Mult,
}  # fmt: skip
MAX_DRAWS = 64


@dataclasses.dataclass(frozen=True)
class Made:
    """A package with a bug."""

    files: dict[str, str]  # with the bug and the visible tests
    path: str  # of the module with the bug
    wrong: str  # the line with the bug
    right: str
    hidden: list[str]  # assertions


def make(rng: random.Random) -> Made:
    """Returns a package drawn by `rng`."""
    for _ in range(MAX_DRAWS):
        sources, visible, hidden = {}, [], []
        for module, functions in FUNCTIONS.items():
            chosen = sorted(rng.sample([*functions], 2))
            parts = []
            for name in chosen:
                source, shown, kept = functions[name]
                number = str(rng.randint(2, 6))
                source, shown, kept = (
                    source.replace("%d", number),
                    [text.replace("%d", number) for text in shown],
                    [text.replace("%d", number) for text in kept],
                )
                # Normal form, in which a bug changes one line.
                parts.append(ast.unparse(ast.parse(source)))
                function = _compiled(source)[name]
                for arguments, tests in ((shown, visible), (kept, hidden)):
                    tests += [f"assert {name}({text}) == {eval(f'f({text})', {'f': function})!r}" for text in arguments]
            sources[f"shop/{module}.py"] = "\n\n\n".join(parts) + "\n"
        path = rng.choice([*sources])
        if broken := _with_bug(sources[path], [*visible, *hidden], rng):
            imports = "".join(f"from {path[:-3].replace('/', '.')} import *\n" for path in sources)
            tests = f"{imports}\n\ndef test_all():\n" + "".join(f"    {test}\n" for test in visible)
            right, wrong = next(
                (a, b) for a, b in zip(sources[path].splitlines(), broken.splitlines(), strict=True) if a != b
            )
            files = {**sources, path: broken, "shop/__init__.py": "", "test_shop.py": tests}
            return Made(files, path, wrong, right, [*visible, *hidden])
    raise AssertionError("no bug makes a visible test fail")


def _compiled(source: str) -> dict:
    namespace: dict = {}
    exec(source, namespace)
    return namespace


def _with_bug(source: str, tests: list[str], rng: random.Random) -> str:
    """Returns the source with one line changed so that a test of it fails; "" if the change drawn has no effect."""
    tree = ast.parse(source)
    places = [node for node in ast.walk(tree) if _is_place(node)]
    node = rng.choice(places)
    if isinstance(node, ast.Constant):
        node.value = (
            node.value + 1 if isinstance(node.value, int) else {"price": "count", "count": "price"}[str(node.value)]
        )
    elif isinstance(node, ast.Compare):
        node.ops = [SWAPS[type(node.ops[0])]()]
    else:
        assert isinstance(node, ast.BinOp)
        node.op = SWAPS[type(node.op)]()
    broken = ast.unparse(tree)
    broken = "\n\n\n".join(ast.unparse(part) for part in ast.parse(broken).body) + "\n"
    changed = [a != b for a, b in zip(source.splitlines(), broken.splitlines(), strict=False)]
    if len(source.splitlines()) != len(broken.splitlines()) or sum(changed) != 1:
        return ""
    wrong = broken.splitlines()[changed.index(True)]
    if broken.count(wrong) != 1:  # an edit must name it
        return ""
    namespace, own = _compiled(broken), {name.split("(")[0] for name in broken.split("def ")[1:]}
    for test in tests:
        if test.removeprefix("assert ").split("(")[0] in own:
            try:
                exec(test, namespace)
            except Exception:  # of a bug that we made
                return broken
    return ""


def _is_place(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int or node.value in ("price", "count")
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    return isinstance(node, ast.BinOp) and type(node.op) in SWAPS

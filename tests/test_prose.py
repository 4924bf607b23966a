"""Plain English holds by itself: wordings that readers stumbled over are counted, and a count may only fall.

Read are docstrings, comments, and the texts of errors and help; of Markdown files, every line. CONTRIBUTING.md has the
rules. `python -m tests.test_prose [PATH...]` prints every place.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRODUCT = ("rl", "inference", "models", "sharding", "configs", "bench")
PREPOSITIONS = "Of|For|By|From|With|At|In|On|As|After|Without|Before|Once|To|What|Why|Whether|How|Where|Who|Which|When"
PATTERNS = {
    "what as a noun": r"\bwhat(ever)?\b",
    "a person for a component": r"\b(no|some|any|every)body\b|\bwhoever\b",
    "who without a person": r"(?<!those )(?<!people )(?<!user )(?<!users )\bwho (asks|is|has|comes|only|waits|can|reads|hashes|gains)\b",
    "code that talks": r"\b(say|says|said|tell|tells|told)\b",
    "code that lies": r"\b(lie|lies|lay) (in|at|on|by|as|there|beside|behind)\b",
    "is no": r"\b(is|are) no (?!longer\b|more\b|less\b|such\b)",
    "behind, beside": r"\b(behind|beside)\b",
    "at once": r"\bat once\b",
    "is there": r"\b(is|are) there\b(?! (a|an|any)\b)",
    "the affair of": r"\b(the affair of|is news|that are some|of it is)\b",
}
FIRST_WORD = "a docstring that starts with a preposition or a question word"
BUDGETS = dict.fromkeys([FIRST_WORD, *PATTERNS], 9)


def texts(path):
    """Returns (line number, kind, text) of all prose in a file."""
    source = path.read_text()
    if path.suffix == ".md":
        plain = re.sub(r"```.*?```", lambda m: "\n" * m.group().count("\n"), source, flags=re.S)
        return [(n, "line", re.sub(r"`[^`]*`", "", line)) for n, line in enumerate(plain.splitlines(), 1)]
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], "comment", token.string))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                found.append((node.body[0].lineno, "docstring", text))
        elif isinstance(node, ast.Raise) and node.exc is not None:
            strings = [n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            found.append((node.lineno, "error", " ".join(strings)))
        elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            found.append((node.value.lineno, "help", str(node.value.value)))
    return found


def places(paths):
    """Returns {pattern: places}, each place "file:line: the words around it"."""
    found = {name: [] for name in BUDGETS}
    for path in paths:
        for line, kind, text in texts(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            if kind == "docstring" and re.match(rf"({PREPOSITIONS})\b", text):
                found[FIRST_WORD].append(f"{where}: {text.splitlines()[0][:80]}")
            for name, pattern in PATTERNS.items():
                for match in re.finditer(pattern, text, re.I):
                    around = text[max(0, match.start() - 40) : match.end() + 40].replace("\n", " ")
                    found[name].append(f"{where}: {around}")
    return found


def files(*tops):
    """Returns the Python and Markdown files below folders of the checkout, and files named directly."""
    out = []
    for top in tops:
        path = ROOT / top
        out += [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
    return [path for path in out if path.suffix == ".md" or "fixtures" not in path.parts]


@pytest.mark.parametrize(
    "tops", [(*PRODUCT, "docs", *sorted(path.name for path in ROOT.glob("*.md"))), ("tests",)], ids=["product", "tests"]
)
def test_wordings_that_strangers_stumble_over_are_rare(tops):
    found = places([path for path in files(*tops) if path.name != "test_prose.py"])
    over = {name: hits for name, hits in found.items() if len(hits) > BUDGETS[name]}
    assert not over, {name: (len(hits), hits[:5]) for name, hits in over.items()}


def undocumented(paths):
    """Returns the public functions and methods without a docstring, except `main`, `close`, and overrides."""
    trees = {path: ast.parse(path.read_text()) for path in paths}
    nodes = [(path, node) for path, tree in trees.items() for node in (tree, *tree.body)]
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}

    def functions(node):
        return [x for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]

    def inherited(node, below=()):
        names = {ast.unparse(base).rpartition(".")[2] for base in node.bases} - {*below, node.name}
        bases = [classes[name] for name in names if name in classes]
        own = {x.name for base in bases for x in functions(base)}
        return own.union(*(inherited(base, (*below, node.name)) for base in bases))

    found = []
    for path, node in nodes:
        is_class = isinstance(node, ast.ClassDef)
        if not isinstance(node, ast.ClassDef | ast.Module) or (is_class and node.name.startswith("_")):
            continue
        for x in functions(node):
            is_stub = ast.unparse(x.body[0]) == "..."
            exempt = is_stub or x.name.startswith("_") or x.name in ("main", "close")
            exempt |= is_class and x.name in inherited(node)
            if not exempt and not ast.get_docstring(x):
                found.append(f"{path.relative_to(ROOT)}:{x.lineno}: {x.name}")
    return found


def test_public_functions_have_docstrings():
    assert not undocumented([path for path in files("rl", "inference", "models", "sharding") if path.suffix == ".py"])


if __name__ == "__main__":
    for pattern, hits in places(files(*(sys.argv[1:] or PRODUCT))).items():
        print(f"{pattern}: {len(hits)}", *hits, sep="\n    ")

"""The walls of the house: arrows between folders and rooms point down, rooms import no command, no file hides another's module.

Everything is read from the syntax tree, imports inside functions included; nothing is executed. Each rule is also run on
a small tree that breaks it.
"""

import ast
import functools
import importlib.metadata
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS = ("rl", "inference", "models", "sharding")  # from the top
PACKAGES = (*LAYERS, "configs")
# The folders directly in a package, from the top: each imports those after it.
ROOMS = {
    "rl": ("swarm", "trust", "experiment", "evaluation", "envs", "learning", "protocol"),
    "sharding": ("mesh", "weights", "system"),
}
MAX_FILES = 14  # in one folder: more is a list to search, not a room
MAX_COMMANDS = 16  # files directly in rl, which people list by `python -m rl.`
MAX_LINES = 550  # in one file: beyond, it has two nouns
NO_ENVIRONMENT = (
    "rl.learning.learner.train_step",
    "rl.swarm.orchestrator.orchestrator",
    "rl.learning.algorithms.losses",
    "rl.learning.batch.packing",
)
ACCELERATED = ("jax", "jaxlib", "flax", "optax", "orbax", "jetstream", "torch", "ml_dtypes", "tensorstore")


@functools.cache
def modules(root, packages=PACKAGES):
    """Returns {dotted name: file} of the given packages under `root`."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(root, name):
    """Returns the imports of a module as dotted names: `from inference import client` gives inference and inference.client."""
    path = modules(root, (*PACKAGES, "tests"))[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            found.add(str(ast.literal_eval(node.args[0])) if isinstance(node.args[0], ast.Constant) else "?")
    return frozenset(found)


def upward(root):
    """Every import that points up, sideways to `configs`, or nowhere that can be read."""
    wrong = []
    for name in modules(root):
        package = name.split(".")[0]
        below = LAYERS[LAYERS.index(package) :] if package in LAYERS else ()
        for target in sorted(imports(root, name)):
            top = target.split(".")[0]
            allowed = top in below or (package == top == "configs")
            if target == "?" or (top in PACKAGES and not allowed):
                wrong.append(f"{name} imports {target}")
    return wrong


def edges(root):
    """Returns {module: modules of ours that it imports}; of a package and a module in it, the module alone."""
    ours = modules(root)
    found = {}
    for name in ours:
        hits = {target for target in imports(root, name) if target in ours and target != name}
        found[name] = {hit for hit in hits if not any(other.startswith(hit + ".") for other in hits)}
    return found


def folder_edges(root):
    """Returns {folder: folders that files in it import}."""
    folder = {name: str(path.parent) for name, path in modules(root).items()}
    found = {name: set() for name in folder.values()}
    for name, targets in edges(root).items():
        found[folder[name]] |= {folder[target] for target in targets} - {folder[name]}
    return found


def room(root, name):
    """Returns the folder of a module directly in its package, or "" for a file directly in it."""
    parts = modules(root)[name].relative_to(root).parts
    return parts[1] if len(parts) > 2 else ""


def out_of_rooms(root):
    """Returns every import of a file in a room of `ROOMS` that points to a room above it, or to a command of its package."""
    wrong = []
    for name, targets in edges(root).items():
        package, mine = name.split(".")[0], room(root, name)
        order = ROOMS.get(package, ())
        for target in sorted(targets) if mine in order else ():
            its = room(root, target)
            if target.startswith(f"{package}.") and (its not in order or order.index(its) < order.index(mine)):
                wrong.append(f"{name} imports {target}")
    return wrong


def rings(graph):
    """Returns the sets of nodes that reach each other, each sorted."""

    def below(node):
        seen, todo = set(), [node]
        while todo:
            for target in graph.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return frozenset(seen)

    reach = {node: below(node) for node in graph}
    return sorted({tuple(sorted(m for m in reach[n] if n in reach.get(m, ()))) for n in graph if n in reach[n]})


def imported_commands(root):
    """Returns every import of a `__main__` file, from the product or the tests."""
    names = modules(root, (*PACKAGES, "tests"))
    return [
        f"{name} imports {target}"
        for name in names
        for target in sorted(imports(root, name))
        if target.split(".")[-1] == "__main__"
    ]


def bench_in_tests(root):
    """Returns every import of `bench` from the tests of something else."""
    return [
        f"{name} imports {target}"
        for name in modules(root, ("tests",))
        for target in sorted(imports(root, name))
        if target.split(".")[0] == "bench" and not name.startswith("tests.bench.")
    ]


def reached(root, name):
    """Everything `name` loads: our modules with the packages they are in, and foreign names, with the way to each."""
    ways, todo = {name: name}, [name]
    while todo:
        current = todo.pop()
        for target in sorted(imports(root, current)):
            parts = target.split(".")
            for step in (".".join(parts[:i]) for i in range(1, len(parts) + 1)):
                if step not in ways and (step in modules(root) or step.split(".")[0] not in PACKAGES):
                    ways[step] = f"{ways[current]} -> {step}"
                    todo += [step] if step in modules(root) else []
    return ways


def accelerated(root, name):
    return [way for target, way in reached(root, name).items() if target in ACCELERATED]


def clashes(root):
    """Our files whose name is that of a stdlib module or of something installed."""
    foreign = set(sys.stdlib_module_names) | installed()
    return [name for name in modules(root) if name.split(".")[-1] in foreign or name.split(".")[0] in foreign]


@functools.cache
def installed():
    names = set()
    for top, distributions in importlib.metadata.packages_distributions().items():
        if any(distribution != "intellax" for distribution in distributions):
            names.add(top)
    return frozenset(names)


# ---- the repository --------------------------------------------------------------------------------------------------


def test_imports_point_down():
    assert len(modules(ROOT)) > 40
    assert upward(ROOT) == []


def test_configs_are_numbers_only():
    for name, path in modules(ROOT).items():
        if name.split(".")[0] == "configs":
            tops = {target.split(".")[0] for target in imports(ROOT, name)}
            assert tops <= {"configs", "ml_collections", "difflib"}, path


JAX_FREE = (
    *(name for name in modules(ROOT) if name.startswith("rl.envs")),
    "rl.worker",
    "rl.protocol.lease",
    "inference.client",
    "inference.rollouts.rollout",
    "inference.server.web",
    "models.text.tokenizer",
    "sharding.weights.format.delta",
    "sharding.weights.format.manifest",
)


@pytest.mark.parametrize("name", JAX_FREE)
def test_no_jax_is_reached_from(name):
    assert accelerated(ROOT, name) == []


def test_the_documented_jax_free_files_are_those_checked():
    text = (ROOT / "docs" / "architecture.md").read_text()
    sentence = text[: text.index("import no JAX")].rsplit("\n\n", 1)[1]
    documented = {piece for piece in sentence.split("`") if "/" in piece}
    checked = {name.replace(".", "/") for name in JAX_FREE}
    assert documented and {piece.removesuffix(".py").rstrip("/") for piece in documented} <= checked


@pytest.mark.parametrize("name", NO_ENVIRONMENT)
def test_no_environment_is_reached_from(name):
    assert not [way for target, way in reached(ROOT, name).items() if target.startswith("rl.envs")]


def test_no_file_has_the_name_of_another_module():
    assert {"jax", "numpy", "tokenizers"} <= installed()  # the list is not empty for some other reason
    assert clashes(ROOT) == []
    assert not (ROOT / "benchmarks").exists()  # a package that JetStream's wheel installs


def test_folders_point_down():
    assert rings(folder_edges(ROOT)) == []


def test_rooms_point_down():
    assert out_of_rooms(ROOT) == []


@pytest.mark.parametrize("package", ROOMS)
def test_the_rooms_are_those_of_the_tree_and_of_the_page(package):
    folders = {room(ROOT, name) for name in modules(ROOT) if name.startswith(f"{package}.")} - {""}
    assert folders == {*ROOMS[package]}
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert re.findall(rf"^\| `{package}/(\w+)` \|", page, re.MULTILINE) == [*ROOMS[package]]


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"rl.trust.a": "from rl.swarm import b", "rl.swarm.b": ""}, ["rl.trust.a imports rl.swarm.b"]),
        ({"rl.envs.a.b": "from rl import plan", "rl.plan": ""}, ["rl.envs.a.b imports rl.plan"]),
        ({"rl.learning.a": "from rl.other import b", "rl.other.b": ""}, ["rl.learning.a imports rl.other.b"]),
        (
            {"sharding.system.a": "def f():\n    import sharding.weights.relay.b", "sharding.weights.relay.b": ""},
            ["sharding.system.a imports sharding.weights.relay.b"],
        ),
        ({"rl.swarm.a": "from rl.trust import b", "rl.trust.b": "", "rl.train": "from rl.swarm import a"}, []),
        ({"rl.envs.a": "from rl.envs.b import c\nfrom inference import d", "rl.envs.b.c": "", "inference.d": ""}, []),
    ],
)
def test_an_import_out_of_a_room_is_seen(tmp_path, files, wrong):
    assert out_of_rooms(tree(tmp_path, files)) == wrong


def test_no_two_files_import_each_other():
    assert rings(edges(ROOT)) == []


def test_commands_are_imported_by_nothing():
    assert imported_commands(ROOT) == []


def test_tests_import_no_benchmark():
    assert bench_in_tests(ROOT) == []


def test_folders_and_files_are_of_a_readable_size():
    files = modules(ROOT).values()
    folders = {path.parent: len(list(path.parent.glob("*.py"))) for path in files}
    limits = {ROOT / "rl": MAX_COMMANDS}
    assert {folder: n for folder, n in folders.items() if n > limits.get(folder, MAX_FILES)} == {}
    assert {path: n for path in files if (n := len(path.read_text().splitlines())) > MAX_LINES} == {}


def test_tests_mirror_the_tree():
    tests = {path.relative_to(ROOT / "tests").parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert [folder.as_posix() for folder in tests if not (ROOT / folder).is_dir()] == []


# ---- the rules, on trees that break them -----------------------------------------------------------------------------


def tree(root, files):
    """Files by dotted name, with the packages around them."""
    for name, text in files.items():
        path = root / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(root).parents:
            if parent != pathlib.Path("."):
                (root / parent / "__init__.py").touch()
    return root


def rings_of_files(root):
    return rings(edges(root))


def rings_of_folders(root):
    return [
        tuple(pathlib.Path(folder).relative_to(root).as_posix() for folder in ring)
        for ring in rings(folder_edges(root))
    ]


def accelerated_a(root):
    return accelerated(root, "rl.a")


FOLDERS = {"rl.a.x": "from rl.b import y", "rl.b.y": "", "rl.b.z": "from rl.a import w", "rl.a.w": ""}
DOWN = {
    "rl.a": "from inference import b\nfrom . import c\nimport os, models.d",
    "rl.c": "from sharding import e",
    "inference.b": "from .f import g",
    "models.d": "import sharding.e",
    "configs.x": "from configs import base",
}
CLEAN = {"rl.a": "import numpy\nfrom models import leaf", "models.leaf": "import json", "rl.b": "import jax"}


@pytest.mark.parametrize(
    ("rule", "files", "found"),
    [
        (upward, {"models.a": "import rl.b"}, ["models.a imports rl.b"]),
        (upward, {"models.a": "from rl import b"}, ["models.a imports rl", "models.a imports rl.b"]),
        (upward, {"sharding.a": "def f():\n    from models import b"}, ["sharding.a imports models", "sharding.a imports models.b"]),
        (upward, {"inference.a": "if True:\n    import rl"}, ["inference.a imports rl"]),
        (upward, {"models.deep.a": "import inference"}, ["models.deep.a imports inference"]),
        (upward, {"rl.a": "import configs.base"}, ["rl.a imports configs.base"]),
        (upward, {"models.a": "import importlib\nimportlib.import_module('rl.b')"}, ["models.a imports rl.b"]),
        (upward, {"models.a": "import importlib\nimportlib.import_module(name)"}, ["models.a imports ?"]),
        (upward, DOWN, []),
        (rings_of_files, FOLDERS, []),
        (rings_of_folders, FOLDERS, [("rl/a", "rl/b")]),
        (
            rings_of_files,
            {"rl.a": "from rl import b", "rl.b": "def f():\n    from rl.c import d", "rl.c": "import rl.a"},
            [("rl.a", "rl.b", "rl.c")],
        ),
        (imported_commands, {"rl.ledger.__main__": "", "rl.a": "import rl.ledger.__main__ as m"}, ["rl.a imports rl.ledger.__main__"]),
        (imported_commands, {"rl.b.__main__": "", "tests.a": "from rl.b import __main__"}, ["tests.a imports rl.b.__main__"]),
        (bench_in_tests, {"tests.rl.test_a": "import bench.cheats"}, ["tests.rl.test_a imports bench.cheats"]),
        (accelerated_a, {"rl.a": "import jax"}, ["rl.a -> jax"]),
        (accelerated_a, {"rl.a": "def f():\n    import jax.numpy as jnp"}, ["rl.a -> jax"]),
        (accelerated_a, {"rl.a": "from models.b import thing", "models.b": "import flax"}, ["rl.a -> models.b -> flax"]),
        (accelerated_a, {"rl.a": "import models.sub.b", "models.sub.b": "", "models.sub.__init__": "import jax"}, ["rl.a -> models.sub -> jax"]),
        (accelerated_a, {"rl.a": "from . import b", "rl.b": "from .c import d", "rl.c": "import optax"}, ["rl.a -> rl.b -> rl.c -> optax"]),
        (accelerated_a, CLEAN, []),
        (clashes, {"rl.queue": "", "models.tokenizers": "", "sharding.mesh": ""}, ["models.tokenizers", "rl.queue"]),
    ],
)  # fmt: skip
def test_each_rule_finds_what_breaks_it_alone(tmp_path, rule, files, found):
    assert sorted(rule(tree(tmp_path, files))) == found

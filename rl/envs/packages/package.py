"""Environments of other frameworks as installed on this machine, each in an interpreter of its own: by name, with a digest of their code.

A name is "FRAMEWORK:TARGET", or "FRAMEWORK:TARGET@VERSION":

| framework | target | interface |
|---|---|---|
| verifiers | a package, such as `wordle` | `load_environment` of verifiers 0.1 to 0.3, or a `Taskset` of 0.3 and 0.4 |
| openenv | module:Class | `reset`, `step`, and `state` of OpenEnv |
| plain | module:function | returns an object with `tasks`, and `run(task, base_url)`, which returns its scores |

`python -m rl.envs install` (installation.py) writes a record for each name, which has the interpreter. Episodes run in rl/envs/foreign.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from rl.envs.interface import environment
from rl.protocol import user_code

FRAMEWORKS = ("verifiers", "openenv", "plain")
FOLDER = "INTELLAX_ENVIRONMENTS"  # variable that replaces ~/.cache/intellax/environments
ADAPTERS = pathlib.Path(__file__).parents[1] / "foreign" / "child"  # code that runs in the other interpreter


@dataclasses.dataclass(frozen=True)
class Package:
    """An environment of another framework, as installed."""

    name: str  # in configs, such as "verifiers:wordle@0.1.4"
    adapter: str  # file of ADAPTERS, without the suffix
    python: str  # path of the interpreter
    version: str  # of the interpreter, such as "3.11"
    folders: tuple[str, ...]  # in which the interpreter finds packages, in its order
    requirements: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()  # further folders to import from
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the process
    kind: str = "replayed"  # as in `environment.KINDS`

    @property
    def target(self) -> str:
        """The package or function that the adapter loads."""
        return split(self.name)[1]


def split(name: str) -> tuple[str, str, str]:
    """Returns (framework, target, version or "") of a name. Hub names such as owner/wordle lose the owner. Raises ValueError for others."""
    framework, _, rest = name.partition(":")
    target, _, version = rest.partition("@")
    target = target.rpartition("/")[2] if framework == "verifiers" else target
    is_target = user_code.is_name(target) if framework in ("openenv", "plain") else re.fullmatch(r"[\w.-]+", target)
    if framework not in FRAMEWORKS or not is_target:
        forms = "verifiers:PACKAGE[@VERSION], openenv:MODULE:CLASS, or plain:MODULE:FUNCTION"
        raise ValueError(f"{name!r} does not name an environment of another framework; write {forms}")
    return framework, target.replace("-", "_") if framework == "verifiers" else target, version


def folder() -> pathlib.Path:
    """Returns the folder of this user's records and interpreters."""
    return pathlib.Path(os.environ.get(FOLDER) or "~/.cache/intellax/environments").expanduser()


def record_file(name: str) -> pathlib.Path:
    """Returns the file in which an installation of this name is recorded."""
    return folder() / f"{re.sub('[^A-Za-z0-9_.@-]+', '_', name)}.json"


def names() -> list[str]:
    """Returns the names of the environments that are installed on this machine."""
    found = []
    for file in folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of another program, or of a broken record
            found.append(str(json.loads(file.read_text())["name"]))
    return sorted(found)


def find(name: str) -> Package:
    """Returns the environment with this name. Raises ValueError if it is not installed, with the command that installs it."""
    split(name)
    try:
        fields: dict[str, Any] = json.loads(record_file(name).read_text())
        values: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in fields.items()}
        found = Package(**values)
    except FileNotFoundError:
        raise ValueError(f"environment {name!r} is not installed; run python -m rl.envs install {name}") from None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{record_file(name)} is not a record of an installation ({error}); install it again"
        ) from error
    if not os.access(found.python, os.X_OK):
        raise ValueError(f"environment {name!r} needs {found.python}, which is gone; install it again")
    return found


def build(framework: str, target: str, /, *, seed: int = 0, **options: Any) -> environment.Environment:
    """Builds the environment FRAMEWORK:TARGET. `options` go to its own loader, in its own process, which also makes its tasks."""
    name = f"{framework}:{target}"
    package = find(name)

    def make_task(index: int, split: str) -> environment.Task:
        # The adapter finds the task by its number; the text stands for the prompt, which only the other process knows.
        text = f"{name}, {split} task {index}"
        return environment.Task(name, index, split, ({"role": "user", "content": text},), answer="")

    async def play(task: environment.Task, model: Any) -> dict[str, float]:
        raise ValueError(f"environment {name} runs in its own interpreter; play it by rl.envs.foreign.host")

    json.dumps(options)  # the other process gets them as JSON
    foreign = Foreign(package, options, seed)
    return environment.Environment(name, make_task, play=play, kind=package.kind, foreign=foreign)


BUILDERS = {framework: functools.partial(build, framework) for framework in FRAMEWORKS}


@dataclasses.dataclass(frozen=True)
class Foreign:
    """The field `foreign` of an environment that runs in its own interpreter."""

    package: Package
    options: Mapping[str, Any]
    seed: int


def absolute_paths(value: Any) -> Iterator[str]:
    """Yields the texts in options, or in a part of them, that are absolute paths, whether or not there is such a file."""
    if isinstance(value, str):
        yield from [value] * os.path.isabs(value)
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from absolute_paths(part)


def digest(package: Package, options: Mapping[str, Any], data: Iterable[tuple[str, pathlib.Path]] = ()) -> str:
    """Returns the SHA-256 (hex) over the code of an installed environment, and over the files `data` that its options name.

    It covers its files, the versions of packages that it requires, its options, the interpreter's minor version, and the adapter. Raises
    ValueError if its files are gone.
    """
    own, versions = _code(package)
    adapters = [(file.name, file) for file in sorted(ADAPTERS.glob("*.py"))]
    texts = [json.dumps(options, sort_keys=True), package.version, package.adapter, package.kind, *versions]
    return user_code.digest([*adapters, *own, *data], *texts)


def _code(package: Package) -> tuple[list[tuple[str, pathlib.Path]], list[str]]:
    """Returns (files of an environment by name, `name==version` of the packages that it requires)."""
    module = package.target.partition(":")[0].partition(".")[0]
    places = [pathlib.Path(place) for place in (*package.paths, *package.folders)]
    every = metadata.distributions(path=[*package.folders])
    found = {_plain(one.metadata["Name"]): one for one in every if "Name" in one.metadata}
    owner = next((one for one in found.values() if _provides(one, module)), None)
    stated = [*package.requirements, *(owner and owner.requires or ())]
    required = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in stated]
    versions = [f"{name}=={found[name].version}" for name in sorted({*map(_plain, required)} & found.keys())]
    for place in places:
        for top in (place / module, place / f"{module}.py"):
            if top.exists():
                return [(f"{top.name}/{name}", file) for name, file in user_code.files_in(top).items()], versions
    raise ValueError(f"environment {package.name!r} has no module {module} in {package.python}; install it again")


def _provides(distribution: metadata.Distribution, module: str) -> bool:
    tops = (str(file).partition("/")[0] for file in distribution.files or ())
    return any(top.removesuffix(".py") == module for top in tops)


def _plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()

"""Manifests of environment packages: `[project]` and `[tool.intellax.env]` of a pyproject.toml, and the package as a wheel.

    [project.entry-points."intellax.environments"]
    sort_letters = "sort_letters:build"

    [tool.intellax.env]
    kind = "pure"                 # as in rl/envs/interface/environment.py
    tags = ["letters"]            # may be absent
    options = { max_length = 4 }  # with which it is checked; may be absent

The name of the environment is that of its entry point, of which a package has one. Its digest covers the code of one top-level package.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from typing import Any

from rl.envs.catalog import catalog
from rl.envs.interface import environment
from rl.envs.packages import installation

MAX_UNPACKED_BYTES = 2**30
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!-]{0,63}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The parts of a pyproject.toml that the hub uses."""

    name: str  # of the environment
    version: str
    function: str  # "module:function"
    kind: str
    summary: str
    tags: tuple[str, ...]
    options: Mapping[str, Any]
    requires: tuple[str, ...]


def read(folder: str | os.PathLike) -> Manifest:
    """Returns the manifest in a folder. Raises ValueError for a missing or malformed one, with the field."""
    file = pathlib.Path(folder) / "pyproject.toml"
    try:
        found = tomllib.loads(file.read_text())
        project, own = found["project"], found["tool"]["intellax"]["env"]
        entries = [*project["entry-points"][catalog.GROUP].items()]
        ((name, function),) = entries
        made = Manifest(
            name=name,
            version=project["version"],
            function=function,
            kind=own["kind"],
            summary=project.get("description", ""),
            tags=tuple(own.get("tags", ())),
            options=own.get("options", {}),
            requires=tuple(project.get("dependencies", ())),
        )
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; make a package with `python -m rl.envs init NAME`") from None
    except KeyError as error:
        needs = f'it needs project.version, project.entry-points."{catalog.GROUP}", and tool.intellax.env.kind'
        raise ValueError(f"{file} has no {error}; {needs}") from None
    except (ValueError, TypeError, AttributeError) as error:
        found = f"{file} is not the manifest of one environment: {error}"
        raise ValueError(f'{found}; name one function in project.entry-points."{catalog.GROUP}"') from None
    check(made, str(file))
    return made


def check(found: Manifest, where: str) -> None:
    """Raises ValueError for a field with a wrong value. `where` names the file."""
    for field, is_good, rule in (
        ("name", _NAME.fullmatch(found.name), "a lower-case identifier of at most 64 characters"),
        ("version", VERSION.fullmatch(str(found.version)), "a version such as 0.1.0"),
        ("kind", found.kind in environment.KINDS, f"one of {', '.join(environment.KINDS)}"),
        ("function", re.fullmatch(r"[\w.]+:\w+", str(found.function)), "module:function"),
        ("options", isinstance(found.options, Mapping), "a table"),
    ):
        if not is_good:
            raise ValueError(f"{where}: {field} is {getattr(found, field)!r}, and must be {rule}; correct it")
    if found.name in catalog.ENVS:
        raise ValueError(f"{where}: the environment {found.name} is shipped with Intellax; choose another name")


def located(found: Manifest, root: pathlib.Path) -> str:
    """Returns "file.py:function" of a manifest's function beneath `root`, which is a source folder or an unpacked wheel."""
    module, _, function = found.function.partition(":")
    for place in (root, root / "src"):
        base = place.joinpath(*module.split("."))
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                return f"{file.resolve()}:{function}"
    raise ValueError(f"{root} has no module {module}, which the manifest names; correct the entry point")


def digest(found: Manifest, root: pathlib.Path, options: Mapping[str, Any]) -> str:
    """Returns the digest of the environment with these options, equal to `catalog.digest` once the package is installed."""
    return catalog.digest(*catalog.locate(located(found, root), dict(options)))


def build(folder: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Builds the wheel of a package into the folder `out` and returns its path. Raises ValueError if pip fails.

    The build backend of pyproject.toml is used as installed here; if it is not, pip downloads it. Timestamps are fixed.
    """
    backend = (
        tomllib.loads((folder / "pyproject.toml").read_text())
        .get("build-system", {})
        .get("build-backend", "setuptools")
    )
    is_here = importlib.util.find_spec(backend.partition(".")[0]) is not None
    options = "-m pip wheel --quiet --disable-pip-version-check --no-deps -w".split()
    command = [sys.executable, *options, str(out)]
    command += ["--no-build-isolation"] * is_here + [str(folder.resolve())]
    failed = f"pip cannot build {folder}; correct its pyproject.toml"
    installation.run(command, failed, {**os.environ, "SOURCE_DATE_EPOCH": "315532800"})
    (wheel,) = out.glob("*.whl")
    return wheel


def unpack(wheel: pathlib.Path, out: pathlib.Path) -> None:
    """Unpacks a wheel. Raises ValueError for one that is damaged, too large, or of several top-level packages."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            tops = {name.partition("/")[0] for name in archive.namelist()}
            code = {top for top in tops if not top.endswith((".dist-info", ".data"))}
            if len(code) != 1 or any(top.endswith(".data") for top in tops):
                found = f"{wheel.name} has the top-level names {', '.join(sorted(tops))}"
                raise ValueError(f"{found}; put all code of the environment in one package")
            if sum(one.file_size for one in archive.infolist()) > MAX_UNPACKED_BYTES:
                raise ValueError(f"{wheel.name} has more than {MAX_UNPACKED_BYTES} bytes; put large data elsewhere")
            archive.extractall(out)
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise ValueError(f"{wheel} is not a wheel: {error}; build or download it again") from None

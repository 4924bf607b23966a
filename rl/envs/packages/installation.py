"""Installs an environment of another framework: makes a virtual environment for its requirements, and records it by name.

1. One virtual environment serves all names with the same requirements and interpreter; its folder is named by their digest. A framework
   takes 500 to 900 MB and about 100 s, with pip.
2. Without requirements, the given interpreter is used as it is.
3. The installed package is imported once, to choose the adapter: verifiers has two interfaces.
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rl.envs.interface import environment
from rl.envs.packages import package as package_lib
from sharding.system import atomic_file

_DESCRIBE = (
    "import json, sys; print(json.dumps([sys.executable, '%d.%d' % sys.version_info[:2], [p for p in sys.path if p]]))"
)
_KIND = "import sys, importlib; sys.path += sys.argv[2:]; m = importlib.import_module(sys.argv[1]); print('v0' if hasattr(m, 'load_environment') else 'v1')"


def install(
    name: str,
    requirements: Sequence[str] = (),
    *,
    python: str = sys.executable,
    paths: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    kind: str = "replayed",
) -> package_lib.Package:
    """Installs the environment `name` (package.py has the forms), records it, and returns the record. Blocks for minutes.

    Args:
      name: as in configs.
      requirements: for pip. Without any, a name with a version requires itself, and any other name is in `python` already.
      python: interpreter of the virtual environment.
      paths: further folders to import from.
      variables: environment variables of its process, such as the place of its data.
      kind: "replayed", or "recorded" for an environment that depends on a clock or the web.

    Raises ValueError if pip fails, or the package cannot be imported. Then no older installation is left under this name either.
    """
    framework, target, version = package_lib.split(name)
    if kind not in environment.KINDS[1:]:
        raise ValueError(f"kind = {kind!r} is not possible for {name}; use one of {', '.join(environment.KINDS[1:])}")
    absolute = [str(pathlib.Path(path).expanduser().resolve()) for path in paths]
    if absent := [path for path in absolute if not pathlib.Path(path).exists()]:
        raise ValueError(f"--path {absent[0]} does not exist; name the folder to import {target} from")
    file = package_lib.record_file(name)
    file.unlink(missing_ok=True)  # a failure leaves no older installation in use
    if not requirements and version:
        requirements = [f"{target}=={version}"]
    if requirements:
        python = str(_venv(requirements, python))
    python, minor, folders = json.loads(run([python, "-c", _DESCRIBE], f"{python} is not a usable interpreter"))
    adapter = framework
    if framework == "verifiers":
        failed = f"{target} cannot be imported in {python}; name its package with --requirement"
        adapter = f"verifiers_{run([python, '-c', _KIND, target, *absolute], failed).split()[-1]}"
    found = package_lib.Package(
        name, adapter, python, minor, tuple(folders), tuple(requirements), tuple(absolute), dict(variables or {}), kind
    )
    package_lib.digest(found, {})  # raises ValueError for a module that is not there
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(file, json.dumps(dataclasses.asdict(found), indent=1).encode())
    return found


def _venv(requirements: Sequence[str], python: str) -> pathlib.Path:
    """Makes the virtual environment for these requirements, unless it exists. Returns its interpreter."""
    minor = json.loads(run([python, "-c", _DESCRIBE], f"{python} is not a usable interpreter"))[1]
    key = hashlib.sha256(json.dumps([sorted(requirements), minor]).encode()).hexdigest()[:16]
    place = package_lib.folder() / "venvs" / key
    found, ready = place / "bin" / "python", place / "ready"
    if not ready.exists():
        shutil.rmtree(place, ignore_errors=True)
        run([python, "-m", "venv", str(place)], "a virtual environment cannot be made")
        try:
            run([str(found), "-m", "pip", "install", "--quiet", *requirements], "pip failed; correct the requirements")
        except ValueError:
            shutil.rmtree(place)
            raise
        ready.write_text("\n".join(requirements))
    return found


def run(command: Sequence[str], failed: str, variables: Mapping[str, str] | None = None) -> str:
    """Returns the output of a command. Raises ValueError with the text `failed` and the last line of its errors."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    except OSError as error:
        raise ValueError(f"{failed} ({error.strerror})") from error
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise ValueError(f"{failed} ({' '.join(last)[:300]})")
    return done.stdout

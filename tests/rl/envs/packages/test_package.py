"""Names, records, and digests of environments in other interpreters."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from rl import envs
from rl.envs.packages import installation
from rl.envs.packages import package as package_lib
from tests.support import commands

CODE = "def build(**options):\n    return options\n"


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A virtual environment with two packages: `words` 1.2, which requires `lexicon`, and an environment `guess`."""
    monkeypatch.setenv(package_lib.FOLDER, str(tmp_path / "installed"))
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    [site] = place.glob("lib/python*/site-packages")
    add(site, "words", "1.2", {"words/__init__.py": CODE, "words/data.txt": "a b"}, requires=["lexicon>=1"])
    add(site, "lexicon", "1.5", {"lexicon.py": ""})
    add(site, "unrelated", "3.0", {"unrelated.py": ""})
    return str(place / "bin" / "python")


def add(site, name, version, files, requires=()):
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    for relative, text in files.items():
        (site / relative).parent.mkdir(exist_ok=True)
        (site / relative).write_text(text)
    (folder / "RECORD").write_text("".join(f"{relative},,\n" for relative in files))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("verifiers:wordle", ("verifiers", "wordle", "")),
        ("verifiers:owner/alphabet-sort@0.1.4", ("verifiers", "alphabet_sort", "0.1.4")),
        ("openenv:echo_env.server:Echo", ("openenv", "echo_env.server:Echo", "")),
        ("plain:my.module:build", ("plain", "my.module:build", "")),
    ],
)
def test_names(name, expected):
    assert package_lib.split(name) == expected


@pytest.mark.parametrize("name", ["verifiers:", "plain:module", "openenv:a b", "gym:CartPole", "verifiers:../x y"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="does not name"):
        package_lib.split(name)


def test_an_installed_environment_is_found_by_its_name(python):
    found = installation.install("plain:words:build", python=python, variables={"A": "1"}, kind="recorded")
    assert package_lib.find("plain:words:build") == found
    assert found.python == python
    env = envs.load("plain:words:build", size=3)
    assert (env.kind, env.foreign.options, env.foreign.package) == ("recorded", {"size": 3}, found)
    assert env.make_task(3, "train") == env.make_task(3, "train") != env.make_task(3, "held_out")


def test_the_command_list_has_what_is_installed(python, capsys):
    installation.install("plain:words:build", python=python)
    (package_lib.folder() / "other.json").write_text("{}")
    assert commands.run("rl.envs", "list") == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "plain:words:build"


def test_one_that_is_not_installed_names_the_command(python):
    with pytest.raises(ValueError, match="python -m rl.envs install plain:other:build"):
        envs.load("plain:other:build")
    with pytest.raises(ValueError, match="no module other"):
        installation.install("plain:other:build", python=python)
    with pytest.raises(ValueError, match="not a usable interpreter"):
        installation.install("plain:words:build", python="/nowhere/python")


def test_after_a_failed_installation_an_older_one_is_not_used(python):
    installation.install("plain:words:build", python=python)
    with pytest.raises(ValueError, match="not a usable interpreter"):
        installation.install("plain:words:build", python="/nowhere/python")
    with pytest.raises(ValueError, match="is not installed"):
        package_lib.find("plain:words:build")


def test_a_broken_record_is_refused(python):
    installation.install("plain:words:build", python=python)
    file = package_lib.record_file("plain:words:build")
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"python": "/nowhere"}))
    with pytest.raises(ValueError, match="which is gone"):
        package_lib.find("plain:words:build")
    file.write_text(json.dumps(fields | {"pythons": "/nowhere"}))
    with pytest.raises(ValueError, match="install it again"):
        package_lib.find("plain:words:build")


def test_the_digest_covers_code_options_interpreter_and_required_versions(python):
    found = installation.install("plain:words:build", python=python)
    site = next(pathlib.Path(python).parents[1].glob("lib/python*/site-packages"))

    def digest(options=None, **changes):
        return package_lib.digest(dataclasses.replace(found, **changes), options or {})

    before = digest()
    assert digest() == before == envs.digest("plain:words:build", {})
    others = [digest({"size": 3}), digest(version="3.12"), digest(kind="recorded"), digest(adapter="openenv")]
    (site / "words" / "data.txt").write_text("a c")
    others.append(digest())
    (site / "words" / "data.txt").write_text("a b")
    (site / "lexicon-1.5.dist-info").rename(site / "lexicon-1.6.dist-info")
    add(site, "lexicon", "1.6", {"lexicon.py": ""})
    others.append(digest())
    assert len({before, *others}) == 7
    add(site, "lexicon", "1.5", {"lexicon.py": ""})
    (site / "lexicon-1.6.dist-info" / "METADATA").unlink()
    add(site, "unrelated", "4.0", {"unrelated.py": "x = 1"})
    assert digest() == before


def test_the_command_installs_and_prints_the_digest(python, capsys):
    arguments = ["rl.envs", "install", "plain:words:build", "--python", python]
    assert commands.run(*arguments, "--variable", "A=1", "B=c=d") == 0
    found = package_lib.find("plain:words:build")
    assert found.variables == {"A": "1", "B": "c=d"}
    assert package_lib.digest(found, {}) in capsys.readouterr().out
    for more, message in (
        (["--variable", "A"], "write NAME=VALUE"),
        (["--path", "nowhere"], "nowhere does not exist; name the folder to import words:build from"),
    ):
        assert commands.run(*arguments, *more) == 1 and message in capsys.readouterr().err
    assert package_lib.find("plain:words:build") == found


def test_a_virtual_environment_is_made_once_per_requirements(python, monkeypatch):
    """pip is replaced by a command that fails for one requirement."""
    made = []

    def run(command, failed, variables=None):
        made.append(command)
        if "nonsense" in command:
            raise ValueError(failed)
        if command[1:3] == ["-m", "venv"]:
            (pathlib.Path(command[3]) / "bin").mkdir(parents=True)
            (pathlib.Path(command[3]) / "bin" / "python").symlink_to(python)
        return "" if "-m" in command else real(command, failed)

    real, _ = installation.run, monkeypatch.setattr(installation, "run", run)
    with pytest.raises(ValueError, match="pip failed"):
        installation.install("plain:words:build", ["nonsense"])
    assert not [*(package_lib.folder() / "venvs").iterdir()]
    first = installation._venv(["a==1", "b==2"], python)
    assert installation._venv(["b==2", "a==1"], python) == first != installation._venv(["a==2"], python)
    assert sum("pip" in command for command in made) == 3

"""User code by name: where it may come from, how it fails, and which changes its digest sees."""

import pathlib
import shutil
import sys

import pytest

from rl import envs
from rl.envs.catalog import catalog
from rl.protocol import user_code

ENV = """
import random

from rl.envs import environment
{extra}

def build(*, largest=9, path=""):
    def make_task(index, split):
        return environment.Task("add", index, split, ({{"role": "user", "content": f"{{index % largest}}+1="}},), str(index % largest + 1))

    def score(task, completion):
        return {{"reward": float(completion == task.answer)}}

    return environment.Environment("add", make_task, score)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a package, a module of one file that imports a neighbor, and data; removed from the import path after."""
    folder = tmp_path / "project"

    def write(name, text):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    write("own_sums/__init__.py", "")
    write("own_sums/parts.py", "TOP = 3\n")
    write("own_sums/tasks.py", ENV.format(extra="from . import parts\n"))
    write("own_alone.py", ENV.format(extra="import own_folder.part\nimport own_helper\n"))
    write("own_helper.py", "HELP = 1\n")
    write("own_folder/part.py", "PART = 1\n")  # no __init__.py
    write("own_folder/table.bin", "1")
    write("own_apart.py", "X = 1\n")
    write("data/rows.jsonl", "{}\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def located(name, **options):
    return envs.locate(name, options)


def test_each_form_of_a_name_loads_the_same_function(project, monkeypatch):
    monkeypatch.chdir(project)
    file = f"{project}/own_sums/tasks.py:build"
    monkeypatch.syspath_prepend(project)
    for name in ("own_sums.tasks:build", "own_sums/tasks.py:build", file):
        assert user_code.locate(name) == file
        env = envs.load(name, seed=5, largest=4)
        assert env.name == name and env.make_task(5, "train").answer == "2"
        assert env.score(env.make_task(5, "train"), "2") == {"reward": 1.0}
    assert envs.folders(*located("own_sums.tasks:build")) == [str(project), str(project / "own_sums")]


def test_a_process_for_strangers_loads_from_its_folders_alone(project, monkeypatch):
    """A run that names any other function or file of this machine is refused before a line of it runs."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    allowed = [project / "own_sums"]
    for name in (
        "os:system",
        "own_alone:build",
        "own_alone.py:build",
        f"{project}/own_alone.py:build",
        "../own_alone.py:build",
    ):
        with pytest.raises(ValueError, match="env.name = .* in .*own_sums .--code.; add the folder that has it"):
            envs.locate(name, {"command": "true"}, allowed)
    with pytest.raises(ValueError, match="for this process; give the folder that has it with --code"):
        envs.locate("os:system", {}, ())
    (project / "own_sums" / "link.py").symlink_to(project / "own_alone.py")
    with pytest.raises(ValueError, match="link.py' does not exist in"):
        envs.locate("link.py:build", {}, allowed)
    # The name of a file on the machine of the run's owner is found by its last part.
    assert envs.locate("/home/alice/tasks.py:build", {}, allowed)[0] == f"{project}/own_sums/tasks.py:build"
    with pytest.raises(ValueError, match="env.options.path = '/etc/passwd' does not exist in"):
        envs.locate("tasks.py:build", {"path": "/etc/passwd"}, allowed)
    for name in ("dataset", "gsm8k"):  # a shipped one reads only the data of its owner, too
        with pytest.raises(ValueError, match=f"env.options.path = '{project}/data' does not exist in"):
            envs.locate(name, {"path": f"{project}/data"}, allowed)
    assert envs.locate("tasks.py:build", {"path": "/x/rows.jsonl"}, [*allowed, project / "data"])[1] == {
        "path": f"{project}/data/rows.jsonl"
    }
    assert "own_alone" not in sys.modules


def test_of_two_folders_with_one_file_name_the_one_of_the_name_is_taken(project, tmp_path):
    """The first folder was taken for both, and the digest of the other did not agree."""
    folders = [project / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        for name in ("tasks.py", "own_module.py", "rows.jsonl"):
            (folder / name).write_text("")
    for name in ("b", "a"):
        assert user_code.find(f"/home/alice/{name}/tasks.py", folders) == project / name / "tasks.py"
        assert user_code.find(f"{project}/{name}/tasks.py", folders) == project / name / "tasks.py"
    for name in ("/home/alice/tasks.py:build", "tasks.py:build", "own_module:build"):
        with pytest.raises(ValueError, match=r"may be .*/a/.* or .*/b/.*; leave out the folder with the other"):
            user_code.locate(name, folders)
    assert user_code.locate("own_module:build", folders[1:]) == f"{project}/b/own_module.py:build"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "own_nonesuch:build",
            "module 'own_nonesuch' does not exist here or on the import path; correct the name, or add",
        ),
        ("own_alone:bild", "own_alone.py has no function 'bild'; correct the name$"),
        ("own_sums.parts:TOP", "parts.py has no function 'TOP'"),
        (
            "own_broken:build",
            r"cannot be imported: ZeroDivisionError: division by zero \(own_broken.py:1\); correct it",
        ),
        ("own_script:build", r"cannot be imported: SystemExit: 0 \(own_script.py:2\); correct it"),
        ("own_wrong:build", "cannot be built: KeyError: 'k' .own_wrong.py:2.; correct it"),
        ("own_none:build", "the builder of environment .* returned NoneType; return a rl.envs.environment.Environment"),
        ("own_alone:build:x", "module 'own_alone:build' does not exist"),
        ("own_sums", "environment 'own_sums' does not exist; .* or write module:function for your own"),
        ("other/json.py:build", "has the name of another module, .*json/__init__.py; rename it"),
        ("other/time.py:build", "has the name of another module, time of Python itself; rename it"),
        (
            "own_folder.part:build",
            "own_folder has no __init__.py, so own_folder.part is in no package; create the file",
        ),
    ],
)
def test_a_mistake_is_one_line(project, monkeypatch, name, words):
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    (project / "own_broken.py").write_text("1 / 0\n")
    (project / "own_script.py").write_text("import sys\nsys.exit(0)\n")
    (project / "own_wrong.py").write_text("def build():\n    return {}['k']\n")
    (project / "own_none.py").write_text("def build():\n    pass\n")
    (project / "other").mkdir()
    for name_of_python in ("json", "time"):
        (project / "other" / f"{name_of_python}.py").write_text("def build():\n    pass\n")
    import json  # noqa: F401

    with pytest.raises(ValueError, match=words) as error:
        envs.load(name, seed=0)
    assert "\n" not in str(error.value)


def test_an_option_that_the_builder_lacks_is_named(project):
    with pytest.raises(
        ValueError, match="has no option 'bigest' of env.options .did you mean largest..; choose from largest, path"
    ):
        envs.load(f"{project}/own_alone.py:build", seed=0, bigest=3)


def test_an_installed_package_offers_environments_by_name(project, monkeypatch):
    info = project / "own_sums-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: own-sums\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[intellax.environments]\nsums = own_sums.tasks:build\n")
    monkeypatch.syspath_prepend(project)
    assert envs.load("sums", seed=0).name == "sums"
    assert envs.locate("sums", {}, ())[0] == f"{project}/own_sums/tasks.py:build"  # its owner installed it


def changed(project, name):
    """The digests of the package and of the single module, with data, after a change of one file."""
    with open(project / name, "a") as file:
        file.write("\n")
    data = {"path": f"{project}/data"}
    names = (f"{project}/own_sums/tasks.py:build", f"{project}/own_alone.py:build")
    return [envs.digest(name, data if name == names[1] else {}) for name in names]


def test_the_digest_sees_code_and_data_and_nothing_else(project, tmp_path):
    first = changed(project, "own_apart.py")
    assert len({*first}) == 2 and changed(project, "own_apart.py") == first
    for name, package, alone in (
        ("own_sums/parts.py", True, False),
        ("own_helper.py", False, True),
        ("own_folder/part.py", False, True),
        ("own_folder/table.bin", False, False),
        ("own_alone.py", False, True),
        ("data/rows.jsonl", False, True),
    ):
        second = changed(project, name)
        assert [a != b for a, b in zip(first, second, strict=True)] == [package, alone], name
        first = second
    (project / "own_sums" / "__pycache__").mkdir()
    (project / "own_sums" / "__pycache__" / "x.pyc").touch()
    shutil.copytree(project, tmp_path / "elsewhere")  # another machine has other folders
    assert changed(tmp_path / "elsewhere", "own_apart.py") == first
    ours = user_code.code_files(f"{__file__}:changed")
    folders = {name.partition("/")[0] for name in ours}
    assert "tests" in folders and not folders & {*user_code.OURS}  # not the release, which they import
    (project / "path.py").write_text(ENV.format(extra=""))  # named like the option
    before = envs.digest(f"{project}/path.py:build", {"path": f"{project}/data/rows.jsonl"})
    (project / "path.py").write_text(ENV.format(extra="X = 1\n"))
    assert envs.digest(f"{project}/path.py:build", {"path": f"{project}/data/rows.jsonl"}) != before
    (file,) = (project / "data").iterdir()
    tables = f"{project}/path.py:build", {"table_path": str(file)}  # any option of this form
    before = envs.digest(*tables)
    file.write_text("{}")
    assert envs.digest(*tables) != before
    with pytest.raises(ValueError, match="env.options.table_path = .* does not exist in"):
        envs.locate("tasks.py:build", {"table_path": str(file)}, [project / "own_sums"])
    assert user_code.digest([("train", file)]) != user_code.digest([("test", file)])  # a name has a meaning


def test_the_digest_follows_links_as_imports_do(project, tmp_path):
    (tmp_path / "linked" / "deep").mkdir(parents=True)
    (tmp_path / "linked" / "deep" / "x.py").write_text("A = 1\n")
    (project / "own_sums" / "sub").symlink_to(tmp_path / "linked")
    (tmp_path / "linked" / "loop").symlink_to(project / "own_sums")
    before = user_code.code_files(f"{project}/own_sums/parts.py:build")
    assert before["own_sums/sub/deep/x.py"].read_text() == "A = 1\n" and not any("loop" in name for name in before)
    (project / "own_sums" / "twice").symlink_to(tmp_path / "linked" / "deep")  # a folder that is in the digest already
    assert "own_sums/twice/x.py" in user_code.code_files(f"{project}/own_sums/parts.py:build")


def test_a_module_of_another_folder_is_not_taken_for_a_neighbor(project, tmp_path):
    """Two files of a user, such as an environment and a loss, may each have a neighbor of one name."""
    shutil.copytree(project, tmp_path / "other")
    (tmp_path / "other" / "own_alone.py").rename(tmp_path / "other" / "own_second.py")
    envs.load(f"{project}/own_alone.py:build", seed=0)
    with pytest.raises(
        ValueError, match="own_second.py needs the module own_.* in .*other/.*, but .*project/.* is loaded"
    ):
        envs.load(f"{tmp_path}/other/own_second.py:build", seed=0)
    envs.load(f"{project}/own_alone.py:build", seed=0)


def test_the_digest_of_a_shipped_environment_is_of_its_own_files(tmp_path):
    files = {path.name for path in catalog._files_of(sys.modules[envs.ENVS["reverse_text"].build.__module__])}
    assert files == {"reverse_text.py", "environment.py", "episode.py", "tools.py", "mcp_client.py"}
    assert envs.digest("reverse_text", {}) != envs.digest("gsm8k", {})
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    before = envs.digest("gsm8k", {"path": str(tmp_path)})
    pathlib.Path(tmp_path, "test.jsonl").write_text('{"question": "1+2?", "answer": "#### 3"}\n')
    assert envs.digest("gsm8k", {"path": str(tmp_path)}) != before

"""Packages of environments: init, check, publish, list, info, and install, and all that an index or a wheel of an attacker tries."""

import concurrent.futures
import http.server
import json
import os
import pathlib
import runpy
import subprocess
import sys
import threading
import zipfile

import pytest

from inference.rollouts import rollout as rollout_lib
from rl.envs.hub import index as index_lib
from rl.envs.hub import manifest, skeleton, store
from rl.envs.hub import report as report_lib
from sharding.system import files as files_lib
from sharding.system import signed_message
from tests.support import commands

ROOT = pathlib.Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with a package `sums`, its report, and the index that has it; made by the commands themselves."""
    folder = tmp_path_factory.mktemp("hub")
    key = rollout_lib.WorkerKey.generate()
    key.save(folder / "key.pem")
    skeleton.write("sums", folder / "sums")
    sizes = ["--tasks", "10", "--scored", "1", "--episodes", "1"]
    argv = [sys.executable, *"-m rl.envs check sums:build --code sums --report r.json --key key.pem".split(), *sizes]
    subprocess.run(argv, cwd=folder, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    argv = ["rl.envs", "publish", folder / "sums", "--index", folder / "i" / "index.json", "--key", folder / "key.pem"]
    assert commands.run(*argv, "--report", folder / "r.json") == 0
    return folder, key


@pytest.fixture
def copy(published, tmp_path, monkeypatch):
    """Returns (index file that a test may change, key)."""
    folder, key = published
    monkeypatch.setenv("INTELLAX_ENVIRONMENTS", str(tmp_path / "cache"))
    for file in (folder / "i").rglob("*.*"):
        place = tmp_path / file.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    return tmp_path / "i" / "index.json", key


def failed(capsys, *words):
    assert commands.run("rl.envs", *words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def resigned(index, key, change):
    """Lets the owner of the key sign a changed index."""
    found = json.loads(index.read_text())
    change(found)
    del found["signature"]
    index.write_text(json.dumps(signed_message.sign(key.private, found)))


def test_a_package_is_short_and_its_own_test_passes(published, monkeypatch):
    folder, _ = published
    code = (folder / "sums" / "sums" / "__init__.py").read_text()
    assert sum(bool(line.strip()) for line in code.splitlines()) < 40
    monkeypatch.syspath_prepend(folder / "sums")
    found = runpy.run_path(str(folder / "sums" / "tests" / "test_sums.py"))
    (own_test,) = (value for name, value in found.items() if name.startswith("test_"))
    own_test()
    del sys.modules["sums"]


def test_an_installed_environment_has_the_digest_of_its_report(copy, capsys, tmp_path):
    index, key = copy
    assert commands.run("rl.envs", "list", "--index", index) == 0
    out = capsys.readouterr().out
    assert "sums" in out and key.worker in out
    assert commands.run("rl.envs", "info", "sums@0.1.0", "--index", index, "--signer", key.worker) == 0
    digest = json.loads(index.read_text())["environments"]["sums"]["0.1.0"]["digest"]
    assert digest in capsys.readouterr().out
    assert (
        commands.run(
            "rl.envs", "install", "owner/sums", "--index", index, "--signer", key.worker, "--target", tmp_path / "here"
        )
        == 0
    )
    argv = [sys.executable, "-m", "rl.envs", "info", "sums", "--code", str(tmp_path / "here")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert f"digest          {digest}" in done.stdout, done.stderr
    capsys.readouterr()
    words = ["install", "sums", "--dry", "--index", index, "--signer", key.worker]
    assert commands.run("rl.envs", *words) == 0 and "verified sums@0.1.0" in capsys.readouterr().out


def test_an_index_at_a_url_is_read_like_a_file(copy):
    index, key = copy

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(index.parent))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = index_lib.read(f"http://127.0.0.1:{server.server_port}/index.json", key.worker)
        assert store.install(found, "sums", None, dry=True).startswith("sums@0.1.0, digest ")
        with pytest.raises(ValueError, match="404"):
            found.fetch("wheels/none.whl")
        server.shutdown()


def test_a_changed_index_wheel_or_report_is_refused(copy, capsys):
    index, key = copy
    words = ["install", "sums", "--dry", "--index", index, "--signer", key.worker]
    text = index.read_text()
    index.write_text(text.replace('"kind": "pure"', '"kind": "purx"'))
    assert "does not fit its content; get the index again" in failed(capsys, *words)
    index.write_text(text)
    assert "not by --signer 0000" in failed(capsys, *words[:-1], "0" * 64)
    assert f"signed by {key.worker}; pass this key" in failed(capsys, *words[:-2])
    (wheel,) = (index.parent / "wheels").iterdir()
    (report,) = (index.parent / "reports").iterdir()
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    good = wheel.read_bytes()
    wheel.write_bytes(data)
    assert "get it from another place" in failed(capsys, *words)
    wheel.write_bytes(good)
    saved = report.read_text()
    report.write_text(saved.replace('"verdict": "pass"', '"verdict": "pas"'))
    assert "the report cannot be used: the signature of" in failed(capsys, *words)
    for change in ({"verdict": "fail"}, {"environment": json.loads(saved)["environment"] | {"digest": "0" * 64}}):
        forged = report_lib.sign({k: v for k, v in json.loads(saved).items() if k != "signature"} | change, key)
        report.write_text(json.dumps(forged))
        assert "its report did not pass, or is about other code" in failed(capsys, *words)


def test_a_wheel_with_other_code_is_refused_even_if_its_index_is_signed(copy, capsys, tmp_path):
    index, key = copy
    (wheel,) = (index.parent / "wheels").iterdir()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("sums/more.py", "")
    entry = {"sha256": files_lib.sha256(wheel)}
    resigned(index, key, lambda found: found["environments"]["sums"]["0.1.0"].update(entry))
    words = ["install", "sums", "--dry", "--index", index, "--signer", key.worker]
    assert "the wheel has other code than its report" in failed(capsys, *words)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("other/__init__.py", "")
    entry = {"sha256": files_lib.sha256(wheel)}
    resigned(index, key, lambda found: found["environments"]["sums"]["0.1.0"].update(entry))
    assert "put all code of the environment in one package" in failed(capsys, *words)


def test_malformed_entries_are_refused(copy, capsys):
    index, key = copy
    text = index.read_text()
    for change in (
        {"wheel": "../../key.pem"},
        {"wheel": "wheels/../../x"},
        {"report": "http://example.org/x"},
        {"function": "os:system; x"},
        {"number": "1"},
        {"kind": None},
    ):
        index.write_text(text)
        resigned(index, key, lambda found, change=change: found["environments"]["sums"]["0.1.0"].update(change))
        assert "is malformed (sums@0.1.0" in failed(capsys, "list", "--index", index)
    for content in ("", "[]", '{"format": "intellax/environment-index/1"}', "[" * 100_000):
        index.write_text(content)
        assert "is not an index" in failed(capsys, "list", "--index", index)


def test_an_older_index_of_the_same_key_is_refused(copy, capsys):
    index, key = copy
    words = ["install", "sums", "--dry", "--index", index, "--signer", key.worker]
    old = index.read_text()
    entry = json.loads(old)["environments"]["sums"]["0.1.0"]
    index_lib.add(index, key, "sums", "0.2.0", entry, {})
    assert commands.run("rl.envs", *words) == 0 and "sums@0.2.0" in capsys.readouterr().out
    index.write_text(old)
    assert "it is an old copy" in failed(capsys, *words)


def test_a_published_version_never_changes(copy):
    index, key = copy
    entry = json.loads(index.read_text())["environments"]["sums"]["0.1.0"]
    before = index.read_bytes()
    index_lib.add(index, key, "sums", "0.1.0", entry, {})
    assert index.read_bytes() == before
    with pytest.raises(ValueError, match=r"a published version cannot change, so raise project.version"):
        index_lib.add(index, key, "sums", "0.1.0", entry | {"sha256": "1" * 64}, {})
    with pytest.raises(ValueError, match="not by --signer"):
        index_lib.add(index, rollout_lib.WorkerKey.generate(), "sums", "0.3.0", entry, {})
    assert index.read_bytes() == before


def test_publishers_at_the_same_time_lose_no_version(copy):
    index, key = copy
    entry = json.loads(index.read_text())["environments"]["sums"]["0.1.0"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda i: index_lib.add(index, key, "sums", f"1.0.{i}", entry, {}), range(24))]
    found = index_lib.read(str(index), key.worker)
    assert len(found.environments["sums"]) == 25 and found.sequence == 25
    assert found.entry("sums")[1]["number"] == 25


def test_publish_refuses_other_code_and_reports_that_did_not_pass(published, tmp_path):
    folder, key = published
    skeleton.write("sums", tmp_path / "sums")
    code = tmp_path / "sums" / "sums" / "__init__.py"
    code.write_text(code.read_text().replace("largest: int = 99", "largest: int = 98"))
    args = (tmp_path / "sums", tmp_path / "index.json", key)
    (wheel,) = (folder / "i" / "wheels").iterdir()
    with pytest.raises(ValueError, match=r"the code differs .*; check this folder again"):
        store.publish(*args, folder / "r.json", wheel)
    report = json.loads((folder / "r.json").read_text())
    del report["signature"]
    report_lib.write(report_lib.sign(report | {"verdict": "fail"}, key), tmp_path / "failed.json")
    with pytest.raises(ValueError, match=r"failed.json did not pass"):
        store.publish(folder / "sums", *args[1:], tmp_path / "failed.json", wheel)
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('version = "0.1.0"', "", r"has no 'version'"),
        ('kind = "pure"', 'kind = "clean"', "kind is 'clean', and must be one of pure"),
        ('sums = "sums:build"', 'Sums = "sums:build"', "name is 'Sums'"),
        ('sums = "sums:build"', 'gsm8k = "sums:build"', "is shipped with Intellax"),
        ('sums = "sums:build"', 'sums = "sums:build"\nmore = "sums:build"', "is not the manifest of one environment"),
        ("[project]", "[project", "is not the manifest"),
    ],
)
def test_a_malformed_manifest_is_named(tmp_path, old, new, message):
    skeleton.write("sums", tmp_path / "p")
    file = tmp_path / "p" / "pyproject.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        manifest.read(tmp_path / "p")


def test_init_keeps_files_that_exist(tmp_path, capsys):
    (tmp_path / "x").write_text("")
    assert "has files; choose another --folder" in failed(capsys, "init", "sums", "--folder", tmp_path)
    assert "is not a name for a package" in failed(capsys, "init", "Sums-2", "--folder", tmp_path / "new")
    assert commands.run("rl.envs", "list") == 0 and "reverse_text" in capsys.readouterr().out

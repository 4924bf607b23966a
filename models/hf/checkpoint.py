"""Loads and saves Hugging Face checkpoints.

`load` copies each device's part of a parameter from the mapped files straight into its sharding, `PIECE_BYTES` at a time:
the host needs memory for `WORKERS` parameters. `save` writes a folder that appears complete or not at all.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import hub, transformer
from models.hf import config as hf_config
from models.hf import gguf_config, safetensors_file, tensor_check, tensor_names
from sharding.mesh import host_memory, rules
from sharding.system import atomic_file
from sharding.weights.format import gguf_header

MAX_FILE_BYTES = 5_000_000_000  # of one file of a saved checkpoint, as on the hub
BLOCK = 256  # rows and columns that are transposed at a time
PIECE_BYTES = 8_000_000  # of a file that stay in memory while they are copied
WORKERS = 4  # parameters that are copied at the same time


def load(
    path_or_repo: str | pathlib.Path,
    *,
    dtype: str | None = None,
    shardings: transformer.Params | None = None,
    on_host: bool = False,
    scan_layers: bool = False,
) -> tuple[config_lib.ModelConfig, transformer.Params]:
    """Loads a Hugging Face checkpoint. Returns (config, parameters). Blocks until all parameters are on their devices.

    `path_or_repo` is a folder, or the id of a hub repository, which is downloaded. `dtype` also becomes the config's
    `param_dtype` and `dtype`; None keeps the checkpoint's. `shardings` is a tree of `jax.sharding.Sharding` like
    `transformer.specs(read_config(...))`, or None for the default device; with `on_host`, the parameters are numpy arrays, on
    no device. `scan_layers` stacks equal layers. Raises ValueError if the architecture is not supported, a file is damaged, or
    a tensor is missing, unknown or of another shape.
    """
    folder = hub.folder(path_or_repo)
    config = read_config(folder, dtype=dtype, scan_layers=scan_layers)
    reader = open_reader(folder, config)
    sources = collections.defaultdict(list)
    for name, tensor in tensor_names.tensors(config).items():
        for part in tensor.parts:
            sources[part.path].append((name, part))

    paths_and_specs, structure = jax.tree_util.tree_flatten_with_path(transformer.specs(config), is_leaf=rules.is_spec)
    layouts = [None] * len(paths_and_specs) if shardings is None else structure.flatten_up_to(shardings)
    _check_memory(folder, config, [spec for _, spec in paths_and_specs], layouts, on_host)
    largest_first = sorted(range(len(layouts)), key=lambda n: -math.prod(paths_and_specs[n][1].shape))  # an even finish

    def place(n):
        path, spec = paths_and_specs[n]
        return _place(reader, spec, sources[tuple(key.key for key in path)], layouts[n], on_host)

    with concurrent.futures.ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        placed = dict(zip(largest_first, pool.map(place, largest_first), strict=True))
    return config, structure.unflatten(placed[n] for n in range(len(layouts)))


def read_config(
    path_or_repo: str | pathlib.Path, *, dtype: str | None = None, scan_layers: bool = False
) -> config_lib.ModelConfig:
    """Returns the model's config from a checkpoint's config.json, as `load` would. Raises ValueError if it is unsupported."""
    path = hub.folder(path_or_repo, hub.CONFIG)
    is_gguf = gguf_header.is_gguf(path)
    path = path if is_gguf else hub.config_file(path)
    stored: Any = gguf_header.read(path) if is_gguf else atomic_file.read_json(path, dict)
    try:
        config = hf_config.read(gguf_config.entries(stored) if is_gguf else stored, scan_layers=scan_layers)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        found = f"{path} lacks an entry, or has one of another type ({error!r})"
        raise ValueError(f"{found}; download it again") from error
    return config if dtype is None else dataclasses.replace(config, param_dtype=dtype, dtype=dtype)


def open_reader(folder: pathlib.Path, config: config_lib.ModelConfig) -> tensor_check.Reader:
    """Returns a reader of the tensors of a checkpoint's folder or GGUF file, by their names. Raises ValueError if they are not those of `config`."""
    if gguf_header.is_gguf(folder):
        from models.hf import gguf_file  # 0.3 s of imports that a folder does not need

        reader = gguf_file.Reader(folder, config)
    else:
        reader = safetensors_file.Reader(folder)
    tensor_check.check_files(reader, config, folder)
    return reader


def save(
    path: str | pathlib.Path,
    config: config_lib.ModelConfig,
    params: transformer.Params,
    *,
    stored: Mapping | None = None,
    write_more: Callable[[pathlib.Path], None] = lambda folder: None,
) -> None:
    """Writes a Hugging Face checkpoint that transformers can load; the same parameters always give the same bytes.

    `path` is a folder that does not exist yet, or is empty; `params` has arrays on this process's devices, or numpy arrays.
    `stored` has entries to keep in config.json: those of the checkpoint that the model began with. `write_more` writes more files into the folder, such as a
    tokenizer's, before it is renamed to `path`. Raises ValueError if the folder is not empty, or if the files of
    `config.family` cannot express the config.
    """
    hf = hf_config.update(stored or {}, config)
    leaves = tensor_names.leaves(params)

    def lazy(tensor):
        dtype = np.dtype(leaves[tensor.parts[0].path].dtype)
        return dtype, tensor.shape, lambda: _assemble(tensor, dtype, leaves)

    with new_folder(path) as folder:
        _write_tensors(folder, {name: lazy(tensor) for name, tensor in tensor_names.tensors(config).items()})
        _write_json(folder / "config.json", hf)
        write_more(folder)


@contextlib.contextmanager
def new_folder(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a folder to write into, which is renamed to `path` at the end. Raises ValueError as `check_new` does."""
    path = pathlib.Path(path)
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    if path.exists():
        path.rmdir()
    partial.rename(path)


def check_new(path: pathlib.Path) -> None:
    """Raises ValueError if `path` is a file or a folder with files, which `save` would have to overwrite."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; give a folder that does not exist")


def _check_memory(folder: pathlib.Path, config, specs: Sequence[rules.ParamSpec], layouts, on_host: bool) -> None:
    """Raises ValueError if the parameters do not fit the free memory of the devices that hold them, or with `on_host` of this machine."""
    shared = layouts[0]
    devices = [] if on_host else [*shared.addressable_devices] if shared is not None else jax.local_devices()[:1]
    stats = devices[0].memory_stats() if devices else None
    if stats and "bytes_limit" in stats:
        place, free = f"each {devices[0].device_kind}", stats["bytes_limit"] - stats["bytes_in_use"]
    else:
        place, free = "this machine", host_memory.available_bytes()
    total, needed = 0, 0
    for spec, layout in zip(specs, layouts, strict=True):
        itemsize = jnp.dtype(spec.dtype).itemsize
        total += math.prod(spec.shape) * itemsize
        needed += math.prod(layout.shard_shape(spec.shape) if layout is not None else spec.shape) * itemsize
    needed *= 1 if stats else max(len(devices), 1)
    if needed > free:
        fits = transformer.num_params(config) * free / needed
        raise ValueError(
            f"{folder} has {transformer.num_params(config) / 1e9:.3g} B parameters, {total / 1e9:.3g} GB in {config.param_dtype}, and "
            f"{place} has {free / 1e9:.3g} GB free; use a model of at most {fits / 1e9:.2g} B parameters, or more memory"
        )


def _place(
    reader: tensor_check.Reader, spec: rules.ParamSpec, sources, sharding, on_host: bool
) -> jax.Array | np.ndarray:
    """Returns one parameter, read from its tensors `sources` (name, part), as a jax array in `sharding` (None: one device).

    With `on_host`, returns a numpy array.
    """
    dtype = jnp.dtype(spec.dtype)

    @functools.cache  # devices with the same part share the copy
    def copy(*bounds):
        return _copy(reader, sources, tuple(slice(*pair) for pair in bounds), dtype)

    def part(index) -> np.ndarray:
        return copy(*(s.indices(dim)[:2] for s, dim in zip(index, spec.shape, strict=True)))

    if sharding is not None:
        return jax.make_array_from_callback(spec.shape, sharding, part).block_until_ready()
    whole = part((slice(None),) * len(spec.shape))
    return whole if on_host else jax.device_put(whole).block_until_ready()


def _copy(reader, sources, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """Returns the slice `index` of a parameter, copied from the checkpoint's tensors in `sources` that contain some of it."""
    out = _aligned([s.stop - s.start for s in index], dtype)
    for name, part in sources:
        lead = len(part.index)
        place = tuple(i - s.start for i, s in zip(part.index, index[:lead], strict=True))
        if all(0 <= i < size for i, size in zip(place, out.shape, strict=False)):
            view = part.view(reader.tensor(name))[index[lead:]]
            _transfer(out[place], view, lambda piece, name=name: reader.forget(name, piece))
    return out


def _transfer(out: np.ndarray, view: np.ndarray, done: Callable[[np.ndarray], None] = lambda piece: None) -> None:
    """Copies `view`, a tensor in a mapped file, to `out`, a piece at a time; calls `done` with each piece of the file."""
    if out.dtype == view.dtype and out.dtype.kind == "V":  # bfloat16: numpy copies integers without its global lock
        out, view = out.view(np.uint16), view.view(np.uint16)
    out, view = _merge_dims(out, view)
    if not view.ndim or not view.nbytes:
        out[...] = view
        return done(view)
    slow = max(range(view.ndim), key=lambda dim: abs(view.strides[dim]))
    step = max(1, PIECE_BYTES * view.shape[slow] // view.nbytes)
    for start in range(0, view.shape[slow], step):
        piece = (slice(None),) * slow + (slice(start, start + step),)
        _transpose(out[piece], view[piece])
        done(view[piece])


def _transpose(out: np.ndarray, view: np.ndarray) -> None:
    """Copies `view` to `out`, in square blocks if the view is transposed: one column at a time would miss every cache.

    2-core CPU, [3072, 1024] in bfloat16: 78 ms in one assignment, 3.7 ms in blocks of 256.
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
    """Returns views of both arrays with neighboring dims merged where the strides of both allow it, for faster copies."""
    shape, strides = [], []
    for size, pair in zip(view.shape, zip(out.strides, view.strides, strict=True), strict=True):
        if size == 1:
            continue
        if shape and all(before == stride * size for before, stride in zip(strides[-1], pair, strict=True)):
            shape[-1], strides[-1] = shape[-1] * size, pair
        else:
            shape.append(size)
            strides.append(pair)
    outer, inner = ([pair[n] for pair in strides] for n in range(2))
    return np.lib.stride_tricks.as_strided(out, shape, outer), np.lib.stride_tricks.as_strided(view, shape, inner)


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an empty array on a 64-byte boundary: a CPU device uses it without copying."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _assemble(tensor: tensor_names.Tensor, dtype: np.dtype, leaves) -> np.ndarray:
    out = np.empty(tensor.shape, dtype)
    for part in tensor.parts:
        leaf = leaves[part.path]
        part.view(out)[...] = np.asarray(leaf[part.index] if part.index else leaf)
    return out


def _write_tensors(folder: pathlib.Path, tensors: dict) -> None:
    """Writes the tensors to `folder` as one safetensors file, or as several with an index if over `MAX_FILE_BYTES`."""
    files, total, filled = [{}], 0, 0
    for name, tensor in tensors.items():
        size = math.prod(tensor[1]) * tensor[0].itemsize
        if files[-1] and filled + size > MAX_FILE_BYTES:
            files.append({})
            filled = 0
        files[-1][name] = tensor
        total, filled = total + size, filled + size
    if len(files) == 1:
        return safetensors_file.write(folder / "model.safetensors", files[0])
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for name, file in zip(names, files, strict=True):
        safetensors_file.write(folder / name, file)
    weight_map = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
    _write_json(folder / safetensors_file.INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")

"""Weights leave the learner here and reach every server: `publish`, `pull`, and a manifest that makes both honest.

`publish`, in time:

1. The tree is walked once: leaves get `/`-joined names, lists and tuples are noted, so the tree comes back exactly.
2. An exclusive lock on the root makes one publisher out of many; what a killed one left behind is removed.
3. Under a temporary name each leaf becomes a plain zarr3 array (chunks of at most 4 MB, bytes + crc32c). tensorstore
   encodes into memory, so an object is hashed and written from the same bytes and is never read again.
4. `manifest.json` comes last: every object's size and SHA-256, every tensor's name, shape, dtype and SHA-256, the
   digest of the whole tree, the caller's metadata, and a hash of itself.
5. All is fsynced, then one rename makes the version visible: it is whole or it is not there.
6. Versions older than the newest `keep` are renamed away, then deleted.

`pull` trusts nothing: it validates the manifest, reads an object only after its size agrees, shows its bytes to
tensorstore only after their SHA-256 agrees, and opens arrays with the manifest's metadata, so a hostile `zarr.json`
cannot choose a codec or a shape. The digest is that of the decoded tensors. No wrong tree is ever returned.

Left out: compression (bf16 weights shrink 1.3x and cost a core); OCDBT (one growing file is awkward to relay and to
hash, and needs Range); chunk dedupe (an optimizer step leaves no 512-byte block unchanged). Chunk objects are named
`c.0.1`, not `c/0/1`: one directory per tensor is one fsync per tensor. Authenticity is no part of this: the manifest's
hash finds accidents, not a liar who rewrites everything.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import tensorstore as ts

FORMAT = 1
CHUNK_BYTES = 4 << 20  # whole-chunk reads: large enough for 1 GB/s, small enough to refetch or to read for one shard
CRC_BYTES = 4  # what the crc32c codec appends to each chunk
MAX_OBJECT_BYTES = 64 << 20  # ours are CHUNK_BYTES + 4; a manifest from a stranger must not make a reader allocate
MAX_MANIFEST_BYTES = 64 << 20  # 150 bytes per object: enough for 1.7 TB of weights
NUM_WORKERS = 4  # tensors in flight; `pull` holds each twice while it decodes, `publish` once and a chunk

DTYPES = (
    "bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
STORED_AS = dict.fromkeys(("uint2", "uint4", "float8_e4m3"), "uint8")  # no tensorstore type: the same bytes, viewed


@dataclasses.dataclass(frozen=True)
class Object:
    """One file of a version: `path` relative to the version's directory, `size` in bytes."""

    path: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One leaf: its `/`-joined name, zarr chunk shape, and the SHA-256 of its raw little-endian bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a version holds. `containers` names every list, tuple, None and empty dict; other inner nodes are dicts."""

    format: int
    version: int
    digest: str
    tensors: tuple[Tensor, ...]
    objects: tuple[Object, ...]
    containers: dict[str, str]
    metadata: dict


@dataclasses.dataclass(frozen=True)
class Pulled:
    version: int
    params: Any
    metadata: dict
    digest: str


class CorruptBroadcast(ValueError):
    """A manifest or an object that is not what its publisher wrote; the message names it."""


def publish(params: Any, version: int, root: str, *, metadata: dict | None = None, keep: int = 8) -> Manifest:
    """Writes `params` (dicts, lists, tuples of numpy or jax arrays) as `<root>/v<version>`, whole or not at all.

    `metadata` is any JSON object; as JSON, its tuples come back as lists. Versions only grow: after a resume from an
    older checkpoint, `remove` the newer versions first.
    """
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"version {version!r} must be an integer >= 0: pass the learner's step")
    if keep < 1:
        raise ValueError(f"keep={keep} would delete the version just published: pass 1 or more")
    metadata = json.loads(_canonical(metadata or {}))  # now, so that what is no JSON is refused before the work
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata is a {type(metadata).__name__}: pass a dict")
    leaves, containers = _flatten(params, _check_array)
    root_path = _local(root)
    root_path.mkdir(parents=True, exist_ok=True)
    with _lock(root_path):
        existing = versions(root)
        if version in existing:
            raise ValueError(f"version {version} exists under {root} and is immutable: remove() it or publish a newer")
        if existing and version < existing[-1]:
            raise ValueError(
                f"version {version} is older than {existing[-1]} under {root}: remove() the newer ones first"
            )
        for leftover in root_path.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        directory = root_path / f".tmp-{_dirname(version)}"
        try:
            directory.mkdir()
            written = _map(lambda item: _write_tensor(directory, *item), sorted(leaves.items()))
            tensors = tuple(tensor for tensor, _ in written)
            manifest = Manifest(
                format=FORMAT,
                version=version,
                digest=_combine(tensors),
                tensors=tensors,
                objects=tuple(itertools.chain.from_iterable(objects for _, objects in written)),
                containers=containers,
                metadata=metadata,
            )
            body = _canonical(dataclasses.asdict(manifest))
            _write_file(directory / "manifest.json", b'{"manifest":%b,"sha256":"%b"}' % (body, _sha256(body).encode()))
            _map(
                _fsync, [parent for parent, _, _ in os.walk(directory)]
            )  # one by one they were half of a small publish
            os.rename(directory, root_path / _dirname(version))
            _fsync(root_path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            what = f"no space left to publish version {version}, nothing was kept of it: free some or lower keep={keep}"
            raise OSError(errno.ENOSPC, what, str(root)) from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        for old in versions(root)[:-keep]:
            remove(root, old)
    return manifest


def pull(source: str, version: int | None = None, *, shardings: Any = None) -> Pulled:
    """Reads and verifies a version (the newest by default), as numpy arrays or, with `shardings`, as jax arrays.

    `shardings` has the structure of the params; each leaf is put there as soon as it is verified, and its host copy is
    released. Raises `CorruptBroadcast` naming the manifest, object or tensor that is wrong.
    """
    manifest = read_manifest(source, _newest(source) if version is None else version)
    targets = None if shardings is None else _targets(manifest, shardings)

    def finish(tensor: Tensor, array: np.ndarray) -> Any:
        return array if targets is None else jax.device_put(array, targets[tensor.name])

    arrays = _read_tensors(source, manifest, finish)
    return Pulled(manifest.version, _unflatten(arrays, manifest.containers), manifest.metadata, manifest.digest)


def verify(source: str, version: int | None = None) -> Manifest:
    """Everything `pull` checks, without keeping the tree."""
    manifest = read_manifest(source, _newest(source) if version is None else version)
    _read_tensors(source, manifest, lambda tensor, array: None)
    return manifest


def versions(source: str) -> list[int]:
    """The complete versions under `source`, ascending."""
    path = _local(source)
    if not path.is_dir():
        raise FileNotFoundError(
            f"no broadcast directory {source}: start the publisher, or pass the root it publishes to"
        )
    found = (int(p.name[1:]) for p in path.iterdir() if re.fullmatch(r"v[0-9]{8,}", p.name))
    return sorted(v for v in found if (path / _dirname(v) / "manifest.json").is_file())


def latest(source: str) -> int | None:
    """The newest complete version; None where there is none yet."""
    if not _local(source).is_dir():
        return None
    return max(versions(source), default=None)


def wait_for(source: str, at_least: int, timeout_s: float, poll_s: float = 0.05) -> int:
    """Blocks until a version >= `at_least` is visible and returns the newest; TimeoutError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        newest = latest(source)
        if newest is not None and newest >= at_least:
            return newest
        if time.monotonic() >= deadline_s:
            what = f"no version >= {at_least} under {source} after {timeout_s} s (newest: {newest})"
            raise TimeoutError(f"{what}: is the publisher alive?")
        time.sleep(poll_s)


def read_manifest(source: str, version: int) -> Manifest:
    """Reads one manifest and checks every rule that needs no tensor bytes."""
    path = _local(source) / _dirname(version) / "manifest.json"
    try:
        size = path.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise CorruptBroadcast(f"{path} has {size} bytes, more than {MAX_MANIFEST_BYTES}: refused")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"no version {version} under {source}; it holds {versions(source)}") from error
    try:
        return _parse(data, version)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptBroadcast(f"{path}: {type(error).__name__}: {error}") from error


def remove(root: str, version: int) -> None:
    """Deletes a version: first invisible by one rename, then gone."""
    path = _local(root) / _dirname(version)
    doomed = path.with_name(f".tmp-removed-{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def tree_digest(params: Any) -> str:
    """SHA-256 over (name, dtype, shape, SHA-256 of the raw little-endian bytes) of every tensor, sorted by name.

    Two levels rather than one stream, so that tensors are hashed in parallel and a wrong one can be named.
    """
    leaves, _ = _flatten(params, _check_array)

    def describe(item: tuple[str, Any]) -> Tensor:
        array = _host(item[1])
        return Tensor(item[0], array.shape, array.dtype.name, (), _sha256(_raw(array)))

    return _combine(_map(describe, leaves.items()))


def _flatten(tree: Any, check: Callable[[str, Any], None]) -> tuple[dict[str, Any], dict[str, str]]:
    """(leaves by name, containers that are no plain non-empty dict by name); `check` refuses what is no leaf."""
    leaves, containers = {}, {}

    def visit(node: Any, name: str) -> None:
        kind = type(node)
        if kind is dict:
            for key in node:
                if not isinstance(key, str) or not _is_segment(key):
                    raise ValueError(f"key {key!r} under {name!r} must be letters, digits, '_', '-', '.': rename it")
        if kind in (list, tuple) or node is None or (kind is dict and not node):
            containers[name] = "none" if node is None else kind.__name__
        if kind in (dict, list, tuple):
            for key, child in node.items() if kind is dict else enumerate(node):
                visit(child, f"{name}/{key}" if name else str(key))
        elif node is not None:
            if not name:
                raise ValueError(f"params is a {kind.__name__}, not a tree: wrap it in a dict")
            check(name, node)
            leaves[name] = node

    visit(tree, "")
    return leaves, containers


def _is_segment(key: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", key) is not None and key not in (".", "..")


def _check_array(name: str, leaf: Any) -> None:
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
        raise ValueError(f"leaf {name!r} is a {type(leaf).__name__}: params holds dicts, lists, tuples and arrays only")
    if leaf.dtype.name not in DTYPES:
        raise ValueError(
            f"tensor {name!r} has dtype {leaf.dtype}, which cannot be published: cast it to one of {DTYPES}"
        )


def _local(source: str) -> pathlib.Path:
    # Without this check "gs://bucket" would quietly become a directory called "gs:".
    if "://" in str(source):
        raise ValueError(f"{source} is a URL: broadcast reads and writes directories; mount it or pass a path")
    return pathlib.Path(source)


def _dirname(version: int) -> str:
    return f"v{version:08d}"


@contextlib.contextmanager
def _lock(root: pathlib.Path) -> Iterator[None]:
    """Holds the root exclusively; the kernel lets go when a publisher dies, so its leftovers are safe to delete."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _map(function: Callable, items: Any) -> list:
    with concurrent.futures.ThreadPoolExecutor(NUM_WORKERS) as pool:
        return list(pool.map(function, items))  # the first error cancels what has not started


def _write_tensor(directory: pathlib.Path, name: str, leaf: Any) -> tuple[Tensor, list[Object]]:
    array = _host(leaf)
    chunk = _chunk_shape(array.shape, array.dtype.itemsize)
    tensor = Tensor(name, array.shape, array.dtype.name, chunk, _sha256(_raw(array)))
    memory = ts.Context()  # each context has its own "memory" store, which dies with it
    encoded = ts.KvStore.open("memory://", context=memory).result()
    store = ts.open(_spec(tensor), context=memory, create=True).result()
    stored = array.view(STORED_AS.get(tensor.dtype, array.dtype))
    (directory / "tensors" / name).mkdir(parents=True)
    objects = []
    for path, region in _objects(tensor):
        if region is not None:  # chunk by chunk: the host holds a tensor and one chunk, in memory already paged in
            store[region].write(stored[region]).result()
        data = encoded.read(path).result().value
        encoded.write(path, None).result()
        _write_file(directory / path, data)
        objects.append(Object(path, len(data), _sha256(data)))
    return tensor, objects


def _host(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf, order="C")
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def _raw(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)  # hashlib takes no bfloat16 buffers


def _sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Splits leading dims until a chunk has at most CHUNK_BYTES, by a divisor of the dim where a fair one exists.

    zarr stores edge chunks at full size: dividing wastes nothing. A prime dim (151669 tokens) has no fair divisor;
    there the chunks are equal up to one row, which wastes less than a row per chunk.
    """
    chunk = [max(1, n) for n in shape]
    for i, n in enumerate(chunk):
        if math.prod(chunk) * itemsize <= CHUNK_BYTES:
            break
        rows = max(1, CHUNK_BYTES // (math.prod(chunk[i + 1 :]) * itemsize))
        balanced = -(-n // -(-n // rows))
        chunk[i] = next((d for d in range(rows, rows // 4, -1) if n % d == 0), balanced)
    return tuple(chunk)


def _spec(tensor: Tensor) -> dict:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "memory", "path": f"tensors/{tensor.name}/"},
        "metadata": {
            "shape": list(tensor.shape),
            "data_type": STORED_AS.get(tensor.dtype, tensor.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(tensor.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
        "store_data_equal_to_fill_value": True,  # all-zero chunks are objects like any other,
        "fill_missing_data_reads": False,  # so a missing one is an error, not zeros
    }


def _objects(tensor: Tensor) -> Iterator[tuple[str, tuple[slice, ...] | None]]:
    """The paths a tensor consists of, each with the region of the array it holds (None: zarr.json)."""
    yield f"tensors/{tensor.name}/zarr.json", None
    for index in itertools.product(*map(range, _grid(tensor))):
        region = tuple(
            slice(i * c, min(i * c + c, n)) for i, c, n in zip(index, tensor.chunk, tensor.shape, strict=True)
        )
        yield f"tensors/{tensor.name}/{'.'.join(['c', *map(str, index)])}", region


def _grid(tensor: Tensor) -> list[int]:
    return [-(-n // c) for n, c in zip(tensor.shape, tensor.chunk, strict=True)]


def _write_file(path: pathlib.Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync(directory: str | pathlib.Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _combine(tensors: Any) -> str:
    rows = [[t.name, t.dtype, t.shape, t.sha256] for t in sorted(tensors, key=lambda t: t.name)]
    return _sha256(_canonical(rows))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _newest(source: str) -> int:
    found = versions(source)
    if not found:
        raise FileNotFoundError(f"no version under {source} yet: wait_for() one")
    return found[-1]


def _parse(data: bytes, version: int) -> Manifest:
    """A manifest from hostile bytes. Each rule names its value; the caller adds the path."""
    outer = json.loads(data)
    _require(isinstance(outer, dict) and set(outer) == {"manifest", "sha256"}, "fields are not manifest and sha256")
    body = outer["manifest"]
    actual = _sha256(_canonical(body))
    _require(actual == outer["sha256"], f"its sha256 is {actual}, but it says {outer['sha256']!r}")
    _require(body["format"] == FORMAT, f"format {body['format']!r} is not {FORMAT}: use the release that wrote it")
    _require(body["version"] == version, f"version {body['version']!r} lies in the directory of version {version}")
    for field, kind in {"metadata": dict, "containers": dict, "tensors": list, "objects": list}.items():
        _require(type(body[field]) is kind, f"{field} is a {type(body[field]).__name__}, not a {kind.__name__}")
    tensors = tuple(Tensor(**{**t, "shape": tuple(t["shape"]), "chunk": tuple(t["chunk"])}) for t in body["tensors"])
    objects = tuple(Object(**o) for o in body["objects"])
    manifest = Manifest(**{**body, "tensors": tensors, "objects": objects})

    for name, kind in manifest.containers.items():
        _require(kind in ("dict", "list", "tuple", "none"), f"container {name!r} has unknown kind {kind!r}")
        _require(not name or _is_path(name), f"container name {name!r} is no path of plain segments")
    for o in objects:
        _require(_is_path(o.path), f"object path {o.path!r} is no path of plain segments")
        _require(_is_int(o.size, MAX_OBJECT_BYTES), f"object {o.path!r} has size {o.size!r}, not 0..{MAX_OBJECT_BYTES}")
    sizes = {o.path: o.size for o in objects}
    _require(len(sizes) == len(objects), "an object path occurs twice")
    named = collections.Counter(os.path.dirname(path) for path in sizes)
    _require(len({t.name for t in tensors}) == len(tensors), "a tensor name occurs twice")
    for t in tensors:
        _require(_is_path(t.name), f"tensor name {t.name!r} is no path of plain segments")
        _require(t.dtype in DTYPES, f"tensor {t.name!r} has unknown dtype {t.dtype!r}")
        _require(
            len(t.shape) <= 32 and all(_is_int(n, 1 << 48) for n in t.shape), f"tensor {t.name!r} has shape {t.shape}"
        )
        _require(
            len(t.chunk) == len(t.shape) and all(_is_int(n, 1 << 48) and n > 0 for n in t.chunk),
            f"tensor {t.name!r} of shape {t.shape} has chunk {t.chunk}",
        )
        # Chunks are stored uncompressed, so the objects' sizes bound what a reader will allocate.
        listed, expected = named[f"tensors/{t.name}"], 1 + math.prod(_grid(t))
        _require(listed == expected, f"tensor {t.name!r} of shape {t.shape} has {listed} objects, not {expected}")
        chunk_bytes = math.prod(t.chunk) * _dtype(t).itemsize + CRC_BYTES
        for path, region in _objects(t):
            _require(path in sizes, f"object {path!r} is missing")
            fits = region is None or sizes[path] == chunk_bytes
            _require(fits, f"object {path!r} has {sizes[path]} bytes, but chunk {t.chunk} has {chunk_bytes}")
    expected = sum(1 + math.prod(_grid(t)) for t in tensors)
    _require(len(objects) == expected, f"{len(objects)} objects are listed, but the tensors have {expected}")
    _require(_combine(tensors) == manifest.digest, f"digest {manifest.digest!r} is not that of the tensors")
    _unflatten(dict.fromkeys(t.name for t in tensors), manifest.containers)
    return manifest


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CorruptBroadcast(message)


def _is_path(name: Any) -> bool:
    return isinstance(name, str) and all(map(_is_segment, name.split("/")))


def _is_int(value: Any, largest: int) -> bool:
    return type(value) is int and 0 <= value <= largest


def _dtype(tensor: Tensor) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, tensor.dtype, tensor.dtype))


def _unflatten(leaves: dict[str, Any], containers: dict[str, str]) -> Any:
    """The inverse of `_flatten`; ValueError where names and containers make no tree."""
    root: dict = {}
    for name in filter(None, containers):
        node = root
        for key in name.split("/"):
            node = node.setdefault(key, {})
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = root
        for key in parents:
            node = node.setdefault(key, {})
            _require(type(node) is dict, f"tensor {name!r} lies inside another tensor")
        _require(last not in node, f"tensor {name!r} is also a container")
        node[last] = leaf

    def build(node: Any, name: str) -> Any:
        if type(node) is not dict:
            return node
        children = {key: build(child, f"{name}/{key}" if name else key) for key, child in node.items()}
        kind = containers.get(name, "dict")
        if kind == "dict":
            return children
        if kind == "none":
            _require(not children, f"None at {name!r} has children {sorted(children)}")
            return None
        indices = [str(i) for i in range(len(children))]
        _require(set(children) == set(indices), f"the {kind} at {name!r} has indices {sorted(children)}")
        return {"list": list, "tuple": tuple}[kind](children[i] for i in indices)

    return build(root, "")


def _targets(manifest: Manifest, shardings: Any) -> dict[str, jax.sharding.Sharding]:
    """Shardings by tensor name, each checked against its tensor before a byte is read."""

    def check(name: str, leaf: Any) -> None:
        if not isinstance(leaf, jax.sharding.Sharding):
            raise ValueError(f"shardings leaf {name!r} is a {type(leaf).__name__}: pass one jax Sharding per tensor")

    targets, _ = _flatten(shardings, check)
    unmatched = sorted({t.name for t in manifest.tensors} ^ set(targets))
    if unmatched:
        raise ValueError(f"shardings and version {manifest.version} differ in {unmatched[:8]}: use that model's config")
    for t in manifest.tensors:
        if jax.dtypes.canonicalize_dtype(_dtype(t)) != _dtype(t):  # device_put would truncate in silence
            raise ValueError(
                f"tensor {t.name!r} is {t.dtype}, which jax would narrow: set jax_enable_x64 or pull to numpy"
            )
        try:
            targets[t.name].shard_shape(t.shape)
        except ValueError as error:
            raise ValueError(f"tensor {t.name!r} of shape {t.shape} does not fit its sharding: {error}") from error
    return targets


def _read_tensors(source: str, manifest: Manifest, finish: Callable[[Tensor, np.ndarray], Any]) -> dict[str, Any]:
    """`finish(tensor, array)` by name, for every tensor, once its objects and its own hash are verified."""
    directory = _local(source) / _dirname(manifest.version)
    objects = {o.path: o for o in manifest.objects}

    def read(tensor: Tensor) -> Any:
        memory = ts.Context()
        encoded = ts.KvStore.open("memory://", context=memory).result()
        for path, _ in _objects(tensor):
            encoded.write(path, _read_object(directory, objects[path])).result()
        try:
            stored = ts.open(_spec(tensor), context=memory, open=True).result().read().result()
        except ValueError as error:  # the hashes agree: the publisher wrote something else than it says
            raise CorruptBroadcast(f"tensor {tensor.name!r} of {directory}: {error}") from error
        array = stored.view(_dtype(tensor))
        actual = _sha256(_raw(array))
        _require(
            actual == tensor.sha256, f"tensor {tensor.name!r} of {directory} has sha256 {actual}, not {tensor.sha256}"
        )
        return finish(tensor, array)

    names = [t.name for t in manifest.tensors]
    return dict(zip(names, _map(read, manifest.tensors), strict=True))


def _read_object(directory: pathlib.Path, expected: Object) -> bytes:
    path = directory / expected.path
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _require(size == expected.size, f"object {path} has {size} bytes, not {expected.size}")
            data = file.read()
    except FileNotFoundError as error:
        if not (directory / "manifest.json").exists():
            raise FileNotFoundError(
                f"{directory} was deleted while it was read: pull the newest, or raise keep"
            ) from error
        raise CorruptBroadcast(f"object {path} is missing") from error
    actual = _sha256(data)
    _require(actual == expected.sha256, f"object {path} has sha256 {actual}, not {expected.sha256}")
    return data


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sharding.broadcast", description="Look at published weights.")
    parser.add_argument("command", choices=("list", "verify"))
    parser.add_argument("root")
    parser.add_argument("--version", type=int, help="default: list all, verify the newest")
    args = parser.parse_args(argv)
    try:
        if args.command == "list":
            for version in versions(args.root) if args.version is None else [args.version]:
                print(_describe(read_manifest(args.root, version)))
        else:
            print(f"ok: {_describe(verify(args.root, args.version))}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _describe(manifest: Manifest) -> str:
    size_mb = sum(o.size for o in manifest.objects) / 1e6
    return f"version {manifest.version}: {len(manifest.tensors)} tensors, {size_mb:.1f} MB, digest {manifest.digest}"


if __name__ == "__main__":
    sys.exit(main())

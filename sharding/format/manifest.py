"""The manifest of a version: the signed list of its objects and tensors, and the checks of it.

A manifest is canonical JSON (sorted keys, no spaces, ASCII), with these fields:

* `version`; `base`, the version that must be read first (null for a snapshot, which is complete in itself); `delta_of`, the
  version that the deltas apply to (a snapshot may have deltas, too); `encodings`: "zarr3" (snapshots), "xor" (deltas).
* `tensors`: name, shape, dtype, chunk shape, and one digest (`sharding/format/digests.py`) per chunk. That is the digest of
  the file that zarr3 with the codecs bytes and crc32c stores for the chunk. In a snapshot this file is an object, so one
  hash proves both; in a delta version it is the digest that the patched chunk must have. `deltas` locates the patch of each chunk:
  object, offset, size; null means unchanged.
* `objects`: every file except the manifest, in the order of publishing, with size and digest.
* `digest_after`, the digest of the tree (see `digest`), and `digest_before`, that of `delta_of`.
* `containers` (see `sharding/format/tree.py`), `metadata` (any JSON object of the publisher), `run` (the name of the run).
* `own_digest`, of all fields except itself and `signature`; `signature`, by `public_key` (ed25519), of all other fields.

`parse` accepts hostile bytes: it allocates memory in proportion to them, and each error names the offending value. All rules
that need no object are checked here, so that a bad manifest costs no download. Imports no jax: relays run without it.
"""

import collections
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.format import digests, journal, tree

FORMAT = 3
ENCODINGS = (["zarr3"], ["xor"], ["xor", "zarr3"])
CRC_BYTES = 4  # appended to each chunk by the crc32c codec
MAX_CHUNK_BYTES = 256 << 20  # a hostile manifest must not make a reader allocate more
MAX_DELTA_BYTES = 320 << 20  # a patch is at most a little larger than its chunk
MAX_RANK = 32
MAX_RUN_LENGTH = 200

_DTYPES = {  # by bytes per element
    1: "bool int2 int4 int8 uint2 uint4 uint8 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
    2: "int16 uint16 float16 bfloat16",
    4: "int32 uint32 float32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
ITEM_BYTES = {name: size for size, names in _DTYPES.items() for name in names.split()}
# Not in tensorstore's zarr3: the same bytes.
STORED_AS: dict[str, str] = dict.fromkeys(("uint2", "uint4", "float8_e4m3"), "uint8")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor as a manifest describes it: a leaf of the published parameter tree, stored in chunks.

    `chunk` is the shape of a chunk. `chunks` has the hex digest, and `deltas` the patch (object, offset, size) or None, of
    each chunk, row-major. A tied tensor has neither: `tied_to` names the leaf that is the same array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    chunks: tuple[str, ...]
    deltas: tuple[tuple[int, int, int] | None, ...] | None = None
    tied_to: str | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each dim of the tensor."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """The bytes of one chunk without its checksum. Edge chunks are padded with zeros to the full chunk shape."""
        return math.prod(self.chunk) * ITEM_BYTES[self.dtype]

    def chunk_regions(self) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """Yields (path of the chunk's file in a snapshot, slices of the array that the chunk contains), row-major."""
        for index in itertools.product(*map(range, self.grid)):
            yield f"tensors/{self.name}/{'.'.join(['c', *map(str, index)])}", self._region(index)

    def region(self, number: int) -> tuple[slice, ...]:
        """Returns the slices, one per dim, of the array that chunk `number` contains; chunks are counted row-major."""
        index = []
        for n in reversed(self.grid):
            number, i = divmod(number, n)
            index.append(i)
        return self._region(tuple(index[::-1]))

    def _region(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(i * c, min(i * c + c, n)) for i, c, n in zip(index, self.chunk, self.shape, strict=True))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The signed description of one published version of the weights: its tensors, and the files that store them.

    Has the fields of manifest.json except `own_digest`; the docstring of sharding/format/manifest.py explains each.
    """

    version: int
    base: int | None
    delta_of: int | None
    encodings: tuple[str, ...]
    digest_before: str | None
    digest_after: str
    tensors: tuple[Tensor, ...]
    objects: tuple[journal.Object, ...]
    containers: dict[str, str]
    metadata: dict
    run: str = ""
    public_key: str | None = None
    signature: str | None = None
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """The digest of the version's parameter tree."""
        return self.digest_after

    @property
    def size_bytes(self) -> int:
        """The total size of the version's objects."""
        return sum(o.size for o in self.objects)


def encode(manifest: Manifest, key: ed25519.Ed25519PrivateKey | None = None) -> bytes:
    """Returns the bytes of manifest.json, signed with `key`, or unsigned if `key` is None.

    Ignores `manifest.public_key` and `manifest.signature`. Raises ValueError if the result is larger than readers accept.
    """
    body = {name: getattr(manifest, name) for name in _FIELDS - {"own_digest", "signature"}}
    body["tensors"] = [vars(t) for t in manifest.tensors]
    body["objects"] = [vars(o) for o in manifest.objects]
    body["public_key"] = None if key is None else key.public_key().public_bytes_raw().hex()
    body["own_digest"] = digests.of(canonical(body))
    body["signature"] = None if key is None else key.sign(canonical(body)).hex()
    data = canonical(body)
    if len(data) > journal.MAX_MANIFEST_BYTES:
        raise ValueError(
            f"the manifest has {len(data)} bytes, more than readers accept ({journal.MAX_MANIFEST_BYTES}): shorten metadata"
        )
    return data


def parse(data: bytes, *, version: int | None = None, trusted_key: str | None = None) -> Manifest:
    """Returns the manifest in `data`, the untrusted bytes of a manifest.json, after checking it.

    Raises CorruptSource, with the reason, if it is malformed, contradicts itself, or breaks one of the two conditions.

    Args:
      data: the bytes of a manifest.json.
      version: the version number that the manifest must have; None accepts any.
      trusted_key: hex of the only public key whose signature is accepted; None accepts any valid signature, and none.
    """
    try:
        return _parse(data, version, trusted_key)
    except journal.CorruptSource:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise journal.CorruptSource(f"manifest is malformed: {type(error).__name__}: {str(error)[:200]}") from error


def canonical(value: Any) -> bytes:
    """Returns `value` as JSON bytes with sorted keys and without spaces. Raises ValueError or TypeError if it is not JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(tensors: tuple[Tensor, ...]) -> str:
    """Returns the digest of a parameter tree: the hash of canonical JSON with one row per tensor, sorted by name.

    A row is [name, dtype, shape, chunk shape, digest of the chunks' digests], so each host can hash its own chunks. Equal
    trees have equal digests if their chunk shapes are equal. Chunk shapes depend on shapes and, over several hosts, on
    shardings.
    """
    by_name = {t.name: t for t in tensors}

    def combined(t: Tensor) -> str:
        return digests.of(bytes.fromhex("".join(by_name[t.tied_to or t.name].chunks)))

    rows = [[t.name, t.dtype, t.shape, t.chunk, combined(t)] for t in sorted(tensors, key=lambda t: t.name)]
    return digests.of(canonical(rows))


def zarr_json(tensor: Tensor) -> bytes:
    """Returns the bytes of a tensor's zarr.json, the array metadata with which any zarr3 reader opens it in a snapshot."""
    kind = STORED_AS.get(tensor.dtype, tensor.dtype)
    zeros = {"bool": False, "complex64": [0.0, 0.0], "complex128": [0.0, 0.0]}
    return canonical(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": tensor.shape,
            "data_type": kind,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": tensor.chunk}},
            # One directory per tensor, c.0.1 rather than c/0/1: making directories took half of a small publish.
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "fill_value": zeros.get(kind, 0.0 if "float" in kind else 0),
        }
    )


_FIELDS = {field.name for field in dataclasses.fields(Manifest)} | {"own_digest"}
_TENSOR_FIELDS = {field.name for field in dataclasses.fields(Tensor)}
_LISTS_AND_DICTS = {"tensors": list, "objects": list, "encodings": list, "metadata": dict, "containers": dict}


def _parse(data: bytes, version: int | None, trusted_key: str | None) -> Manifest:
    limit = f"at most {journal.MAX_MANIFEST_BYTES} are allowed"
    _require(len(data) <= journal.MAX_MANIFEST_BYTES, f"manifest has {len(data)} bytes: {limit}")
    body = json.loads(data)
    _require(isinstance(body, dict), f"manifest is a {type(body).__name__}, not an object")
    _require(
        body.get("format") == FORMAT,
        f"format {str(body.get('format'))[:80]} is not {FORMAT}, which this release reads: publish again, or use the "
        "release that wrote it",
    )
    unmatched = sorted(set(body) ^ _FIELDS)
    _require(
        not unmatched, f"manifest lacks, or has in addition to those of format {FORMAT}, the fields {unmatched[:8]}"
    )
    _check_origin(data, body, trusted_key)
    for field, kind in _LISTS_AND_DICTS.items():
        _require(type(body[field]) is kind, f"{field} is a {type(body[field]).__name__}, not a {kind.__name__}")
    for field in ("base", "delta_of"):
        _require(body[field] is None or _is_int(body[field]), f"{field} is {body[field]!r}, not null or a version")
    _require(_is_int(body["version"]), f"version is {body['version']!r}, not an integer >= 0")
    _require(version in (None, body["version"]), f"manifest is of version {body['version']}, not of version {version}")
    run = body["run"]
    is_run = isinstance(run, str) and len(run) <= MAX_RUN_LENGTH
    _require(is_run, f"run is {str(run)[:80]!r}, not a string of at most {MAX_RUN_LENGTH} characters")
    del body["own_digest"]
    parsers = {"encodings": str, "tensors": _tensor, "objects": journal.parse_object}
    manifest = Manifest(**body | {field: tuple(map(parse, body[field])) for field, parse in parsers.items()})
    _check_lineage(manifest)
    _check_objects(manifest)
    for name, kind in manifest.containers.items():
        _require(kind in ("dict", "list", "tuple", "none"), f"container {name!r} has unknown kind {str(kind)[:80]!r}")
        _require(not name or tree.is_name(name), f"container name {name[:200]!r} is not a path of plain segments")
    tree.unflatten(dict.fromkeys(t.name for t in manifest.tensors), manifest.containers)
    actual, stated = digest(manifest.tensors), manifest.digest_after
    _require(actual == stated, f"digest_after {stated!r} is not {actual}, the tensors' digest")
    return manifest


def _check_origin(data: bytes, body: dict, trusted_key: str | None) -> None:
    """Raises CorruptSource unless the manifest's own digest, its canonical form, and its signature are right."""
    signed = {name: value for name, value in body.items() if name != "signature"}
    hashed = {name: value for name, value in signed.items() if name != "own_digest"}
    actual = digests.of(canonical(hashed))
    _require(actual == body["own_digest"], f"its digest is {actual}, not own_digest {str(body['own_digest'])[:80]!r}")
    _require(canonical(body) == data, "manifest is not canonical JSON: it has spaces, unsorted keys, or a field twice")
    public_key, signature = body["public_key"], body["signature"]
    if trusted_key is not None:
        check_signer(public_key, trusted_key)
    if public_key is None:
        _require(signature is None, "manifest has a signature but no public_key")
        return
    for field, digits in (("public_key", 64), ("signature", 128)):
        good = isinstance(body[field], str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", body[field])
        _require(bool(good), f"{field} is {str(body[field])[:80]!r}, not {digits} hex digits")
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(
            bytes.fromhex(signature), canonical(signed)
        )
    except (exceptions.InvalidSignature, ValueError) as error:
        raise journal.CorruptSource(f"the signature is not one by key {public_key} over this manifest") from error


def check_signer(public_key: Any, trusted_key: str) -> None:
    """Raises CorruptSource unless `public_key`, the key that signed a manifest, equals `trusted_key` (both in hex)."""
    signer = str(public_key)[:80]
    _require(public_key == trusted_key, f"manifest is signed by {signer}, not by the trusted {trusted_key}")


def _tensor(entry: Any) -> Tensor:
    """Returns the tensor of one entry of a manifest's `tensors`. Raises CorruptSource if the entry breaks a rule."""
    _require(
        isinstance(entry, dict) and set(entry) == _TENSOR_FIELDS,
        f"tensor entry {str(entry)[:200]} does not have exactly the fields {sorted(_TENSOR_FIELDS)}",
    )
    name, dtype = entry["name"], entry["dtype"]
    _require(tree.is_name(name), f"tensor name {str(name)[:200]!r} is not a path of plain segments")
    _require(isinstance(dtype, str) and dtype in ITEM_BYTES, f"tensor {name!r} has unknown dtype {str(dtype)[:80]!r}")
    for field in ("shape", "chunk", "chunks"):
        _require(
            type(entry[field]) is list, f"{field} of tensor {name!r} is a {type(entry[field]).__name__}, not a list"
        )
    shape, chunk = tuple(entry["shape"]), tuple(entry["chunk"])
    is_shape = len(shape) <= MAX_RANK and all(map(_is_int, shape))
    _require(is_shape, f"tensor {name!r} has shape {str(shape)[:200]}, not up to {MAX_RANK} integers >= 0")
    fits = len(chunk) == len(shape) and all(_is_int(c) and c > 0 for c in chunk)
    _require(fits, f"tensor {name!r} of shape {shape} has chunk shape {str(chunk)[:200]}, not one integer >= 1 per dim")
    tensor = Tensor(name, shape, dtype, chunk, tuple(entry["chunks"]), tied_to=entry["tied_to"])
    small = tensor.chunk_bytes <= MAX_CHUNK_BYTES
    _require(small, f"tensor {name!r} has chunk {chunk} of {tensor.chunk_bytes} bytes, more than {MAX_CHUNK_BYTES}")
    if tensor.tied_to is not None:
        _require(not tensor.chunks and entry["deltas"] is None, f"tied tensor {name!r} has chunks or deltas of its own")
        return tensor
    expected, listed = math.prod(tensor.grid), len(tensor.chunks)
    _require(
        listed == expected, f"tensor {name!r} of shape {shape} lists {listed} chunk digests, but has {expected} chunks"
    )
    _require(all(map(digests.is_digest, tensor.chunks)), f"a chunk of tensor {name!r} has no digest of 64 hex digits")
    if entry["deltas"] is None:
        return tensor
    deltas = tuple(d if d is None else tuple(d) for d in entry["deltas"])
    _require(len(deltas) == expected, f"tensor {name!r} has {len(deltas)} deltas for {expected} chunks")
    good = all(d is None or (len(d) == 3 and all(map(_is_int, d))) for d in deltas)
    _require(good, f"a delta of tensor {name!r} is not [object, offset, size]")
    return dataclasses.replace(tensor, deltas=deltas)


def _check_lineage(m: Manifest) -> None:
    """Raises CorruptSource unless the fields on versions, encodings and digests agree with each other, and with the deltas."""
    _require(list(m.encodings) in ENCODINGS, f"encodings {str(m.encodings)[:200]} are not one of {ENCODINGS}")
    for field in ("base", "delta_of"):
        number = getattr(m, field)
        _require(number is None or number < m.version, f"{field} {number} is not older than version {m.version}")
    has_arrays, has_deltas = "zarr3" in m.encodings, "xor" in m.encodings
    needed = None if has_arrays else m.delta_of
    _require(m.base == needed, f"base {m.base} is not {needed}, which encodings {m.encodings} require")
    good = has_deltas == (m.delta_of is not None)
    _require(good, f"delta_of is {m.delta_of} with encodings {m.encodings}: it must be set with 'xor', and only then")
    good = digests.is_digest(m.digest_before) if has_deltas else m.digest_before is None
    _require(
        good, f"digest_before is {str(m.digest_before)[:80]!r}: it must be 64 hex digits with encoding 'xor', else null"
    )
    _require(digests.is_digest(m.digest_after), f"digest_after is {str(m.digest_after)[:80]!r}, not 64 hex digits")
    for t in m.tensors:
        good = (t.deltas is not None) == (has_deltas and t.tied_to is None)
        _require(good, f"tensor {t.name!r} must have deltas with encoding 'xor', and only then; it is {m.encodings}")


def _check_objects(m: Manifest) -> None:
    """Raises CorruptSource unless the manifest lists exactly the objects that its tensors need, with the right sizes."""
    by_name = {t.name: t for t in m.tensors}
    _require(len(by_name) == len(m.tensors), "a tensor name occurs twice")
    objects = {o.path: o for o in m.objects}
    _require(len(objects) == len(m.objects), "an object path occurs twice")
    expected: dict[str, tuple[int, str]] = {}
    used = collections.Counter()
    for t in m.tensors:
        if t.tied_to is not None:
            other = by_name.get(t.tied_to) if isinstance(t.tied_to, str) else None
            expected_tie = dataclasses.replace(t, name="", tied_to=None)
            same = other is not None and dataclasses.replace(other, name="", chunks=(), deltas=None) == expected_tie
            _require(
                same,
                f"tensor {t.name!r} is tied to {str(t.tied_to)[:200]!r}, not an untied tensor of its shape and chunk",
            )
            continue
        if "zarr3" in m.encodings:
            data = zarr_json(t)
            expected[f"tensors/{t.name}/zarr.json"] = len(data), digests.of(data)
            for (path, _), chunk_digest in zip(t.chunk_regions(), t.chunks, strict=True):
                expected[path] = t.chunk_bytes + CRC_BYTES, chunk_digest
        for delta in filter(None, t.deltas or ()):
            index, offset, size = delta
            inside = index < len(m.objects) and offset + size <= m.objects[index].size
            inside = inside and m.objects[index].path.startswith("deltas/")
            _require(inside, f"a delta of tensor {t.name!r} at {list(delta)} is outside every object of deltas")
            used[m.objects[index].path] += size
    for path, (size, stated) in expected.items():
        _require(path in objects, f"object {path!r} is missing: a tensor of this manifest needs it")
        o = objects[path]
        _require(o.size == size, f"object {path!r} has {o.size} bytes, but its tensor needs {size}")
        _require(o.digest == stated, f"object {path!r} has digest {o.digest}, but its tensor lists {stated}")
    for path, num_bytes in used.items():
        size = objects[path].size
        _require(num_bytes == size, f"object {path!r} has {size} bytes, but its patches add up to {num_bytes}")
        _require(size <= MAX_DELTA_BYTES, f"object {path!r} has {size} bytes: at most {MAX_DELTA_BYTES} are allowed")
    for path in objects:
        _require(path in expected or path in used, f"object {path!r} belongs to no tensor")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise journal.CorruptSource(message)


def _is_int(value: Any, largest: int = 1 << 48) -> bool:
    return type(value) is int and 0 <= value <= largest

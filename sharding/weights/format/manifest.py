"""The manifest of a version: the signed list of its objects and tensors, and the checks of it.

A manifest is canonical JSON (sorted keys, no spaces, ASCII), with these fields:

* `version`; `base`, the version that must be read first (null for a snapshot, which is complete in itself); `delta_of`, the
  version that the deltas apply to (a snapshot may have deltas, too); `encodings`: "zarr3" (snapshots), "xor" (deltas).
* `tensors`: name, shape, dtype, chunk shape, and one digest (`sharding/weights/format/digests.py`) per chunk. That is the digest of
  the file that zarr3 with the codecs bytes and crc32c stores for the chunk. In a snapshot this file is an object, so one
  hash proves both; in a delta version it is the digest that the patched chunk must have. `deltas` locates the patch of each chunk:
  object, offset, size; null means unchanged.
* `objects`: every file except the manifest, in the order of publishing, with size and digest.
* `digest_after`, the digest of the tree (see `digest`), and `digest_before`, that of `delta_of`.
* `containers` (see `sharding/weights/format/tree.py`), `metadata` (any JSON object of the publisher), `run` (the name of the run), `epoch` (of the
  signed head; null without one).
* `own_digest`, of all fields except itself and `signature`; `signature`, by `public_key` (ed25519), of all other fields.

`parse` accepts hostile bytes: it allocates memory in proportion to them, and each error names the offending value. All rules
that need no object are checked here, so that a bad manifest costs no download. Imports no jax: relays run without it.
"""

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from typing import Annotated, Any

import pydantic
from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.system import text as text_lib
from sharding.weights.format import digests, journal, tree

_require = journal.require
FORMAT = 4
ENCODINGS = (["zarr3"], ["xor"], ["xor", "zarr3"])
CRC_BYTES = 4  # appended to each chunk by the crc32c codec
MAX_CHUNK_BYTES = 256 << 20  # a hostile manifest must not make a reader allocate more
MAX_DELTA_BYTES = 320 << 20  # a patch is at most a little larger than its chunk
MAX_TENSOR_BYTES = 1 << 48
MAX_UNPROVED_BYTES = 16 << 20  # of a manifest that no signed head lists: parsing costs its reader up to 1 s
MAX_UNPROVED_LISTS = 100_000  # lists and objects in it, and one more per 24 bytes: our own have one per 50 or more
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

# The types of fields are also the rules by which pydantic checks a parsed manifest.
Number = Annotated[int, pydantic.Field(ge=0, le=1 << 48)]
FAIL_FAST = pydantic.Field(fail_fast=True)  # a list of a million mistakes must not become a million errors


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor as a manifest describes it: a leaf of the published parameter tree, stored in chunks.

    `chunk` is the shape of a chunk. `chunks` has the hex digest, and `deltas` the patch (object, offset, size) or None, of
    each chunk, row-major. A tied tensor has neither: `tied_to` names the leaf that is the same array.
    """

    name: str
    shape: Annotated[tuple[Number, ...], pydantic.Field(max_length=MAX_RANK, fail_fast=True)]
    dtype: str
    chunk: Annotated[tuple[pydantic.PositiveInt, ...], pydantic.Field(max_length=MAX_RANK, fail_fast=True)]
    chunks: Annotated[tuple[digests.Digest, ...], FAIL_FAST]
    deltas: Annotated[tuple[tuple[Number, Number, Number] | None, ...], FAIL_FAST] | None = None
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
        grid = self.grid if 0 not in self.grid else (0,)  # product copies the ranges
        for index in itertools.product(*map(range, grid)):
            yield f"tensors/{self.name}/{'.'.join(['c', *map(str, index)])}", self._region(index)

    def objects(self) -> Iterator[journal.Object]:
        """Yields the files that store an untied tensor in a snapshot."""
        data = zarr_json(self)
        yield journal.Object(f"tensors/{self.name}/zarr.json", len(data), digests.of(data))
        for (path, _), digest in zip(self.chunk_regions(), self.chunks, strict=True):
            yield journal.Object(path, self.chunk_bytes + CRC_BYTES, digest)

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

    Has the fields of manifest.json except `own_digest`; the docstring of sharding/weights/format/manifest.py explains each.
    """

    version: Number
    base: Number | None
    delta_of: Number | None
    encodings: Annotated[tuple[str, ...], FAIL_FAST]
    digest_before: digests.Digest | None
    digest_after: digests.Digest
    tensors: Annotated[tuple[Tensor, ...], FAIL_FAST]
    objects: Annotated[tuple[journal.Object, ...], FAIL_FAST]
    containers: dict
    metadata: dict
    run: Annotated[str, pydantic.Field(max_length=MAX_RUN_LENGTH)] = ""
    public_key: Annotated[str, pydantic.Field(pattern=text_lib.HEX_64)] | None = None
    signature: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{128}$")] | None = None
    epoch: Number | None = None  # of the signed head; None: published without a key

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

    Ignores `manifest.public_key` and `manifest.signature`. Raises ValueError for a manifest that `parse` would refuse.
    """
    body = _to_json(manifest)
    del body["signature"]
    body["public_key"] = None if key is None else key.public_key().public_bytes_raw().hex()
    body["own_digest"] = digests.of(canonical(body))
    body["signature"] = None if key is None else key.sign(canonical(body)).hex()
    data = canonical(body)
    readable(manifest.metadata)
    try:  # the choices of a caller: all else is our own; to parse it took 0.13 s of CPU for 10,000 objects
        _check_size(data, manifest.epoch is not None)
        for t in manifest.tensors:
            _check_tensor(t, "xor" in manifest.encodings)
    except journal.CorruptSource as error:
        raise ValueError(f"readers would refuse the manifest of version {manifest.version}: {error}") from error
    return data


def readable(metadata: dict | None) -> dict:
    """Returns `metadata` as readers of a manifest get it: tuples are lists. Raises ValueError or TypeError if they would refuse it."""
    try:
        return _METADATA.validate_json(canonical({"metadata": metadata or {}}))["metadata"]
    except pydantic.ValidationError as error:
        text = f"metadata cannot be published: {error.errors(include_url=False)[0]['msg']}"
        raise ValueError(f"{text}; pass a JSON object of UTF-8 text, nested less deeply") from error


def parse(
    data: bytes, *, version: int | None = None, trusted_key: str | None = None, is_proved: bool = False
) -> Manifest:
    """Returns the manifest in `data`, the untrusted bytes of a manifest.json, after checking it.

    Raises CorruptSource, with the reason, if it is malformed, contradicts itself, or is not of `version` or `trusted_key`.

    Args:
      data: the bytes of a manifest.json.
      version: the version number that the manifest must have; None accepts any.
      trusted_key: hex of the only public key whose signature is accepted; None accepts any valid signature, and none.
      is_proved: whether the bytes are those that a signed head lists, whose hash covers them: they may be more, and their own digest
        and signature are checked only with `trusted_key`.
    """
    try:
        _check_size(data, is_proved)
        return _parse(data, version, trusted_key, is_proved)
    except journal.CorruptSource:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise journal.malformed("manifest", error) from error


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


_FIELDS = {field.name for field in dataclasses.fields(Manifest)} | {"own_digest", "format"}
_MANIFEST = pydantic.TypeAdapter(Manifest)
_METADATA = pydantic.TypeAdapter(dict[str, dict])


def _to_json(manifest: Manifest) -> dict[str, Any]:
    """Returns the fields of manifest.json except `own_digest`."""
    body = vars(manifest) | {name: list(map(vars, getattr(manifest, name))) for name in ("tensors", "objects")}
    return body | {"format": FORMAT}


def _check_size(data: bytes, is_proved: bool) -> None:
    """Raises CorruptSource if parsing `data` would take too long; this costs 1 ms per 10 MB."""
    most = journal.MAX_MANIFEST_BYTES if is_proved else min(MAX_UNPROVED_BYTES, journal.MAX_MANIFEST_BYTES)
    _require(len(data) <= most, f"manifest has {len(data)} bytes: at most {most} are allowed")
    count, most = data.count(b"[") + data.count(b"{"), MAX_UNPROVED_LISTS + len(data) // 24
    _require(is_proved or count <= most, f"manifest has {count} lists in {len(data)} bytes: at most {most} are allowed")


def _parse(data: bytes, version: int | None, trusted_key: str | None, is_proved: bool) -> Manifest:
    body = json.loads(data)
    _require(isinstance(body, dict), f"manifest is a {type(body).__name__}, not an object")
    remedy = "which this release reads; publish again, or use the release that wrote it"
    number = body.get("format")
    known = type(number) is int and number == FORMAT
    _require(known, f"format {str(number)[:80]} is not {FORMAT}, {remedy}")
    fields = sorted(set(body) ^ _FIELDS)
    _require(not fields, f"manifest lacks, or has in addition to those of format {FORMAT}, the fields {fields[:8]}")
    needs_proof = trusted_key is not None or not is_proved
    if needs_proof:
        _check_origin(body, trusted_key)
    manifest = _MANIFEST.validate_json(data, strict=True)
    same = not needs_proof or canonical(_to_json(manifest) | {"own_digest": body["own_digest"]}) == data
    text = "manifest is not canonical JSON: it has spaces, unsorted keys, or a field twice, too many or too few"
    _require(same, text)
    text = f"manifest is of version {manifest.version}, not of version {version}"
    _require(version in (None, manifest.version), text)
    _check_lineage(manifest)
    for t in manifest.tensors:
        _check_tensor(t, "xor" in manifest.encodings)
    _check_objects(manifest)
    for name, kind in manifest.containers.items():
        _require(kind in ("dict", "list", "tuple", "none"), f"container {name!r} has unknown kind {str(kind)[:80]!r}")
        _require(not name or tree.is_name(name), f"container name {name[:200]!r} is not a path of plain segments")
    tree.unflatten(dict.fromkeys(t.name for t in manifest.tensors), manifest.containers)
    actual, stated = digest(manifest.tensors), manifest.digest_after
    _require(actual == stated, f"digest_after {stated!r} is not {actual}, the tensors' digest")
    return manifest


def _check_origin(body: dict, trusted_key: str | None) -> None:
    """Raises CorruptSource unless the manifest's own digest and its signature are right."""
    signed = {name: value for name, value in body.items() if name != "signature"}
    hashed = {name: value for name, value in signed.items() if name != "own_digest"}
    actual = digests.of(canonical(hashed))
    _require(actual == body["own_digest"], f"its digest is {actual}, not own_digest {str(body['own_digest'])[:80]!r}")
    public_key, signature = body["public_key"], body["signature"]
    if trusted_key is not None:
        text = f"version {str(body['version'])[:80]} is signed by {str(public_key)[:80]}"
        _require(public_key == trusted_key, f"{text}, not by the trusted {trusted_key}")
    if public_key is None:
        _require(signature is None, "manifest has a signature but no public_key")
        return
    try:
        verifier = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        verifier.verify(bytes.fromhex(signature), canonical(signed))
    except (exceptions.InvalidSignature, ValueError, TypeError) as error:  # TypeError: not a string
        text = f"the signature is not one by public_key {str(public_key)[:80]!r} over this manifest"
        raise journal.CorruptSource(text) from error


def _check_lineage(m: Manifest) -> None:
    """Raises CorruptSource unless the fields on versions, encodings and digests agree with each other."""
    _require(list(m.encodings) in ENCODINGS, f"encodings {str(m.encodings)[:200]} are not one of {ENCODINGS}")
    for field, number in (("base", m.base), ("delta_of", m.delta_of)):
        _require(number is None or number < m.version, f"{field} {number} is not older than version {m.version}")
    needed = None if "zarr3" in m.encodings else m.delta_of
    _require(m.base == needed, f"base {m.base} is not {needed}, which encodings {m.encodings} require")
    for field, value in (("delta_of", m.delta_of), ("digest_before", m.digest_before)):
        good = (value is not None) == ("xor" in m.encodings)
        _require(good, f"{field} is {value} with encodings {m.encodings}: it must be set with 'xor', and only then")


def _check_tensor(t: Tensor, has_deltas: bool) -> None:
    """Raises CorruptSource unless the fields of a tensor agree with each other, and with the version's encodings."""
    _require(tree.is_name(t.name), f"tensor name {t.name[:200]!r} is not a path of plain segments")
    _require(t.dtype in ITEM_BYTES, f"tensor {t.name!r} has unknown dtype {t.dtype[:80]!r}")
    _require(len(t.chunk) == len(t.shape), f"tensor {t.name!r} of shape {t.shape} has chunk shape {t.chunk}")
    small = t.chunk_bytes <= MAX_CHUNK_BYTES
    _require(small, f"tensor {t.name!r} has chunk {t.chunk} of {t.chunk_bytes} bytes, more than {MAX_CHUNK_BYTES}")
    num_bytes = math.prod(max(n, 1) for n in t.shape) * ITEM_BYTES[t.dtype]  # an empty one can overflow a reader, too
    text = f"tensor {t.name!r} of shape {t.shape} has dims for {num_bytes} bytes, more than {MAX_TENSOR_BYTES}"
    _require(num_bytes <= MAX_TENSOR_BYTES, text)
    if t.tied_to is not None:
        _require(not t.chunks and t.deltas is None, f"tied tensor {t.name!r} has chunks or deltas of its own")
        return
    expected = math.prod(t.grid)
    for kind, listed in (("chunk digests", t.chunks), ("deltas", t.deltas)):
        good = listed is None or len(listed) == expected
        _require(good, f"tensor {t.name!r} of shape {t.shape} has {len(listed or ())} {kind} for {expected} chunks")
    good = (t.deltas is not None) == has_deltas
    _require(good, f"tensor {t.name!r} must have deltas with encoding 'xor', and only then")


def _check_objects(m: Manifest) -> None:
    """Raises CorruptSource unless the manifest lists exactly the objects that its tensors need, with the right sizes."""
    by_name = {t.name: t for t in m.tensors}
    _require(len(by_name) == len(m.tensors), "a tensor name occurs twice")
    objects = {o.path: o for o in m.objects}
    _require(len(objects) == len(m.objects), "an object path occurs twice")
    expected: list[journal.Object] = []
    used = collections.Counter()
    for t in m.tensors:
        if t.tied_to is not None:
            other, as_other = by_name.get(t.tied_to), dataclasses.replace(t, name=t.tied_to, tied_to=None)
            same = other is not None and dataclasses.replace(other, chunks=(), deltas=None) == as_other
            rule = "an untied tensor of its shape and chunk"
            _require(same, f"tensor {t.name!r} is tied to {t.tied_to[:200]!r}, not {rule}")
            continue
        if "zarr3" in m.encodings:
            expected += t.objects()
        for index, offset, size in filter(None, t.deltas or ()):
            inside = index < len(m.objects) and offset + size <= m.objects[index].size
            text = f"a delta of tensor {t.name!r} at {[index, offset, size]} is outside every object of deltas"
            _require(inside and m.objects[index].path.startswith("deltas/"), text)
            used[m.objects[index].path] += size
    for needed in expected:
        _require(needed == objects.get(needed.path), f"a tensor needs {needed}, not {objects.get(needed.path)}")
    for path, num_bytes in used.items():
        size = objects[path].size
        _require(num_bytes == size, f"object {path!r} has {size} bytes, but its patches add up to {num_bytes}")
        _require(size <= MAX_DELTA_BYTES, f"object {path!r} has {size} bytes: at most {MAX_DELTA_BYTES} are allowed")
    surplus = objects.keys() - used.keys() - {needed.path for needed in expected}
    _require(not surplus, f"objects {sorted(surplus)[:8]} belong to no tensor")

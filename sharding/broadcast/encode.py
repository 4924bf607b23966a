"""One version being written: from device arrays to objects, on every host of the learner, and the manifest over all of them.

`write` does what `broadcast.publish` promises, in this order: lock, refuse what cannot be, clean up, decide between snapshot and
deltas, encode and write this host's chunks, collect what the other hosts wrote, seal, delete what nobody needs.
"""

import collections
import contextlib
import dataclasses
import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, Protocol

import jax
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519
from jax.experimental import multihost_utils

from sharding.broadcast import assemble, destination
from sharding.download import source as source_lib
from sharding.format import chunks, delta, digests, journal, manifest
from sharding.multihost import transport

PACK_BYTES = 4 << 20  # patches are collected into objects of about this size: one per chunk would be 60 kB
PREFETCH_PIECES = 2  # shards on their way from the devices while one is encoded

DTYPES = tuple(manifest.ITEM_BYTES)


class Base(Protocol):
    """What deltas are made from: `broadcast.Pulled`, or one whose params are `Kept`."""

    version: int
    params: Any
    digest: str


@dataclasses.dataclass
class Kept:
    """A publisher's copy of what its host wrote last: chunk bytes by (tensor name, number), and the manifest of it."""

    chunks: dict[tuple[str, int], np.ndarray]
    written: manifest.Manifest | None = None


@dataclasses.dataclass(frozen=True)
class _Encoded:
    """One chunk after its thread: `digest` of what a snapshot stores, the object if it was stored, the patch if any."""

    name: str
    number: int
    digest: str
    stored: journal.Object | None
    patch: bytes | None


@dataclasses.dataclass
class _Written:
    """What one host wrote: digests and patches [object, offset, size] by tensor and chunk number, and its objects."""

    chunks: dict[str, dict[int, tuple[str, tuple[int, int, int] | None]]]
    objects: list[journal.Object]


def write(
    params: Any,
    version: int,
    root: str | os.PathLike,
    *,
    base: Base | None,
    snapshot: bool | None,
    key: ed25519.Ed25519PrivateKey | None,
    metadata: dict | None,
    keep: int,
    dtype: str | None,
    run: str,
    kept: Kept | None = None,
) -> manifest.Manifest:
    """See `broadcast.publish`. `kept` receives a copy of what this host writes, for the next delta."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"version {version!r} must be an integer >= 0: pass the learner's step")
    if keep < 1:
        raise ValueError(f"keep={keep} would delete the version just published: pass 1 or more")
    if not isinstance(run, str) or len(run) > manifest.MAX_RUN_LENGTH:
        raise ValueError(f"run {str(run)[:80]!r} must be a string of at most {manifest.MAX_RUN_LENGTH} characters")
    if base is None and snapshot is False:
        raise ValueError("snapshot=False without base: pass the version that the deltas shall apply to")
    metadata = json.loads(manifest.canonical(metadata or {}))  # now, so that what is no JSON is refused before the work
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata is a {type(metadata).__name__}: pass a dict")
    leaves, containers, ties = walk(params, dtype)
    tensors = [blank(name, leaf, _target_dtype(leaf, dtype), ties.get(name)) for name, leaf in leaves.items()]
    first = jax.process_index() == 0
    out = destination.create(root, version)
    try:
        with _reported_by_all():
            if first:
                out.lock()
                _check_is_newer(root, version)
                out.begin()
        done = False
        try:
            with _reported_by_all(), _explained_when_full(version, root, keep):
                before = None if base is None else _base_manifest(root, version, base, leaves, tensors)
                if before is not None:
                    tensors = [
                        dataclasses.replace(t, chunk=b.chunk) for t, b in zip(tensors, before.tensors, strict=True)
                    ]
                writes_arrays = before is None or snapshot is True
                mine = _write(out, leaves, tensors, None if before is None else base, kept, writes_arrays)
                if jax.process_count() > 1:
                    out.put(_part_name(jax.process_index()), [_part_json(mine)])
            with _reported_by_all(), _explained_when_full(version, root, keep):
                parts = [mine]
                if jax.process_count() > 1:
                    parts = [_read_part(out, i) for i in range(jax.process_count())]
                described = _merge(tensors, parts, before is not None)
                result = manifest.Manifest(
                    version=version,
                    base=None if writes_arrays else before.version,
                    delta_of=None if before is None else before.version,
                    encodings=(("xor",) if before is not None else ()) + (("zarr3",) if writes_arrays else ()),
                    digest_before=None if before is None else before.digest,
                    digest_after=manifest.digest(described),
                    tensors=described,
                    objects=tuple(o for part in parts for o in part.objects),
                    containers=containers,
                    metadata=metadata,
                    run=run,
                    public_key=None if key is None else key.public_key().public_bytes_raw().hex(),
                )
                if first:
                    _seal(out, result, key, parts)
            done = True
        finally:
            if not done and first:
                out.abort()
        if first:
            for i in range(jax.process_count()) if jax.process_count() > 1 else ():
                out.delete(_part_name(i))  # every host has read them
            for old in _unneeded(root, keep):
                destination.remove(root, old)
    finally:
        out.close()
    return result


def walk(params: Any, dtype: str | None) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """(Leaves by name, sorted; containers; name of the first leaf that is the same array, for the later ones)."""
    if dtype is not None and (dtype not in DTYPES or not jax.dtypes.issubdtype(chunks.dtype(dtype), np.floating)):
        raise ValueError(f"dtype {dtype!r} is no floating dtype that can be published: pass 'bfloat16' or None")
    leaves, containers = manifest.flatten(params, check_array)
    leaves = dict(sorted(leaves.items()))
    first_with: dict[int, str] = {}
    ties = {}
    for name, leaf in leaves.items():
        if first_with.setdefault(id(leaf), name) != name:
            ties[name] = first_with[id(leaf)]
    return leaves, containers, ties


def check_array(name: str, leaf: Any) -> None:
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
        raise ValueError(f"leaf {name!r} is a {type(leaf).__name__}: params holds dicts, lists, tuples and arrays only")
    if leaf.dtype.name not in DTYPES:
        raise ValueError(
            f"tensor {name!r} has dtype {leaf.dtype}, which cannot be published: cast it to one of {DTYPES}"
        )


def _target_dtype(leaf: Any, dtype: str | None) -> np.dtype:
    kind = chunks.dtype(leaf.dtype.name)
    if dtype is None or not jax.dtypes.issubdtype(kind, np.floating):
        return kind
    wanted = chunks.dtype(dtype)
    return wanted if wanted.itemsize < kind.itemsize else kind


def blank(name: str, leaf: Any, kind: np.dtype, tied_to: str | None) -> manifest.Tensor:
    return manifest.Tensor(name, tuple(leaf.shape), kind.name, chunks.grid(leaf, kind), (), tied_to=tied_to)


@contextlib.contextmanager
def _reported_by_all() -> Iterator[None]:
    """A barrier: after it, either every host succeeded, or every host raises."""
    if jax.process_count() == 1:
        yield
        return
    failed = True
    try:
        yield
        failed = False
    finally:
        others = np.flatnonzero(multihost_utils.process_allgather(np.array(failed)))
        if not failed and len(others):
            raise transport.RemoteHostError(
                f"hosts {others.tolist()} could not publish, so this version is not: see their errors"
            )


def _check_is_newer(root: str | os.PathLike, version: int) -> None:
    existing = _versions(root)
    if version in existing:
        raise ValueError(f"version {version} exists under {root} and is immutable: remove() it or publish a newer")
    if existing and version < existing[-1]:
        raise ValueError(f"version {version} is older than {existing[-1]} under {root}: remove() the newer ones first")


@contextlib.contextmanager
def _explained_when_full(version: int, root: str | os.PathLike, keep: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = f"no space left to publish version {version}, nothing was kept of it: free some or lower keep={keep}"
        raise OSError(errno.ENOSPC, what, str(root)) from error


def _base_manifest(
    root: str | os.PathLike, version: int, base: Base, leaves: dict[str, Any], tensors: Sequence[manifest.Tensor]
) -> manifest.Manifest | None:
    """The manifest of `base`; None where no delta can be made from it, so that a snapshot must be."""
    if base.version >= version:
        raise ValueError(f"base is version {base.version}, but deltas to version {version} need an older one")
    if base.version not in _versions(root):
        return None
    before = base.params.written if isinstance(base.params, Kept) else None
    if before is None:
        with contextlib.closing(source_lib.open(root)) as opened:
            before = assemble.load(opened, base.version)
    if before.digest != base.digest:  # it was removed and published again
        return None
    for t, b in itertools.zip_longest(tensors, before.tensors):
        if t is None or b is None or (t.name, t.shape, t.dtype, t.tied_to) != (b.name, b.shape, b.dtype, b.tied_to):
            name = (t or b).name
            raise ValueError(f"tensor {name!r} is not the same in version {base.version}: publish without base")
    return before if all(chunks.fits(b.chunk, leaves[b.name]) for b in before.tensors) else None


def _write(
    out: destination.Writer,
    leaves: dict[str, Any],
    tensors: Sequence[manifest.Tensor],
    base: Base | None,
    kept: Kept | None,
    writes_arrays: bool,
) -> _Written:
    """Encodes and writes this host's chunks; copies from the devices, encoding and writing overlap."""
    first = jax.process_index() == 0
    untied = [t for t in tensors if t.tied_to is None]
    objects: list[journal.Object] = []
    written: dict[str, dict[int, tuple]] = {t.name: {} for t in untied}
    pack: list[tuple[_Encoded, int]] = []
    old_chunk = None if base is None else _old_chunks(base)
    if kept is not None and base is None:
        kept.chunks.clear()

    def add(entry: journal.Object) -> None:
        objects.append(entry)
        out.note(entry)

    def flush() -> None:
        if pack:
            data = b"".join(done.patch for done, _ in pack)
            path = f"deltas/{jax.process_index():05d}-{len(objects):06d}.bin"
            out.put(path, [data])
            for done, offset in pack:
                written[done.name][done.number] = done.digest, (len(objects), offset, len(done.patch))
            add(journal.Object(path, len(data), digests.of(data)))
            pack.clear()

    def calls() -> Iterator[tuple[int, Callable[[], _Encoded]]]:
        for t, piece in _prefetched(_owned(leaves, untied)):
            array = piece.fetch()
            for number, path, region in _cells_of(t, piece):
                yield t.chunk_bytes, _Encoding(out, t, number, path, region, array, old_chunk, kept, writes_arrays)

    if first and writes_arrays:
        for t in untied:
            data, path = manifest.zarr_json(t), f"tensors/{t.name}/zarr.json"
            out.put(path, [data])
            add(journal.Object(path, len(data), digests.of(data)))
    with futures.ThreadPoolExecutor(assemble.NUM_THREADS, "weights") as pool:
        for done in assemble.in_order(pool, calls(), assemble.IN_FLIGHT_BYTES):
            if done.stored is not None:
                add(done.stored)
            if done.patch is None:
                written[done.name][done.number] = done.digest, None
                continue
            pack.append((done, sum(len(other.patch) for other, _ in pack)))
            if pack[-1][1] + len(done.patch) >= PACK_BYTES:
                flush()
    flush()
    return _Written(written, objects)


@dataclasses.dataclass(frozen=True)
class _Encoding:
    """The work on one chunk, in a thread: hash, write, difference, copy for the next difference."""

    out: destination.Writer
    tensor: manifest.Tensor
    number: int
    path: str
    region: chunks.Region  # of `array`
    array: np.ndarray
    old_chunk: Callable[[manifest.Tensor, int], np.ndarray] | None
    kept: Kept | None
    writes_arrays: bool

    def __call__(self) -> _Encoded:
        t = self.tensor
        values = chunks.raw(self.array, self.region, t.chunk)
        checksum, digest = chunks.encoded_digest(values)
        stored = patch = None
        if self.writes_arrays:
            self.out.put(self.path, [values, checksum])
            stored = journal.Object(self.path, len(values) + len(checksum), digest)
        if self.old_chunk is not None:
            patch = delta.encode(self.old_chunk(t, self.number), values, manifest.ITEM_BYTES[t.dtype])
        if self.kept is not None:
            if (t.name, self.number) in self.kept.chunks:
                np.copyto(self.kept.chunks[t.name, self.number], values)
            else:
                self.kept.chunks[t.name, self.number] = values.copy()
        return _Encoded(t.name, self.number, digest, stored, patch)


def _owned(
    leaves: dict[str, Any], tensors: Sequence[manifest.Tensor]
) -> Iterator[tuple[manifest.Tensor, chunks.Piece]]:
    for t in tensors:
        for piece in chunks.pieces(leaves[t.name], chunks.dtype(t.dtype)):
            yield t, piece


def _prefetched(
    items: Iterator[tuple[manifest.Tensor, chunks.Piece]],
) -> Iterator[tuple[manifest.Tensor, chunks.Piece]]:
    """The same, with the copies of the next pieces to the host started."""
    ahead = collections.deque()
    for item in items:
        item[1].prefetch()
        ahead.append(item)
        if len(ahead) > PREFETCH_PIECES:
            yield ahead.popleft()
    yield from ahead


def _cells_of(t: manifest.Tensor, piece: chunks.Piece) -> Iterator[tuple[int, str, chunks.Region]]:
    """(Number, object path, region within the piece) of the chunks that lie in the piece."""
    for number, (path, region) in enumerate(t.cells()):
        spans = list(zip(region, piece.start, piece.shape, strict=True))
        if all(o <= s.start and s.stop <= o + n for s, o, n in spans):
            yield number, path, tuple(slice(s.start - o, s.stop - o) for s, o, _ in spans)


def _old_chunks(base: Base) -> Callable[[manifest.Tensor, int], np.ndarray]:
    """The bytes of a chunk as they were in the base."""
    if isinstance(base.params, Kept):
        kept = base.params.chunks

        def from_copy(t: manifest.Tensor, number: int) -> np.ndarray:
            if (t.name, number) not in kept:
                raise ValueError(
                    f"tensor {t.name!r} was spread otherwise in version {base.version}: use a new Publisher"
                )
            return kept[t.name, number]

        return from_copy
    leaves, _ = manifest.flatten(base.params, check_array)

    def from_tree(t: manifest.Tensor, number: int) -> np.ndarray:
        region = t.region(number)
        part = chunks.host_region(leaves[t.name], region)
        if part is None:
            raise ValueError(
                f"base does not have {region} of tensor {t.name!r} on this host: give it the params' shardings"
            )
        if part.dtype.name != t.dtype:
            raise ValueError(
                f"tensor {t.name!r} of base is {part.dtype}, but {t.dtype} was published: pass what pull returned"
            )
        return chunks.raw(chunks.host(part), tuple(slice(0, n) for n in part.shape), t.chunk)

    return from_tree


def _part_name(process: int) -> str:
    return f".part-{process:05d}.json"


def _part_json(written: _Written) -> bytes:
    return manifest.canonical({"chunks": written.chunks, "objects": [vars(o) for o in written.objects]})


def _read_part(out: destination.Writer, process: int) -> _Written:
    part = json.loads(out.get(_part_name(process)))
    found = {
        name: {int(number): (digest, patch) for number, (digest, patch) in cells.items()}
        for name, cells in part["chunks"].items()
    }
    return _Written(found, [journal.Object(**o) for o in part["objects"]])


def _merge(
    tensors: Sequence[manifest.Tensor], parts: Sequence[_Written], has_deltas: bool
) -> tuple[manifest.Tensor, ...]:
    """The tensors with everybody's chunks; patches count objects over all parts."""
    offsets = list(itertools.accumulate((len(part.objects) for part in parts), initial=0))
    merged = []
    for t in tensors:
        if t.tied_to is None:
            cells = {}
            for part, before in zip(parts, offsets, strict=False):
                for number, (digest, patch) in part.chunks[t.name].items():
                    cells[number] = digest, None if patch is None else (patch[0] + before, *patch[1:])
            assert sorted(cells) == list(range(len(cells))), f"chunks of {t.name}"
            ordered = [cells[i] for i in range(len(cells))]
            deltas = tuple(patch for _, patch in ordered) if has_deltas else None
            t = dataclasses.replace(t, chunks=tuple(digest for digest, _ in ordered), deltas=deltas)
        merged.append(t)
    return tuple(merged)


def _seal(
    out: destination.Writer, result: manifest.Manifest, key: ed25519.Ed25519PrivateKey | None, parts: Sequence[_Written]
) -> None:
    data = manifest.encode(result, key)
    if len(data) > journal.MAX_MANIFEST_BYTES:
        raise ValueError(
            f"the manifest has {len(data)} bytes, and readers refuse more than {journal.MAX_MANIFEST_BYTES}"
        )
    for entry in itertools.chain.from_iterable(part.objects for part in parts[1:]):
        out.note(entry)  # this host's own are noted already; two hosts do not append to one file of a network drive
    out.finish(data)


def _unneeded(root: str | os.PathLike, keep: int) -> list[int]:
    """Versions that are neither among the newest `keep` nor needed by one of them."""
    existing = _versions(root)
    needed, todo = set(), existing[-keep:]
    while todo:
        version = todo.pop()
        if version is not None and version not in needed:
            needed.add(version)
            if version in existing:
                todo.append(destination.base_of(root, version))
    return [v for v in existing if v not in needed]


def _versions(root: str | os.PathLike) -> list[int]:
    with contextlib.closing(source_lib.open(root)) as opened:
        return opened.versions()

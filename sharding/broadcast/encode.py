"""Encodes one host's chunks of a version: from device arrays to objects, as a snapshot, as deltas, or as both.

Copies of the next shards from the devices start while threads hash, compress and write the chunks of these.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
import pydantic

from sharding.broadcast import assemble, destination
from sharding.format import chunks, delta, digests, journal, manifest, tree

DELTA_OBJECT_BYTES = 4 << 20  # patches are joined into objects of about this size: one per chunk would have 60 kB
PREFETCHED_SHARDS = 2  # copied from the devices while one is encoded

OldChunk = Callable[[manifest.Tensor, int], np.ndarray]  # the bytes of a chunk of the base, by tensor and number


@dataclasses.dataclass
class HostCopy:
    """One host's copy of the last published weights, for the next deltas: bytes by (tensor name, chunk number), and manifest."""

    chunks: dict[tuple[str, int], np.ndarray] = dataclasses.field(default_factory=dict)
    written: manifest.Manifest | None = None

    def chunk(self, t: manifest.Tensor, number: int) -> np.ndarray:
        """Returns the bytes of chunk `number` of tensor `t`. Raises ValueError if another host wrote that chunk."""
        if (t.name, number) not in self.chunks:
            raise ValueError(f"tensor {t.name!r} was sharded differently in the last version: create a new Publisher")
        return self.chunks[t.name, number]


@dataclasses.dataclass
class HostPart:
    """The part of a published version that one host wrote: its objects, and the digests and patches of its chunks.

    `chunks` has rows (chunk number, digest, patch) by tensor name; a patch is (index in `objects`, offset, size) or None.
    """

    chunks: dict[str, list[tuple[int, str, tuple[int, int, int] | None]]]
    objects: list[journal.Object]


HOST_PART = pydantic.TypeAdapter(HostPart)  # to and from JSON, in which hosts exchange their parts


def named_leaves(params: Any) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Flattens a tree. Returns (sorted leaves by name; containers by name; ties: later name of an array -> first name)."""
    leaves, containers = tree.flatten(params, chunks.check_array)
    leaves = dict(sorted(leaves.items()))
    first_with: dict[int, str] = {}
    ties = {}
    for name, leaf in leaves.items():
        if first_with.setdefault(id(leaf), name) != name:
            ties[name] = first_with[id(leaf)]
    return leaves, containers, ties


def blank_tensor(name: str, leaf: Any, dtype: str | None, tied_to: str | None) -> manifest.Tensor:
    """Returns the manifest's entry for the array `leaf`, without digests. Floats wider than `dtype` will be cast to it."""
    kind = chunks.dtype(leaf.dtype.name)
    if dtype is not None and jax.numpy.issubdtype(kind, np.floating):
        kind = min(kind, chunks.dtype(dtype), key=lambda k: k.itemsize)
    chunk = chunks.chunk_shape(leaf.shape, chunks.shard_shape(leaf), kind.itemsize)
    return manifest.Tensor(name, tuple(leaf.shape), kind.name, chunk, (), tied_to=tied_to)


def tree_chunks(params: Any) -> OldChunk:
    """Returns a function of (tensor, chunk number) that cuts the bytes of that chunk out of the parameter tree `params`."""
    leaves, _ = tree.flatten(params, chunks.check_array)

    def chunk(t: manifest.Tensor, number: int) -> np.ndarray:
        values = chunks.host_chunk(leaves[t.name], t, t.region(number))
        if values is None:
            text = (
                f"this host lacks chunk {number} of {t.dtype} tensor {t.name!r} of base: pull it with params' shardings"
            )
            raise ValueError(text)
        return values

    return chunk


def write_chunks(
    out: destination.Directory | destination.Bucket,
    leaves: dict[str, Any],
    tensors: Sequence[manifest.Tensor],
    old_chunk: OldChunk | None,
    copy: HostCopy | None,
    writes_arrays: bool,
) -> HostPart:
    """Encodes and writes this host's chunks of `leaves` to `out`, and returns their digests, patches and objects.

    `tensors` describe the leaves, without digests. If `old_chunk` is given, writes deltas from the chunks it returns. If
    `writes_arrays`, writes a snapshot. `copy`, if given, receives the bytes of the chunks.
    """
    untied = [t for t in tensors if t.tied_to is None]
    part = HostPart({t.name: [] for t in untied}, [])
    patches: list[tuple[str, int, str, bytes]] = []  # of the next object of deltas: tensor, chunk number, digest, patch

    def add(entry: journal.Object) -> None:
        part.objects.append(entry)
        out.note(entry)

    def put(path: str, data: bytes) -> None:
        out.put(path, [data])
        add(journal.Object(path, len(data), digests.of(data)))

    def flush() -> None:
        offset = 0
        for name, number, digest, patch in patches:
            part.chunks[name].append((number, digest, (len(part.objects), offset, len(patch))))
            offset += len(patch)
        if patches:
            path = f"deltas/{jax.process_index():05d}-{len(part.objects):06d}.bin"
            put(path, b"".join(patch for _, _, _, patch in patches))
            patches.clear()

    def encode(t: manifest.Tensor, number: int, path: str, array: np.ndarray, region: chunks.Region):
        values = chunks.padded_bytes(array, region, t.chunk)
        checksum, digest = chunks.encoded_digest(values)
        if writes_arrays:
            out.put(path, [values.data, checksum])
        patch = None
        if old_chunk is not None:
            patch = delta.encode(old_chunk(t, number), values, manifest.ITEM_BYTES[t.dtype])
        if copy is not None:
            if (t.name, number) in copy.chunks:
                np.copyto(copy.chunks[t.name, number], values)
            else:
                copy.chunks[t.name, number] = values.copy()
        return t.name, number, journal.Object(path, len(values) + len(checksum), digest), patch

    def jobs(pool: futures.Executor) -> Iterator[assemble.Job]:
        for t, start, values in _prefetched(leaves, untied):
            array = chunks.to_host(values)
            del values  # a cast is freed on the device
            for number, path, region in _chunks_of(t, start, array.shape):
                call = functools.partial(encode, t, number, path, array, region)
                yield t.chunk_bytes, lambda call=call: (future := pool.submit(call), [future])

    if jax.process_index() == 0 and writes_arrays:
        for t in untied:
            put(f"tensors/{t.name}/zarr.json", manifest.zarr_json(t))
    num_bytes = 0
    with futures.ThreadPoolExecutor(assemble.NUM_THREADS, "weights") as pool:
        for future in assemble.in_order(jobs(pool)):
            name, number, entry, patch = future.result()
            if writes_arrays:
                add(entry)
            if patch is None:
                part.chunks[name].append((number, entry.digest, None))
                continue
            patches.append((name, number, entry.digest, patch))
            num_bytes += len(patch)
            if num_bytes >= DELTA_OBJECT_BYTES:
                flush()
                num_bytes = 0
    flush()
    return part


def merge(
    tensors: Sequence[manifest.Tensor], parts: Sequence[HostPart], has_deltas: bool
) -> tuple[manifest.Tensor, ...]:
    """Returns `tensors` with the digests and patches that all hosts wrote. Patches then index the hosts' joined objects."""
    num_before = list(itertools.accumulate((len(part.objects) for part in parts), initial=0))
    merged = []
    for t in tensors:
        if t.tied_to is None:
            rows = []
            for part, before in zip(parts, num_before, strict=False):
                for number, digest, patch in part.chunks[t.name]:
                    rows.append((number, digest, None if patch is None else (patch[0] + before, *patch[1:])))
            rows.sort(key=lambda row: row[0])
            assert [row[0] for row in rows] == list(range(len(rows))), f"chunks of {t.name}"
            deltas = tuple(patch for _, _, patch in rows) if has_deltas else None
            t = dataclasses.replace(t, chunks=tuple(digest for _, digest, _ in rows), deltas=deltas)
        merged.append(t)
    return tuple(merged)


def _prefetched(
    leaves: dict[str, Any], tensors: Sequence[manifest.Tensor]
) -> Iterator[tuple[manifest.Tensor, tuple[int, ...], Any]]:
    """Yields (tensor, start, values) of this host's shards, after starting the copies of the next ones to the host."""
    ahead = collections.deque()
    for t in tensors:
        for start, values in chunks.owned_shards(leaves[t.name], chunks.dtype(t.dtype)):
            ahead.append((t, start, values))
            del values
            if len(ahead) > PREFETCHED_SHARDS:
                yield ahead.popleft()
    while ahead:
        yield ahead.popleft()


def _chunks_of(
    t: manifest.Tensor, start: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, str, chunks.Region]]:
    """Yields (chunk number, object path, region within the shard) of each chunk of `t` in the shard at `start` of `shape`."""
    for number, (path, region) in enumerate(t.chunk_regions()):
        spans = list(zip(region, start, shape, strict=True))
        if all(o <= s.start and s.stop <= o + n for s, o, n in spans):
            yield number, path, tuple(slice(s.start - o, s.stop - o) for s, o, _ in spans)

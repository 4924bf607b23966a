"""Encodes one host's chunks of a version: from device arrays to objects, as a snapshot, as deltas, or as both.

Copies of the next shards from the devices start while threads hash, compress and write the chunks of these.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
import pydantic

from sharding.weights.broadcast import assemble, destination
from sharding.weights.format import chunks, delta, digests, journal, manifest, tree

DELTA_OBJECT_BYTES = 4 << 20  # patches are joined into objects of about this size: one per chunk would have 60 kB
PREFETCHED_SHARDS = 2  # copied from the devices while one is encoded


@dataclasses.dataclass
class HostCopy:
    """One host's copy of the last published weights, for the next deltas: bytes by (tensor name, chunk number), and manifest."""

    chunks: dict[tuple[str, int], np.ndarray] = dataclasses.field(default_factory=dict)
    written: manifest.Manifest | None = None

    def chunk(self, t: manifest.Tensor, number: int) -> np.ndarray:
        """Returns the bytes of chunk `number` of tensor `t`. Raises ValueError if another host wrote that chunk."""
        if (t.name, number) not in self.chunks:
            raise ValueError(f"tensor {t.name!r} was sharded differently in the last version; create a new Publisher")
        return self.chunks[t.name, number]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A version to be written: a snapshot if `writes_arrays`; deltas if `before` is given, the manifest of the base version.

    Tensors in `fixed` never change. If `same`, the manifest of an earlier snapshot, is given, this version links the files of these
    tensors there and does not read their arrays.
    """

    version: int
    leaves: dict[str, Any]
    containers: dict[str, str]
    tensors: list[manifest.Tensor]  # without digests
    metadata: dict
    before: manifest.Manifest | None = None
    writes_arrays: bool = True
    fixed: frozenset[str] = frozenset()  # names of tensors that never change
    same: manifest.Manifest | None = None  # None: no earlier version has the fixed ones


@dataclasses.dataclass
class HostPart:
    """The part of a published version that one host wrote: its objects, and the digests and patches of its chunks.

    `chunks` has rows (chunk number, digest, patch) by tensor name; a patch is (index in `objects`, offset, size) or None. Only the
    first host knows the `epoch`, from the signed head.
    """

    chunks: dict[str, list[tuple[int, str, tuple[int, int, int] | None]]]
    objects: list[journal.Object]
    epoch: int | None = None


HOST_PART = pydantic.TypeAdapter(HostPart)  # to and from JSON, in which hosts exchange their parts


def named_leaves(params: Any) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Flattens a tree. Returns (sorted leaves by name; containers by name; ties: later name of an array -> first name)."""
    leaves, containers = tree.flatten(params, chunks.check_array)
    leaves = dict(sorted(leaves.items()))
    first_with: dict[int, str] = {}
    firsts = {name: first_with.setdefault(id(leaf), name) for name, leaf in leaves.items()}
    return leaves, containers, {name: first for name, first in firsts.items() if first != name}


def blank_tensor(name: str, leaf: Any, dtype: str | Mapping[str, str] | None, tied_to: str | None) -> manifest.Tensor:
    """Returns the manifest's entry for the array `leaf`, without digests. Floats wider than `dtype` will be cast to it."""
    kind, dtype = chunks.dtype(leaf.dtype.name), dtype if dtype is None or isinstance(dtype, str) else dtype[name]
    if dtype is not None and jax.numpy.issubdtype(kind, np.floating):
        kind = min(kind, chunks.dtype(dtype), key=lambda k: k.itemsize)
    chunk = chunks.chunk_shape(leaf.shape, chunks.shard_shape(leaf), kind.itemsize)
    return manifest.Tensor(name, tuple(leaf.shape), kind.name, chunk, (), tied_to=tied_to)


def write_chunks(out: destination.Directory | destination.Bucket, plan: Plan, copy: HostCopy | None) -> HostPart:
    """Writes this host's chunks of a version to `out`, and returns the written part. `copy`, if given, receives their bytes."""
    untied, is_first = [t for t in plan.tensors if t.tied_to is None], jax.process_index() == 0
    writer = _Writer(out, plan, copy, HostPart({t.name: [] for t in untied}, []))
    if plan.same is not None:
        if is_first:
            for t in plan.same.tensors:
                if t.name in plan.fixed and t.tied_to is None:
                    writer.link(plan.same.version, t)
        untied = [t for t in untied if t.name not in plan.fixed]
    if is_first and plan.writes_arrays:
        for t in untied:
            writer.put(f"tensors/{t.name}/zarr.json", manifest.zarr_json(t))
    with futures.ThreadPoolExecutor(assemble.NUM_THREADS, "weights") as pool:
        jobs = _jobs(pool, _prefetched(plan.leaves, untied), writer.encode)
        for future in assemble.in_order(jobs, assemble.IN_FLIGHT_BYTES):
            writer.add(*future.result())
    writer.flush()
    return writer.part


def merge(plan: Plan, parts: Sequence[HostPart]) -> tuple[manifest.Tensor, ...]:
    """Returns the plan's tensors with the digests and patches of all hosts. Patches then index the hosts' joined objects."""
    num_before = list(itertools.accumulate((len(part.objects) for part in parts), initial=0))
    merged = []
    for t in plan.tensors:
        if t.tied_to is None:
            rows = sorted(
                (number, digest, patch and (patch[0] + before, *patch[1:]))
                for part, before in zip(parts, num_before, strict=False)
                for number, digest, patch in part.chunks[t.name]
            )
            assert [row[0] for row in rows] == list(range(len(rows))), f"chunks of {t.name}"
            deltas = tuple(patch for _, _, patch in rows) if plan.before is not None else None
            t = dataclasses.replace(t, chunks=tuple(digest for _, digest, _ in rows), deltas=deltas)
        merged.append(t)
    return tuple(merged)


@dataclasses.dataclass
class _Writer:
    """Encodes chunks in many threads, and adds them to `part`, the journal and objects of deltas in one."""

    out: destination.Directory | destination.Bucket
    plan: Plan
    copy: HostCopy | None
    part: HostPart
    patches: list[tuple[str, int, str, bytes]] = dataclasses.field(default_factory=list)  # of the next object of deltas
    num_bytes: int = 0  # of them

    def encode(self, t: manifest.Tensor, number: int, path: str, array: np.ndarray, region: chunks.Region) -> tuple:
        """Returns (tensor name, chunk number, object, patch or None) of a chunk. Writes the object if it is of a snapshot."""
        values = chunks.padded_bytes(array, region, t.chunk)
        checksum, digest = chunks.encoded_digest(values)
        if self.plan.writes_arrays:
            self.out.put(path, [values.data, checksum])
        patch, is_fixed = None, t.name in self.plan.fixed
        if self.plan.before is not None and self.copy is not None and not is_fixed:
            patch = delta.encode(self.copy.chunk(t, number), values, manifest.ITEM_BYTES[t.dtype])
        if self.copy is not None and not is_fixed:
            if (t.name, number) in self.copy.chunks:
                np.copyto(self.copy.chunks[t.name, number], values)
            else:
                self.copy.chunks[t.name, number] = values.copy()
        return t.name, number, journal.Object(path, len(values) + len(checksum), digest), patch

    def link(self, version: int, t: manifest.Tensor) -> None:
        """Adds a fixed tensor: its chunks in the snapshot `version`, whose files become files of this version if it is one, too."""
        self.part.chunks[t.name] = [(number, digest, None) for number, digest in enumerate(t.chunks)]
        for entry in t.objects() if self.plan.writes_arrays else ():
            self.out.link(version, entry.path)
            self.note(entry)

    def add(self, name: str, number: int, entry: journal.Object, patch: bytes | None) -> None:
        if self.plan.writes_arrays:
            self.note(entry)
        if patch is None:
            self.part.chunks[name].append((number, entry.digest, None))
            return
        self.patches.append((name, number, entry.digest, patch))
        self.num_bytes += len(patch)
        if self.num_bytes >= DELTA_OBJECT_BYTES:
            self.flush()

    def flush(self) -> None:
        offset = 0
        for name, number, digest, patch in self.patches:
            self.part.chunks[name].append((number, digest, (len(self.part.objects), offset, len(patch))))
            offset += len(patch)
        if self.patches:
            path = f"deltas/{jax.process_index():05d}-{len(self.part.objects):06d}.bin"
            self.put(path, b"".join(patch for *_, patch in self.patches))
        self.patches, self.num_bytes = [], 0

    def put(self, path: str, data: bytes) -> None:
        self.out.put(path, [data])
        self.note(journal.Object(path, len(data), digests.of(data)))

    def note(self, entry: journal.Object) -> None:
        self.part.objects.append(entry)
        self.out.note(entry)


def _jobs(pool: futures.Executor, shards: Iterator[tuple], encode: Callable[..., tuple]) -> Iterator[assemble.Job]:
    for t, start, values in shards:
        array = chunks.to_host(values)
        del values  # a cast is freed on the device
        for number, path, region in _chunks_of(t, start, array.shape):
            call = functools.partial(pool.submit, encode, t, number, path, array, region)
            yield t.chunk_bytes, lambda call=call: (future := call(), [future])


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

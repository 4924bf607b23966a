"""How a version is put together from what a source has: the shortest way to it, then chunk by chunk, each one proved.

1. `plan` walks back from the version over the manifests until it meets the tree at hand or a snapshot. Where both lead there, the
   way with fewer bytes wins. Each manifest must continue the digest of the one before it.
2. `read` takes the tensors in order. For each it allocates what this host needs (all of it, or the regions of its devices),
   and fetches and patches the chunks that touch it, in parallel; an object of deltas is fetched once for all its chunks.
3. A chunk that came as a snapshot's object was proved by the object's hash. A patched one must have the digest that the
   manifest gives. One that was at hand and unchanged is hashed all the same: memory may have been overwritten.
4. A finished tensor goes to `finish`, which puts it on the devices, and its host memory is free again. At most
   `IN_FLIGHT_BYTES` and one tensor are on their way, so the host never holds the tree beside the devices' copy.
"""

import collections
import concurrent.futures
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sharding.download import source as source_lib
from sharding.format import chunks, delta, journal, manifest

IN_FLIGHT_BYTES = 256 << 20
NUM_THREADS = max(2, min(16, os.cpu_count() or 1))
NUM_REQUESTS = 16  # at once: relays are far away, and their own pool has as many
ALIGN_BYTES = 64  # an array that starts at a multiple of this becomes an array of a CPU device without a copy
HUGE_BYTES = 2 << 20  # a page, where numpy asks for huge ones: arrays that start elsewhere have small ones at both ends
MAX_CHAIN = 1000  # versions between a delta and its snapshot

Region = chunks.Region


@dataclasses.dataclass(frozen=True)
class Plan:
    """`chain[0]` is the version wanted; each of `chain` is patched onto the next. The start is `have` or a snapshot."""

    chain: tuple[manifest.Manifest, ...]
    snapshot: manifest.Manifest | None  # None: the start is the tree at hand
    have: dict[str, Any] | None  # its leaves by name

    @property
    def target(self) -> manifest.Manifest:
        return self.chain[0] if self.chain else self.snapshot


@dataclasses.dataclass(frozen=True)
class Need:
    """What of one tensor is wanted: the regions, each to become an array of its own."""

    tensor: manifest.Tensor
    regions: tuple[Region, ...]
    names: tuple[str, ...]  # of the leaves that are this: more than one if they are tied


def load(source: source_lib.Source, version: int, key: str | None = None) -> manifest.Manifest:
    """The manifest of a version. The source verified it with its signature; whose that must be, `key` says."""
    found = source.manifest(version)
    if key is not None and found.public_key != key:
        raise manifest.CorruptManifest(
            f"version {version}: manifest is signed by {found.public_key}, not by the trusted {key}"
        )
    return found


def plan(
    source: source_lib.Source,
    target: manifest.Manifest,
    have: Any = None,
    have_leaves: dict[str, Any] | None = None,
    key: str | None = None,
) -> Plan:
    """The way to `target`; `have` has `version` and `digest`, and `have_leaves` are its arrays by name."""
    if have is not None and have.digest == target.digest:
        return Plan((dataclasses.replace(target, tensors=_unchanged(target)),), None, have_leaves)
    chain, to_snapshot = [target], None
    while True:
        last = chain[-1]
        if have is not None and (last.delta_of, last.digest_before) == (have.version, have.digest):
            if to_snapshot is None or _delta_bytes(chain) <= _delta_bytes(to_snapshot[:-1]) + _array_bytes(
                to_snapshot[-1]
            ):
                return Plan(tuple(chain), None, have_leaves)
            break
        if last.base is None and to_snapshot is None:
            to_snapshot = list(chain)
        if to_snapshot is not None and (have is None or last.delta_of is None or last.delta_of <= have.version):
            break
        if len(chain) > MAX_CHAIN:
            raise manifest.CorruptManifest(
                f"version {target.version} has no snapshot in {MAX_CHAIN} versions before it"
            )
        try:
            before = load(source, last.delta_of, key)
            _check_continues(last, before)
        except FileNotFoundError:
            if to_snapshot is None:
                raise
            break  # deltas from the tree at hand are gone, and the snapshot is there
        except manifest.CorruptManifest:
            if to_snapshot is None:
                raise
            break
        chain.append(before)
    return Plan(tuple(to_snapshot[:-1]), to_snapshot[-1], None)


def read(
    source: source_lib.Source,
    way: Plan,
    needs: Sequence[Need],
    finish: Callable[[Need, list[np.ndarray]], Any],
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Need, Any]]:
    """(need, `finish(need, arrays)`) in the order of `needs`, with one verified array per region.

    `CorruptSource` names the object or chunk that is wrong, `FileNotFoundError` a version that was deleted meanwhile.
    """
    remote = not isinstance(source, source_lib.Directory)
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS if remote else NUM_THREADS, "weights") as pool:
        job = _Job(source, way, needs, progress)

        def submit(need: Need) -> tuple[list[np.ndarray], list[concurrent.futures.Future]]:
            arrays = [
                _empty([s.stop - s.start for s in region], chunks.dtype(need.tensor.dtype)) for region in need.regions
            ]
            return arrays, [pool.submit(job.chunk, need, arrays, i, cell) for i, cell in touched(need)]

        flying = collections.deque()
        num_bytes = 0
        waiting = collections.deque(needs)
        try:
            while waiting or flying:
                while waiting and (not flying or num_bytes + _num_bytes(waiting[0]) <= IN_FLIGHT_BYTES):
                    need = waiting.popleft()
                    num_bytes += _num_bytes(need)
                    flying.append((need, *submit(need)))
                need, arrays, futures = flying.popleft()
                for future in futures:
                    future.result()
                result = finish(need, arrays)
                num_bytes -= _num_bytes(need)
                del arrays
                yield need, result
        finally:
            for _, _, futures in flying:
                for future in futures:
                    future.cancel()


def _empty(shape: Sequence[int], kind: np.dtype) -> np.ndarray:
    """Fresh memory at a multiple of `ALIGN_BYTES`; if it is large, of `HUGE_BYTES`."""
    size = math.prod(shape) * kind.itemsize
    align = HUGE_BYTES if size >= 8 * HUGE_BYTES else ALIGN_BYTES  # at most an eighth of it is left unused
    memory = np.empty(size + align, np.uint8)
    start = -memory.ctypes.data % align
    return memory[start : start + size].view(kind).reshape(shape)


def touched(need: Need) -> Iterator[tuple[int, Region]]:
    """(number, region) of each chunk that a region of the need touches."""
    for i, (_, cell) in enumerate(need.tensor.cells()):
        if any(_overlaps(cell, region) for region in need.regions):
            yield i, cell


def in_order(
    pool: concurrent.futures.Executor, calls: Iterable[tuple[int, Callable[[], Any]]], limit_bytes: int
) -> Iterator[Any]:
    """Results of (bytes it holds, call) in order, with at most `limit_bytes` in the pool."""
    flying, num_bytes = collections.deque(), 0
    try:
        for size, call in calls:
            while flying and num_bytes + size > limit_bytes:
                done, future = flying.popleft()
                num_bytes -= done
                yield future.result()
            flying.append((size, pool.submit(call)))
            num_bytes += size
        while flying:
            yield flying.popleft()[1].result()
    finally:
        for _, future in flying:
            future.cancel()


class _Job:
    """One tree being read: what all threads share."""

    def __init__(self, source, way: Plan, needs: Sequence[Need], progress: Callable[[int, int], None] | None):
        self._source, self._way, self._progress = source, way, progress
        self._tensors = [{t.name: t for t in m.tensors} for m in way.chain]
        self._objects = {}
        if way.snapshot is not None:
            self._objects = {o.path: o for o in way.snapshot.objects}
            self._start = {t.name: t for t in way.snapshot.tensors}
        self._lock = threading.Lock()
        self._packs: dict[tuple[int, int], concurrent.futures.Future] = {}
        self._uses = collections.Counter()
        self._done_bytes = self._total_bytes = 0
        for need in needs:
            for i, _ in touched(need):
                for link, tensors in enumerate(self._tensors):
                    if patch := tensors[need.tensor.name].deltas[i]:
                        self._uses[link, patch[0]] += 1
                if way.snapshot is not None:
                    self._total_bytes += need.tensor.chunk_bytes + manifest.CRC_BYTES
        self._total_bytes += sum(way.chain[link].objects[number].size for link, number in self._uses)

    def chunk(self, need: Need, arrays: list[np.ndarray], i: int, cell: Region) -> None:
        """Fetches, patches and proves chunk `i` and writes it where it belongs."""
        tensor = need.tensor
        patches = [(link, tensors[tensor.name].deltas[i]) for link, tensors in enumerate(self._tensors)]
        patches = [(link, patch) for link, patch in patches[::-1] if patch is not None]  # oldest first
        origins = [tuple(s.start for s in region) for region in need.regions]
        slots = [chunks.slot(array, o, tensor, cell) for array, o in zip(arrays, origins, strict=True)]
        values = next((slot for slot in slots if slot is not None), None)
        if self._way.snapshot is not None:
            start = self._snapshot_chunk(tensor, cell, values)
        else:
            start = self._chunk_at_hand(tensor, cell)
        if values is not None:
            if start is not values:
                np.copyto(values, start)
        else:
            values = start.copy() if patches else start  # what is at hand stays what it is
        for link, (number, offset, size) in patches:
            pack = self._pack(link, number)
            try:
                delta.apply(values, memoryview(pack)[offset : offset + size], manifest.ITEM_BYTES[tensor.dtype])
            except delta.CorruptDelta as error:
                path = self._way.chain[link].objects[number].path
                raise journal.CorruptSource(
                    f"object {path} of version {self._way.chain[link].version}, tensor {tensor.name!r}: {error}"
                ) from error
        if self._way.snapshot is None or patches:
            _, actual = chunks.encoded_digest(values)
            if actual != tensor.chunks[i]:
                origin = "the tree at hand" if self._way.snapshot is None else f"version {self._way.snapshot.version}"
                raise journal.CorruptSource(
                    f"tensor {tensor.name!r}, chunk {i}: {origin} and {len(patches)} deltas come to digest {actual}, "
                    f"not {tensor.chunks[i]}"
                )
        for array, origin, region, slot in zip(arrays, origins, need.regions, slots, strict=True):
            if slot is not values and _overlaps(cell, region):
                chunks.paste(array, origin, values, tensor, cell)

    def _snapshot_chunk(self, tensor: manifest.Tensor, cell: Region, slot: np.ndarray | None) -> np.ndarray:
        start = self._start[tensor.name]
        index = [s.start // c for s, c in zip(cell, start.chunk, strict=True)]
        o = self._objects[f"tensors/{tensor.name}/{'.'.join(['c', *map(str, index)])}"]
        if slot is not None:
            into = [memoryview(slot), memoryview(bytearray(manifest.CRC_BYTES))]
            self._source.read(self._way.snapshot.version, o, into)
            self._count(o.size)
            return slot
        data = source_lib.read(self._source, self._way.snapshot.version, o)
        self._count(o.size)
        return np.frombuffer(data, np.uint8)[: -manifest.CRC_BYTES]

    def _chunk_at_hand(self, tensor: manifest.Tensor, cell: Region) -> np.ndarray:
        part = chunks.host_region(self._way.have[tensor.name], cell)
        if part is None:
            raise NotAtHand(f"the devices of this host hold no {cell} of tensor {tensor.name!r}")
        part = chunks.host(part)
        whole = tuple(slice(0, n) for n in part.shape)
        return chunks.raw(part, whole, tensor.chunk)

    def _pack(self, link: int, number: int) -> bytearray:
        """An object of deltas, fetched by the first that needs it and held until the last has had it."""
        o, version = self._way.chain[link].objects[number], self._way.chain[link].version
        with self._lock:
            future = self._packs.get((link, number))
            first = future is None
            if first:
                future = self._packs[link, number] = concurrent.futures.Future()
        if first:
            try:
                future.set_result(source_lib.read(self._source, version, o))
                self._count(o.size)
            except BaseException as error:  # not handled here: everyone who waits for it must see it
                future.set_exception(error)
        data = future.result()
        with self._lock:
            self._uses[link, number] -= 1
            if not self._uses[link, number]:
                del self._packs[link, number]
        return data

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


class NotAtHand(Exception):
    """The tree at hand is spread over hosts in another way than this host needs it; never seen outside `broadcast`."""


def _unchanged(m: manifest.Manifest) -> tuple[manifest.Tensor, ...]:
    return tuple(dataclasses.replace(t, deltas=(None,) * len(t.chunks)) for t in m.tensors)


def _check_continues(later: manifest.Manifest, earlier: manifest.Manifest) -> None:
    if later.digest_before != earlier.digest_after:
        raise manifest.CorruptManifest(
            f"version {later.version} continues a version {earlier.version} of digest {later.digest_before}, but the one "
            f"here has {earlier.digest_after}: it is of another run, or was published again; pull a newer snapshot"
        )
    for a, b in zip(later.tensors, earlier.tensors, strict=False):
        if (a.name, a.shape, a.dtype, a.chunk, a.tied_to) != (b.name, b.shape, b.dtype, b.chunk, b.tied_to):
            raise manifest.CorruptManifest(
                f"tensor {a.name!r} of version {later.version} is {b.name!r} in {earlier.version}"
            )
    if len(later.tensors) != len(earlier.tensors):
        raise manifest.CorruptManifest(f"versions {later.version} and {earlier.version} have not the same tensors")


def _delta_bytes(chain: Sequence[manifest.Manifest]) -> int:
    return sum(o.size for m in chain for o in m.objects if o.path.startswith("deltas/"))


def _array_bytes(m: manifest.Manifest) -> int:
    return sum(o.size for o in m.objects if not o.path.startswith("deltas/"))


def _num_bytes(need: Need) -> int:
    item = manifest.ITEM_BYTES[need.tensor.dtype]
    return sum(int(np.prod([s.stop - s.start for s in region], dtype=np.int64)) * item for region in need.regions)


def _overlaps(cell: Region, region: Region) -> bool:
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(cell, region, strict=True))

"""Assembles a version from the manifests and objects of a source: the shortest plan, then chunk by chunk, each one proved.

`make_plan` follows manifests back to the base or a snapshot; `read` fetches and patches the chunks of one tensor after
another, in parallel, compares each with its digest, and places the tensor. At most `IN_FLIGHT_BYTES` and one tensor are in
host memory, so the host never has the tree in addition to the devices' copy.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sharding.weights.download import source as source_lib
from sharding.weights.format import chunks, delta, journal, manifest, tree

IN_FLIGHT_BYTES = 256 << 20
NUM_THREADS = max(2, min(16, os.cpu_count() or 1))
NUM_REQUESTS = 16  # at a time: relays are far away, and their own pool has as many
ALIGN_BYTES = 64  # a CPU device adopts an array that starts at a multiple of this, without a copy
HUGE_BYTES = 2 << 20  # a huge page: an array that starts elsewhere has small pages at both ends
MAX_CHAIN = 1000  # versions between a delta and its snapshot

Region = chunks.Region
Progress = Callable[[int, int], None]  # (bytes done, bytes in total)
Job = tuple[int, Callable[[], tuple[Any, Sequence[concurrent.futures.Future]]]]  # (bytes of memory, start)


@dataclasses.dataclass(frozen=True)
class Pulled:
    """One verified version of the weights: the result of `pull`. As a base, a later `pull` or `publish` uses it for deltas."""

    version: int
    params: Any
    metadata: dict
    digest: str
    run: str = ""
    epoch: int | None = None  # None: published without a signed head
    sha256: str = ""  # of the manifest: the digest by which a policy is named
    tensors: tuple[manifest.Tensor, ...] = ()  # those of `params`, with the digests of their chunks; (): not known

    def unchanged(self, target: manifest.Manifest) -> dict[str, Any]:
        """Returns those leaves, by name, whose tensors are the same in the version of manifest `target`, and that nothing may have overwritten."""
        ours, theirs = _contents(self.tensors), _contents(target.tensors)
        leaves = tree.flatten(self.params, chunks.check_array)[0] if self.tensors else {}
        safe = {name: x for name, x in leaves.items() if not (isinstance(x, np.ndarray) and x.flags.writeable)}
        return {name: leaf for name, leaf in safe.items() if name in theirs and ours[name] == theirs[name]}

    def locked(self) -> "Pulled":
        """Makes numpy arrays read-only, so that a later `pull` may return them again, and returns this version."""
        for leaf in tree.flatten(self.params, chunks.check_array)[0].values():
            if isinstance(leaf, np.ndarray):
                leaf.setflags(write=False)
        return self


@dataclasses.dataclass(frozen=True)
class Plan:
    """The manifests to read for one version: a start, and the chain of delta versions to apply to it.

    `chain` is newest first. The start is `snapshot`, or, if None, `base_leaves`: leaves by name that this process already has.
    """

    chain: tuple[manifest.Manifest, ...]
    snapshot: manifest.Manifest | None
    base_leaves: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TensorRequest:
    """The regions (slices) to read of one tensor, each into its own array. `names` are the leaves that share the tensor."""

    tensor: manifest.Tensor
    regions: tuple[Region, ...]
    names: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """The total size of the arrays that the regions are read into."""
        num_items = sum(math.prod(s.stop - s.start for s in region) for region in self.regions)
        return num_items * manifest.ITEM_BYTES[self.tensor.dtype]

    def chunks(self) -> Iterator[tuple[int, str, Region]]:
        """Yields (chunk number, object path, the chunk's region) of each chunk that overlaps a requested region."""
        for i, (path, chunk_region) in enumerate(self.tensor.chunk_regions()):
            if any(_overlaps(chunk_region, region) for region in self.regions):
                yield i, path, chunk_region


def make_plan(source: source_lib.Source, target: manifest.Manifest, base: Pulled | None = None) -> Plan:
    """Returns the plan that reads the version of manifest `target` with the fewest bytes: deltas from `base`, or a snapshot.

    A `base` with other tensors is ignored. Raises CorruptSource or FileNotFoundError if a needed version is damaged or missing.
    """
    base_leaves = {} if base is None else tree.flatten(base.params, chunks.check_array)[0]
    expected = {t.name: (t.shape, t.dtype) for t in target.tensors}
    if {n: (tuple(a.shape), a.dtype.name) for n, a in base_leaves.items()} != expected:
        base = None
    if base is not None and base.digest == target.digest:
        unchanged = (dataclasses.replace(t, deltas=(None,) * len(t.chunks)) for t in target.tensors)
        return Plan((dataclasses.replace(target, tensors=tuple(unchanged)),), None, base_leaves)
    chain, to_snapshot = [target], None
    while True:
        last = chain[-1]
        if base is not None and (last.delta_of, last.digest_before) == (base.version, base.digest):
            if to_snapshot is None or _num_bytes(chain, None) <= _num_bytes(to_snapshot[:-1], to_snapshot[-1]):
                return Plan(tuple(chain), None, base_leaves)
            break
        if last.base is None and to_snapshot is None:
            to_snapshot = list(chain)
        if to_snapshot is not None and (base is None or last.delta_of is None or last.delta_of <= base.version):
            break
        text = f"version {target.version} has no snapshot in the {MAX_CHAIN} versions before it; publish a snapshot"
        journal.require(len(chain) <= MAX_CHAIN, text)
        assert last.delta_of is not None  # without deltas it is a snapshot, at which the loop has ended
        try:
            _, before = source.manifest(last.delta_of)
            _check_continues(last, before)
        except (FileNotFoundError, journal.CorruptSource):
            if to_snapshot is None:
                raise
            break  # the deltas from the base are gone, but the snapshot is not
        chain.append(before)
    return Plan(tuple(to_snapshot[:-1]), to_snapshot[-1])


def read(
    source: source_lib.Source,
    plan: Plan,
    requests: Sequence[TensorRequest],
    place: Callable[[TensorRequest, list[np.ndarray]], Any],
    progress: Progress | None = None,
    in_flight_bytes: int | None = None,
) -> Iterator[tuple[TensorRequest, Any]]:
    """Reads tensors of a version. Yields (request, `place(request, arrays)`) in order; `arrays` has one array per region.

    All arrays are verified. Arrays of `in_flight_bytes` (None: IN_FLIGHT_BYTES) are read at a time, or one larger one. Calls
    `progress`, if given, with (bytes done, bytes in total). Raises CorruptSource, naming the wrong object or chunk, and
    FileNotFoundError if a version was deleted meanwhile, or if this host's devices lack a part of the base.
    """
    num_threads = NUM_THREADS if isinstance(source, source_lib.Directory) else NUM_REQUESTS
    with concurrent.futures.ThreadPoolExecutor(num_threads, "weights") as pool:
        reader = _Reader(source, plan, requests, progress)

        def start(request: TensorRequest) -> tuple[Any, list[concurrent.futures.Future]]:
            kind = chunks.dtype(request.tensor.dtype)
            arrays = [empty([s.stop - s.start for s in region], kind) for region in request.regions]
            calls = [pool.submit(reader.read_chunk, request, arrays, *chunk) for chunk in request.chunks()]
            return (request, arrays), calls

        jobs = ((r.num_bytes, functools.partial(start, r)) for r in requests)
        for request, arrays in in_order(jobs, in_flight_bytes or IN_FLIGHT_BYTES):
            result = place(request, arrays)
            del arrays
            yield request, result


def in_order(jobs: Iterable[Job], limit: int) -> Iterator[Any]:
    """Starts jobs (bytes of memory, start), where `start()` returns (value, futures). Yields each value in order.

    Blocks until the futures of the next job are done, and raises their first error. Later jobs are started as long as the
    jobs in progress need at most `limit` bytes.
    """
    running, num_bytes = collections.deque(), 0
    try:
        for size, start in itertools.chain(jobs, [(math.inf, None)]):
            while running and num_bytes + size > limit:
                for future in running[0][2]:
                    future.result()
                num_bytes -= running[0][0]
                yield running.popleft()[1]  # no reference stays here: the memory can be freed
            if start is not None:
                running.append((size, *start()))
                num_bytes += size
    finally:
        for future in itertools.chain.from_iterable(futures for _, _, futures in running):
            future.cancel()


def empty(shape: Sequence[int], kind: np.dtype) -> np.ndarray:
    """Returns an uninitialized array whose address is a multiple of `ALIGN_BYTES`, or of `HUGE_BYTES` if it is large."""
    size = math.prod(shape) * kind.itemsize
    align = HUGE_BYTES if size >= 8 * HUGE_BYTES else ALIGN_BYTES  # wastes at most an eighth
    memory = np.empty(size + align, np.uint8)
    start = -memory.ctypes.data % align
    return memory[start : start + size].view(kind).reshape(shape)


class _Reader:
    """Reads and verifies chunks of one version: the state that all threads of one call of `read` share."""

    def __init__(
        self, source: source_lib.Source, plan: Plan, requests: Sequence[TensorRequest], progress: Progress | None
    ):
        self._source, self._plan, self._progress = source, plan, progress
        self._deltas = [{t.name: t.deltas or () for t in m.tensors} for m in plan.chain]
        self._snapshot_objects = {o.path: o for o in plan.snapshot.objects} if plan.snapshot is not None else {}
        self._lock = threading.Lock()
        self._delta_objects: dict[tuple[int, int], concurrent.futures.Future] = {}
        self._num_uses = collections.Counter()  # of each object of deltas, that are still to come
        self._done_bytes = self._total_bytes = 0
        for request in requests:
            for i, _, _ in request.chunks():
                for link, (number, _, _) in self._patches(request.tensor.name, i):
                    self._num_uses[link, number] += 1
                if plan.snapshot is not None:
                    self._total_bytes += request.tensor.chunk_bytes + manifest.CRC_BYTES
        self._total_bytes += sum(plan.chain[link].objects[number].size for link, number in self._num_uses)

    def read_chunk(self, request: TensorRequest, arrays: list[np.ndarray], i: int, path: str, region: Region) -> None:
        """Reads, patches and verifies chunk `i` of the requested tensor, and copies it to each of `arrays` that it overlaps."""
        tensor, snapshot = request.tensor, self._plan.snapshot
        patches = self._patches(tensor.name, i)
        origins = [tuple(s.start for s in wanted) for wanted in request.regions]
        views = [chunks.view_in(array, o, tensor, region) for array, o in zip(arrays, origins, strict=True)]
        values = next((view for view in views if view is not None), None)
        if snapshot is None:
            start = self._base_chunk(tensor, region)
        else:
            start = self._snapshot_chunk(snapshot.version, self._snapshot_objects[path], values)
        if values is None:
            values = start.copy() if patches else start  # the base must not change
        elif start is not values:
            np.copyto(values, start)
        for link, (number, offset, size) in patches:
            data, m = self._delta_object(link, number), self._plan.chain[link]
            try:
                delta.apply(values, memoryview(data)[offset : offset + size], manifest.ITEM_BYTES[tensor.dtype])
            except journal.CorruptSource as error:
                found = f"object {m.objects[number].path} of version {m.version}, tensor {tensor.name!r}"
                raise journal.CorruptSource(f"{found}: {error}") from error
        # The object of an unpatched chunk was hashed as it was read.
        actual = self._snapshot_objects[path].digest if not patches and snapshot is not None else None
        if actual != tensor.chunks[i]:
            actual = actual or chunks.encoded_digest(values)[1]
            start_name = "the base" if snapshot is None else f"version {snapshot.version}"
            text = f"{start_name} and {len(patches)} deltas result in digest {actual}, not {tensor.chunks[i]}"
            journal.require(actual == tensor.chunks[i], f"tensor {tensor.name!r}, chunk {i}: {text}")
        for array, origin, wanted, view in zip(arrays, origins, request.regions, views, strict=True):
            if view is not values and _overlaps(region, wanted):
                chunks.copy_into(array, origin, values, tensor, region)

    def _patches(self, name: str, i: int) -> list[tuple[int, tuple[int, int, int]]]:
        """Returns the patches of chunk `i` of tensor `name`, oldest first: (index in the chain, (object, offset, size))."""
        found = [(link, deltas[name][i]) for link, deltas in enumerate(self._deltas)]
        return [(link, patch) for link, patch in found[::-1] if patch is not None]

    def _snapshot_chunk(self, version: int, o: journal.Object, into: np.ndarray | None) -> np.ndarray:
        """Reads the chunk that is stored as object `o` of the snapshot, into `into` if given, and returns its bytes."""
        if into is None:
            into = np.empty(o.size - manifest.CRC_BYTES, np.uint8)
        self._source.read(version, o, [into.data, memoryview(bytearray(manifest.CRC_BYTES))])
        self._count(o.size)
        return into

    def _base_chunk(self, tensor: manifest.Tensor, region: Region) -> np.ndarray:
        values = chunks.host_chunk(self._plan.base_leaves[tensor.name], tensor, region)
        if values is None:
            text = f"this host's devices do not have {region} of tensor {tensor.name!r} of the base; pull without base"
            raise FileNotFoundError(text)
        return values

    def _delta_object(self, link: int, number: int) -> bytearray:
        """Returns the bytes of a version's object `number` of patches, which stay in memory until the last chunk used them."""
        o, version = self._plan.chain[link].objects[number], self._plan.chain[link].version
        own = concurrent.futures.Future()
        with self._lock:
            future = self._delta_objects.setdefault((link, number), own)
        if future is own:  # no other thread reads it
            try:
                future.set_result(source_lib.read(self._source, version, o))
                self._count(o.size)
            except BaseException as error:  # every thread that waits for the object must get it
                future.set_exception(error)
        data = future.result()
        with self._lock:
            self._num_uses[link, number] -= 1
            if not self._num_uses[link, number]:
                del self._delta_objects[link, number]
        return data

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


def _contents(tensors: Sequence[manifest.Tensor]) -> dict[str, tuple]:
    """Returns all that decides the values of each tensor, by its name."""
    chunks_of = {t.name: t.chunks for t in tensors}
    return {t.name: (t.dtype, t.shape, t.chunk, chunks_of[t.tied_to or t.name]) for t in tensors}


def _check_continues(later: manifest.Manifest, earlier: manifest.Manifest) -> None:
    text = f"version {later.version} has deltas from version {earlier.version}"
    journal.require(
        later.digest_before == earlier.digest_after,
        f"{text} with digest {later.digest_before}, but the source's has {earlier.digest_after}: it was published again, or "
        "by another run; pull a newer snapshot",
    )
    layouts = [[dataclasses.replace(t, chunks=(), deltas=None) for t in m.tensors] for m in (later, earlier)]
    journal.require(layouts[0] == layouts[1], f"{text}, which has other tensors; pull a snapshot")


def _num_bytes(chain: Sequence[manifest.Manifest], snapshot: manifest.Manifest | None) -> int:
    arrays = () if snapshot is None else (o.size for o in snapshot.objects if not o.path.startswith("deltas/"))
    return sum(o.size for m in chain for o in m.objects if o.path.startswith("deltas/")) + sum(arrays)


def _overlaps(a: Region, b: Region) -> bool:
    return all(max(r.start, s.start) < min(r.stop, s.stop) for r, s in zip(a, b, strict=True))

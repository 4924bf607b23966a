"""Weights leave the learner here and reach every server: `publish`, `pull`, and a manifest that makes both honest.

`publish`, in time, on every host of the learner:

1. The tree is walked once: leaves get `/`-joined names, lists and tuples are noted, so the tree comes back exactly.
2. A lock on the root makes one publisher out of many; what a killed one left behind is removed.
3. Each host takes its own shards (`sharding/format/chunks.py`), casts them on the device, and starts the copy of the next ones to the host
   while threads encode and write the chunks of these: as zarr3 (a snapshot), as patches of the base (`sharding/format/delta.py`), or both.
4. Finished objects go into the journal, from which relays fetch them already.
5. The first host collects what the others wrote; its manifest (`sharding/format/manifest.py`), signed, makes the version visible at once.
6. Versions older than the newest `keep`, that none of those needs, are deleted.

`pull` trusts nothing: it validates the manifest before it fetches anything, takes the shortest way from what is at hand
(`sharding/broadcast/assemble.py`), reads what this host's devices need, and proves every chunk. What fails on the way over deltas is tried again
from the snapshot. No tree with another digest than the manifest's is ever returned.

Left out: compression of snapshots (bf16 weights shrink 1.3x and cost a core); OCDBT (one growing file is awkward to relay and to
hash, and needs Range); chunk dedupe (an optimizer step leaves no 512-byte block unchanged).
"""

import collections
import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sharding.broadcast import assemble, encode
from sharding.download import range_get
from sharding.download import source as source_lib
from sharding.format import chunks, digests, journal, manifest
from sharding.system import atomic_file

DTYPES = encode.DTYPES
Manifest = manifest.Manifest
CorruptBroadcast = journal.CorruptSource
Source = str | os.PathLike | Sequence[str] | source_lib.Source


@dataclasses.dataclass(frozen=True)
class Pulled:
    """A tree and which one it is: what `pull` returns, and what deltas can be applied to or made from (`base`)."""

    version: int
    params: Any
    metadata: dict
    digest: str
    run: str = ""


def pull(
    source: Source,
    version: int | None = None,
    *,
    shardings: Any = None,
    base: Pulled | None = None,
    key: str | None = None,
    run: str | None = None,
    cache: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pulled:
    """Reads and verifies a version (the newest by default), as numpy arrays or, with `shardings`, as jax arrays.

    `source` is a directory, a bucket URL, one or more relay URLs, or what `source.open` returned. `shardings` has the
    structure of the params; its leaves are Shardings, or ShapeDtypeStructs with one, and then shapes and dtypes must agree. Only
    what this process's devices need is fetched. `base` is an earlier result: if the version can be reached from it by
    deltas, these are fetched instead. `key` is the hex of the publisher's ed25519 key, `run` the run that it must be of.
    `cache` is a directory that keeps verified objects until the pull succeeds: a killed one resumes there.

    Raises `CorruptBroadcast` naming the manifest, object or tensor that is wrong; `FileNotFoundError` for a version that is
    not there (any more); `journal.Unavailable` where no relay delivers.
    """
    with _opened(source, key) as opened:
        target = assemble.load(opened, _newest(opened, source) if version is None else version, key)
        if run is not None and target.run != run:
            raise CorruptBroadcast(f"version {target.version} is of run {target.run!r}, not of {run!r}")
        needs, finish = _numpy_needs(target) if shardings is None else _sharded_needs(target, shardings)
        leaves = None if base is None else _matching_leaves(base, target)
        way = assemble.plan(opened, target, base if leaves is not None else None, leaves, key)
        reader = opened if cache is None else _Cached(opened, cache)
        try:
            found = _gather(reader, way, needs, finish, progress)
        except (CorruptBroadcast, FileNotFoundError, assemble.NotAtHand):
            if way.snapshot is not None:
                raise
            found = _gather(reader, assemble.plan(opened, target, key=key), needs, finish, progress)
        if cache is not None:
            reader.clear()
    return Pulled(
        target.version, manifest.unflatten(found, target.containers), target.metadata, target.digest, target.run
    )


def verify(
    source: Source, version: int | None = None, *, key: str | None = None, progress: Callable | None = None
) -> Manifest:
    """Everything `pull` checks and every object of the version, without keeping the tree."""
    with _opened(source, key) as opened:
        target = assemble.load(opened, _newest(opened, source) if version is None else version, key)
        needs, _ = _numpy_needs(target)
        _gather(opened, assemble.plan(opened, target, key=key), needs, lambda need, arrays: [None], progress)
        others = [
            o
            for o in target.objects
            if o.path.endswith("/zarr.json") or target.base is None and o.path.startswith("deltas/")
        ]
        for o in others:
            source_lib.read(opened, target.version, o)
        return target


def versions(source: Source) -> list[int]:
    """The complete versions under `source`, ascending."""
    with _opened(source) as opened:
        return opened.versions()


def latest(source: Source) -> int | None:
    """The newest complete version; None where there is none yet."""
    try:
        return max(versions(source), default=None)
    except FileNotFoundError:
        return None


def wait_for(source: Source, at_least: int, timeout_s: float, poll_s: float = 0.05) -> int:
    """Blocks until a version >= `at_least` is visible and returns the newest; TimeoutError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    with _opened(source) as opened:
        known = None
        while True:
            newest, reason = None, "no version there"
            try:
                newest = latest(opened)
            except journal.Unavailable as error:  # relays may start after their clients
                reason = str(error)
            if newest is not None and newest >= at_least:
                return newest
            if time.monotonic() >= deadline_s:
                what = f"no version >= {at_least} under {source} after {timeout_s} s (newest: {newest})"
                raise TimeoutError(f"{what}: is the publisher alive?" + (f" {reason}" if newest is None else ""))
            try:  # relays hold this back until there is news: no client has to ask twenty times a second
                known = opened.listing(max(0.0, min(1.0, deadline_s - time.monotonic())), known)
            except (journal.Unavailable, FileNotFoundError):
                known = None
                time.sleep(poll_s)


def watch(source: Source, *, after: int = -1, key: str | None = None, poll_s: float = 0.5) -> Iterator[int]:
    """Yields the newest version whenever there is one newer than `after` and than all before; never ends."""
    with _opened(source, key) as opened:
        while True:
            after = wait_for(opened, after + 1, timeout_s=float("inf"), poll_s=poll_s)
            yield after


def read_manifest(source: Source, version: int, *, key: str | None = None) -> Manifest:
    """Reads one manifest and checks every rule that needs no object's bytes."""
    with _opened(source, key) as opened:
        return assemble.load(opened, version, key)


# ---- pull ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(source: Source, key: str | None = None) -> Iterator[source_lib.Source]:
    if hasattr(source, "manifest_bytes"):
        yield source
        return
    opened = source_lib.open(source, trusted_key=key)
    try:
        yield opened
    finally:
        opened.close()


def _newest(opened: source_lib.Source, source: Source) -> int:
    found = opened.versions()
    if not found:
        raise FileNotFoundError(f"no version under {source} yet: wait_for() one")
    return found[-1]


def _gather(reader, way: assemble.Plan, needs, finish, progress) -> dict[str, Any]:
    return {name: value for need, value in assemble.read(reader, way, needs, finish, progress) for name in need.names}


def _numpy_needs(target: Manifest) -> tuple[list[assemble.Need], Callable]:
    names = _names_by_tensor(target)
    needs = [
        assemble.Need(t, (tuple(slice(0, n) for n in t.shape),), tuple(names[t.name]))
        for t in target.tensors
        if t.tied_to is None
    ]
    return needs, lambda need, arrays: arrays[0]


def _names_by_tensor(target: Manifest) -> dict[str, list[str]]:
    names = collections.defaultdict(list)
    for t in target.tensors:
        names[t.tied_to or t.name].append(t.name)
    return names


def _sharded_needs(target: Manifest, shardings: Any) -> tuple[list[assemble.Need], Callable]:
    """What this process's devices need, and how it becomes a jax.Array; everything is checked before a byte is read."""
    targets = _targets(target, shardings)
    by_name = {t.name: t for t in target.tensors}
    needs, placements = [], {}
    for owner, names in _names_by_tensor(target).items():
        t = by_name[owner]
        by_sharding = collections.defaultdict(list)
        for name in names:
            by_sharding[targets[name]].append(name)
        for sharding, same in by_sharding.items():
            indices = sharding.addressable_devices_indices_map(t.shape)
            devices = {
                device: tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, t.shape, strict=True))
                for device, index in indices.items()
            }
            regions = tuple({tuple((s.start, s.stop) for s in region): region for region in devices.values()}.values())
            need = assemble.Need(t, regions, tuple(same))
            placements[need.names] = sharding, devices
            needs.append(need)

    def finish(need: assemble.Need, arrays: list[np.ndarray]) -> jax.Array:
        sharding, devices = placements[need.names]
        values = []
        for device, region in devices.items():
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            values.append(jax.device_put(arrays[need.regions.index(region)], place))
        return jax.make_array_from_single_device_arrays(need.tensor.shape, sharding, values)

    return needs, finish


def _targets(target: Manifest, shardings: Any) -> dict[str, jax.sharding.Sharding]:
    """Shardings by tensor name, each checked against its tensor."""

    def check(name: str, leaf: Any) -> None:
        abstract = isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
        if not abstract and not isinstance(leaf, jax.sharding.Sharding):
            raise ValueError(
                f"shardings leaf {name!r} is a {type(leaf).__name__}: pass one jax Sharding, or ShapeDtypeStruct with a "
                "sharding, per tensor"
            )

    leaves, _ = manifest.flatten(shardings, check)
    unmatched = sorted({t.name for t in target.tensors} ^ set(leaves))
    if unmatched:
        raise ValueError(f"shardings and version {target.version} differ in {unmatched[:8]}: use that model's config")
    targets = {}
    for t in target.tensors:
        leaf = leaves[t.name]
        if isinstance(leaf, jax.ShapeDtypeStruct):
            if (leaf.shape, leaf.dtype.name) != (t.shape, t.dtype):
                raise ValueError(
                    f"tensor {t.name!r} of version {target.version} is {t.dtype}{list(t.shape)}, but the model has "
                    f"{leaf.dtype.name}{list(leaf.shape)}: use that model's config"
                )
            leaf = leaf.sharding
        if jax.dtypes.canonicalize_dtype(chunks.dtype(t.dtype)) != chunks.dtype(t.dtype):  # would truncate in silence
            raise ValueError(
                f"tensor {t.name!r} is {t.dtype}, which jax would narrow: set jax_enable_x64 or pull to numpy"
            )
        try:
            leaf.shard_shape(t.shape)
        except ValueError as error:
            raise ValueError(f"tensor {t.name!r} of shape {t.shape} does not fit its sharding: {error}") from error
        targets[t.name] = leaf
    return targets


def _matching_leaves(have: Pulled, target: Manifest) -> dict[str, Any] | None:
    """The arrays at hand by name, or None if they are those of another model."""
    leaves, _ = manifest.flatten(have.params, encode.check_array)
    expected = {t.name: (t.shape, t.dtype) for t in target.tensors}
    return leaves if {n: (tuple(a.shape), a.dtype.name) for n, a in leaves.items()} == expected else None


class _Cached:
    """A source whose objects are kept in a directory, by hash, until `clear`."""

    def __init__(self, source: source_lib.Source, directory: str | os.PathLike):
        self._source, self._directory = source, pathlib.Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def read(self, version: int, entry: journal.Object, into: Sequence[memoryview]) -> None:
        kept = self._directory / f"{entry.digest}.object"
        if kept.exists():
            data = kept.read_bytes()
            if digests.of(data) == entry.digest:
                range_get.Target.of(entry, into).put(0, memoryview(data))
                return
        self._source.read(version, entry, into)
        atomic_file.write(kept, *into)

    def clear(self) -> None:
        for path in [*self._directory.glob("*.object"), *self._directory.glob(atomic_file.LEFTOVERS)]:
            path.unlink(missing_ok=True)

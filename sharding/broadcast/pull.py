"""Pulls versions: reads, verifies, and returns the weights that `publish` wrote; lists and awaits versions.

`pull` trusts no source. It validates the manifest before it reads anything else, makes the shortest plan from the base or a
snapshot (`sharding/broadcast/assemble.py`), reads the regions that this host's devices need, and proves every chunk. If the plan
over deltas fails, it tries again from the snapshot. It never returns a tree with another digest than the manifest's.
"""

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sharding.broadcast import assemble, encode, placement
from sharding.download import range_get
from sharding.download import source as source_lib
from sharding.format import digests, journal, manifest, tree
from sharding.system import atomic_file

Manifest = manifest.Manifest
Source = str | os.PathLike | Sequence[str] | source_lib.Source


def pull(
    source: Source,
    version: int | None = None,
    *,
    shardings: Any = None,
    base: assemble.Pulled | None = None,
    key: str | None = None,
    run: str | None = None,
    cache: str | os.PathLike | None = None,
    progress: assemble.Progress | None = None,
) -> assemble.Pulled:
    """Reads and verifies a version, as numpy arrays or, with `shardings`, as jax arrays.

    Args:
      source: a directory, a bucket URL, one or more relay URLs, or the result of `source.open`.
      version: the version, or None for the newest.
      shardings: a tree like the params, with a Sharding, or a ShapeDtypeStruct with a sharding, per leaf. The latter's shape and
        dtype are checked. Only the regions of this process's devices are read.
      base: an earlier result. If deltas lead from it to the version, these are read instead of the snapshot.
      key: hex of the publisher's ed25519 key; None accepts any, and unsigned manifests.
      run: the name of the run that the version must be of; None accepts any.
      cache: a directory that keeps verified objects until the pull succeeds, so that a killed pull resumes.
      progress: called with (bytes done, bytes in total).

    Raises:
      CorruptSource: names the manifest, object or tensor that is wrong.
      FileNotFoundError: the version does not exist, or was deleted meanwhile.
      Unavailable: no relay delivers.
      ValueError: `shardings` do not fit the tensors.
    """
    with _opened(source, key) as opened:
        target = assemble.load(opened, _newest(opened, source) if version is None else version, key)
        if run is not None and target.run != run:
            raise journal.CorruptSource(f"version {target.version} is of run {target.run!r}, not of {run!r}")
        placed = placement.on_host(target) if shardings is None else placement.on_devices(target, shardings)
        leaves = None if base is None else _matching_leaves(base, target)
        plan = assemble.make_plan(opened, target, None if leaves is None else base, leaves, key)
        reader = opened if cache is None else _Cached(opened, cache)
        try:
            found = _read(reader, plan, placed, progress)
        except (journal.CorruptSource, FileNotFoundError, assemble.BaseNotLocal):
            if plan.snapshot is not None:
                raise
            found = _read(reader, assemble.make_plan(opened, target, key=key), placed, progress)
        if isinstance(reader, _Cached):
            reader.clear()
    params = tree.unflatten(found, target.containers)
    return assemble.Pulled(target.version, params, target.metadata, target.digest, target.run)


def verify(
    source: Source, version: int | None = None, *, key: str | None = None, progress: assemble.Progress | None = None
) -> Manifest:
    """Checks everything that `pull` checks, and every object of the version, without keeping the tree. Raises as `pull`."""
    with _opened(source, key) as opened:
        target = assemble.load(opened, _newest(opened, source) if version is None else version, key)
        requests, _ = placement.on_host(target)
        _read(opened, assemble.make_plan(opened, target, key=key), (requests, lambda request, arrays: None), progress)
        for o in target.objects:
            if o.path.endswith("/zarr.json") or (target.base is None and o.path.startswith("deltas/")):
                source_lib.read(opened, target.version, o)
        return target


def versions(source: Source) -> list[int]:
    """Returns the complete versions, ascending."""
    with _opened(source) as opened:
        return opened.versions()


def latest(source: Source) -> int | None:
    """Returns the newest complete version, or None if there is none yet."""
    try:
        return max(versions(source), default=None)
    except FileNotFoundError:
        return None


def wait_for(source: Source, at_least: int, timeout_s: float, poll_s: float = 0.05) -> int:
    """Blocks until a version >= `at_least` is visible, and returns the newest. Raises TimeoutError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    with _opened(source) as opened:
        known = None
        while True:
            newest, reason = None, "there is no version"
            try:
                newest = latest(opened)
            except journal.Unavailable as error:  # relays may start after their clients
                reason = str(error)
            if newest is not None and newest >= at_least:
                return newest
            if time.monotonic() >= deadline_s:
                text = f"no version >= {at_least} under {source} after {timeout_s} s (newest: {newest})"
                raise TimeoutError(
                    f"{text}: check that the publisher is running" + (f"; {reason}" if newest is None else "")
                )
            try:  # relays reply as soon as the listing changes: no client has to poll twenty times a second
                known = opened.listing(max(0.0, min(1.0, deadline_s - time.monotonic())), known)
            except (journal.Unavailable, FileNotFoundError):
                known = None
                time.sleep(poll_s)


def watch(source: Source, *, after: int = -1, key: str | None = None, poll_s: float = 0.5) -> Iterator[int]:
    """Yields the newest version whenever it is newer than `after` and all earlier ones. Blocks, and never ends."""
    with _opened(source, key) as opened:
        while True:
            after = wait_for(opened, after + 1, timeout_s=float("inf"), poll_s=poll_s)
            yield after


def read_manifest(source: Source, version: int, *, key: str | None = None) -> Manifest:
    """Returns a manifest, checked by every rule that needs no object."""
    with _opened(source, key) as opened:
        return assemble.load(opened, version, key)


@contextlib.contextmanager
def _opened(source: Source, key: str | None = None) -> Iterator[source_lib.Source]:
    if isinstance(source, source_lib.Directory | source_lib.Bucket | source_lib.relays.Relays):
        yield source
        return
    with contextlib.closing(source_lib.open(source, trusted_key=key)) as opened:
        yield opened


def _newest(opened: source_lib.Source, source: Source) -> int:
    found = opened.versions()
    if not found:
        raise FileNotFoundError(f"no version under {source} yet: wait_for() one")
    return found[-1]


def _read(
    reader: source_lib.Reader,
    plan: assemble.Plan,
    placed: placement.Placement,
    progress: assemble.Progress | None,
) -> dict[str, Any]:
    """Returns the leaves by name."""
    pairs = assemble.read(reader, plan, *placed, progress)
    return {name: leaf for request, leaf in pairs for name in request.names}


def _matching_leaves(base: assemble.Pulled, target: Manifest) -> dict[str, Any] | None:
    """Returns the arrays of `base` by name, or None if they are another model's."""
    leaves, _ = tree.flatten(base.params, encode.check_array)
    expected = {t.name: (t.shape, t.dtype) for t in target.tensors}
    return leaves if {n: (tuple(a.shape), a.dtype.name) for n, a in leaves.items()} == expected else None


class _Cached:
    """A source that keeps its objects in a directory, by digest, until `clear`."""

    def __init__(self, source: source_lib.Source, directory: str | os.PathLike):
        self._source, self._directory = source, pathlib.Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def read(self, version: int, entry: journal.Object, into: Sequence[memoryview]) -> None:
        cached = self._directory / f"{entry.digest}.object"
        if cached.exists():
            data = cached.read_bytes()
            if digests.of(data) == entry.digest:
                range_get.Target.of(entry, into).put(0, memoryview(data))
                return
        self._source.read(version, entry, into)
        atomic_file.write(cached, *into)

    def clear(self) -> None:
        for path in [*self._directory.glob("*.object"), *self._directory.glob(atomic_file.LEFTOVERS)]:
            path.unlink(missing_ok=True)

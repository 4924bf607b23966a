"""Pulls versions: reads, verifies, and returns the weights that `publish` wrote; lists and awaits versions.

`pull` trusts no source. It validates the manifest before it reads anything else, makes the shortest plan from the base or a
snapshot (`sharding/broadcast/assemble.py`), reads the regions that this host's devices need, and proves every chunk. If the plan
over deltas fails, it tries again from the snapshot. It never returns a tree with another digest than the manifest's.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sharding.broadcast import assemble, placement
from sharding.download import source as source_lib
from sharding.format import journal, manifest, tree

Manifest = manifest.Manifest
Source = str | os.PathLike | Sequence[str] | source_lib.Source
POLL_S = 0.05  # while no relay replies, and no directory exists


def pull(
    source: Source,
    version: int | None = None,
    *,
    shardings: Any = None,
    base: assemble.Pulled | None = None,
    key: str | None = None,
    run: str | None = None,
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

    Raises:
      CorruptSource: names the manifest, object or tensor that is wrong.
      FileNotFoundError: the version does not exist, or was deleted meanwhile.
      Unavailable: no relay delivers.
      ValueError: `shardings` do not fit the tensors.
    """
    with _opened(source, key) as opened:
        target = _target(opened, version, key)
        if run is not None and target.run != run:
            raise journal.CorruptSource(f"version {target.version} is of run {target.run!r}, not of {run!r}")
        requests, place = placement.on_host(target) if shardings is None else placement.on_devices(target, shardings)
        plan = assemble.make_plan(opened, target, base, key)
        try:
            found = list(assemble.read(opened, plan, requests, place))
        except (journal.CorruptSource, FileNotFoundError):
            if plan.snapshot is not None:
                raise
            found = list(assemble.read(opened, assemble.make_plan(opened, target, key=key), requests, place))
    params = tree.unflatten({name: leaf for request, leaf in found for name in request.names}, target.containers)
    return assemble.Pulled(target.version, params, target.metadata, target.digest, target.run)


def verify(
    source: Source, version: int | None = None, *, key: str | None = None, progress: assemble.Progress | None = None
) -> Manifest:
    """Checks everything that `pull` checks, and every object of the version, without keeping the tree. Raises as `pull`.

    `progress` is called with (bytes done, bytes in total).
    """
    with _opened(source, key) as opened:
        target = _target(opened, version, key)
        plan, (requests, _) = assemble.make_plan(opened, target, key=key), placement.on_host(target)
        for _ in assemble.read(opened, plan, requests, lambda request, arrays: None, progress):
            pass
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


def wait_for(source: Source, at_least: int, timeout_s: float) -> int:
    """Blocks until a version >= `at_least` is visible, and returns the newest. Raises TimeoutError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    with _opened(source) as opened:
        known = None
        while True:
            newest, reason = None, ""
            try:
                newest = latest(opened)
            except journal.Unavailable as error:  # relays may start after their clients
                reason = f"; {error}"
            if newest is not None and newest >= at_least:
                return newest
            if time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"no version >= {at_least} under {source} after {timeout_s} s (newest: {newest}): check that the "
                    f"publisher is running{reason}"
                )
            try:  # relays reply as soon as the listing changes: no client has to poll twenty times a second
                known = opened.listing(max(0.0, min(1.0, deadline_s - time.monotonic())), known)
            except (journal.Unavailable, FileNotFoundError):
                known = None
                time.sleep(POLL_S)


def watch(source: Source, *, after: int = -1, key: str | None = None) -> Iterator[int]:
    """Yields the newest version whenever it is newer than `after` and all earlier ones. Blocks, and never ends."""
    with _opened(source, key) as opened:
        while True:
            after = wait_for(opened, after + 1, timeout_s=float("inf"))
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


def _target(opened: source_lib.Source, version: int | None, key: str | None) -> Manifest:
    """Returns the manifest of `version`, or of the newest."""
    if version is None:
        found = opened.versions()
        if not found:
            raise FileNotFoundError(f"no version under {opened.stats()['source']} yet: wait_for() one")
        version = found[-1]
    return assemble.load(opened, version, key)

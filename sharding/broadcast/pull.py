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
    """Reads and verifies one version of the weights, as numpy arrays or, with `shardings`, as jax arrays.

    Args:
      source: a directory, a bucket URL, one or more relay URLs, or the result of `source.open`.
      version: the version number, or None for the newest version.
      shardings: a tree like the params, with a Sharding, or a ShapeDtypeStruct with a sharding, per leaf. The shape and dtype of
        a ShapeDtypeStruct are checked. Only the regions of this process's devices are read.
      base: an earlier result of `pull`. Deltas from that version are read if they are fewer bytes than a snapshot.
      key: hex of the publisher's ed25519 public key; None accepts any key, and unsigned manifests.
      run: the name of the run that must have published the version; None accepts any.

    Raises:
      CorruptSource: a manifest, object or tensor is not the published one, or the version is of another run.
      FileNotFoundError: the version does not exist, or was deleted meanwhile.
      Unavailable: no relay delivered in time.
      ValueError: `shardings` do not fit the tensors.
    """
    with _opened(source, key) as opened:
        target = _target(opened, version, key)
        text = f"version {target.version} is of run {target.run!r}, not of {run!r}: use the right run's source or name"
        journal.require(run in (None, target.run), text)
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
    """Reads and verifies a version and every object of it, without keeping the weights. Returns the manifest.

    Raises the errors of `pull`. Calls `progress`, if given, with (bytes done, bytes in total).
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
    """Returns the numbers of the complete versions that `source` has, ascending."""
    with _opened(source) as opened:
        return opened.versions()


def latest(source: Source) -> int | None:
    """Returns the number of the newest complete version that `source` has, or None if no version or directory exists yet."""
    try:
        return max(versions(source), default=None)
    except FileNotFoundError:
        return None


def wait_for(source: Source, at_least: int, timeout_s: float) -> int:
    """Blocks until `source` has a version >= `at_least`. Returns the newest; raises TimeoutError after `timeout_s`."""
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
                text = f"no version >= {at_least} under {opened.stats()['source']} in {timeout_s} s (newest: {newest})"
                raise TimeoutError(f"{text}: start the publisher{reason}")
            try:  # relays reply as soon as the listing changes: no client has to poll twenty times a second
                known = opened.listing(max(0.0, min(1.0, deadline_s - time.monotonic())), known)
            except (journal.Unavailable, FileNotFoundError):
                known = None
                time.sleep(POLL_S)


def watch(source: Source, *, after: int = -1, key: str | None = None) -> Iterator[int]:
    """Yields the newest version number each time it exceeds `after` and all yielded numbers. Blocks, and never ends."""
    with _opened(source, key) as opened:
        while True:
            after = wait_for(opened, after + 1, timeout_s=float("inf"))
            yield after


def read_manifest(source: Source, version: int, *, key: str | None = None) -> Manifest:
    """Returns the manifest of `version`, checked without reading its objects. Raises CorruptSource if `key` did not sign it."""
    with _opened(source, key) as opened:
        return assemble.load(opened, version, key)


def _opened(source: Source, key: str | None = None) -> contextlib.AbstractContextManager[source_lib.Source]:
    if isinstance(source, source_lib.Source):
        return contextlib.nullcontext(source)
    return contextlib.closing(source_lib.open(source, trusted_key=key))


def _target(opened: source_lib.Source, version: int | None, key: str | None) -> Manifest:
    """Returns the manifest of `version`, or of the newest version if None. Raises FileNotFoundError if there is none."""
    if version is None:
        found = opened.versions()
        if not found:
            raise FileNotFoundError(f"no version under {opened.stats()['source']} yet: call wait_for() first")
        version = found[-1]
    return assemble.load(opened, version, key)

"""Pulls versions: reads, verifies, and returns the weights that `publish` wrote; lists and awaits versions.

`pull` trusts no source. It validates the manifest before it reads anything else, makes the shortest plan from the base or a
snapshot (`sharding/weights/broadcast/assemble.py`), reads the regions that this host's devices need, and proves every chunk. If the plan
over deltas fails, it tries again from the snapshot. It never returns a tree with another digest than the manifest's.

Every `key` is the hex of the publisher's public key, the path of its root file, or a verifier (sharding/weights/format/head.py). With
one, the newest version is that of the signed head, and never older, in (epoch, version), than any that this process has accepted
from anywhere. Without one, it is the newest that the source lists.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sharding.weights.broadcast import assemble, placement
from sharding.weights.download import source as source_lib
from sharding.weights.format import head as head_lib
from sharding.weights.format import journal, manifest, tree

Manifest = manifest.Manifest
Source = str | os.PathLike | Sequence[str] | source_lib.Source
Trusted = source_lib.Trusted
POLL_S = 0.05  # while no relay replies, and no directory exists


def pull(
    source: Source,
    version: int | None = None,
    *,
    shardings: Any = None,
    staged: bool = False,
    base: assemble.Pulled | None = None,
    key: Trusted = None,
    run: str | None = None,
    epoch: int | None = None,
    digest: str = "",
) -> assemble.Pulled:
    """Reads and verifies one version of the weights, as numpy arrays or, with `shardings`, as jax arrays.

    Args:
      source: a directory, a bucket URL, one or more relay URLs, or the result of `source.open`.
      version: the version number, or None for the newest version. Older ones are those that the head lists.
      shardings: a tree like the params, with a Sharding, or a ShapeDtypeStruct with a sharding, per leaf. The shape and dtype of
        a ShapeDtypeStruct are checked. Only the regions of this process's devices are read.
      staged: with `shardings`, returns `placement.Staged` leaves, which the caller puts on the devices one by one.
      base: an earlier result of `pull`. Tensors that have not changed since are its own leaves, unless these are numpy arrays that can be
        written to. Of the others, deltas from that version are read if they are fewer bytes than a snapshot.
      key: the publisher's; None accepts any key, and unsigned manifests.
      run: the name of the run that must have published the version; None accepts any.
      epoch: the epoch of the version, since a resumed run publishes some numbers again, with other weights; None accepts any.
      digest: the SHA-256 (hex) of its manifest; "" accepts any.

    Raises:
      CorruptSource: a head, manifest, object or tensor is not the published one or too old, or the version is of another run.
      FileNotFoundError: the version does not exist, is another one than `epoch` and `digest` name, or was deleted meanwhile.
      Unavailable: no relay delivered in time.
      ValueError: `shardings` do not fit the tensors.
    """
    with _opened(source, key) as opened:
        target, sha256 = _target(opened, version, epoch, digest)
        text = f"version {target.version} is of run {target.run!r}, not of {run!r}; use the right run's source or name"
        journal.require(run in (None, target.run), text)

        kept = {} if base is None else base.unchanged(target)

        def read(plan: assemble.Plan) -> list[tuple[assemble.TensorRequest, Any]]:
            limit = None
            if shardings is None:
                requests, place = placement.on_host(target)
            elif staged:
                requests, place, limit = placement.staged(target, shardings)
            else:
                requests, place = placement.on_devices(target, shardings)
            requests = [request for request in requests if not kept.keys() >= set(request.names)]
            return list(assemble.read(opened, plan, requests, place, in_flight_bytes=limit))

        plan = assemble.make_plan(opened, target, base)
        try:
            found = read(plan)
        except (journal.CorruptSource, FileNotFoundError):
            if plan.snapshot is not None:
                raise
            found = read(assemble.make_plan(opened, target))
    leaves = kept | {name: leaf for request, leaf in found for name in request.names}
    params = tree.unflatten(leaves, target.containers)
    about = target.metadata, target.digest, target.run, target.epoch, sha256, target.tensors
    return assemble.Pulled(target.version, params, *about)


def verify(
    source: Source, version: int | None = None, *, key: Trusted = None, progress: assemble.Progress | None = None
) -> Manifest:
    """Reads and verifies a version and every object of it, without keeping the weights. Returns the manifest.

    Raises the errors of `pull`. Calls `progress`, if given, with (bytes done, bytes in total).
    """
    with _opened(source, key) as opened:
        target, _ = _target(opened, version)
        plan, (requests, _) = assemble.make_plan(opened, target), placement.on_host(target)
        for _ in assemble.read(opened, plan, requests, lambda request, arrays: None, progress):
            pass
        for o in target.objects:
            if o.path.endswith("/zarr.json") or (target.base is None and o.path.startswith("deltas/")):
                source_lib.read(opened, target.version, o)
        return target


def versions(source: Source, *, key: Trusted = None) -> list[int]:
    """Returns the numbers of the complete versions that `source` has, ascending; with `key`, of those that the head lists."""
    with _opened(source, key) as opened:
        return opened.versions()


def latest(source: Source, *, key: Trusted = None) -> int | None:
    """Returns the number of the newest complete version that `source` has, or None if no version or directory exists yet."""
    order = latest_order(source, key=key)
    return None if order is None else order[1]


def latest_order(source: Source, *, key: Trusted = None) -> tuple[int, int] | None:
    """Returns (epoch, version) of the newest complete version, or None. The epoch is 0 without a signed head."""
    with _opened(source, key) as opened:
        try:
            return _newest(opened)
        except FileNotFoundError:
            return None


def wait_for(
    source: Source, at_least: int, timeout_s: float, *, key: Trusted = None, epoch: int | None = None, digest: str = ""
) -> int:
    """Blocks until the newest version of `source` is >= `at_least`. Returns it; raises TimeoutError after `timeout_s`.

    Versions of epochs before `epoch`, which a resumed run replaces, do not count. With `digest`, blocks until version
    `at_least` itself is there, of `epoch` and with a manifest of that SHA-256: a relay mirrors newer versions first. Raises
    FileNotFoundError if a signed head shows that it was deleted or replaced.
    """
    with _opened(source, key) as opened:
        if digest:
            return _wait_exactly(opened, at_least, epoch, digest, timeout_s)
        text = f"version >= {at_least}" + (f" of epoch {epoch}" if epoch else "")
        return _wait(opened, lambda order: order[0] >= (epoch or 0) and order[1] >= at_least, text, timeout_s)[1]


def entry_of(source: Source, version: int, *, key: Trusted = None) -> head_lib.Entry | None:
    """Returns the signed head's entry for `version`, or None if there is no head or it does not list the version."""
    with _opened(source, key) as opened:
        head = opened.head()
        return None if head is None else head.versions.get(version)


def watch(source: Source, *, after: int = -1, key: Trusted = None) -> Iterator[int]:
    """Yields the newest version number each time it is newer than `after` and all yielded ones. Blocks, and never ends.

    A version of a newer epoch, which a resumed run has published again, is newer than a higher number of an older epoch.
    """
    with _opened(source, key) as opened:
        order = _wait(opened, lambda order: order[1] > after)
        while True:
            yield order[1]
            order = _wait(opened, lambda now, last=order: now > last)


def read_manifest(source: Source, version: int, *, key: Trusted = None, digest: str = "") -> Manifest:
    """Returns the manifest of `version`, checked without reading its objects. Raises the errors of `pull`."""
    with _opened(source, key) as opened:
        return _target(opened, version, digest=digest)[0]


def _opened(source: Source, key: Trusted = None) -> contextlib.AbstractContextManager[source_lib.Source]:
    if not isinstance(source, source_lib.Source):
        return contextlib.closing(source_lib.open(source, trusted_key=key))
    trusted = head_lib.verifier_of(key)
    if trusted is not None and (source.trusted is None or source.trusted.name != trusted.name):
        name = None if source.trusted is None else source.trusted.name
        raise ValueError(f"the source was opened with key {name}, not {trusted.name}; open it with that trusted_key")
    return contextlib.nullcontext(source)


def _newest(opened: source_lib.Source) -> tuple[int, int] | None:
    """Returns (epoch, version) of the newest version; None if there is none yet. Without a head the epoch is 0."""
    listed = opened.versions()
    if opened.trusted is None or opened.trusted.head is None:
        return (0, max(listed)) if listed else None
    newest = opened.trusted.head.newest
    return (newest.epoch, newest.version) if newest and newest.version in listed else None


def _wait(
    opened: source_lib.Source,
    is_new: Callable[[tuple[int, int]], bool],
    what: str = "newer version",
    timeout_s: float = float("inf"),
) -> tuple[int, int]:
    """Blocks until (epoch, version) of the newest version `is_new`, and returns it. Raises TimeoutError after `timeout_s`."""
    deadline_s, known = time.monotonic() + timeout_s, None
    while True:
        newest, reason = None, "start the publisher"
        try:
            newest = _newest(opened)
        except FileNotFoundError as error:
            reason = str(error)
        except (journal.Unavailable, head_lib.StaleHead, head_lib.ExpiredHead) as error:  # relays may be late
            reason += f"; {error}"
        if newest is not None and is_new(newest):
            return newest
        if time.monotonic() >= deadline_s:
            place, found = opened.stats()["source"], None if newest is None else newest[1]
            text = f"no {what} under {place} in {timeout_s} s (newest: {found})"
            raise TimeoutError(f"{text}: {reason}")
        try:
            known = _await_change(opened, known, min(deadline_s, time.monotonic() + 1.0))
        except (journal.Unavailable, FileNotFoundError, head_lib.StaleHead, head_lib.ExpiredHead):
            known = None
            time.sleep(POLL_S)


def _wait_exactly(opened: source_lib.Source, version: int, epoch: int | None, digest: str, timeout_s: float) -> int:
    deadline_s, known = time.monotonic() + timeout_s, None
    while True:
        reason = f"no version {version} with manifest {digest[:16]} in {timeout_s} s"
        try:
            known = _await_change(opened, known, min(deadline_s, time.monotonic() + 1.0))
            if version in known.complete:
                return _target(opened, version, epoch, digest)[0].version
        except (journal.Unavailable, FileNotFoundError, journal.CorruptSource) as error:  # it may be on its way
            reason, known = str(error), None
            time.sleep(POLL_S)
        if _is_gone(opened, version, epoch, digest):
            found = f"version {version} with manifest {digest[:16]} is not published any more"
            raise FileNotFoundError(f"{found}; pull the newest version")
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"{reason}; compare the source with the one that the run publishes to")


def _is_gone(opened: source_lib.Source, version: int, epoch: int | None, digest: str) -> bool:
    """Returns True if the newest head accepted is of a later version, and does not list this one: no source will have it again."""
    head = opened.trusted and opened.trusted.head
    if head is None or head.newest is None:
        return False
    newest, listed = head.newest, head.versions.get(version)
    is_later = (newest.epoch, newest.version) > (newest.epoch if epoch is None else epoch, version)
    return is_later and (listed is None or listed.sha256 != digest)


def _await_change(opened: source_lib.Source, known: journal.Listing | None, until_s: float) -> journal.Listing:
    """Blocks until other versions than in `known` are complete, or `until_s`. Returns the listing.

    Relays reply as soon as it changes: no client has to poll twenty times a second. Each version changes it four times, and only
    its end is news: to ask for the newest version each time cost clients 10 % more CPU on small versions.
    """
    while True:
        found = opened.listing(max(0.0, until_s - time.monotonic()), known)
        if known is None or found.complete != known.complete or time.monotonic() >= until_s:
            return found
        known = found


def _target(
    opened: source_lib.Source, version: int | None, epoch: int | None = None, digest: str = ""
) -> tuple[Manifest, str]:
    """Returns (the manifest of `version`, or of the newest version if None, the SHA-256 of its bytes).

    Raises FileNotFoundError if there is none, or another one than `epoch` and `digest` name.
    """
    if version is None:
        order = _newest(opened)
        if order is None:
            raise FileNotFoundError(f"no version under {opened.stats()['source']} yet; call wait_for() first")
        version = order[1]
    elif opened.trusted is not None:
        listed = opened.trusted.head and opened.trusted.head.versions.get(version)
        if not digest or listed is None or listed.sha256 != digest:
            opened.head()  # of another source or an earlier time: a resumed run may have published the number again since
    data, found = opened.manifest(version)
    sha256 = hashlib.sha256(data).hexdigest()
    if epoch not in (None, found.epoch or 0) or digest not in ("", sha256):
        wanted = f"epoch {'any' if epoch is None else epoch}, manifest {digest[:16] or 'any'}"
        text = f"version {version} under {opened.stats()['source']} is of epoch {found.epoch or 0}"
        text += f", manifest {sha256[:16]}"
        remedy = "a resumed run has published it again; wait for its source, or use the run's newest"
        raise FileNotFoundError(f"{text}, not of {wanted}; {remedy}")
    return found, sha256

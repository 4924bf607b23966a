"""Copies new versions from the upstreams into a relay's store, in a thread of its own.

1. Files on disk are hashed again and exposed (`Store.recover`).
2. The upstreams are polled; they answer when something is new. Mirrored are the newest `keep` versions and all bases that their
   deltas need. The newest version that is still being published is followed object by object.
3. The manifest comes last: it is checked, with a trusted key its signature, too, and stored when all its objects are.
4. Versions that are no longer needed are deleted. On a full disk the oldest version goes first.

Failures (upstream gone, disk full, version rejected) are counted, reported and retried; complete versions stay.
"""

import collections
import concurrent.futures
import errno
import sys
import threading
import time
from collections.abc import Callable, Collection

from sharding.download import source
from sharding.format import journal
from sharding.format import manifest as manifest_lib
from sharding.relay import store as store_lib

NUM_DOWNLOADS = 8  # objects that are downloaded at the same time
REUSED_BYTES = 64 << 20  # a download thread keeps a buffer for objects up to this size
MAX_UNAVAILABLE = 8  # versions tried per pass, so that an upstream with many false ones does not delay the others
UNAVAILABLE_S = 5.0  # until a version without a manifest is tried again
REPEAT_S = 30.0  # one kind of error is printed at most once in this time


class Mirror:
    """A thread that copies new versions from `upstream` into `store` until `stop`, and counts its work and errors."""

    def __init__(self, store: store_lib.Store, upstream: source.Source, keep: int, trusted_key: str | None = None):
        self.counters = collections.Counter()
        self.upstream = upstream
        self.is_upstream_alive = False
        self.last_error = ""
        self._printed: dict[int | str, float] = {}  # kind of error -> when it was printed
        self._store, self._trusted_key = store, trusted_key
        self._keep = sys.maxsize if store.in_place else keep  # in place the publisher decides
        self._confirmed: set[int] = set()  # complete versions whose manifest was compared with the upstream's
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_DOWNLOADS, "mirror-download")
        self._manifests: dict[int, tuple[bytes, manifest_lib.Manifest]] = {}
        self._unavailable: dict[int, float] = {}  # versions whose manifest failed -> when to try again
        self._lock = threading.Lock()  # for the counters
        self._local = threading.local()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and closes the upstream. Blocks for at most 30 s."""
        self._stop.set()
        self.upstream.close()
        self._thread.join(timeout=30)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while self._store.is_recovering and not self._store.in_place and not self._stop.is_set():
            try:
                self._count("bad_recovered", self._store.recover(self._trusted_key))
            except OSError as error:  # a disk error: it may be repaired
                self._note(error)
                self._stop.wait(2.0)
        pause_s, idle, listing = 0.05, False, None
        while not self._stop.is_set():
            try:
                listing = self.upstream.listing(1.0 if idle else 0.0, listing)
                self.is_upstream_alive = True
                idle = not self._pass(listing)
                pause_s = 0.05
            except (OSError, ValueError) as error:
                if self._stop.is_set():
                    return
                self.is_upstream_alive = not isinstance(error, journal.Unavailable | FileNotFoundError)
                self._note(error)
                self._confirmed.clear()  # meanwhile the upstream may publish a number again
                self._manifests.clear()
                self._stop.wait(pause_s)
                pause_s, idle = min(2 * pause_s, 2.0), True
                self._store.recovered()

    def _pass(self, listing: journal.Listing) -> bool:
        """Compares the store with the upstream, and downloads newer versions first. Returns True if it downloaded anything."""
        listed = set(listing.complete)
        self._confirmed &= listed
        self._manifests = {n: m for n, m in self._manifests.items() if n in listed}
        self._unavailable = {n: until_s for n, until_s in self._unavailable.items() if n in listed}
        self._drop(listing)
        for number in sorted(listed.intersection(self._store.complete()) - self._confirmed):
            self._try(self._confirm, number)
        moved = any([self._try(self._download, number, listing) for number in self._download_order(listing)])
        self._store.recovered()
        for number in listing.partial[-1:]:
            # complete here and partial there: another version, or lost objects there; `_confirm` decides later
            if number > max(listing.complete, default=-1) and not self._store.is_complete(number):
                moved |= self._try(self._follow, number)
        self._drop(listing)
        return moved

    def _try(self, step: Callable[..., bool], number: int, *args) -> bool:
        """Returns step(number, ...) for one version. After an error, reports it and returns False: other versions go on."""
        try:
            return step(number, *args)
        except (OSError, ValueError) as error:
            self._note(error)
            return False

    def _confirm(self, number: int) -> bool:
        """Deletes a version, and returns True, if its upstream manifest differs: a resumed learner publishes a number again."""
        differs = self.upstream.manifest(number)[0] != self._store.manifest(number)
        if differs:
            self._store.remove(number)
            self._count("replaced_versions")
        self._confirmed.add(number)
        return differs

    def _download_order(self, listing: journal.Listing) -> list[int]:
        """Returns the missing versions: newest first, each after the bases its deltas need, up to `keep` versions."""
        order, num_found, num_failed = [], 0, 0
        for number in reversed(sorted({*listing.complete, *self._store.complete()})):
            if num_found == self._keep or num_failed == MAX_UNAVAILABLE:
                break
            if self._unavailable.get(number, 0.0) > time.monotonic():
                continue
            try:
                order += [n for n in reversed(self._chain(number, listing.complete)) if n not in order]
                num_found += 1
            except (OSError, ValueError) as error:  # listed but not available: it must not take a real one's place
                self._note(error)
                self._unavailable[number] = time.monotonic() + UNAVAILABLE_S
                num_failed += 1
        return [n for n in order if not self._store.is_complete(n)]

    def _chain(self, number: int | None, listed: Collection[int] = ()) -> list[int]:
        """Returns a version and its bases, newest first, up to the first that is neither complete here nor in `listed`."""
        chain = []
        while number is not None and number not in chain:
            found = self._store.versions.get(number)
            is_complete = found is not None and found.manifest is not None
            if not is_complete and number not in listed:
                break
            chain.append(number)
            number = found.base if found and is_complete else self._manifest(number)[1].base
        return chain

    def _manifest(self, number: int) -> tuple[bytes, manifest_lib.Manifest]:
        if number not in self._manifests:
            self._manifests[number] = self.upstream.manifest(number)
        return self._manifests[number]

    def _follow(self, number: int) -> bool:
        """Downloads the finished objects of a version that is being published, until it is complete or nothing is new."""
        pending, moved, is_complete, quiet_s = set(), False, False, time.monotonic()
        while not (self._stop.is_set() or is_complete or time.monotonic() > quiet_s + 1.0):
            entries, is_complete = self.upstream.entries(number, wait_s=0.25)
            for entry in {e.path: e for e in entries}.values():
                if not self._store.has(number, entry):
                    pending.add(self._pool.submit(self._copy, number, entry))
            pending = self._collect(pending)
            if entries:
                moved, quiet_s = True, time.monotonic()
        self._collect(pending, concurrent.futures.ALL_COMPLETED)
        return (is_complete and not self._stop.is_set() and self._download(number)) or moved

    def _download(self, number: int, listing: journal.Listing | None = None) -> bool:
        """Downloads the missing objects of a version. Returns True if it is now complete or fewer are missing.

        Given `listing`, stops early when the upstream has a newer version.
        """
        data, manifest = self._manifest(number)
        missing = [o for o in manifest.objects if not self._store.has(number, o)]
        pending, polled_s = set(), time.monotonic()
        for entry in missing:
            pending.add(self._pool.submit(self._copy, number, entry))
            while len(pending) >= 2 * NUM_DOWNLOADS:
                pending = self._collect(pending, concurrent.futures.FIRST_COMPLETED)
            if self._stop.is_set():
                return False
            if listing is not None and time.monotonic() > polled_s + 1.0:
                polled_s = time.monotonic()
                if _newest(self.upstream.listing()) > _newest(listing):
                    break
        self._collect(pending, concurrent.futures.ALL_COMPLETED)
        num_missing = sum(not self._store.has(number, o) for o in manifest.objects)
        if num_missing:
            return num_missing < len(missing)
        self._store.finish(number, manifest, data)
        self._confirmed.add(number)
        self._count("versions")
        return True

    def _copy(self, number: int, entry: journal.Object) -> None:
        data = None if self._store.in_place else self._buffer(entry.size)
        if data is not None:
            self.upstream.read(number, entry, [data])
        elif (self._store.root / journal.dirname(number) / entry.path).stat().st_size != entry.size:
            # The publisher hashed it: only an unfinished file is detected.
            found = f"object {entry.path} of version {number} does not have {entry.size} bytes"
            raise journal.CorruptSource(f"{found}: publish the version again")
        try:
            self._store.add(number, entry, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room(number):
                raise
            self._store.add(number, entry, data)
        self._count("objects")
        self._count("bytes", entry.size)

    def _buffer(self, size: int) -> memoryview:
        """Returns a buffer of this thread. It is reused: fresh memory costs a page fault for every 4 kB."""
        if size > REUSED_BYTES:
            return memoryview(bytearray(size))
        buffer = getattr(self._local, "buffer", b"")
        if len(buffer) < size:
            buffer = self._local.buffer = bytearray(size)
        return memoryview(buffer)[:size]

    def _collect(self, pending: set, wait: str = "") -> set:
        """Takes finished downloads out of `pending`, counts failed ones in the metrics, and returns the unfinished ones.

        Waits for the next one or for all, as `wait` (a constant of `concurrent.futures.wait`); not at all without it.
        """
        done, pending = concurrent.futures.wait(pending, None if wait else 0, wait or concurrent.futures.ALL_COMPLETED)
        for error in (future.exception() for future in done if not future.cancelled()):
            if isinstance(error, OSError | ValueError):
                self._note(error)
                self._count("failed_objects")
            elif error is not None:
                raise error
        return pending

    def _drop(self, listing: journal.Listing) -> None:
        """Deletes complete versions that are neither among the newest nor their bases, and abandoned partial ones."""
        complete, partial = self._store.complete(), self._store.partial()
        kept = {n for number in complete[-self._keep :] for n in self._chain(number)}
        if self._store.in_place:  # there the publisher decides
            kept &= self._confirmed.union(listing.complete)  # a version finished since the listing is not gone
        newest = max(complete, default=-1)
        wanted = self._download_order(listing) if partial else ()
        kept |= {n for n in partial if n in wanted or (n in listing.partial and n > newest)}
        for number in sorted({*complete, *partial} - kept):
            self._store.remove(number)

    def _make_room(self, number: int) -> bool:
        """Deletes the oldest version that neither the newest nor `number` needs. Returns False if there is none."""
        with self._store.lock:
            complete = self._store.complete()
            base = self._manifests[number][1].base if number in self._manifests else None
            needed = {number, *self._chain(base), *self._chain(max(complete, default=None))}
            doomed = next((n for n in complete if n not in needed), None)
        if doomed is None:
            return False
        self._store.remove(doomed)
        self._count("evicted_for_room")
        return True

    def _note(self, error: Exception) -> None:
        """Counts an error, and prints it unless one of its kind was printed lately: a full disk fails every object."""
        self._count(f"errors_{type(error).__name__}")
        kind, now_s = getattr(error, "errno", None) or str(error), time.monotonic()
        with self._lock:
            self._printed = {k: s for k, s in self._printed.items() if s > now_s - REPEAT_S}
            is_new = kind not in self._printed
            self._printed.setdefault(kind, now_s)
        if is_new:
            print(f"relay: {error}", file=sys.stderr, flush=True)
        self.last_error = str(error)

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counters[name] += amount


def _newest(listing: journal.Listing) -> int:
    return max((*listing.complete, *listing.partial), default=-1)

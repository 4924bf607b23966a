"""Keeps a relay's store in step with its upstreams, in a thread of its own.

1. What is on disk is hashed again and exposed (`Store.recover`). In place, the first look at the directory exposes it.
2. The upstreams are asked for news; they answer when they have some. `_wanted`: the newest `keep` versions, and every base that
   those need. The newest that is still being published is followed object by object (`_follow`).
3. An object is fetched as soon as an upstream lists it; `upstream.read` hashed it before it comes here.
4. The manifest comes last, checked (with a trusted key: its signature too), when all its objects are in place. What was
   listed before and is not in the manifest is dropped: a journal is a promise, the manifest is the word.
5. What is no longer wanted goes. On a full disk the oldest version goes that neither the newest nor the one in work needs.

Upstream gone, disk full, a version that is refused: it is counted, noted, and tried again; what is complete stays.
"""

import collections
import concurrent.futures
import errno
import sys
import threading
import time

from sharding.download import source
from sharding.format import journal
from sharding.format import manifest as manifest_lib
from sharding.relay import store as store_lib

NUM_FETCHES = 8  # objects on their way at the same time
REUSED_BYTES = 64 << 20  # a fetching thread keeps memory for an object of at most this size
MAX_PHANTOMS = 8  # refused in one look at the upstreams, so that a liar with many does not hold up the rest
PHANTOM_S = 5.0
TOLD_S = 30.0  # how long one kind of error is not told again


class Mirror:
    """Use as `start`, `stop`. `counters`, `last_error` and `is_upstream_alive` tell how it goes."""

    def __init__(
        self, store: store_lib.Store, upstream: source.Source, *, keep: int = 5, trusted_key: str | None = None
    ):
        self.counters = collections.Counter()
        self.upstream = upstream
        self.is_upstream_alive = False
        self._told: dict[int | str, float] = {}  # kind of error -> when it was told
        self.last_error = ""
        self._store, self._trusted_key = store, trusted_key
        self._keep = sys.maxsize if store.in_place else keep  # in place the publisher decides
        self._confirmed: set[int] = set()  # complete versions that are, as far as known, what the upstream has
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_FETCHES, "mirror-fetch")
        self._manifests: dict[int, manifest_lib.Manifest] = {}
        self._phantoms: dict[int, float] = {}  # versions whose manifest could not be had, until when to leave them
        self._lock = threading.Lock()  # of the counters
        self._local = threading.local()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        if not self._stop.is_set():
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.upstream.close()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while self._store.is_recovering and not self._store.in_place and not self._stop.is_set():
            try:
                self._count("bad_recovered", self._store.recover(self._trusted_key))
            except OSError as error:  # the disk: perhaps somebody mends it
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
                self._stop.wait(pause_s)
                pause_s, idle = min(2 * pause_s, 2.0), True
                self._store.recovered()

    def _pass(self, listing: journal.Listing) -> bool:
        """One look at everything; whether something moved. Newest first: that is what everybody waits for."""
        self._confirmed &= set(listing.complete)
        moved = self._drop(listing) | self._confirm(listing)
        for number in self._wanted(listing):
            moved |= self._try(self._fetch_complete, number, listing)
        self._store.recovered()
        for number in listing.partial[-1:]:
            # one that is whole here and partial there is another version, or there they lost some: `_confirm` will tell
            if number > max(listing.complete, default=-1) and not self._store.is_complete(number):
                moved |= self._try(self._follow, number)
        return moved | self._drop(listing)

    def _try(self, step, number: int, *args) -> bool:
        """A version that cannot be had must not keep others away."""
        try:
            return step(number, *args)
        except (OSError, ValueError) as error:
            self._note(error)
            return False

    def _confirm(self, listing: journal.Listing) -> bool:
        """A learner that resumed from an older checkpoint publishes a number again, with other weights: ours must go."""
        self._manifests = {n: m for n, m in self._manifests.items() if n in listing.complete}
        self._phantoms = {n: until_s for n, until_s in self._phantoms.items() if n in listing.complete}
        held = [n for n in self._complete() if n in listing.complete and n not in self._confirmed]
        return any([self._try(self._confirm_one, number) for number in held])

    def _confirm_one(self, number: int) -> bool:
        same = self.upstream.manifest_bytes(number) == self._store.manifest(number)
        if not same:
            self._store.remove(number)
            self._count("replaced_versions")
        self._confirmed.add(number)
        return not same

    def _wanted(self, listing: journal.Listing) -> list[int]:
        """What is missing: of the newest `keep` complete versions the newest with its bases before it, then the others."""
        order, num_found, num_phantoms = [], 0, 0
        for number in reversed(sorted({*listing.complete, *self._complete()})):
            if num_found == self._keep or num_phantoms == MAX_PHANTOMS:
                break
            if self._phantoms.get(number, 0.0) > time.monotonic():
                continue
            try:
                order += [n for n in self._chain(number, listing) if n not in order]
                num_found += 1
            except (OSError, ValueError) as error:  # claimed, and not to be had: it takes no place of a real one
                self._note(error)
                self._phantoms[number] = time.monotonic() + PHANTOM_S
                num_phantoms += 1
        return [n for n in order if n in listing.complete and not self._store.is_complete(n)]

    def _chain(self, number: int, listing: journal.Listing) -> list[int]:
        """A version and the bases it needs, the first base first. A base that is nowhere ends the chain."""
        chain = []
        while number is not None and number not in chain:
            chain.insert(0, number)
            with self._store.lock:
                held = self._store.versions.get(number)
                is_held = held is not None and held.manifest is not None
                base = held.base if is_held else None
            if not is_held:
                base = self._manifest(number).base if number in listing.complete else None
            number = base
        return chain

    def _manifest(self, number: int) -> manifest_lib.Manifest:
        if number not in self._manifests:
            self._manifests[number] = self.upstream.manifest(number)
        return self._manifests[number]

    def _complete(self) -> list[int]:
        with self._store.lock:
            return sorted(n for n, v in self._store.versions.items() if v.manifest is not None)

    def _follow(self, number: int) -> bool:
        """Mirrors what is finished of a version that is still being published; returns when it rests, or is whole."""
        pending, moved, is_complete, quiet_s = set(), False, False, time.monotonic()
        while not (self._stop.is_set() or is_complete or time.monotonic() > quiet_s + 1.0):
            entries, is_complete = self.upstream.entries(number, wait_s=0.25)
            for entry in {e.path: e for e in entries}.values():
                if not self._store.has(number, entry):
                    pending.add(self._pool.submit(self._copy, number, entry))
            pending = self._collect(pending)
            if entries:
                moved, quiet_s = True, time.monotonic()
        self._collect(pending, wait=concurrent.futures.ALL_COMPLETED)
        return (is_complete and not self._stop.is_set() and self._fetch_complete(number)) or moved

    def _fetch_complete(self, number: int, listing: journal.Listing | None = None) -> bool:
        """Whether it got closer to being whole. With the listing it was chosen from, something newer interrupts it."""
        manifest = self._manifest(number)
        missing = [o for o in manifest.objects if not self._store.has(number, o)]
        pending, looked_s = set(), time.monotonic()
        for entry in missing:
            pending.add(self._pool.submit(self._copy, number, entry))
            while len(pending) >= 2 * NUM_FETCHES:
                pending = self._collect(pending, wait=concurrent.futures.FIRST_COMPLETED)
            if self._stop.is_set():
                return False
            if listing is not None and time.monotonic() > looked_s + 1.0:
                looked_s = time.monotonic()
                if _newest(self.upstream.listing()) > _newest(listing):
                    break
        self._collect(pending, wait=concurrent.futures.ALL_COMPLETED)
        still_missing = [o for o in manifest.objects if not self._store.has(number, o)]
        if still_missing:
            return len(still_missing) < len(missing)
        self._store.finish(number, manifest, self.upstream.manifest_bytes(number))
        self._confirmed.add(number)
        self._count("versions")
        return True

    def _copy(self, number: int, entry: journal.Object) -> None:
        if self._store.in_place:  # the learner's own directory: only what a publisher left unfinished is found out
            if (self._store.root / journal.dirname(number) / entry.path).stat().st_size != entry.size:
                raise journal.CorruptSource(f"object {entry.path} of version {number} has not {entry.size} bytes")
            self._store.add(number, entry, None)
        else:
            data = self._buffer(entry.size)
            self.upstream.read(number, entry, [data])
            try:
                self._store.add(number, entry, data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room(number):
                    raise
                self._store.add(number, entry, data)
        self._count("objects")
        self._count("bytes", entry.size)

    def _buffer(self, size: int) -> memoryview:
        """Memory of this thread, for one object after the other: fresh memory costs a page fault for every 4 kB."""
        if size > REUSED_BYTES:
            return memoryview(bytearray(size))
        held = getattr(self._local, "buffer", b"")
        if len(held) < size:
            held = self._local.buffer = bytearray(size)
        return memoryview(held)[:size]

    def _collect(self, pending: set, wait: str | None = None) -> set:
        """Takes the results of what is done; an object that failed is counted, and asked for again in the next pass."""
        if wait is None:
            done = {future for future in pending if future.done()}
        else:
            done, _ = concurrent.futures.wait(pending, return_when=wait)
        for future in done:
            try:
                future.result()
            except concurrent.futures.CancelledError:
                pass  # stopped
            except (OSError, ValueError) as error:
                self._note(error)
                self._count("failed_objects")
        return pending - done

    def _drop(self, listing: journal.Listing) -> bool:
        """Bounded disk: what is neither among the newest nor a base of those goes, and so do abandoned beginnings."""
        complete = self._complete()
        kept = set()
        for number in complete[-self._keep :]:
            kept |= set(self._held_chain(number))
        if self._store.in_place:  # there the publisher decides
            kept &= self._confirmed.union(listing.complete)  # what was finished since the listing is not gone
        newest = max(complete, default=-1)
        with self._store.lock:
            partial = [n for n, v in self._store.versions.items() if v.manifest is None]
        wanted = self._wanted(listing) if partial else ()
        kept |= {n for n in partial if n in wanted or (n in listing.partial and n > newest)}
        doomed = [n for n in (*complete, *partial) if n not in kept]
        for number in doomed:
            self._store.remove(number)
        return bool(doomed)

    def _make_room(self, number: int) -> bool:
        """On a full disk the oldest version goes that neither the newest complete one nor the one in work needs."""
        with self._store.lock:
            complete = self._complete()
            manifest = self._manifests.get(number)
            needed = {
                number,
                *self._held_chain(manifest.base if manifest else None),
                *self._held_chain(max(complete, default=None)),
            }
            doomed = next((n for n in complete if n not in needed), None)
        if doomed is None:
            return False
        self._store.remove(doomed)
        self._count("evicted_for_room")
        return True

    def _held_chain(self, number: int | None) -> list[int]:
        """A complete version of ours and its bases, as far as we hold them."""
        chain = []
        with self._store.lock:
            while number is not None and self._store.is_complete(number) and number not in chain:
                chain.append(number)
                number = self._store.versions[number].base
        return chain

    def _note(self, error: Exception) -> None:
        """Counts it, and says so unless one of its kind was told a moment ago: a full disk fails every object of a version."""
        self._count(f"errors_{type(error).__name__}")
        kind, now_s = getattr(error, "errno", None) or str(error), time.monotonic()
        with self._lock:
            self._told = {k: s for k, s in self._told.items() if s > now_s - TOLD_S}
            is_new = kind not in self._told
            self._told.setdefault(kind, now_s)
        if is_new:
            print(f"relay: {error}", file=sys.stderr, flush=True)
        self.last_error = str(error)

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counters[name] += amount


def _newest(listing: journal.Listing) -> int:
    return max((*listing.complete, *listing.partial), default=-1)

"""Mirrors one upstream into a relay's store, in threads of its own: a false or slow upstream delays only itself.

1. The upstream is polled; it answers when something is new. Its newest versions are proven: it must deliver their manifests.
2. Missing versions are downloaded, newest first, each after its bases. Objects that another upstream is delivering are left to it,
   and asked for here only if they are all that is missing.
3. The newest version that is still being published is followed object by object, within a budget of bytes and time: its journal is
   not signed. Its manifest decides in the end.

A version that an upstream lists and does not deliver is refuted for a time that doubles, at least ten times as long as it took
to find out, and an upstream with many refuted versions is left alone for a time that doubles as well.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import math
import threading
import time
from collections.abc import Callable

from sharding.download import relays, source, version_search
from sharding.format import journal
from sharding.relay import lasting_thread
from sharding.relay import plan as plan_lib
from sharding.relay import store as store_lib

MAX_REFUTED = 8  # at once; later one per second, else the upstream is left alone
MAX_CHAIN = 64  # bases of a version that are proven with it
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # until a refuted version is asked for again
COST = 10.0  # times the seconds that a false claim took, is the least pause
FOLLOWED_BYTES = 1 << 30  # of a version being published, or twice the newest version if that is more
FOLLOWED_S = 600.0  # and a second per MB
FOLLOW_PAUSE_S, LONGEST_FOLLOW_PAUSE_S = 60.0, 3600.0  # until another version is followed after one that cost too much
ENTRY_BYTES = 16 << 10  # an object costs its upstream at least this
OTHERS_S = 5.0  # for the last objects, if other upstreams are delivering them
REUSED_BYTES = 64 << 20  # a download thread keeps a buffer for objects up to this size


@dataclasses.dataclass
class _Followed:
    """A version that the upstream is publishing, and the cost of its journal so far."""

    number: int
    most_bytes: float
    begun_s: float = dataclasses.field(default_factory=time.monotonic)
    num_bytes: int = 0
    pending: set[concurrent.futures.Future] = dataclasses.field(default_factory=set)


class Upstream:
    """One upstream of a relay and the threads that mirror it, until `stop`."""

    def __init__(self, name: str, opened: source.Source, plan: plan_lib.Plan, num_downloads: int):
        self.name, self.source, self.is_alive = name, opened, False
        self._plan, self._store, self._log, self._num_downloads = plan, plan.store, plan.log, num_downloads
        self._pool = concurrent.futures.ThreadPoolExecutor(num_downloads, "mirror-download")
        self._local = threading.local()
        self._listing: journal.Listing | None = None
        self._claims: dict[int, version_search.Proof] = {}
        self._refuted: dict[int, tuple[float, float]] = {}  # version -> until when, length of the pause
        self._followed: _Followed | None = None
        self._follow_from_s = self._follow_pause_s = 0.0
        self._is_idle, self._pause_s = False, 0.0
        self._epoch, self._is_stale = -1, False  # when this step began; True if a resumed run begins another meanwhile
        self._paid_s = 0.0  # until when the costs of refuted versions are paid
        self.thread = lasting_thread.LastingThread(f"mirror {name}", self._step, self._fail)
        self.thread.start()

    def stop(self) -> None:
        """Makes the threads end. Does not block."""
        self.thread.stopped.set()
        self.source.close()

    def join(self, timeout_s: float) -> None:
        """Blocks until the thread has ended, for at most `timeout_s`."""
        self.thread.join(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fail(self, error: BaseException) -> None:
        self._log.note(self.name, error)
        self._forget()

    def _forget(self) -> None:
        self._listing, self._claims, self._followed = None, {}, None

    def _step(self) -> None:
        """Asks the upstream once, and mirrors its new versions."""
        self._plan.recover()
        self._epoch, self._is_stale = self._plan.epoch, False
        try:
            listing = self.source.listing(1.0 if self._is_idle else 0.0, self._listing)
        except (OSError, ValueError) as error:
            if not self.thread.stopped.is_set():
                self.is_alive = False
                self._log.note(self.name, error)
                self._forget()  # meanwhile the upstream may publish a number again
                self._store.recovered()
                self._pause_s = min(max(2 * self._pause_s, 0.05), 2.0)
                self.thread.stopped.wait(self._pause_s)
            return
        self.is_alive, self._listing, self._pause_s = True, listing, 0.0
        self._plan.withdraw(self.name, listing.head)  # before any request for what follows
        self._refuted = {n: r for n, r in self._refuted.items() if n in listing.complete + listing.partial}
        self._claims = self._prove(listing)
        self._choose_followed(listing)
        self._plan.update(self.name, self._claims, self._followed and self._followed.number)
        wanted = [n for n in self._plan.wanted(self.name) if not self._is_refuted(n)]
        moved = False
        for number in wanted:
            if self._is_stale or (moved and not self._is_offered(number)):
                break
            moved |= self._try(self._download, number)
        self._plan.serve_head()
        self._store.recovered()
        if self._followed is not None and self._followed.number in listing.complete:
            self._followed = None
        if self._followed is not None:
            moved |= self._try(self._follow, self._followed.number)
        self._is_idle = not moved and self._followed is None
        if not self._can_pay():
            self.thread.stopped.wait(min(self._paid_s - time.monotonic(), LONGEST_PAUSE_S))

    def _try(self, step: Callable[[int], bool], number: int) -> bool:
        """Returns step(number) for one version. After an error, refutes the version and returns False: other versions go on.

        It is no fault if a resumed run began an epoch meanwhile: then the listing is stale, and is asked for again.
        """
        begun_s = time.monotonic()
        try:
            return step(number)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError, ValueError):
                self.source.listing()  # brings the newest head
            self._is_stale = self._plan.epoch != self._epoch
            if not self.thread.stopped.is_set() and not self._is_stale:
                self._log.note(self.name, error)
                now_s = time.monotonic()
                cost_s = max(1.0, COST * (now_s - begun_s))
                self._paid_s = max(self._paid_s, now_s - MAX_REFUTED) + min(cost_s, LONGEST_PAUSE_S)
                pause_s = max(min(2 * self._refuted.get(number, (0.0, FIRST_PAUSE_S / 2))[1], LONGEST_PAUSE_S), cost_s)
                self._refuted[number] = (now_s + pause_s, pause_s)
            return False

    def _can_pay(self) -> bool:
        """Returns True unless this upstream has listed too many versions lately that it did not deliver."""
        return self._paid_s <= time.monotonic() and not self.thread.stopped.is_set()

    def _is_refuted(self, number: int) -> bool:
        return self._refuted.get(number, (0.0, 0.0))[0] > time.monotonic()

    def _prove(self, listing: journal.Listing) -> dict[int, version_search.Proof]:
        """Returns the newest versions in `listing`, and their bases, with the manifests that the upstream delivers."""
        listed, claims, num_found = set(listing.complete), {}, 0

        def prove(number: int | None) -> bool:
            chain: dict[int, version_search.Proof] = {}
            while number in listed and number not in claims and number not in chain:
                if len(chain) == MAX_CHAIN:
                    text = f"version {max(chain)} needs more than {MAX_CHAIN} bases"
                    raise ValueError(f"{text}; publish snapshots more often")
                known = self._claims.get(number)
                if known is None or not _names(listing, known):
                    known = version_search.Proof(*self.source.manifest(number))
                chain[number] = known
                number = chain[number].manifest.base
            claims.update(chain)
            return True

        for number in reversed(listing.complete):
            if num_found >= self._plan.keep or not self._can_pay() or self._is_stale:
                break
            num_found += not self._is_refuted(number) and self._try(prove, number)
        return claims

    def _download(self, number: int) -> bool:
        """Downloads the missing objects of a version. Returns False if it is not claimed any more. Raises OSError or ValueError if that brought nothing."""
        if (claim := self._claims.get(number)) is None:  # by a head that another upstream has just delivered
            return False
        self._plan.check(number)
        missing = self._missing(number, claim)
        num_missing, until_s = len(missing), math.inf
        pending = self._followed.pending if self._followed and self._followed.number == number else set()
        goes_on = self._fetch(number, missing, pending, is_shared=True)
        while goes_on and (missing := self._missing(number, claim)):
            until_s = min(until_s, time.monotonic() + OTHERS_S)
            if time.monotonic() > until_s or not any((number, o.path) in self._plan.taken for o in missing):
                self._fetch(number, missing, set(), is_shared=False)
                break
            goes_on = not self.thread.stopped.wait(0.02)  # other upstreams deliver the rest
        with self._plan.lock:
            missing = self._missing(number, claim)
            is_current = self._plan.is_current(number, claim.sha256)  # another upstream may have brought a newer head
            if not missing and is_current and not self._store.is_complete(number):
                self._store.finish(number, claim.manifest, claim.data)
                self._log.count("versions")
        if missing and len(missing) >= num_missing and self._is_offered(number):
            raise journal.Unavailable(f"{len(missing)} objects of version {number} did not come ({self._log.last})")
        return True

    def _is_offered(self, number: int) -> bool:
        """Returns True if the upstream still lists the proven manifest under `number`, and nothing newer.

        An upstream that a run has resumed lists other versions under the numbers of the old ones.
        """
        try:
            listing, claim = self.source.listing(), self._claims.get(number)
        except (OSError, ValueError):  # the next step reports it
            return False
        is_same = claim is not None and _names(listing, claim)
        return number in listing.complete and is_same and _newest(listing) <= _newest(self._listing)

    def _missing(self, number: int, claim: version_search.Proof) -> list[journal.Object]:
        return [o for o in claim.manifest.objects if not self._store.has(number, o)]

    def _fetch(self, number: int, missing: list[journal.Object], pending: set, *, is_shared: bool) -> bool:
        """Downloads objects, those that others download only unless `is_shared`. Returns False if something newer came up."""
        polled_s, goes_on = time.monotonic(), True
        for entry in missing:
            if self._store.has(number, entry) or (not self._take(number, entry) and is_shared):
                continue
            pending.add(self._submit(number, entry, makes_room=True))
            while len(pending) >= 2 * self._num_downloads:
                pending = self._collect(pending, concurrent.futures.FIRST_COMPLETED)
            if time.monotonic() > polled_s + 1.0:
                polled_s = time.monotonic()
                goes_on = self._is_offered(number)
            if self.thread.stopped.is_set() or not goes_on:
                break
        self._collect(pending, concurrent.futures.ALL_COMPLETED)
        return goes_on and not self.thread.stopped.is_set()

    def _choose_followed(self, listing: journal.Listing) -> None:
        """Begins to follow the newest version that is being published; ends it when the version is gone or complete."""
        number = max(listing.partial, default=-1)
        is_newest = number > max(listing.complete, default=-1) and not self._store.is_complete(number)
        if self._followed is not None and self._followed.number not in ([number] * is_newest + [*listing.complete]):
            self._end_following()
        if self._followed is None and is_newest and time.monotonic() >= self._follow_from_s:
            size = max((c.manifest.size_bytes for c in self._claims.values()), default=0)
            most = max(FOLLOWED_BYTES, 2 * size) if isinstance(self.source, relays.Relays) else math.inf
            self._followed = _Followed(number, most)

    def _end_following(self) -> None:
        for future in self._followed.pending if self._followed else ():
            future.cancel()
        self._followed = None

    def _follow(self, number: int) -> bool:
        """Begins the download of objects that are new in the journal of a version. Returns True if there are any."""
        followed = self._followed
        assert followed is not None
        entries, _ = self.source.entries(number, wait_s=0.25)
        most_s = FOLLOWED_S + followed.most_bytes / 1e6
        for entry in entries:
            followed.num_bytes += max(entry.size, ENTRY_BYTES)
            if followed.num_bytes > followed.most_bytes or time.monotonic() > followed.begun_s + most_s:
                self._follow_pause_s = min(2 * self._follow_pause_s or FOLLOW_PAUSE_S, LONGEST_FOLLOW_PAUSE_S)
                self._follow_from_s = time.monotonic() + self._follow_pause_s
                self._end_following()
                self._plan.update(self.name, self._claims, None)
                text = f"version {number} is being published with more than {followed.most_bytes:.0f} bytes or {most_s:.0f} s"
                raise journal.CorruptSource(f"{text}: it is mirrored when it has a manifest")
            if entry.size <= REUSED_BYTES and not self._store.has(number, entry) and self._take(number, entry):
                followed.pending.add(self._submit(number, entry, makes_room=self._plan.is_single))
        followed.pending = self._collect(followed.pending)
        return bool(entries)

    def _take(self, number: int, entry: journal.Object) -> bool:
        """Returns True, and marks the object until `_submit` has ended, if no upstream is asked for it now."""
        mark = object()
        return self._plan.taken.setdefault((number, entry.path), mark) is mark  # atomic

    def _submit(self, number: int, entry: journal.Object, *, makes_room: bool) -> concurrent.futures.Future:
        """Begins the download of an object that `_take` has marked. `makes_room` deletes old versions on a full disk."""
        future = self._pool.submit(self._copy, number, entry, makes_room, self._store.num_removals(number))
        future.add_done_callback(lambda _: self._plan.taken.pop((number, entry.path), None))  # even if it is cancelled
        return future

    def _copy(self, number: int, entry: journal.Object, makes_room: bool, num_removals: int) -> None:
        if not self._store.in_place and (same := self._store.same(number, entry)) is not None:
            with contextlib.suppress(OSError):  # that version was removed meanwhile, or the disk has no hard links
                self._store.add(number, entry, same, num_removals)
                self._log.count("linked_objects")
                return
        data = None if self._store.in_place else self._buffer(entry.size)
        if data is not None:
            self.source.read(number, entry, [data])
        elif (self._store.root / journal.dirname(number) / entry.path).stat().st_size != entry.size:
            # The publisher hashed it: only an unfinished file is detected.
            found = f"object {entry.path} of version {number} does not have {entry.size} bytes"
            raise journal.CorruptSource(f"{found}: publish the version again")
        if self._store.has(number, entry):  # another upstream was faster
            return
        try:
            self._store.add(number, entry, data, num_removals)
        except store_lib.NotNeeded:
            return
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not (makes_room and is_full and self._plan.make_room(number)):
                raise
            self._store.add(number, entry, data, num_removals)
        self._log.count("objects")
        self._log.count("bytes", entry.size)

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
                self._log.note(self.name, error)
                self._log.count("failed_objects")
            elif error is not None:
                raise error
        return pending


def _names(listing: journal.Listing, proof: version_search.Proof) -> bool:
    """Returns False if the listing has a head without the manifest's hash: the number was published again.

    The head's signature is not needed, as the answer only decides whether to ask again.
    """
    return listing.head is None or proof.sha256.encode() in listing.head


def _newest(listing: journal.Listing | None) -> int:
    return max((*listing.complete, *listing.partial), default=-1) if listing else -1

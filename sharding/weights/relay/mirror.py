"""Copies new versions from the upstream into a relay's store. Several relays are one upstream, in which a signed head decides.

1. Files on disk are hashed again and exposed (`Store.recover`).
2. The upstream is polled; it answers when something is new. Its newest versions are proven: it must deliver their manifests.
3. The newest `keep` versions are kept, with the bases they need. Missing ones are downloaded, newest first, each after its bases. On a
   full disk, objects that no manifest lists are deleted first, and then the oldest version.
4. The newest version that is still being published is followed object by object, within a budget of bytes and time: its journal is
   not signed. Its manifest decides in the end.

Failures (upstream gone, disk full, version rejected) are counted, reported and retried; complete versions stay. A version that the
upstream lists and does not deliver is not asked for again during a pause that doubles, unless another relay lists it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import math
import sys
import threading
import time
from collections.abc import Callable

from sharding.system import retries
from sharding.weights.download import manifest_download, relays, source
from sharding.weights.format import head as head_lib
from sharding.weights.format import journal
from sharding.weights.relay import plan as plan_lib
from sharding.weights.relay import store as store_lib

NUM_DOWNLOADS = 8  # objects that are downloaded at the same time
MAX_CHAIN = 64  # bases of a version that are proven with it
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # until a version that did not come is asked for again
FOLLOWED_BYTES = 1 << 30  # of a version being published, or twice the newest version if that is more
FOLLOWED_S = 600.0  # and a second per MB
FOLLOW_PAUSE_S, LONGEST_FOLLOW_PAUSE_S = 60.0, 3600.0  # until another version is followed after one that cost too much
ENTRY_BYTES = 16 << 10  # an object costs its upstream at least this
REUSED_BYTES = 64 << 20  # a download thread keeps a buffer for objects up to this size
MINUTE_S, LINE_CHARS = 60.0, 500  # at most one line per minute about errors, and its length
RECENT_S = 600.0  # `Mirror.health` shows an error this long
BEHIND_S = 21600.0  # an upstream with an old version is reported after `Head.renewal_s`, at most this long

Pending = dict[journal.Object, concurrent.futures.Future]  # downloads that run


@dataclasses.dataclass
class _Refuted:
    """A version that the upstream listed and did not deliver. It is not asked for until `until_s`, unless others than `holders` list it."""

    pauses: retries.Backoff = dataclasses.field(default_factory=lambda: retries.Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    until_s: float = 0.0
    holders: frozenset[str] = frozenset()


@dataclasses.dataclass
class _Followed:
    """A version that the upstream is publishing, the cost of its journal so far, and the downloads that run, by their objects."""

    number: int
    most_bytes: float
    begun_s: float = dataclasses.field(default_factory=time.monotonic)
    num_bytes: int = 0
    pending: Pending = dataclasses.field(default_factory=dict)


class Mirror:
    """The thread that copies new versions from the source `opened` into `store` until `stop`, and the state of its work.

    With `trusted`, every manifest is one that its head lists.
    """

    def __init__(
        self,
        store: store_lib.Store,
        opened: source.Source,
        keep: int,
        trusted: head_lib.HeadVerifier | None = None,
    ):
        self.source, self.is_upstream_alive, self.log = opened, False, ErrorLog(opened.stats()["source"])
        self._store, self._trusted = store, trusted
        self._plan = plan_lib.Plan(store, keep, trusted, self.log.count)
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_DOWNLOADS, "mirror-download")
        self._local = threading.local()
        self._is_recovered = store.in_place
        self._listing: journal.Listing | None = None
        self._refuted: dict[int, _Refuted] = {}
        self._followed: _Followed | None = None
        self._follow_pauses, self._follow_from_s = retries.Backoff(FOLLOW_PAUSE_S, LONGEST_FOLLOW_PAUSE_S), 0.0
        self._poll_pauses, self._is_idle = retries.Backoff(0.05, 2.0), False
        self._stale, self._stale_noted_s = "", -math.inf  # the error of a stale upstream
        self._epoch, self._is_stale = -1, False  # when this step began; True if a resumed run begins another meanwhile
        self.thread = retries.LastingThread("mirror", self._step, self._fail)
        self.thread.start()

    def health(self) -> dict:
        """Returns {"upstream": True if it answered last, "error": the last, "since": when steps began to fail, "epoch": the newest head's}.

        "error" is "" if none is recent; "since" is a Unix time, or None; "epoch" is -1 without a head.
        """
        error, since = self.thread.error or self._stale or self.log.recent(), self.thread.since
        return {"upstream": self.is_upstream_alive, "error": error, "since": since, "epoch": self._plan.epoch}

    def stop(self) -> None:
        """Stops the thread and closes the upstream. Blocks for at most 30 s."""
        self.thread.stopped.set()
        self.source.close()
        self.thread.join(30)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fail(self, error: BaseException) -> None:
        self.log.note(error)
        self._forget()

    def _forget(self) -> None:
        self._listing, self._plan.proofs, self._followed = None, {}, None

    def _step(self) -> None:
        """Asks the upstream once, and mirrors its new versions."""
        if not self._is_recovered:
            self.log.count("bad_recovered", self._store.recover(self._trusted))
            self._plan.serve_head()
            self._is_recovered = True
        self._epoch, self._is_stale = self._plan.epoch, False
        listing = self._poll()
        if listing is None:
            return
        self._plan.withdraw(listing.head)  # before any request for what follows
        proofs = self._prove(listing)
        self._choose_followed(listing)
        self._plan.update(proofs, self._followed and self._followed.number)
        has_moved = self._download_wanted()
        self._plan.serve_head()
        self._store.recovered()
        if self._followed is not None and self._followed.number in listing.complete:
            self._followed = None
        if self._followed is not None:
            has_moved |= self._try(self._follow, self._followed.number)
        self._is_idle = not has_moved and self._followed is None

    def _poll(self) -> journal.Listing | None:
        """Returns the versions that the upstream lists, or None, after a pause, if it does not answer."""
        try:
            listing = self.source.listing(1.0 if self._is_idle else 0.0, self._listing)
        except (OSError, ValueError) as error:
            if not self.thread.stopped.is_set():
                self.is_upstream_alive, self._stale = False, ""
                self.log.note(error)
                self._forget()  # meanwhile the upstream may publish a number again
                self._store.recovered()
                self.thread.stopped.wait(self._poll_pauses.next_s())
            return None
        self._poll_pauses.reset()
        self.is_upstream_alive, self._listing = True, listing
        self._note_stale()
        self._refuted = {n: r for n, r in self._refuted.items() if n in listing.complete + listing.partial}
        return listing

    def _note_stale(self) -> None:
        """Notes upstream relays whose newest version has been older than the accepted head for long, and again after as long, or a minute."""
        head, now_s = self._trusted and self._trusted.head, time.monotonic()
        listed = self.source.relays if isinstance(self.source, relays.Relays) else ()
        most_s = min(head.renewal_s, BEHIND_S) if head else BEHIND_S
        late = [(relay.url, *found) for relay in listed if (found := relay.stale) and now_s - found[0] > most_s]
        lines = [f"{url} has been stale for {now_s - since_s:.0f} s: {error}" for url, since_s, error in late]
        if lines and now_s - self._stale_noted_s > max(most_s, MINUTE_S):
            self._stale_noted_s = now_s
            self.log.note(head_lib.StaleHead("; ".join(lines)), is_rare=True)
        self._stale = "; ".join(lines)

    def _try(self, step: Callable[[int], bool], number: int) -> bool:
        """Returns step(number) for one version. After an error, refutes the version and returns False: other versions go on.

        It is no fault if a resumed run began an epoch meanwhile: then the listing is stale, and is asked for again.
        """
        holders = self._holders(number)
        try:
            return step(number)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError, ValueError):
                self.source.listing()  # brings the newest head
            self._is_stale = self._plan.epoch != self._epoch
            if not self.thread.stopped.is_set() and not self._is_stale:
                self.log.note(error)
                refuted = self._refuted.setdefault(number, _Refuted())
                refuted.until_s, refuted.holders = time.monotonic() + refuted.pauses.next_s(), holders
            return False

    def _is_refuted(self, number: int) -> bool:
        refuted = self._refuted.get(number)
        return refuted is not None and refuted.until_s > time.monotonic() and self._holders(number) <= refuted.holders

    def _holders(self, number: int) -> frozenset[str]:
        """Returns the URLs of the relays that list a version; none for another upstream."""
        listed = self.source.relays if isinstance(self.source, relays.Relays) else ()
        return frozenset(relay.url for relay in listed if number in relay.claims[0])

    def _prove(self, listing: journal.Listing) -> dict[int, manifest_download.Proof]:
        """Returns the newest versions in `listing`, and their bases, with the manifests that the upstream delivers."""
        listed, proofs, num_found = set(listing.complete), {}, 0

        def prove(number: int | None) -> bool:
            chain: dict[int, manifest_download.Proof] = {}
            while number in listed and number not in proofs and number not in chain:
                if len(chain) == MAX_CHAIN:
                    text = f"version {max(chain)} needs more than {MAX_CHAIN} bases"
                    raise ValueError(f"{text}; publish snapshots more often")
                known = self._plan.proofs.get(number)
                if known is None or not _names(listing, known):
                    known = manifest_download.Proof(*self.source.manifest(number))
                chain[number] = known
                number = chain[number].manifest.base
            proofs.update(chain)
            return True

        for number in reversed(listing.complete):
            if num_found >= self._plan.keep or self._is_stale or self.thread.stopped.is_set():
                break
            num_found += not self._is_refuted(number) and self._try(prove, number)
        return proofs

    def _download_wanted(self) -> bool:
        """Downloads the missing versions, until a newer one comes up. Returns True if that brought any objects."""
        has_moved = False
        for number in [n for n in self._plan.wanted() if not self._is_refuted(n)]:
            if self._is_stale or (has_moved and not self._is_offered(number)):
                break
            has_moved |= self._try(self._download, number)
        return has_moved

    def _download(self, number: int) -> bool:
        """Downloads the missing objects of a version, and returns True. Raises OSError or ValueError if that brought nothing."""
        proof = self._plan.proofs[number]
        num_missing = len(self._missing(number, proof))
        self._fetch(number, proof)
        missing = self._missing(number, proof)
        is_current = self._plan.is_current(number, proof.sha256)  # a newer head may have come meanwhile
        if not missing and is_current and not self._store.is_complete(number):
            self._store.finish(number, proof.manifest, proof.data)
            self.log.count("versions")
        if missing and len(missing) >= num_missing and self._is_offered(number):
            raise journal.Unavailable(f"{len(missing)} objects of version {number} did not come ({self.log.last})")
        return True

    def _is_offered(self, number: int) -> bool:
        """Returns True if the upstream still lists the proven manifest under `number`, and nothing newer.

        An upstream that a run has resumed lists other versions under the numbers of the old ones.
        """
        try:
            listing, proof = self.source.listing(), self._plan.proofs.get(number)
        except (OSError, ValueError):  # the next step reports it
            return False
        is_same = proof is not None and _names(listing, proof)
        return number in listing.complete and is_same and _newest(listing) <= _newest(self._listing)

    def _missing(self, number: int, proof: manifest_download.Proof) -> list[journal.Object]:
        return [o for o in proof.manifest.objects if not self._store.has(number, o)]

    def _fetch(self, number: int, proof: manifest_download.Proof) -> None:
        """Downloads the missing objects of a version, until something newer comes up."""
        pending: Pending = {}
        polled_s = time.monotonic()
        if self._followed is not None and self._followed.number == number:
            pending, self._followed.pending = self._collect(self._followed.pending), {}
        for entry in self._missing(number, proof):
            if entry in pending or self._store.has(number, entry):
                continue
            pending[entry] = self._submit(number, entry, makes_room=True)
            while len(pending) >= 2 * NUM_DOWNLOADS:
                pending = self._collect(pending, concurrent.futures.FIRST_COMPLETED)
            if self.thread.stopped.is_set():
                break
            if time.monotonic() > polled_s + 1.0:
                polled_s = time.monotonic()
                if not self._is_offered(number):
                    break
        self._collect(pending, concurrent.futures.ALL_COMPLETED)

    def _choose_followed(self, listing: journal.Listing) -> None:
        """Begins to follow the newest version that is being published; ends it when the version is gone or complete."""
        number = max(listing.partial, default=-1)
        is_newest = number > max(listing.complete, default=-1) and not self._store.is_complete(number)
        if self._followed is not None and self._followed.number not in ([number] * is_newest + [*listing.complete]):
            self._end_following()
        if self._followed is None and is_newest and time.monotonic() >= self._follow_from_s:
            size = max((proof.manifest.size_bytes for proof in self._plan.proofs.values()), default=0)
            most = max(FOLLOWED_BYTES, 2 * size) if isinstance(self.source, relays.Relays) else math.inf
            self._followed = _Followed(number, most)

    def _end_following(self) -> None:
        for future in self._followed.pending.values() if self._followed else ():
            future.cancel()
        self._followed = None

    def _follow(self, number: int) -> bool:
        """Begins the download of objects that are new in the journal of a version. Returns True if there are any."""
        followed = self._followed
        assert followed is not None
        entries = self.source.entries(number, wait_s=0.25)
        most_s = FOLLOWED_S + followed.most_bytes / 1e6
        is_single = not isinstance(self.source, relays.Relays) or len(self.source.relays) == 1
        for entry in entries:
            followed.num_bytes += max(entry.size, ENTRY_BYTES)
            if followed.num_bytes > followed.most_bytes or time.monotonic() > followed.begun_s + most_s:
                self._follow_from_s = time.monotonic() + self._follow_pauses.next_s()
                self._end_following()
                self._plan.update(self._plan.proofs, None)
                text = f"version {number} is being published with more than {followed.most_bytes:.0f} bytes or {most_s:.0f} s"
                raise journal.CorruptSource(f"{text}; it is mirrored when it has a manifest")
            if entry.size <= REUSED_BYTES and entry not in followed.pending and not self._store.has(number, entry):
                followed.pending[entry] = self._submit(number, entry, makes_room=is_single)
        followed.pending = self._collect(followed.pending)
        return bool(entries)

    def _submit(self, number: int, entry: journal.Object, *, makes_room: bool) -> concurrent.futures.Future:
        """Begins the download of an object. `makes_room` deletes old versions on a full disk."""
        return self._pool.submit(self._copy, number, entry, makes_room, self._store.num_removals(number))

    def _copy(self, number: int, entry: journal.Object, makes_room: bool, num_removals: int) -> None:
        if not self._store.in_place and (same := self._store.same(number, entry)) is not None:
            with contextlib.suppress(OSError):  # that version was removed meanwhile, or the disk has no hard links
                self._store.add(number, entry, same, num_removals)
                self.log.count("linked_objects")
                return
        data = None if self._store.in_place else self._buffer(entry.size)
        if data is not None:
            self.source.read(number, entry, [data])
        elif (self._store.root / journal.dirname(number) / entry.path).stat().st_size != entry.size:
            # The publisher hashed it: only an unfinished file is detected.
            found = f"object {entry.path} of version {number} does not have {entry.size} bytes"
            raise journal.CorruptSource(f"{found}; publish the version again")
        try:
            self._store.add(number, entry, data, num_removals)
        except store_lib.NotNeeded:
            return
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not (makes_room and is_full and self._plan.make_room(number)):
                raise
            self._store.add(number, entry, data, num_removals)
        self.log.count("objects")
        self.log.count("bytes", entry.size)

    def _buffer(self, size: int) -> memoryview:
        """Returns a buffer of this thread. It is reused: fresh memory costs a page fault for every 4 kB."""
        if size > REUSED_BYTES:
            return memoryview(bytearray(size))
        buffer = getattr(self._local, "buffer", b"")
        if len(buffer) < size:
            buffer = self._local.buffer = bytearray(size)
        return memoryview(buffer)[:size]

    def _collect(self, pending: Pending, wait: str = "") -> Pending:
        """Counts failed downloads in the metrics, and returns the unfinished ones.

        Waits for the next one or for all, as `wait` (a constant of `concurrent.futures.wait`); not at all without it.
        """
        until = wait or concurrent.futures.ALL_COMPLETED
        done, _ = concurrent.futures.wait(pending.values(), None if wait else 0, until)
        for error in (future.exception() for future in done if not future.cancelled()):
            if isinstance(error, OSError | ValueError):
                self.log.note(error)
                self.log.count("failed_objects")
            elif error is not None:
                raise error
        return {entry: future for entry, future in pending.items() if future not in done}


class ErrorLog:
    """The counters of a mirror, and its errors, of which at most a line per minute is printed, besides rare ones, with the `name` of the upstream. Thread-safe."""

    def __init__(self, name: str):
        self.counters = collections.Counter()
        self.last = ""
        self._name, self._lock = name, threading.Lock()
        self._printed_s, self._num_silent = -math.inf, 0  # when the last line was printed, errors since then
        self._noted_s = -math.inf  # of the last error

    def count(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to the counter `name`."""
        with self._lock:
            self.counters[name] += amount

    def recent(self) -> str:
        """Returns the last error, or "" if it is older than `RECENT_S`."""
        with self._lock:
            return self.last if time.monotonic() - self._noted_s < RECENT_S else ""

    def note(self, error: BaseException, *, is_rare: bool = False) -> None:
        """Counts an error; prints it with the number of unprinted ones, unless the last line is fresh and the error is not rare."""
        text = f"{self._name}: {error or type(error).__name__}"[:LINE_CHARS].replace("\n", " ")
        now_s = time.monotonic()
        with self._lock:
            self.counters[f"errors_{type(error).__name__}"] += 1
            self.last, self._noted_s, num_silent = text, now_s, self._num_silent
            is_due = is_rare or now_s - self._printed_s >= MINUTE_S
            self._printed_s, self._num_silent = (now_s, 0) if is_due else (self._printed_s, num_silent + 1)
        if is_due:
            more = f" (and {num_silent} errors in between)" if num_silent else ""
            print(f"relay: {text}{more}", file=sys.stderr, flush=True)


def _names(listing: journal.Listing, proof: manifest_download.Proof) -> bool:
    """Returns False if the listing has a head without the manifest's hash: the number was published again.

    The head's signature is not needed, as the answer only decides whether to ask again.
    """
    return listing.head is None or proof.sha256.encode() in listing.head


def _newest(listing: journal.Listing | None) -> int:
    return max((*listing.complete, *listing.partial), default=-1) if listing else -1

"""Several relays as one source: the choice of a relay, when a reply is trusted, and how a dishonest relay is found.

An object is read in two steps:

1. `sharding/weights/download/object_download.py` downloads it in ranges, each from a relay that the selector draws.
2. The digest of the whole is compared. If it is wrong and one relay delivered everything, that relay is at fault. If several
   did, one relay at a time is asked for the whole, and the relays whose ranges differ from the right bytes are at fault.
   Such a relay is counted and suspended. It cannot make an object wrong, nor a read fail while an honest relay works.
   One that names the digest of another object is only late, or early: a resumed run publishes numbers again.

Every wait has an end: connecting, silence, and the read as a whole (`patience_s` plus the size at `MIN_BYTES_PER_S`).
"""

import collections
import concurrent.futures
import contextlib
import json
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

from sharding.weights.download import manifest_download, object_download, range_get, relay_selector
from sharding.weights.format import digests, journal
from sharding.weights.format import head as head_lib
from sharding.weights.format import manifest as manifest_lib

MIN_BYTES_PER_S = 32_000  # an object that is slower fails: a 4 MB chunk may take two minutes
MAX_CORRUPT_PER_OBJECT = 3  # copies of one object that the only relay may deliver wrong: wires flip bits, too
FEW_READS = max(4, 2 * (os.cpu_count() or 1))
QUICK_S = 0.1  # 4 MB at 40 MB/s
MAX_LISTED = 4096
MAX_LISTING_BYTES = head_lib.MAX_HEAD_BYTES * 2 + (1 << 20)  # a head as JSON text, and the numbers
MAX_KEPT = 16  # manifests
JOURNAL_S = 3.0  # for a page of a journal: a relay that drips must not hold up its reader


class Relays:
    """Published weights as read from relays: processes of `python -m sharding.relay`. Has a `Directory`'s methods. Several need `trusted`."""

    def __init__(
        self,
        urls: Sequence[str],
        trusted: head_lib.HeadVerifier | None = None,
        options: range_get.Options | None = None,
    ):
        self._options = options or range_get.Options()
        self.relays = [range_get.Relay(url, self._options) for url in urls]
        self._selector = relay_selector.RelaySelector(self.relays, self._options.seed)
        self._pool = range_get.RequestPool(self._options.parallel, len(urls))
        self._concurrency = AdaptiveConcurrency(FEW_READS, QUICK_S)
        self.trusted = trusted
        self._lock = threading.Lock()  # protects the following
        self._polls: dict[range_get.Relay, tuple[range_get.Get, concurrent.futures.Future]] = {}
        self._manifests: dict[int, manifest_download.Proof] = {}

    # ---- versions

    def head(self) -> head_lib.Head | None:
        """Returns the newest head that a relay has; None without a trusted key, and while no relay has one.

        Raises Unavailable if no relay replies, and CorruptSource if the newest head has expired, or all are of another key.
        """
        self.listing()
        head = self.trusted and self.trusted.head
        if self.trusted is not None and head is not None:
            self.trusted.check_time(head)
        return head

    def versions(self) -> list[int]:
        """Returns the complete versions, ascending. Leaves out the newest one if no relay delivers its manifest yet.

        Raises Unavailable, CorruptSource, or FileNotFoundError. No relay can hide the versions of another relay.
        """
        head, versions = self.head(), list(self._union().complete)
        try:
            if versions:
                self.manifest(versions[-1])
        except (OSError, journal.CorruptSource) as error:
            is_late = isinstance(error, FileNotFoundError) or (self.trusted is not None and len(versions) > 1)
            if not is_late:
                raise
            versions.pop()
        if head is not None and head.versions and not versions:
            text = f"the signed head lists {sorted(head.versions)}, and no relay delivers one of them ({self._selector.reasons()})"
            raise FileNotFoundError(f"{text}; they may be late; try again, or use other relays")
        return versions

    def listing(self, wait_s: float = 0.0, known: journal.Listing | None = None) -> journal.Listing:
        """Returns the versions that any relay lists and the head confirms, if there is one.

        Blocks up to `wait_s` seconds until the result differs from `known`. Raises Unavailable if no relay replies.
        """
        begun = set()
        with self._lock:
            for relay in self.relays:
                if relay not in self._polls or self._polls[relay][1].done():
                    path = f"/versions?tag={relay.tag if wait_s else ''}&wait={wait_s:.1f}"
                    get = range_get.Get(relay, path, limit=MAX_LISTING_BYTES, extra_s=wait_s)
                    self._polls[relay] = (get, self._pool.submit(get, self._poll))
                    begun.add(self._polls[relay][1])
            # A relay that has not replied to an earlier poll has no news, or hangs. It is waited for only with `wait_s`,
            # and where no other relay is alive.
            waiting = begun if not wait_s and self._any_alive() else {future for _, future in self._polls.values()}
        until_s = time.monotonic() + (wait_s + 0.5 if self._any_alive() else self._options.connect_s + wait_s)
        grace_given = False
        while waiting and not (wait_s and self._union() != known):
            left_s = max(0.0, until_s - time.monotonic())
            done, waiting = concurrent.futures.wait(waiting, left_s, concurrent.futures.FIRST_COMPLETED)
            if not done:
                break
            if not wait_s and not grace_given and self._any_alive():
                until_s, grace_given = time.monotonic() + 0.5, True  # for the others; a relay that hangs gets no more
        if not self._any_alive():
            with self._lock:
                self._manifests.clear()  # meanwhile a version may become another one
            refused = next((r.refused for r in self.relays if r.refused is not None), None)
            raise refused or journal.Unavailable(
                f"no relay replies ({self._selector.reasons()}); start one, or use another relay"
            )
        listing = self._union()
        if wait_s and listing == known:  # a relay that has no news must not make its client busy
            time.sleep(max(0.0, min(0.1, until_s - 0.5 - time.monotonic())))
        head = listing.head if self.trusted is None else None
        with self._lock:  # a version that was deleted and comes back, or was published again, is another one
            for n, found in [*self._manifests.items()]:
                if n not in listing.complete or (head is not None and found.sha256.encode() not in head):
                    del self._manifests[n]
        return listing

    def _poll(self, get: range_get.Get) -> None:
        """Runs a request for a relay's versions and head, and stores the result, or the reason of a failure, in the relay."""
        relay = get.relay
        try:
            body, _ = get.run()
            fields = json.loads(body)
            complete, partial, tag, head = (fields.get(name) for name in ("complete", "partial", "tag", "head"))
            numbers = [*complete, *partial]
            if len(numbers) > MAX_LISTED or any(type(n) is not int or not 0 <= n < 10**15 for n in numbers):
                raise ValueError(f"the relay's /versions are not at most {MAX_LISTED} integers >= 0")
            data, stale = None if head is None else head.encode(), None
            if data is not None and self.trusted is not None:
                try:
                    self.trusted.accept(data, expired=True)
                except head_lib.StaleHead as error:  # the relay may be late: the newest head counts
                    since_s = relay.stale[0] if relay.stale else time.monotonic()
                    stale = (since_s, str(error)) if error.is_old_version else None
            relay.claims = tuple(sorted(complete)), tuple(sorted(partial)), data
            relay.tag, relay.is_alive, relay.refused = urllib.parse.quote(str(tag)[:100]), True, None
            relay.stale = stale
        except (range_get.Failed, OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            relay.claims, relay.tag, relay.is_alive, relay.stale = ((), (), None), "", False, None
            relay.reason = str(error)[:300]
            relay.refused = error if isinstance(error, journal.CorruptSource) else None

    def _union(self) -> journal.Listing:
        complete = {v for relay in self.relays for v in relay.claims[0]}
        partial = {v for relay in self.relays for v in relay.claims[1]}
        head = next((relay.claims[2] for relay in self.relays if relay.claims[2] is not None), None)
        return head_lib.listing(self.trusted, complete, partial, head)

    def _any_alive(self) -> bool:
        return any(relay.is_alive for relay in self.relays)

    # ---- manifests and journals

    def manifest(self, version: int) -> tuple[bytes, manifest_lib.Manifest]:
        """Returns the manifest of `version`: (its bytes, parsed). Raises CorruptSource, FileNotFoundError, or Unavailable."""
        if self.trusted is not None and self.trusted.head is None:
            self.listing()  # brings the head
        found = self._known().get(version)
        if found is None:
            download = manifest_download.ManifestDownload(self._pool, self._selector, self.trusted, version)
            found = download.run(self._options.patience_s)
            with self._lock:
                self._manifests[version] = found
                self._manifests = dict([*self._manifests.items()][-MAX_KEPT:])
        return found.data, found.manifest

    def _known(self) -> dict[int, manifest_download.Proof]:
        """Returns the manifests that were delivered before, unless the head lists others now."""
        head = self.trusted and self.trusted.head
        with self._lock:
            known = dict(self._manifests)
        if head is None:
            return known
        current = {n: entry.sha256 for n, entry in head.versions.items()}
        return {n: found for n, found in known.items() if current.get(n) == found.sha256}

    def entries(self, version: int, wait_s: float = 0.0) -> list[journal.Object]:
        """Returns the objects newly finished on a relay that lists the version since the last call.

        Blocks up to `wait_s` seconds until an object or the manifest is new. The journal is not signed.
        """
        relay, until_s = self._journal_relay(version), time.monotonic() + wait_s
        epoch, count = relay.cursors.get(version, ("", 0))
        path = f"/{journal.dirname(version)}/objects.jsonl?epoch={epoch}&after={count}&wait={wait_s:.1f}"
        get = range_get.Get(relay, path, limit=journal.MAX_PAGE_BYTES, extra_s=wait_s)
        entries = []
        try:
            body, headers = self._pool.submit(get).result(wait_s + min(JOURNAL_S, self._options.stall_s))
            entries, _ = journal.parse_journal(body)
            epoch, following = urllib.parse.quote(headers.get("X-Epoch", "")[:100]), headers.get("X-Next", "")
            relay.cursors = {version: (epoch, int(following) if re.fullmatch("[0-9]{1,9}", following) else 0)}
        except range_get.Failed as error:
            self._selector.record_failure(get, error)
        except TimeoutError:  # it drips
            get.abort()
            self._selector.observe(get, False)
        except journal.CorruptSource as error:
            self._selector.record_corrupt(relay, str(error))
        if not entries:  # a relay that fails does so immediately
            time.sleep(max(0.0, min(0.05, until_s - time.monotonic())))
        return entries

    def _journal_relay(self, version: int) -> range_get.Relay:
        """Returns the relay whose journal of `version` is read: the one of the last call, unless it failed, else one drawn at random."""
        listed = [r for r in self.relays if version in (*r.claims[0], *r.claims[1])] or self.relays
        now_s = time.monotonic()
        if last := next((r for r in listed if version in r.cursors and r.suspended_s <= now_s), None):
            return last
        return self._selector.select(version, {*self.relays} - {*listed}, wait=False) or listed[0]

    # ---- objects

    def read(self, version: int, entry: journal.Object, into: Sequence[memoryview]) -> None:
        """Fills the buffers `into` with the verified object `entry`. Raises CorruptSource, FileNotFoundError or Unavailable."""
        target = range_get.Target(into, entry)
        text = f"empty object {entry.path} of version {version} has digest {entry.digest}, not of 0 bytes"
        journal.require(entry.size > 0 or entry.digest == digests.of(), text)
        with self._concurrency.slot():
            self._read(version, entry, target)

    def _read(self, version: int, entry: journal.Object, target: range_get.Target) -> None:
        deadline_s = time.monotonic() + self._options.patience_s + entry.size / MIN_BYTES_PER_S
        path = f"/{journal.dirname(version)}/{entry.path}"
        # Wrong copies that several relays delivered.
        mixed: list[tuple[bytes, list[object_download.ReceivedRange]]] = []
        num_corrupt, only, late, until_s = collections.Counter(), None, set(), deadline_s
        while True:
            download = object_download.ObjectDownload(
                self._pool, self._selector, version, entry, target, self._options.range_bytes, until_s, only
            )
            try:
                received = download.run()
            except (range_get.Failed, journal.Unavailable) as error:
                if only is None or self._pool.is_closed:
                    raise
                received, only.reason = [], str(error)[:300]
                late.add(only)
            actual = digests.of(*target.views) if received else ""
            if actual == entry.digest:
                right = b"".join(target.views) if mixed else b""
                for relay in {r for wrong, ranges in mixed for i, j, r in ranges if wrong[i:j] != right[i:j]}:
                    self._selector.record_corrupt(relay, f"{path} differs from the published object")
                self._pool.count("num_bytes", entry.size)
                self._pool.count("num_objects")
                return
            relays = {relay for _, _, relay in received}
            self._pool.count("num_bad_objects", bool(relays))
            if len(relays) > 1:
                mixed.append((b"".join(target.views), received))
            for relay in relays if len(relays) == 1 else ():
                num_corrupt[relay] += 1
                self._selector.record_corrupt(relay, f"{path} has digest {actual}, not {entry.digest}")
            honest = [r for r in self.relays if not num_corrupt[r]]
            if not honest and max(num_corrupt.values()) >= MAX_CORRUPT_PER_OBJECT:
                reasons = self._selector.reasons()
                raise journal.CorruptSource(f"{path} is wrong on every relay ({reasons}); use other relays")
            if time.monotonic() > deadline_s:
                raise journal.Unavailable(f"{path} was not downloaded in time ({self._selector.reasons()}); try again")
            if not (left := {*(honest or self.relays)} - late):
                left, late = {*(honest or self.relays)}, set()
            only = self._selector.select(version, {*self.relays} - left)
            now_s = time.monotonic()
            until_s = now_s + (deadline_s - now_s) / len(left)  # one that drips leaves time for others

    # ---- the rest

    def stats(self) -> dict[str, Any]:
        """Returns the relays' URLs, counters of bytes, objects and hedges, and the measurements of each relay."""
        return {"source": self._selector.urls(), **self._pool.counters(), "relays": self._selector.stats()}

    def close(self) -> None:
        """Aborts every call that is running, and makes later calls raise Unavailable."""
        self._pool.close()
        with self._lock:
            polls = [get for get, _ in self._polls.values()]
        for get in polls:
            get.abort()
        for relay in self.relays:
            relay.close()


class AdaptiveConcurrency:
    """Limits concurrent reads: at most `limit` are in their first `quick_s` seconds; older reads do not count. Thread-safe.

    On a fast network a few reads keep every core busy with receiving and hashing, and more of them only take cache and time slices from
    the others. On a slow one the bandwidth grows with the number of reads: all of them have begun before the first ends.
    """

    def __init__(self, limit: int, quick_s: float):
        self._limit, self._quick_s = limit, quick_s
        self._changed = threading.Condition()
        self._begun_s: dict[object, float] = {}

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Returns a context manager to run one read in. Entering blocks until the limit allows one more read."""
        read = object()
        with self._changed:
            while (wait_s := self._wait_s()) > 0:
                self._changed.wait(wait_s)
            self._begun_s[read] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del self._begun_s[read]
                self._changed.notify()

    def _wait_s(self) -> float:
        """Returns the seconds until one more read may begin if no running read ends earlier; 0 or less: immediately."""
        newest = sorted(self._begun_s.values())[-self._limit :]
        return newest[0] + self._quick_s - time.monotonic() if len(newest) == self._limit else 0.0

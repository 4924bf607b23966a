"""Several relays as one source: the choice of a relay, when a reply is trusted, and how a dishonest relay is found.

An object is read in two steps:

1. `sharding/download/object_download.py` downloads it in ranges, each from a relay that the selector draws.
2. The digest of the whole is compared. If it is wrong and one relay delivered everything, that relay is at fault. If several
   did, one relay at a time is asked for the whole, and the relays whose ranges differ from the right bytes are at fault.
   Such a relay is counted and suspended. It cannot make an object wrong, nor a read fail while an honest relay works.

Every wait has an end: connecting, silence, and the read as a whole (`patience_s` plus the size at `MIN_BYTES_PER_S`).
"""

import collections
import concurrent.futures
import json
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from sharding.download import concurrency, object_download, range_get, relay_selector
from sharding.format import digests, journal
from sharding.format import head as head_lib
from sharding.format import manifest as manifest_lib

MIN_BYTES_PER_S = 32_000  # an object that is slower fails: a 4 MB chunk may take two minutes
MAX_CORRUPT_PER_OBJECT = 3  # copies of one object that the only relay may deliver wrong: wires flip bits, too
FEW_READS = max(4, 2 * (os.cpu_count() or 1))
QUICK_S = 0.1  # 4 MB at 40 MB/s
MAX_LISTED = 4096
PARALLEL_MANIFESTS = 3
PHANTOM_S = 5.0


class Relays:
    """Published weights as read from one or more relays: processes of `python -m sharding.relay`. Has a `Directory`'s methods."""

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
        self._concurrency = concurrency.AdaptiveConcurrency(FEW_READS, QUICK_S)
        self.trusted = trusted
        self._lock = threading.Lock()  # protects the following
        self._polls: dict[range_get.Relay, tuple[range_get.Get, concurrent.futures.Future]] = {}
        self._manifests: collections.OrderedDict[int, tuple[bytes, manifest_lib.Manifest]] = collections.OrderedDict()
        self._phantoms: dict[int, float] = {}  # versions that were listed but not delivered -> ignored until

    # ---- versions

    def head(self) -> head_lib.Head | None:
        """Returns the newest head that a relay has; None without a trusted key, and if no relay has one."""
        return None  # to come: relays do not serve heads yet

    def versions(self) -> list[int]:
        """Returns the complete versions, ascending; the newest has a valid manifest. Raises Unavailable or CorruptSource."""
        listed = [v for v in self.listing().complete if self._phantoms.get(v, 0.0) < time.monotonic()]
        first_error = None
        while listed:
            try:
                self.manifest(listed[-1])
                return listed
            except FileNotFoundError:
                listed.pop()
            except (journal.CorruptSource, journal.Unavailable) as error:
                first_error = first_error or error
                self._phantoms[listed.pop()] = time.monotonic() + PHANTOM_S
        if first_error is not None:  # versions exist, and none is valid: the reason helps more than an empty list
            raise first_error
        return []

    def listing(self, wait_s: float = 0.0, known: journal.Listing | None = None) -> journal.Listing:
        """Returns the versions that any relay lists. Blocks up to `wait_s` seconds until the result differs from `known`.

        Raises Unavailable if no relay replies.
        """
        begun = set()
        with self._lock:
            for relay in self.relays:
                if relay not in self._polls or self._polls[relay][1].done():
                    path = f"/versions?tag={relay.tag if wait_s else ''}&wait={wait_s:.1f}"
                    get = range_get.Get(relay, path, limit=1 << 20, extra_s=wait_s)
                    self._polls[relay] = (get, self._pool.submit(get, self._poll))
                    begun.add(self._polls[relay][1])
            # A relay that has not replied to an earlier poll has no news, or hangs. It is waited for only with `wait_s`,
            # and where no other relay is alive.
            waiting = begun if not wait_s and self._any_alive() else {future for _, future in self._polls.values()}
        until_s = time.monotonic() + (wait_s + 0.5 if self._any_alive() else self._options.connect_s + wait_s)
        grace_given = False
        while waiting and not (wait_s and self._union() != known):
            done, waiting = _wait_first(waiting, until_s)
            if not done:
                break
            if not wait_s and not grace_given and self._any_alive():
                until_s, grace_given = time.monotonic() + 0.5, True  # for the others; a relay that hangs gets no more
        if not self._any_alive():
            self._manifests.clear()  # meanwhile a version may become another one
            raise journal.Unavailable(f"no relay replies ({self._selector.reasons()}): start one, or use another relay")
        listing = self._union()
        with self._lock:  # a version that was deleted and comes back may be another one
            for number in [n for n in self._manifests if n not in listing.complete]:
                del self._manifests[number]
        return listing

    def _poll(self, get: range_get.Get) -> None:
        """Runs a request for a relay's list of versions, and stores the result, or the reason of a failure, in the relay."""
        relay = get.relay
        try:
            body, _ = get.run()
            fields = json.loads(body)
            complete, partial, tag = (fields[name] for name in ("complete", "partial", "tag"))
            numbers = [*complete, *partial]
            if len(numbers) > MAX_LISTED or any(type(n) is not int or not 0 <= n < 10**15 for n in numbers):
                raise ValueError(f"the relay's /versions are not at most {MAX_LISTED} integers >= 0")
            relay.listing = journal.Listing(tuple(sorted(complete)), tuple(sorted(partial)))
            relay.tag, relay.is_alive = urllib.parse.quote(str(tag)[:100]), True
        except (range_get.Failed, ValueError, KeyError, TypeError, RecursionError) as error:
            relay.listing, relay.tag, relay.is_alive = journal.Listing(), "", False
            relay.reason = str(error)[:300]

    def _union(self) -> journal.Listing:
        complete = {v for relay in self.relays for v in relay.listing.complete}
        partial = {v for relay in self.relays for v in relay.listing.partial}
        return journal.Listing(tuple(sorted(complete)), tuple(sorted(partial - complete)))

    def _any_alive(self) -> bool:
        return any(relay.is_alive for relay in self.relays)

    # ---- manifests and journals

    def manifest(self, version: int) -> tuple[bytes, manifest_lib.Manifest]:
        """Returns the manifest of `version`: (its bytes, parsed). Raises CorruptSource, FileNotFoundError, or Unavailable."""
        with self._lock:
            if version in self._manifests:
                return self._manifests[version]
        found = self._download_manifest(version)
        with self._lock:
            self._manifests[version] = found
            while len(self._manifests) > 16:
                self._manifests.popitem(last=False)
        return found

    def _download_manifest(self, version: int) -> tuple[bytes, manifest_lib.Manifest]:
        """Downloads the manifest of `version`. With a trusted key, returns the first with a valid signature.

        Without a key, all relays are requested, and the valid manifests that arrive in time must be equal, else CorruptSource.
        """
        deadline_s = time.monotonic() + self._options.patience_s
        num_missing, num_corrupt, error = collections.Counter(), collections.Counter(), None
        while True:
            if self.trusted is None:
                relays = self.relays
            else:
                given_up = {r for r, n in num_corrupt.items() if n >= MAX_CORRUPT_PER_OBJECT}
                relays = self._selector.select_several(PARALLEL_MANIFESTS, version, given_up)
            valid: dict[bytes, tuple[range_get.Relay, manifest_lib.Manifest]] = {}
            for relay, reply in self._request_manifest(relays, version, deadline_s).items():
                if isinstance(reply, range_get.Failed):
                    num_missing[relay] += isinstance(reply, range_get.Missing)
                elif reply not in valid:
                    try:
                        valid[reply] = relay, self._parse(reply, version)
                    except journal.CorruptSource as corrupt:
                        self._selector.record_corrupt(relay, str(corrupt))
                        num_corrupt[relay] += 1
                        error = error or journal.CorruptSource(f"{relay.url}: {corrupt}")
            if len(valid) > 1 and self.trusted is None:
                urls = ", ".join(relay.url for relay, _ in valid.values())
                text = f"relays {urls} have different manifests of version {version}: pass the publisher's trusted key"
                raise journal.CorruptSource(text)
            for data, (_, manifest) in valid.items():
                return data, manifest
            if all(num_missing[r] >= 2 or num_corrupt[r] for r in self.relays):
                raise error or journal.no_version(version, self._selector.urls(), self._union().complete)
            if time.monotonic() > deadline_s:
                text = f"the manifest of version {version} was not downloaded in time ({self._selector.reasons()})"
                raise error or journal.Unavailable(f"{text}: try again, or use other relays")
            time.sleep(0.2 if self.trusted is None else 0.02)

    def _parse(self, data: bytes, version: int) -> manifest_lib.Manifest:
        return (
            manifest_lib.parse(data, version=version) if self.trusted is None else self.trusted.manifest(data, version)
        )

    def _request_manifest(
        self, relays: list[range_get.Relay], version: int, deadline_s: float
    ) -> dict[range_get.Relay, bytes | range_get.Failed]:
        """Requests a manifest. Returns each relay's reply or error. After the first reply, aborts far slower requests."""
        path = f"/{journal.dirname(version)}/manifest.json"
        gets = [range_get.Get(relay, path, limit=journal.MAX_MANIFEST_BYTES) for relay in relays]
        calls = {self._pool.submit(get): get for get in gets}
        replies, waiting, has_body = {}, set(calls), False
        # One relay that hangs must not use up the time.
        until_s = min(deadline_s, time.monotonic() + self._options.patience_s / 4)
        while waiting and not (has_body and self.trusted is not None):
            done, waiting = _wait_first(waiting, until_s)
            if not done:
                break
            for future in done:
                get = calls[future]
                try:
                    replies[get.relay], _ = future.result()
                except range_get.Failed as error:
                    replies[get.relay] = error
                    self._selector.record_failure(get, error)
                    continue
                has_body = True
                self._selector.observe(get, True)
                until_s = min(until_s, time.monotonic() + max(0.5, 2 * get.seconds))
        for future in waiting:
            get = calls[future]
            get.abort()
            replies[get.relay] = error = range_get.Failed(f"{path} did not come in time")
            if not (has_body and self.trusted is not None):  # not for being slower than the first body
                self._selector.record_failure(get, error)
        return replies

    def entries(self, version: int, wait_s: float = 0.0) -> tuple[list[journal.Object], bool]:
        """Returns (objects newly finished on some relay since the last call, True if some relay has the manifest).

        Blocks up to `wait_s` seconds until an object or the manifest is new.
        """
        calls = {}
        for relay in self.relays:
            if version in relay.listing.complete + relay.listing.partial:
                epoch, count = relay.cursors.get(version, ("", 0))
                path = f"/{journal.dirname(version)}/objects.jsonl?epoch={epoch}&after={count}&wait={wait_s:.1f}"
                get = range_get.Get(relay, path, limit=journal.MAX_JOURNAL_BYTES, extra_s=wait_s)
                calls[self._pool.submit(get)] = get
        entries, is_complete, waiting = [], False, set(calls)
        until_s = time.monotonic() + wait_s + self._options.stall_s
        while waiting and not entries and not is_complete:
            done, waiting = _wait_first(waiting, until_s)
            if not done:
                break
            for future in done:
                relay = calls[future].relay
                try:
                    body, headers = future.result()
                    new, _ = journal.parse_journal(body)
                except range_get.Failed as error:
                    relay.reason = str(error)
                    continue
                except journal.CorruptSource as error:
                    self._selector.record_corrupt(relay, str(error))
                    continue
                epoch = urllib.parse.quote(headers.get("X-Epoch", "")[:100])
                following = headers.get("X-Next", "")
                relay.cursors[version] = (epoch, int(following) if re.fullmatch("[0-9]{1,9}", following) else 0)
                entries += new
                is_complete |= headers.get("X-Complete") == "1"
        for future in waiting:
            calls[future].abort()
        if not entries and not is_complete:
            # Relays that failed did so immediately: do not ask them again without a pause.
            time.sleep(max(0.0, min(0.05, until_s - self._options.stall_s - time.monotonic())))
        return entries, is_complete

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
        num_corrupt, only = collections.Counter(), None
        while True:
            download = object_download.ObjectDownload(
                self._pool, self._selector, version, path, target, self._options.range_bytes, deadline_s, only
            )
            try:
                received = download.run()
            except range_get.Failed:  # of the relay `only`
                received = []
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
                raise journal.CorruptSource(f"{path} is wrong on every relay ({reasons}): use other relays")
            if time.monotonic() > deadline_s:
                raise journal.Unavailable(f"{path} was not downloaded in time ({self._selector.reasons()}): try again")
            only = self._selector.select(version, set(num_corrupt) if honest else ())

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


def _wait_first(waiting: set[concurrent.futures.Future], until_s: float):
    """Blocks until a future is done, or the monotonic clock reaches `until_s`. Returns the sets of (done, not done) futures."""
    return concurrent.futures.wait(waiting, max(0.0, until_s - time.monotonic()), concurrent.futures.FIRST_COMPLETED)

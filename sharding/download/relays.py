"""Many relays as one source: what they are asked for, when they are believed, and what is done about liars.

An object takes this way:

1. `sharding/download/object.py` fetches it in ranges, each from a relay drawn by `sharding/download/relay_choice.py`.
2. The digest of the whole is compared. If it is wrong and came from one relay, that relay lied; if it came from several,
   one relay at a time is asked for the whole, and those whose ranges differ from the right bytes lied. A liar is counted
   and suspended. It cannot make an object wrong, nor a read fail while an honest relay lives.

Every wait has an end: connecting, silence, and the read as a whole (`patience_s` plus the size at `MIN_BYTES_PER_S`).
Left out: discovering relays (a list is configuration), and peers serving peers, which shows workers' addresses to all.
"""

import collections
import concurrent.futures
import json
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from sharding.download import concurrency, object, range_get
from sharding.download import relay_choice as choice_lib
from sharding.format import digests, journal
from sharding.format import manifest as manifest_lib

MIN_BYTES_PER_S = 32_000  # below this an object is given up: a 4 MB chunk may take two minutes
MAX_LIES_PER_OBJECT = 3  # how often one object may arrive wrong from the only relay: wires flip bits, too
FEW_READS = max(4, 2 * (os.cpu_count() or 1))
QUICK_S = 0.1  # 4 MB at 40 MB/s
MAX_LISTED = 4096
MANIFESTS_AT_ONCE = 3
COUNTERS = ("num_bytes", "num_objects", "num_bad_objects", "num_resumed", "num_hedges", "num_hedges_won")


class Relays:
    """One or more `python -m sharding.relay`, or anything else that speaks their few routes."""

    def __init__(self, urls: Sequence[str], trusted_key: str | None = None, options: range_get.Options | None = None):
        self.options = options or range_get.Options()
        self.relays = [range_get.Relay(url, self.options) for url in urls]
        self.choice = choice_lib.Choice(self.relays, self.options.seed)
        self._pieces = concurrent.futures.ThreadPoolExecutor(self.options.parallel, "weights-piece")
        # apart, or hedges would queue behind those that hang
        self._hedges = concurrent.futures.ThreadPoolExecutor(self.options.parallel, "weights-hedge")
        self._ramp = concurrency.Ramp(FEW_READS, QUICK_S)
        self.is_closed = False
        self._closing = threading.Lock()
        self._trusted_key = trusted_key
        self._asks = concurrent.futures.ThreadPoolExecutor(4 * len(urls) + 4, "weights-ask")
        self._lock = threading.Lock()  # of what follows
        self._polls: dict[range_get.Relay, tuple[range_get.Get, concurrent.futures.Future]] = {}
        self._manifests: collections.OrderedDict[int, tuple[bytes, manifest_lib.Manifest]] = collections.OrderedDict()
        self._phantoms: dict[int, float] = {}  # versions that were claimed and not delivered, until when to ignore them
        self._counters = collections.Counter()

    # -- what there is

    def versions(self) -> list[int]:
        """Complete versions. The newest is proved by its manifest, so a relay cannot make up a version 999999."""
        claimed = [v for v in self.listing().complete if self._phantoms.get(v, 0.0) < time.monotonic()]
        refused = None
        while claimed:
            try:
                self.manifest_bytes(claimed[-1])
                return claimed
            except FileNotFoundError:
                claimed.pop()
            except (journal.CorruptSource, journal.Unavailable) as error:
                refused = refused or error
                self._phantoms[claimed.pop()] = time.monotonic() + 5.0
        if refused is not None:  # there are versions, and none is good: the reason helps more than an empty list
            raise refused
        return []

    def listing(self, wait_s: float = 0.0, known: journal.Listing | None = None) -> journal.Listing:
        """The union over the relays; with `wait_s`, held back until it differs from `known`. `Unavailable`: none answers."""
        asked = set()
        with self._lock:
            for relay in self.relays:
                if relay not in self._polls or self._polls[relay][1].done():
                    name = f"/versions?tag={relay.tag if wait_s else ''}&wait={wait_s:.1f}"
                    get = range_get.Get(relay, name, limit=1 << 20, extra_s=wait_s)
                    self._polls[relay] = (get, self._submit(self._asks, self._poll, get))
                    asked.add(self._polls[relay][1])
            # A relay that still holds an earlier question back has no news, or hangs: it is waited for only by who waits,
            # and where nobody else lives.
            waiting = asked if not wait_s and self._any_alive() else {future for _, future in self._polls.values()}
        until_s = time.monotonic() + (wait_s + 0.5 if self._any_alive() else self.options.connect_s + wait_s)
        graced = False
        while waiting and not (wait_s and self._union() != known):
            done, waiting = concurrent.futures.wait(
                waiting, max(0.0, until_s - time.monotonic()), concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                break
            if not wait_s and not graced and self._any_alive():
                until_s, graced = time.monotonic() + 0.5, True  # the others get a moment, a hung one gets no more
        if not self._any_alive():
            raise journal.Unavailable(f"no relay answers: {self.choice.reasons()}")
        listing = self._union()
        with self._lock:  # a number that went away and comes back is another version
            for number in [n for n in self._manifests if n not in listing.complete]:
                del self._manifests[number]
        return listing

    def _poll(self, get: range_get.Get) -> None:
        relay = get.relay
        try:
            body, _ = get.run()
            fields = json.loads(body)
            complete, partial, tag = (fields[name] for name in ("complete", "partial", "tag"))
            numbers = [*complete, *partial]
            if len(numbers) > MAX_LISTED or any(type(n) is not int or not 0 <= n < 10**15 for n in numbers):
                raise ValueError("its versions are no short list of integers >= 0")
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

    # -- manifests and journals

    def manifest_bytes(self, version: int) -> bytes:
        return self._manifest(version)[0]

    def manifest(self, version: int) -> manifest_lib.Manifest:
        return self._manifest(version)[1]

    def _manifest(self, version: int) -> tuple[bytes, manifest_lib.Manifest]:
        with self._lock:
            if version in self._manifests:
                return self._manifests[version]
        found = self._agreed_manifest(version) if self._trusted_key is None else self._signed_manifest(version)
        with self._lock:
            self._manifests[version] = found
            while len(self._manifests) > 16:
                self._manifests.popitem(last=False)
        return found

    def _signed_manifest(self, version: int) -> tuple[bytes, manifest_lib.Manifest]:
        """The first good one: a signature needs no second opinion. A few are asked at once, since one may hang."""
        deadline_s = time.monotonic() + self.options.patience_s
        num_missing, num_wrong, refused = collections.Counter(), collections.Counter(), None
        while True:
            relays = []
            given_up = {r for r, n in num_wrong.items() if n >= MAX_LIES_PER_OBJECT}
            while len(relays) < MANIFESTS_AT_ONCE:
                relay = self.choice.choose(version, given_up | set(relays), wait=not relays)
                if relay is None:
                    break
                relays.append(relay)
            if not relays:
                raise refused
            answers = self._ask(relays, f"/{journal.dirname(version)}/manifest.json", deadline_s, first=True)
            for relay, answer in answers.items():
                if isinstance(answer, bytes):
                    try:
                        return answer, manifest_lib.parse(answer, version=version, trusted_key=self._trusted_key)
                    except journal.CorruptSource as error:
                        self.choice.convict(relay, str(error))
                        num_wrong[relay] += 1
                        refused = refused or journal.CorruptSource(f"{relay.url}: {error}")
                elif isinstance(answer, range_get.Missing):
                    num_missing[relay] += 1
            if all(num_missing[r] >= 2 or num_wrong[r] for r in self.relays):
                raise refused or journal.no_version(version, self.choice.urls(), self._union().complete)
            if time.monotonic() > deadline_s:
                raise refused or journal.Unavailable(
                    f"no manifest of version {version} in time: {self.choice.reasons()}"
                )
            time.sleep(0.02)

    def _agreed_manifest(self, version: int) -> tuple[bytes, manifest_lib.Manifest]:
        """From all relays at once: without a key, two that differ cannot be told apart, and neither is taken."""
        deadline_s = time.monotonic() + self.options.patience_s
        while True:
            answers = self._ask(self.relays, f"/{journal.dirname(version)}/manifest.json", deadline_s)
            good, refused = {}, None
            for relay, answer in answers.items():
                if isinstance(answer, bytes):
                    try:
                        parsed = good[answer][1] if answer in good else manifest_lib.parse(answer, version=version)
                        good[answer] = relay, parsed
                    except journal.CorruptSource as error:
                        self.choice.convict(relay, str(error))
                        refused = refused or journal.CorruptSource(f"{relay.url}: {error}")
            if len(good) > 1:
                urls = ", ".join(relay.url for relay, _ in good.values())
                raise journal.CorruptSource(
                    f"{urls} hold different manifests of version {version}: pass the trusted key"
                )
            if good:
                ((data, (_, parsed)),) = good.items()
                return data, parsed
            if all(isinstance(answer, range_get.Missing) for answer in answers.values()):
                raise journal.no_version(version, self.choice.urls(), self._union().complete)
            if refused is not None and not any(type(answer) is range_get.Failed for answer in answers.values()):
                raise refused
            if time.monotonic() > deadline_s:
                raise refused or journal.Unavailable(
                    f"no manifest of version {version} in time: {self.choice.reasons()}"
                )
            time.sleep(0.2)

    def _ask(
        self, relays: list[range_get.Relay], name: str, deadline_s: float, first: bool = False
    ) -> dict[range_get.Relay, Any]:
        """Body or `Failed` by relay. Those far slower than the first body are cut off; with `first`, all others are."""
        gets = [range_get.Get(relay, name, limit=journal.MAX_MANIFEST_BYTES) for relay in relays]
        calls = {self._submit(self._asks, get.run): get for get in gets}
        answers, waiting, begun_s = {}, set(calls), time.monotonic()
        until_s = min(deadline_s, begun_s + self.options.patience_s / 4)  # one hung relay must not use up the time
        while waiting and not (first and any(isinstance(answer, bytes) for answer in answers.values())):
            done, waiting = concurrent.futures.wait(
                waiting, max(0.0, until_s - time.monotonic()), concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                break
            for future in done:
                relay, seconds = calls[future].relay, time.monotonic() - begun_s
                try:
                    answers[relay], _ = future.result()
                    self.choice.observe(relay, True, 0, seconds)
                    until_s = min(until_s, time.monotonic() + max(0.5, 2 * seconds))
                except range_get.Failed as error:
                    answers[relay] = error
                    self.choice.failed(relay, error, 0, seconds)
        for future in waiting:
            get = calls[future]
            get.abort()
            answers[get.relay] = range_get.Failed(f"{name} did not come in time")
            if not (first and len(answers) > len(waiting)):  # to be second is no failure
                self.choice.failed(get.relay, answers[get.relay], 0, time.monotonic() - begun_s)
        return answers

    def entries(self, version: int, wait_s: float = 0.0) -> tuple[list[journal.Object], bool]:
        """(Objects that some relay got since the last call, whether some relay has the manifest); waits for either."""
        calls = {}
        for relay in self.relays:
            if version in relay.listing.complete + relay.listing.partial:
                epoch, count = relay.cursors.get(version, ("", 0))
                name = f"/{journal.dirname(version)}/objects.jsonl?epoch={epoch}&after={count}&wait={wait_s:.1f}"
                get = range_get.Get(relay, name, limit=journal.MAX_JOURNAL_BYTES, extra_s=wait_s)
                calls[self._submit(self._asks, get.run)] = get
        entries, is_complete, waiting = [], False, set(calls)
        until_s = time.monotonic() + wait_s + self.options.stall_s
        while waiting and not entries and not is_complete:
            done, waiting = concurrent.futures.wait(
                waiting, max(0.0, until_s - time.monotonic()), concurrent.futures.FIRST_COMPLETED
            )
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
                    self.choice.convict(relay, str(error))
                    continue
                epoch = urllib.parse.quote(headers.get("X-Epoch", "")[:100])
                following = headers.get("X-Next", "")
                relay.cursors[version] = (epoch, int(following) if re.fullmatch("[0-9]{1,9}", following) else 0)
                entries += new
                is_complete |= headers.get("X-Complete") == "1"
        for future in waiting:
            calls[future].abort()
        if not entries and not is_complete:
            # who refused did so at once, and would be asked again at once
            time.sleep(max(0.0, min(0.05, until_s - self.options.stall_s - time.monotonic())))
        return entries, is_complete

    # -- objects

    def read(self, version: int, entry: journal.Object, into: Sequence[memoryview]) -> None:
        target = range_get.Target.of(entry, into)
        with self._ramp.admitted():
            self._read(version, entry, target)

    def _read(self, version: int, entry: journal.Object, target: range_get.Target) -> None:
        deadline_s = time.monotonic() + self.options.patience_s + entry.size / MIN_BYTES_PER_S
        name = f"/{journal.dirname(version)}/{entry.path}"
        mixed: list[tuple[bytes, list[object.Part]]] = []  # what several relays together delivered, and was wrong
        lies, only = collections.Counter(), None
        if entry.size == 0 and entry.digest != digests.of():
            raise journal.CorruptSource(
                f"object {entry.path} of version {version} has no bytes, and digest {entry.digest}"
            )
        while True:
            try:
                parts = object.Gathering(self, version, name, target, deadline_s, only).run()
            except range_get.Failed:
                parts = None  # the one relay that was to deliver all of it does not
            actual = None if parts is None else target.digest()
            if actual == entry.digest:
                right = target.copy() if mixed else b""
                for relay in {p.relay for other, ps in mixed for p in ps if not p.agrees(other, right)}:
                    self.choice.convict(relay, f"{name} differs from what was published")
                self.count("num_bytes", entry.size)
                self.count("num_objects", 1)
                return
            if parts is not None:
                self.count("num_bad_objects", 1)
                relays = {p.relay for p in parts}
                if len(relays) > 1:
                    mixed.append((target.copy(), parts))
                else:
                    (relay,) = relays
                    lies[relay] += 1
                    self.choice.convict(relay, f"{name} has digest {actual}, not {entry.digest}")
            honest = [r for r in self.relays if not lies[r]]
            if not honest and max(lies.values()) >= MAX_LIES_PER_OBJECT:
                raise journal.CorruptSource(
                    f"object {entry.path} of version {version} is wrong wherever it was asked for: {self.choice.reasons()}"
                )
            if time.monotonic() > deadline_s:
                raise journal.Unavailable(
                    f"object {entry.path} of version {version} did not come in time: {self.choice.reasons()}"
                )
            only = self.choice.choose(version, set(lies) if honest else ())

    # -- the rest

    def stats(self) -> dict[str, Any]:
        """Counters, and per relay its averages, failures and lies."""
        with self._lock:
            counters = {name: self._counters[name] for name in COUNTERS}
        return {"source": self.choice.urls(), **counters, "relays": self.choice.stats()}

    def submit(self, get: range_get.Get) -> concurrent.futures.Future:
        return self._submit(self._hedges if get.is_hedge else self._pieces, get.run)

    def _submit(self, pool: concurrent.futures.Executor, function: Callable, *args: Any) -> concurrent.futures.Future:
        with self._closing:  # a pool that was shut down raises what nobody outside expects
            if self.is_closed:
                raise journal.Unavailable("the source was closed")
            return pool.submit(function, *args)

    def count(self, name: str, amount: int) -> None:
        with self._lock:
            self._counters[name] += amount

    def close(self) -> None:
        with self._closing:
            self.is_closed = True
        with self._lock:
            polls = [get for get, _ in self._polls.values()]
        for get in polls:
            get.abort()
        for relay in self.relays:
            relay.close()
        self._asks.shutdown(wait=False)
        self._pieces.shutdown(wait=False)
        self._hedges.shutdown(wait=False)

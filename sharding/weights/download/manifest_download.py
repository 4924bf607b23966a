"""Downloads the manifest of one version from relays, of which some may be late, slow, or false: all are asked at the same time.

With several relays, the signed head names the SHA-256 of the manifest, so the first relay that delivers it decides. The others are asked
again and again meanwhile: a relay that lists the version and does not deliver it delays nothing.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import time

from sharding.system import retries
from sharding.weights.download import range_get, relay_selector
from sharding.weights.format import head as head_lib
from sharding.weights.format import journal
from sharding.weights.format import manifest as manifest_lib

MAX_REFUSALS = 3  # of one relay: wires flip bits, and the version may be on its way
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


@dataclasses.dataclass(frozen=True)
class Proof:
    """A manifest that a source has delivered, as bytes and parsed: it proves that the source has the version."""

    data: bytes
    manifest: manifest_lib.Manifest

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of `data` in hex, by which a signed head names it."""
        return hashlib.sha256(self.data).hexdigest()


class ManifestDownload:
    """The download of the manifest of `version` from several relays. Call `run` once.

    With `trusted`, only the manifest that its head lists is accepted. Without it, there must be one relay, and any manifest of the
    version is accepted.
    """

    def __init__(
        self,
        pool: range_get.RequestPool,
        selector: relay_selector.RelaySelector,
        trusted: head_lib.HeadVerifier | None,
        version: int,
    ):
        self.pool, self.selector, self.trusted, self.version = pool, selector, trusted, version
        self.is_ended = False
        self._questions = [_Question(self, relay) for relay in selector.relays]

    def run(self, patience_s: float) -> Proof:
        """Returns the manifest. Blocks for at most `patience_s`, and for a quarter of it once a relay has replied without it.

        Raises CorruptSource, Unavailable, or FileNotFoundError if no relay has it.
        """
        begun_s = time.monotonic()
        try:
            while True:
                running = [future for q in self._questions if (future := q.ask()) is not None]
                if found := next((q.found for q in self._questions if q.found is not None), None):
                    return found
                waiting = [q for q in self._questions if q.num_refused < MAX_REFUSALS]
                until_s = begun_s + patience_s / (1 if len(waiting) == len(self._questions) else 4)
                if not waiting or time.monotonic() >= until_s or self.pool.is_closed:
                    break
                if running:
                    concurrent.futures.wait(running, 0.1, concurrent.futures.FIRST_COMPLETED)
                else:  # all are in a pause
                    time.sleep(FIRST_PAUSE_S / 2)
        finally:
            self.is_ended = True
            for question in self._questions:
                question.abort()
        if error := next((q.error for q in self._questions if q.error is not None), None):
            raise error
        if waiting:
            text = f"no manifest of version {self.version} came in time ({self.selector.reasons()})"
            raise journal.Unavailable(f"{text}; try again, or use other relays")
        listed = sorted({n for relay in self.selector.relays for n in relay.claims[0]})
        raise journal.no_version(self.version, self.selector.urls(), listed)


class _Question:
    """Asks one relay for the manifest of a download, with pauses. `found` is the answer, `error` that of the last wrong one."""

    def __init__(self, download: ManifestDownload, relay: range_get.Relay):
        self.relay, self.num_refused = relay, 0
        self.found: Proof | None = None
        self.error: journal.CorruptSource | None = None
        self._download = download
        self._pauses, self._due_s = retries.Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0
        self._get: range_get.Get | None = None
        self._future: concurrent.futures.Future | None = None

    def ask(self) -> concurrent.futures.Future | None:
        """Returns the request that is running, or a new one; None during the pause after one that failed."""
        if self._future is not None and not self._future.done():
            return self._future
        if self.found is not None or time.monotonic() < self._due_s or self._download.pool.is_closed:
            return None
        trusted, version = self._download.trusted, self._download.version
        listed = trusted.head.versions.get(version) if trusted and trusted.head else None
        limit = listed.num_bytes if listed else min(manifest_lib.MAX_UNPROVED_BYTES, journal.MAX_MANIFEST_BYTES)
        self._get = range_get.Get(self.relay, f"/{journal.dirname(version)}/manifest.json", limit=limit)
        self._future = self._download.pool.submit(self._get, self._run)
        return self._future

    def abort(self) -> None:
        """Ends a request that is running. Does not block."""
        if self._get is not None:
            self._get.abort()

    def _run(self, get: range_get.Get) -> None:
        trusted, selector, version = self._download.trusted, self._download.selector, self._download.version
        data = b""
        try:
            data, _ = get.run()
            self.found = Proof(data, head_lib.manifest_of(trusted, data, version))
            selector.observe(get, True)
        except (range_get.Missing, range_get.TooLong) as error:
            self.relay.reason, self.num_refused = str(error), self.num_refused + 1
        except journal.CorruptSource as error:
            self.error, self.num_refused = type(error)(f"{self.relay.url}: {error}"), self.num_refused + 1
            self.relay.reason = str(error)
            if not (trusted and trusted.has_signed(data, version)):
                selector.record_corrupt(self.relay, str(error))
        except range_get.Failed as error:
            if not self._download.is_ended:
                selector.record_failure(get, error)
        self._due_s = time.monotonic() + self._pauses.next_s()

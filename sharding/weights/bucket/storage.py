"""Reads and writes the objects of a bucket by tensorstore (gs://, s3://, and file:// for a directory), and waits while it is away.

Credentials are those of Google's and Amazon's own tools. `open_store` adds two variables that tensorstore ignores: AWS_REGION, and
AWS_ENDPOINT_URL for other servers with Amazon's protocol.
"""

import fnmatch
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import tensorstore as ts

from sharding.system import cli, retries
from sharding.weights.format import journal

SCHEMES = ("gs", "s3", "file")
TRY_S = 30.0  # of one request; a lost connection is silent
SLOWEST = 100_000  # bytes a second of one of several requests; a try has the more time, the larger the object
LIST_S = 600.0  # of a list: a second has about 10,000 names
START_S = 60.0  # of patience when a command starts; a mirror has no end of it
NOTICE_S = 10.0  # of silence before the first line on it; the pauses between lines double
_TEMPORARY = ("UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN", "CANCELLED")
# `Storage` retries: tensorstore would be silent for minutes.
_FEW_RETRIES = {"max_retries": 1, "initial_delay": "100ms", "max_delay": "1s"}


def is_url(place: str | os.PathLike) -> bool:
    """Returns True for the URL of a bucket, and False for a path. Raises ValueError for another URL."""
    scheme, is_a_url, rest = str(place).partition("://")
    if is_a_url and (scheme not in SCHEMES or not rest.strip("/")):
        raise ValueError(f"{place} is not the URL of a bucket; write gs://BUCKET/PATH, s3://BUCKET/PATH, or a path")
    return bool(is_a_url)


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Returns True if the name of an object or file matches one of the patterns, such as "checkpoints/*"."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def open_store(url: str, **context: Any) -> ts.KvStore:
    """Opens the objects whose names begin with `url` and a slash. `context` has more of tensorstore's context resources."""
    try:
        url = url.rstrip("/") + "/"
        spec = ts.KvStore.Spec(url).to_json()
    except ValueError as error:  # it repeats the URL in each of its parts
        reason = str(error).rpartition(f'component "{url}": ')[2] or str(error)
        raise ValueError(f"{url} is not the URL of a folder in a bucket ({reason}); correct it") from error
    if spec["driver"] == "s3":
        environment = os.environ
        if endpoint := environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL"):
            spec |= {"endpoint": endpoint, "aws_region": "us-east-1"}
        if region := environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"):
            spec["aws_region"] = region
        if environment.get("AWS_ACCESS_KEY_ID"):  # no search for files, of which it prints the absent ones
            spec["aws_credentials"] = {"type": "environment"}
    return ts.KvStore.open(spec | {"context": context} if context else spec).result()


class Storage:
    """The objects under a URL. All methods may be called from many threads. They try again until the bucket answers, or `close`.

    With `patience_s`, they raise Unavailable after this time, and ValueError immediately for an answer that no retry changes.
    """

    def __init__(self, url: str, meanwhile: str = "trying again"):
        self.url, self._meanwhile = url, meanwhile
        self._store = open_store(url, s3_request_retries=_FEW_RETRIES, gcs_request_retries=_FEW_RETRIES)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._silent_s: float | None = None  # since when
        self._noticed_s = NOTICE_S  # after which silence the next line is due

    def close(self) -> None:
        """Ends waiting and later calls: they raise Unavailable."""
        self._closed.set()

    def read(self, key: str, patience_s: float | None = None, size: int = 0) -> tuple[bytes | None, Any]:
        """Returns (the bytes of an object or None if there is none, its generation). `size` is the number of bytes, if it is known."""
        found = self._answer(lambda: self._store.read(key), patience_s, TRY_S + size / SLOWEST)
        return (None if found.state == "missing" else found.value), found.stamp.generation

    def read_new(
        self, key: str, known: bytes | None, patience_s: float | None, try_s: float
    ) -> tuple[bytes | None, bytes]:
        """Returns (the bytes of an object, or None if its generation is `known`; its generation). Each attempt may take `try_s` seconds."""
        found = self._answer(lambda: self._store.read(key, if_not_equal=known), patience_s, try_s)
        if found.state == "missing":
            raise FileNotFoundError(f"{self.url}/{key} was deleted during the download; start again")
        return (found.value if found.state == "value" else None), found.stamp.generation

    def write(self, key: str, data: bytes, *, replaces: Any = None, patience_s: float | None = None) -> Any:
        """Writes an object, if its generation is still `replaces` or that is None. Returns the new generation, or None if the object had another one."""
        try_s = TRY_S + len(data) / SLOWEST
        written = self._answer(lambda: self._store.write(key, data, if_equal=replaces), patience_s, try_s)
        return written.generation or None

    def keys(self, patience_s: float | None = None) -> list[str]:
        """Returns the names of all objects."""
        return [key.decode() for key in self._answer(self._store.list, patience_s, LIST_S)]

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects, also if they do not exist."""
        for key in keys:
            self._answer(lambda key=key: self._store.write(key, None), None)

    def _answer(self, begin: Callable[[], ts.Future], patience_s: float | None, try_s: float | None = None) -> Any:
        begun_s, pauses = time.monotonic(), retries.Backoff(0.2, 5.0)
        while not self._closed.is_set():
            future = begin()
            try:
                result = future.result(timeout=try_s or TRY_S)
            except (ValueError, TimeoutError) as error:  # the only types that tensorstore raises
                future.cancel()
                reason = str(error).partition(" [")[0].splitlines()[0] if str(error) else "no answer"
                is_temporary = isinstance(error, TimeoutError) or reason.startswith(_TEMPORARY)
                if patience_s is not None and not is_temporary:
                    raise ValueError(
                        f"bucket {self.url}: {reason}; check its name, and your credentials (docs/bring_your_own.md)"
                    ) from error
                if patience_s is not None and time.monotonic() - begun_s > patience_s:
                    found = f"bucket {self.url} has not answered for {patience_s:.0f} s ({reason})"
                    raise journal.Unavailable(f"{found}; check the network, and start again") from error
                self._note_silence(reason)
            else:
                self._note_answer()
                return result
            self._closed.wait(pauses.next_s())
        raise journal.Unavailable(f"bucket {self.url} is closed in this process; open it again")

    def _note_silence(self, reason: str) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._silent_s = now_s if self._silent_s is None else self._silent_s
            if (silence_s := now_s - self._silent_s) >= self._noticed_s:
                self._noticed_s = 2 * silence_s
                cli.note(f"bucket {self.url} has not answered for {silence_s:.0f} s ({reason}); {self._meanwhile}")

    def _note_answer(self) -> None:
        with self._lock:
            if self._silent_s is not None and self._noticed_s > NOTICE_S:
                cli.note(f"bucket {self.url} answers again after {time.monotonic() - self._silent_s:.0f} s")
            self._silent_s, self._noticed_s = None, NOTICE_S

"""Mirrors the working directory of a running command into a bucket, so that any machine can continue the run.

The command works in a folder of this machine, a cache. At the URL of the working directory are

    head.json           the owner of the run, and the manifest of its newest state
    manifests/DIGEST    the files of a state (snapshot.py)
    files/PATH/...      the blocks of the files

1. `mirrored` makes this process the owner. Only one may be: each write of the head replaces exactly the one before, and the owner writes
   it every `BEAT_S`. An owner that has been silent for `LEASE_S` is replaced, and fails at its next write.
2. If the folder is not the one that the last owner left, or an older copy of it, the newest state is restored into it. Batches of earlier steps stay in the bucket,
   unless the run drops or encrypts them itself. One that it has redacted is deleted there, too.
3. One thread captures the folder every few seconds, writes new blocks, then the manifest, and then the head, which makes the state
   visible as a whole; then it deletes the blocks that only the state before had. After a kill, these are swept at the next start.
4. Requests are repeated until the bucket answers; the run goes on meanwhile. `pace` holds its next checkpoint when the newest state
   in the bucket is older than `BACKLOG_S`.
5. At the end, the last state is written, and the head marked as closed.
"""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

from sharding.system import atomic_file, cli, retries
from sharding.system import files as files_lib
from sharding.system import text as text_lib
from sharding.weights.bucket import snapshot, storage
from sharding.weights.format import digests, journal

HEAD = "head.json"
EVERY_S, BEAT_S, LEASE_S = 10.0, 15.0, 60.0
BACKLOG_S = 600.0
RETRY_S, MAX_RETRY_S = 1.0, 60.0  # after a capture that failed, as on a full disk
CLOSE_S, FAILED_CLOSE_S = 600.0, 60.0  # of patience with the bucket at the end of a run, and of one that failed
NUM_REQUESTS = 8
MAY_LACK = re.compile(r"checkpoints/\d+/")  # a run continues from an earlier checkpoint if one of these is lost
STAYS = re.compile(r"rollouts/step_\d+/")  # files that no resume reads: they are restored only for readers
READER = ".reader"  # next to a copy: the lock of the process that reads it (models/hub.py, too)
# Files of a step. A redaction writes the second, and deletes the first (rl/experiment/redaction.py).
REDACTED, HASHES = "accepted.parquet", "redacted.json"
_MIRRORS: dict[pathlib.Path, "Mirror"] = {}  # of this process, by their folder
_READING: dict[pathlib.Path, int] = {}  # the copies that this process reads, with the descriptors of their locks


@dataclasses.dataclass(frozen=True)
class Head:
    """The content of head.json. `manifest` is the digest of the newest manifest, "" for a run without files."""

    owner: str
    host: str
    beat: int
    time_s: float  # of the owner's clock
    manifest: str = ""
    is_closed: bool = False

    def encode(self) -> bytes:
        """Returns the head as JSON."""
        return json.dumps({"format": 1} | dataclasses.asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes, url: str) -> "Head":
        """Returns the head in `data`. Raises ValueError for any other content; `url` names the place in the message."""
        try:
            fields = json.loads(data)
            if fields.pop("format") != 1 or (fields["manifest"] != "" and not text_lib.is_hex(fields["manifest"])):
                raise ValueError("its format is not 1")
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            found = f"{url}/{HEAD} does not belong to the working directory of a run ({error})"
            raise ValueError(f"{found}; give another --workdir") from error


def local_folder(workdir: str | os.PathLike) -> pathlib.Path:
    """Returns the folder on this machine of a working directory: itself, or the cache of one in a bucket; absolute.

    Caches are in $INTELLAX_BUCKET_CACHE, by default ~/.cache/intellax/buckets.
    """
    if not storage.is_url(workdir):
        return pathlib.Path(workdir).absolute()
    url = str(workdir).rstrip("/")
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    root = os.environ.get("INTELLAX_BUCKET_CACHE") or pathlib.Path(home) / "intellax" / "buckets"
    return pathlib.Path(root).absolute() / hashlib.sha256(url.encode()).hexdigest()[:12] / url.rpartition("/")[2]


@contextlib.contextmanager
def mirrored(workdir: str | os.PathLike, *, with_batches: bool = False) -> Iterator[None]:
    """Keeps `local_folder(workdir)` and the bucket in step during the block. Does nothing for a path.

    With `with_batches`, a restore includes the batches of earlier steps, for a run that will redact them. The caller has locked the
    folder. Raises ValueError if another run uses the bucket, and Unavailable, an OSError, if the bucket does not answer.
    """
    if not storage.is_url(workdir):
        yield
        return
    mirror = Mirror(str(workdir).rstrip("/"), local_folder(workdir))
    try:
        mirror.open(with_batches=with_batches)
        _MIRRORS[mirror.folder] = mirror
        yield
    except BaseException:
        with contextlib.suppress(ValueError, OSError):  # the first error is reported
            mirror.close(FAILED_CLOSE_S)
        raise
    else:
        mirror.close(CLOSE_S)
    finally:
        _MIRRORS.pop(mirror.folder, None)


def pace(folder: pathlib.Path) -> None:
    """Blocks while the bucket of a working directory is too far behind it, and raises the errors of `check`."""
    if mirror := _MIRRORS.get(folder):
        mirror.pace()


def check(folder: pathlib.Path) -> None:
    """Raises ValueError if another run has taken the bucket of a working directory over, and OSError if its mirror has failed."""
    if mirror := _MIRRORS.get(folder):
        mirror.check()


def fetched(workdir: str | os.PathLike, names: Sequence[str] = ("*",), *, is_optional: bool = False) -> pathlib.Path:
    """Returns a local folder with the newest files of a working directory that match patterns such as "checkpoints/*".

    For a path, the folder is `workdir` itself. For a bucket, it is the run's own folder if the run is on this machine and the folder is
    whole; else a copy that no other process changes until this one ends. If the bucket has no run, raises ValueError, or with
    `is_optional` returns a folder without files.
    """
    folder = local_folder(workdir)
    if not storage.is_url(workdir):
        return folder
    bucket = storage.Storage(str(workdir).rstrip("/"))
    copy = _own_copy(folder, names)
    copy.parent.mkdir(parents=True, exist_ok=True)  # again, if the user has emptied the cache
    with futures.ThreadPoolExecutor(NUM_REQUESTS) as pool, files_lib.locked(copy.parent / ".lock"):
        for is_last in (False, False, True):
            data, _ = bucket.read(HEAD, storage.START_S)
            if data is None and not is_optional:
                raise ValueError(f"{bucket.url} is not the working directory of a run; correct the URL")
            head = Head.parse(data, bucket.url) if data else Head("", "", 0, 0.0)
            files = _read_files(bucket, head)
            if _left_by(head, folder) and _is_whole(folder, files):
                return folder
            files = {path: file for path, file in files.items() if storage.matches(path, names)}
            try:
                snapshot.restore(bucket, files, copy, pool, storage.START_S)
                return copy
            except FileNotFoundError:  # a newer state has replaced this one
                if is_last:
                    raise
    raise AssertionError


def _own_copy(folder: pathlib.Path, names: Sequence[str]) -> pathlib.Path:
    """Returns the first copy of files that match `names` which no other process reads; it belongs to this one until its end."""
    key = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    for n in itertools.count():
        copy = folder.parent / "reading" / f"{key}-{n}" / folder.name
        if copy in _READING:
            return copy
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            _READING[copy] = files_lib.lock(copy.parent / READER, wait=False)  # until this process ends
        except BlockingIOError:
            continue
        return copy
    raise AssertionError


class Mirror:
    """The mirror of one working directory. `open`, then `pace` at will, then `close`."""

    def __init__(self, url: str, folder: pathlib.Path):
        self.folder, self._staging = folder, folder.parent / "staging"
        self._storage = storage.Storage(url, "the run goes on, and sends the rest later")
        self._pool = futures.ThreadPoolExecutor(NUM_REQUESTS, "bucket")
        self._lock = threading.Lock()  # of the head
        self._head, self._generation = Head("", f"{socket.gethostname()}, process {os.getpid()}", 0, 0.0), None
        self._files: dict[str, snapshot.File] = {}  # of the newest manifest
        self._stamps: dict[str, snapshot.Stamp] = {}
        self._present: dict[tuple[str, str], str] = {}  # (path, digest) -> key of each block in the bucket
        self._failure: BaseException | None = None
        self._is_restored = False
        self._saved_s = time.monotonic()  # the time of capture of the newest state in the bucket
        self._changed = threading.Condition()  # of `_saved_s` and `_failure`
        self._ending, self._wake, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._beats = threading.Thread(target=self._guarded, args=(self._beat,), name="bucket lease", daemon=True)
        self._saves = threading.Thread(target=self._guarded, args=(self._save_all,), name="bucket", daemon=True)

    def open(self, *, with_batches: bool = False) -> None:
        """Takes the run over and starts to mirror. Restores the newest state, earlier batches only `with_batches`, if the folder does not have it."""
        patience_s = storage.START_S
        data, self._generation = self._storage.read(HEAD, patience_s)
        if data is None:
            if found := self._storage.keys(patience_s):
                text = f"{self._storage.url} has objects such as {found[0]}, but no run: it has no {HEAD}"
                raise ValueError(f"{text}; give a --workdir without objects")
            last = self._head
        else:
            last = self._free(data)
        self._files = _read_files(self._storage, last)
        self._is_restored = _left_by(last, self.folder) and _is_whole(self.folder, self._files)
        owner = last.owner if self._is_restored else secrets.token_hex(16)
        self._head = dataclasses.replace(self._head, owner=owner, beat=last.beat, manifest=last.manifest)
        self._write_head(patience_s)
        self._beats.start()
        if not self._is_restored:
            needed = {path: file for path, file in self._files.items() if with_batches or not STAYS.match(path)}
            if needed:
                cli.note(f"restoring {len(needed)} files from {self._storage.url} to {self.folder}")
            snapshot.restore(self._storage, needed, self.folder, self._pool, patience_s, MAY_LACK)
            with self._lock:
                _leave(self._head, self.folder)
                self._is_restored = True
        blocks = ((path, key) for path, file in self._files.items() for key, *_ in file.blocks(path))
        self._present = {(path, snapshot.digest_of(key)): key for path, key in blocks}
        self._saves.start()

    def pace(self) -> None:
        """Blocks while the newest state in the bucket is older than `BACKLOG_S`. Raises the error that ended the mirror."""
        with self._changed:
            if self._is_late():
                text = f"the newest state in {self._storage.url} is {BACKLOG_S:.0f} s old"
                cli.note(f"{text}; the run waits for the bucket")
            self._changed.wait_for(lambda: self._failure or not self._is_late())
        self.check()

    def _is_late(self) -> bool:
        return time.monotonic() - self._saved_s > BACKLOG_S

    def close(self, patience_s: float) -> None:
        """Writes the last state. Raises Unavailable if the bucket does not take it in time, and ValueError after a takeover."""
        deadline_s = time.monotonic() + patience_s
        self._ending.set()
        self._wake.set()
        try:
            if self._saves.ident is not None:
                self._saves.join(patience_s if not self._failure else 0.0)
                self.check()
                if self._saves.is_alive():
                    found = f"{self._storage.url} lacks the last state of the run, which is in {self.folder}"
                    raise journal.Unavailable(f"{found}; run the command again on this machine, or copy the folder")
            if self._beats.ident is not None:  # also after a restore that failed
                self._closed.set()
                self._write_head(max(deadline_s - time.monotonic(), 1.0), is_closed=True)
        finally:
            self._closed.set()
            self._storage.close()
            self._pool.shutdown(wait=False, cancel_futures=True)
            shutil.rmtree(self._staging, ignore_errors=True)

    def _free(self, data: bytes) -> Head:
        """Returns the head as soon as its owner has ended; sets the generation. Raises ValueError if the owner is alive."""
        begun_s, first = time.monotonic(), Head.parse(data, self._storage.url)
        head = first
        is_own = _left_by(head, self.folder)  # by a process of this machine that no longer has the lock of the folder
        while not is_own and not head.is_closed and time.monotonic() - begun_s < LEASE_S:
            if head is first and time.monotonic() - begun_s < 1:
                text = f"{self._storage.url} was in use by {head.host} until {max(0.0, time.time() - head.time_s):.0f} s ago"
                cli.note(f"{text}; waiting {LEASE_S:.0f} s, in case that it is alive")
            time.sleep(min(1.0, LEASE_S / 4))
            found, self._generation = self._storage.read(HEAD, storage.START_S)
            head = Head.parse(found or b"", self._storage.url)
            if head != first and not head.is_closed:
                text = f"workdir {self._storage.url} is in use by another run ({head.host})"
                raise ValueError(f"{text}; wait, or use another --workdir")
        return head

    def _write_head(self, patience_s: float | None = None, **changes: Any) -> None:
        """Replaces the head of this owner. Raises ValueError if another has replaced it."""
        with self._lock:
            self.check()
            head = dataclasses.replace(self._head, beat=self._head.beat + 1, time_s=time.time(), **changes)
            data = head.encode()
            if self._is_restored:
                _leave(head, self.folder)  # first: after a kill, the folder is not older than the head
            generation = self._storage.write(HEAD, data, replaces=self._generation, patience_s=patience_s)
            if generation is None:
                found, generation = self._storage.read(HEAD, patience_s)
                if found != data:  # else the write before a lost reply was done
                    other = Head.parse(found or b"", self._storage.url).host
                    found = f"workdir {self._storage.url} is in use by another run now ({other})"
                    cause = f"it began at the same time, or this one was silent for {LEASE_S:.0f} s"
                    raise ValueError(f"{found} ({cause}); end one of the two")
            self._head, self._generation = head, generation

    def check(self) -> None:
        """Raises the error that ended the mirror, if there is one."""
        if self._failure:
            raise self._failure

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._write_head()

    def _save_all(self) -> None:
        known = {*self._present.values(), HEAD, f"manifests/{self._head.manifest}"}
        # Other objects belong to a run in a folder below, or to the user.
        own = [key for key in self._storage.keys() if key.startswith(("files/", "manifests/"))]
        self._write_head()  # then none of them is of a later owner
        self._storage.delete(key for key in own if key not in known)  # of a kill
        pause_s, retry_pauses = 0.0, retries.Backoff(RETRY_S, MAX_RETRY_S)
        while not self._closed.is_set():
            self._wake.wait(pause_s)
            is_last, begun_s = self._ending.is_set(), time.monotonic()
            try:
                capture_s = self._save()
            except (sqlite3.Error, _Incomplete, OSError) as error:
                if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                retry_s = retry_pauses.next_s()
                cli.note(f"{self.folder} could not be captured for its bucket ({error}); next try in {retry_s:.0f} s")
                self._closed.wait(retry_s)
                continue
            retry_pauses.reset()
            with self._changed:
                self._saved_s = begun_s
                self._changed.notify_all()
            if is_last:
                return
            pause_s = max(EVERY_S, 4 * capture_s)

    def _save(self) -> float:
        """Writes the state of this moment, if it is a new one. Returns the seconds of its capture."""
        begun_s, beat = time.monotonic(), self._head.beat
        captured = snapshot.capture(self.folder, self._staging, self._stamps)
        capture_s = time.monotonic() - begun_s
        if gone := _lasting(self._files) - _lasting(captured):  # then the bucket has the only copy
            remedy = "end the command and start it again, which restores them"
            raise _Incomplete(f"{', '.join(sorted(gone))} disappeared; {remedy}")
        stays = {path: file for path, file in self._files.items() if STAYS.match(path)}  # maybe not on this machine
        hashes = (path for path in {*stays, *captured} if path.endswith(HASHES))
        gone = {str(pathlib.PurePath(path).with_name(REDACTED)) for path in hashes}
        files = {path: file for path, file in stays.items() if path not in gone}
        for path, one in captured.items():
            files[path] = self._files[path] if one.link is None else self._upload(path, one, one.link, beat)
        stamps = {path: one.stamp for path, one in captured.items() if one.stamp}
        if files == self._files:
            self._stamps = stamps
            return capture_s
        data = snapshot.encode(files, beat)
        manifest, before = digests.of(data), self._head.manifest
        self._storage.write(f"manifests/{manifest}", data)
        self._write_head(manifest=manifest)
        self._files, self._stamps = files, stamps
        old = [f"manifests/{before}"] if before else []
        needed = {key for path, file in files.items() for key, *_ in file.blocks(path)}
        self._storage.delete([*({*self._present.values()} - needed), *old])
        self._present = {block: key for block, key in self._present.items() if key in needed}
        return capture_s

    def _upload(self, path: str, one: snapshot.Captured, link: pathlib.Path, beat: int) -> snapshot.File:
        """Writes the blocks of a file that the bucket does not have, with names that end with `beat`."""
        block_bytes = snapshot.BIG_BLOCK_BYTES if one.size >= snapshot.BIG_BYTES else snapshot.BLOCK_BYTES

        def send(offset: int) -> str:
            with open(link, "rb") as file:
                size = min(block_bytes, one.size - offset)
                data = os.pread(file.fileno(), size, offset)
            if len(data) != size:
                raise _Incomplete(f"{path} became shorter")
            digest = digests.of(data)
            if (path, digest) not in self._present:
                key = snapshot.block_key(path, f"{digest}.{beat}")
                self._storage.write(key, data)
                self._present[path, digest] = key
            return self._present[path, digest].rpartition("/")[2]

        found: list[str] = []
        offsets = iter(range(0, one.size, block_bytes))
        while some := list(itertools.islice(offsets, NUM_REQUESTS)):
            found += self._pool.map(send, some)
        return snapshot.File(one.size, one.mode, block_bytes, tuple(found))


class _Incomplete(Exception):
    """A file was truncated or removed meanwhile."""


def _read_files(bucket: storage.Storage, head: Head) -> dict[str, snapshot.File]:
    if not head.manifest:
        return {}
    key = f"manifests/{head.manifest}"
    data = snapshot.read(bucket, key, head.manifest, "head", storage.START_S)
    return snapshot.parse(data, f"{bucket.url}/{key}")


def _leave(head: Head, folder: pathlib.Path) -> None:
    """Records that the folder has all that the run had when it wrote this head."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(folder.parent / "owner.json", head.encode())


def _left_by(head: Head, folder: pathlib.Path) -> bool:
    """Returns True if the folder is the one of the head's owner, at this head or later: then it is newer than the bucket."""
    left = atomic_file.read_json(folder.parent / "owner.json", dict)
    return bool(head.owner) and left.get("owner") == head.owner and left["beat"] >= head.beat


def _is_whole(folder: pathlib.Path, files: Mapping[str, snapshot.File]) -> bool:
    """Returns False if the user has emptied the cache, or a part of it."""
    found = [*filter(pathlib.Path.is_file, folder.glob("*")), *folder.glob("checkpoints/*/*")]
    return _lasting(files) <= _lasting(path.relative_to(folder).as_posix() for path in found)


def _lasting(paths: Iterable[str]) -> set[str]:
    """Returns the names that a working directory keeps once it has them: its files at the top, and "checkpoints" if a step has one."""
    return {path.partition("/")[0] for path in paths if "/" not in path or MAY_LACK.match(path)}

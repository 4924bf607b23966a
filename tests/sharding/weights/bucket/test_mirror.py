"""A working directory in a bucket: another machine continues the run of the first, after a kill at any moment."""

import contextlib
import errno
import json
import os
import random
import shutil
import sqlite3
import threading
import time
from concurrent import futures

import pytest

from models import hub
from sharding.mesh import checkpoint
from sharding.weights import bucket
from sharding.weights.bucket import mirror, snapshot, storage
from sharding.weights.format import journal
from tests.support import proxy, s3_server


def machine(monkeypatch, tmp_path, name):
    """Continues on another machine, with a cache of its own."""
    monkeypatch.setenv("INTELLAX_BUCKET_CACHE", str(tmp_path / name))


def files(folder):
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    return {name: (path.read_bytes(), path.stat().st_mode & 0o777) for name, path in sorted(found.items())}


def write(folder, name, data, mode=0o644):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def check_swept(url):
    """Asserts that the bucket has one state, and no block that it does not name. Its run has ended: the next one need not wait."""
    place = storage.Storage(url)
    head = json.loads(place.read(mirror.HEAD)[0])
    manifest = f"manifests/{head['manifest']}"
    assert head["is_closed"]
    named = {key for path, file in snapshot.parse(place.read(manifest)[0], "").items() for key, *_ in file.blocks(path)}
    assert {*place.keys()} == named | {manifest, mirror.HEAD}


def abandon(one):
    """Ends a mirror as `kill -9` does."""
    one._closed.set()
    one._storage.close()
    one._wake.set()
    one._saves.join()


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path, monkeypatch):
    if request.param == "file":
        return f"file://{tmp_path}/bucket/run"
    s3_server.use(monkeypatch, request.getfixturevalue("s3"))
    return f"s3://{s3_server.BUCKET}/{tmp_path.name}/run"


def test_another_machine_gets_the_same_files(url, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "BLOCK_BYTES", 1000)
    random.seed(0)
    contents = {"config.json": b"{}", "weights.key": b"k" * 32, "checkpoints/2/state/d/a b": random.randbytes(5001)}
    contents |= {
        "checkpoints/2/seal.json": b"{}",
        "logs/empty": b"",
        "logs/late": b"",
        "rollouts/step_12/accepted.parquet": b"p" * 3000,
    }
    with bucket.mirrored(url):
        folder = bucket.local_folder(url)
        for name, data in contents.items():
            write(folder, name, data, 0o600 if name.endswith("key") else 0o644)
        for name in (
            ".lock",
            "checkpoints/3.orbax-checkpoint-tmp/x",
            "checkpoints/torn-1/x",
            "weights/v00000001/c.0",
            "weights/.tmp-removed-v0/c",
        ):
            write(folder, name, b"unfinished")
        with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as db, db:
            db.execute("CREATE TABLE t (x)")
            db.execute("INSERT INTO t VALUES (7)")
    here = files(folder)
    machine(monkeypatch, tmp_path, "other")
    with bucket.mirrored(url):
        there = files(other := bucket.local_folder(url))
        assert other != folder
        names = {*contents} - {"rollouts/step_12/accepted.parquet"}
        with contextlib.closing(sqlite3.connect(other / "ledger.db")) as db:
            assert db.execute("SELECT x FROM t").fetchall() == [(7,)]
        there.pop("ledger.db")
        assert {name: there[name] for name in names} == {name: here[name] for name in names} and {*there} == names
        write(other, "logs/empty", b"grown")
        (other / "logs/late").unlink()
    third = bucket.fetched(url, ["rollouts/*", "logs/*"])
    assert third == other  # the run is on this machine
    machine(monkeypatch, tmp_path, "third")
    copy = bucket.fetched(url, ["rollouts/*", "logs/*"])
    stayed = files(copy)
    assert {*stayed} == {"rollouts/step_12/accepted.parquet", "logs/empty"}
    assert stayed["logs/empty"][0] == b"grown" and stayed["rollouts/step_12/accepted.parquet"][0] == b"p" * 3000
    check_swept(url)


def test_readers_do_not_change_the_files_of_each_other(tmp_path, monkeypatch):
    """Readers of the same files, too, when the run has deleted one meanwhile. The copy of a reader that ended is used again."""
    url = f"file://{tmp_path}/bucket/run"

    def publish(version):
        with bucket.mirrored(url):
            shutil.rmtree(folder / "weights" / f"v{version - 1}", ignore_errors=True)
            write(folder, f"weights/v{version}/manifest.json", b"{}")
            write(folder, "ledger.db.txt", b"ledger")

    def process():
        """Continues as another process."""
        locks.append(dict(mirror._READING))
        monkeypatch.setattr(mirror, "_READING", {})

    folder, locks = bucket.local_folder(url), []
    publish(1)
    machine(monkeypatch, tmp_path, "other")
    first = bucket.fetched(url, ["weights/*"])
    assert {*files(bucket.fetched(url, ["ledger*"]))} == {"ledger.db.txt"}  # of the same process
    assert {*files(first)} == {"weights/v1/manifest.json"}
    by_hub = hub.folder(url, ["no"])
    machine(monkeypatch, tmp_path, "machine")
    publish(2)
    machine(monkeypatch, tmp_path, "other")
    process()
    second, third = bucket.fetched(url, ["weights/*"]), bucket.fetched(url, ["no", "weights/*"])
    assert {*files(second)} == {*files(third)} == {"weights/v2/manifest.json"}
    assert {*files(first)} == {*files(by_hub)} == {"weights/v1/manifest.json"}
    process()
    os.close(locks[0][first])
    assert bucket.fetched(url, ["weights/*"]) == first and {*files(first)} == {*files(second)}


def test_a_batch_that_was_redacted_is_deleted_in_the_bucket(url, tmp_path, monkeypatch):
    """Also by another machine, which restores the batches if it redacts them. Other batches stay."""
    steps = [f"rollouts/step_{step}/accepted.parquet" for step in (1, 2, 3)]
    with bucket.mirrored(url):
        folder = bucket.local_folder(url)
        for name in ("config.json", *steps):
            write(folder, name, name.encode())
    with bucket.mirrored(url):
        write(folder, "rollouts/step_1/redacted.json", b"{}")
        (folder / steps[0]).unlink()
    machine(monkeypatch, tmp_path, "other")
    with bucket.mirrored(url, with_batches=True):
        other = bucket.local_folder(url)
        assert {*files(other)} == {"config.json", *steps[1:], "rollouts/step_1/redacted.json"}
        write(other, "rollouts/step_2/redacted.json", b"{}")
        (other / steps[1]).unlink()
    check_swept(url)
    machine(monkeypatch, tmp_path, "third")
    found = {name for name in files(bucket.fetched(url, ["rollouts/*"]))}
    assert found == {steps[2], "rollouts/step_1/redacted.json", "rollouts/step_2/redacted.json"}


def test_a_file_that_grows_sends_its_end_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "BLOCK_BYTES", 1000)
    url, sent, put = f"file://{tmp_path}/bucket", [], storage.Storage.write

    def counted(self, key, data, **options):
        sent.append(key)
        return put(self, key, data, **options)

    monkeypatch.setattr(storage.Storage, "write", counted)
    for size, num in ((3500, 4), (3900, 1), (3900, 0), (4100, 2)):
        with bucket.mirrored(url):
            with open(bucket.local_folder(url) / "metrics.jsonl", "ab") as file:
                file.write(bytes(i % 251 for i in range(file.tell(), size)))
        blocks = [key for key in sent if key.startswith("files/")]
        assert len(blocks) == num, size
        sent.clear()


def test_content_that_comes_back_is_written_again(tmp_path, monkeypatch):
    """Its blocks were deleted with the state before."""
    url = f"file://{tmp_path}/bucket"
    with bucket.mirrored(url):
        one = mirror._MIRRORS[folder := bucket.local_folder(url)]
        for data in (b"1", b"22", b"1"):
            write(folder, "a", data)
            proxy.wait_until(lambda data=data: "a" in one._files and one._files["a"].size == len(data))
    machine(monkeypatch, tmp_path, "other")
    assert files(bucket.fetched(url))["a"][0] == b"1"
    check_swept(url)


class Run(threading.Thread):
    """A run by the order of its writes: group in the ledger, group in the log, batch in the ledger, checkpoint, weights."""

    def __init__(self, folder, start):
        super().__init__(daemon=True)
        self.folder, self.start_step, self.is_ended = folder, start, False

    def run(self):
        with contextlib.closing(sqlite3.connect(self.folder / "ledger.db", timeout=30)) as db:
            db.execute("PRAGMA synchronous = OFF")
            with db:
                db.execute("CREATE TABLE IF NOT EXISTS t (x)")
            step = self.start_step
            while not self.is_ended:
                step += 1
                time.sleep(0.005)
                with db:
                    db.execute("INSERT INTO t VALUES (?)", (f"group {step}",))
                with open(self.folder / "open.log", "a") as log:
                    log.write(f"group {step}\n")
                with db:
                    db.execute("INSERT INTO t VALUES (?)", (f"batch {step}",))
                made = self.folder / f"checkpoints/{step}.orbax-checkpoint-tmp"
                write(made, "state", b"%d" % step)
                write(made, "head", b"batch %d" % step)
                made.rename(made.with_name(str(step)))
                weights = self.folder / f"weights/v{step:08d}"
                write(weights, "c.0", b"%d" % step)
                write(weights, "manifest.json", b"batch %d" % step)
                with contextlib.suppress(FileNotFoundError):
                    old = self.folder / f"weights/v{step - 2:08d}"
                    old.rename(self.folder / f"weights/.tmp-removed-{step}")


def test_any_state_in_the_bucket_is_one_that_a_kill_leaves(tmp_path, monkeypatch):
    url, step, seen = f"file://{tmp_path}/bucket", 0, []
    for turn in range(5):
        machine(monkeypatch, tmp_path, f"machine{turn}")
        one = mirror.Mirror(url, bucket.local_folder(url))
        one.open()
        folder = one.folder
        ledger = []
        if (folder / "ledger.db").exists():
            with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as db:
                ledger = [row[0] for row in db.execute("SELECT x FROM t")]
        log = (folder / "open.log").read_text().splitlines() if (folder / "open.log").exists() else []
        assert {*log} <= {*ledger}
        assert {f"group {entry.split()[1]}" for entry in ledger if entry.startswith("batch")} <= {*log}
        for kind, content, mark in (("checkpoints", "state", "head"), ("weights", "c.0", "manifest.json")):
            for path in (folder / kind).glob("*"):
                assert (path / mark).read_text() in ledger
                assert path.name.strip("v").lstrip("0") == (path / content).read_text()
        step = int(log[-1].split()[1]) if log else 0
        seen.append(step)
        run = Run(folder, step)
        run.start()
        if turn % 2 == 0:
            name = f"checkpoints/{step + 2}/head"
            proxy.wait_until(lambda one=one, name=name: name in one._files, 60)
        time.sleep(random.Random(turn).uniform(0.1, 0.4))
        abandon(one)
        run.is_ended = True
        run.join()
        time.sleep(0.05)
    assert seen == sorted(seen) and seen[-1] >= 4
    with bucket.mirrored(url):  # sweeps the blocks of the kills
        pass
    check_swept(url)


def test_files_that_change_meanwhile_are_captured_as_they_are_linked(tmp_path, monkeypatch):
    """A deleted one is left out, with its version. Versions come first: they depend on earlier lines of the other files."""
    folder = tmp_path / "run"
    for name in ("checkpoints/1/a", "checkpoints/1/b", "checkpoints/2/a", "open/1.log", "open/2.log"):
        write(folder, name, b"1")
        os.utime(folder / name, (1, 1))
    link, seen = os.link, []

    def racing(source, target):
        seen.append(source.parent.name)
        if source == folder / "open/1.log" or (source.parent.name == "1" and seen.count("1") == 2):
            source.unlink()
        if source == folder / "open/2.log":
            write(folder, "new", b"22")
            (folder / "new").replace(source)
        link(source, target)

    monkeypatch.setattr(snapshot.os, "link", racing)
    found = snapshot.capture(folder, tmp_path / "staging", {})
    assert [(name, one.size, one.stamp is None) for name, one in found.items()] == [
        ("checkpoints/2/a", 1, False),
        ("open/2.log", 2, True),  # too young: it may change again at the same time
    ]
    again = snapshot.capture(folder, tmp_path / "staging", {name: one.stamp for name, one in found.items()})
    assert [again[name].link is None for name in found] == [True, False]


def test_two_runs_do_not_use_one_working_directory(url, tmp_path, monkeypatch):
    with bucket.mirrored(url):
        machine(monkeypatch, tmp_path, "other")
        with pytest.raises(ValueError, match=r"run is in use by another run \(.*process"), bucket.mirrored(url):
            raise AssertionError
    with bucket.mirrored(url):  # the end of a run frees it
        pass
    with bucket.mirrored(f"{url}/below"):
        write(bucket.local_folder(f"{url}/below"), "a", b"1")
    machine(monkeypatch, tmp_path, "third")
    with bucket.mirrored(url):
        pass
    assert {*files(bucket.fetched(f"{url}/below"))} == {"a"}


def test_a_silent_run_is_replaced_and_notices_it(url, tmp_path, monkeypatch):
    first = mirror.Mirror(url, bucket.local_folder(url))
    first.open()
    write(first.folder, "a", b"1")
    proxy.wait_until(lambda: first._files)
    first._lock.acquire()  # paused between two writes of its head, as on a suspended machine
    machine(monkeypatch, tmp_path, "other")
    with bucket.mirrored(url):
        write(bucket.local_folder(url), "b", b"2")
        write(first.folder, "c", b"3")
        first._lock.release()
        proxy.wait_until(lambda: first._failure)
        monkeypatch.setitem(mirror._MIRRORS, first.folder, first)
        with (
            checkpoint.Checkpointer(first.folder / "checkpoints", every=2) as checkpointer,
            pytest.raises(ValueError, match="is in use by another run now"),
        ):
            checkpointer.save(1, {}, {})  # also of a step without a checkpoint
        with pytest.raises(ValueError, match="is in use by another run now"):
            first.pace()
        with pytest.raises(ValueError, match="is in use by another run now"):
            first.close(1.0)
    machine(monkeypatch, tmp_path, "third")
    assert {*files(bucket.fetched(url))} == {"a", "b"}


@pytest.mark.parametrize(("late", "data"), [("keys", b"1"), ("delete", b"1"), ("delete", b"")])
def test_a_suspended_run_deletes_nothing_of_its_successor(late, data, tmp_path, monkeypatch):
    """It is suspended before it lists or deletes objects, while the successor writes the same file, or the same state, again."""
    url, resumed, is_done = f"file://{tmp_path}/bucket", threading.Event(), threading.Event()
    with bucket.mirrored(url):
        write(bucket.local_folder(url), "d/a", data)
    first = mirror.Mirror(url, bucket.local_folder(url))
    call, begun_s = getattr(first._storage, late), first._saved_s

    def suspended(*args):
        resumed.wait()
        found = call(*args)
        is_done.set()
        return found

    if late == "keys":
        first._storage.keys = suspended
    first.open()
    if late == "delete":
        proxy.wait_until(lambda: first._saved_s > begun_s)
        first._storage.delete = suspended
        (first.folder / "d/a").unlink()
        proxy.wait_until(lambda: not first._files)
    first._lock.acquire()  # nor does it write its head
    machine(monkeypatch, tmp_path, "other")
    with bucket.mirrored(url):
        write(bucket.local_folder(url), "d/a", data)
        if data:
            write(bucket.local_folder(url), "b", b"2")
    resumed.set()
    first._lock.release()
    proxy.wait_until(is_done.is_set)
    write(first.folder, "c", b"3")
    first._saves.join(10)
    assert "is in use by another run now" in str(first._failure)
    machine(monkeypatch, tmp_path, "third")
    assert {*files(bucket.fetched(url))} == ({"d/a", "b"} if data else {"d/a"})


@pytest.mark.parametrize(
    "lost", [["weights.key"], ["checkpoints/2/a"], ["weights.key", "config.json", "checkpoints/2/a"]]
)
def test_a_cache_that_was_emptied_does_not_empty_the_bucket(lost, tmp_path, monkeypatch):
    url, names = f"file://{tmp_path}/bucket", {"weights.key", "config.json", "checkpoints/2/a"}
    with bucket.mirrored(url):
        for name in names:
            write(bucket.local_folder(url), name, b"1")
    for name in lost:
        (bucket.local_folder(url) / name).unlink()
    assert {*files(bucket.fetched(url))} == names
    with bucket.mirrored(url):
        assert {*files(bucket.local_folder(url))} == names


def test_a_cache_that_is_emptied_during_the_run_does_not_empty_the_bucket(tmp_path, monkeypatch, capsys):
    url, names = f"file://{tmp_path}/bucket", {"weights.key", "checkpoints/2/a", "logs/a"}
    for name in ("RETRY_S", "MAX_RETRY_S", "EVERY_S", "FAILED_CLOSE_S"):
        monkeypatch.setattr(mirror, name, 0.02)
    folder = bucket.local_folder(url)
    with pytest.raises(KeyboardInterrupt), bucket.mirrored(url):
        for name in names:
            write(folder, name, b"1")
        mirror._MIRRORS[folder]._wake.set()
        proxy.wait_until(lambda: "checkpoints/2/a" in mirror._MIRRORS[folder]._files, 10.0, "the first state")
        shutil.rmtree(folder / "checkpoints")
        shutil.rmtree(folder / "logs")  # no run needs it, but the whole folder is going
        proxy.wait_until(lambda: "checkpoints disappeared" in capsys.readouterr().err, 10.0, "the notice")
        (folder / "weights.key").unlink()
        proxy.wait_until(lambda: "checkpoints, weights.key dis" in capsys.readouterr().err, 10.0, "another notice")
        raise KeyboardInterrupt
    with bucket.mirrored(url):
        assert {*files(folder)} == names


def test_large_objects_have_more_time_than_small_ones(tmp_path, monkeypatch):
    """A link of 20 Mbit/s sends 8 blocks of 16 MiB in 54 s."""
    monkeypatch.setattr(storage, "TRY_S", 0.05)
    monkeypatch.setattr(storage, "SLOWEST", 100)
    place = storage.Storage(f"file://{tmp_path}/bucket")
    fast, pool = place._store, futures.ThreadPoolExecutor()

    class Slow:
        def write(self, *args, **options):
            return pool.submit(lambda: time.sleep(0.3) or fast.write(*args, **options).result())

        def read(self, *args):
            return pool.submit(lambda: time.sleep(0.3) or fast.read(*args).result())

    place._store = Slow()
    assert place.write("a", bytes(100), patience_s=0.1)
    assert place.read("a", 0.1, 100)[0] == bytes(100)
    with pytest.raises(journal.Unavailable, match="has not answered"):
        place.write("a", b"1", patience_s=0.1)
    pool.shutdown()


def test_an_older_copy_of_the_machine_does_not_replace_the_state(tmp_path, monkeypatch):
    """A disk that is put back from a backup has the name of the owner."""
    url = f"file://{tmp_path}/bucket"
    for name in "ab":
        with bucket.mirrored(url):
            write(bucket.local_folder(url), name, b"1")
        shutil.copytree(tmp_path / "machine", tmp_path / f"backup {name}")
    for name, num_restored in (("b", 0), ("a", 2)):
        machine(monkeypatch, tmp_path, f"backup {name}")
        monkeypatch.setattr(mirror.cli, "note", (notes := []).append)
        with bucket.mirrored(url):
            assert {*files(bucket.local_folder(url))} == {"a", "b"}
        assert [line for line in notes if line.startswith(f"restoring {num_restored} files")] == notes


def test_a_killed_restore_is_not_taken_for_the_run(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/bucket"
    with bucket.mirrored(url):
        for name in "abc":
            write(bucket.local_folder(url), name, name.encode())
    machine(monkeypatch, tmp_path, "other")
    read = snapshot.read

    def killed(storage, key, *args):
        if key.startswith("files/"):
            raise KeyboardInterrupt
        return read(storage, key, *args)

    monkeypatch.setattr(snapshot, "read", killed)
    with pytest.raises(KeyboardInterrupt), bucket.mirrored(url):
        raise AssertionError
    monkeypatch.setattr(snapshot, "read", read)
    folder = bucket.local_folder(url)
    write(folder, "a", b"x")  # as long as the real one
    write(folder, ".lock", b"")
    write(folder, "others/x", b"of an older state")
    with bucket.mirrored(url):
        assert {data for data, _ in files(folder).values()} == {b"", b"a", b"b", b"c"}
        assert not (folder / "others").exists()  # an empty step would be one


@pytest.mark.parametrize("is_written", [True, False])
def test_a_kill_at_a_write_of_the_head_leaves_the_run_to_its_machine(is_written, tmp_path, monkeypatch):
    """Its folder is newer than the bucket: a file since then is not lost, and the next start does not wait for a lease."""
    url, put = f"file://{tmp_path}/bucket", storage.Storage.write

    def killed(self, key, data, **options):
        is_last = key == mirror.HEAD and '"manifest": ""' not in data.decode()
        found = put(self, key, data, **options) if is_written or not is_last else None
        if is_last:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(storage.Storage, "write", killed)
    one = mirror.Mirror(url, bucket.local_folder(url))
    one.open()
    write(one.folder, "a", b"1")
    proxy.wait_until(lambda: one._failure)
    one._closed.set()
    write(one.folder, "b", b"2")
    monkeypatch.setattr(storage.Storage, "write", put)
    monkeypatch.setattr(mirror, "LEASE_S", 60.0)
    begun_s = time.monotonic()
    with bucket.mirrored(url):
        assert {*files(one.folder)} == {"a", "b"} and time.monotonic() - begun_s < 30


def test_a_reader_that_is_overtaken_reads_the_newer_state(tmp_path, monkeypatch):
    url, restore, is_overtaken = f"file://{tmp_path}/bucket", snapshot.restore, []
    with bucket.mirrored(url):
        write(bucket.local_folder(url), "a", b"1")

    def slow(*args):
        if not is_overtaken:
            is_overtaken.append(True)
            machine(monkeypatch, tmp_path, "machine")
            with bucket.mirrored(url):
                write(bucket.local_folder(url), "a", b"2")
        return restore(*args)

    monkeypatch.setattr(snapshot, "restore", slow)
    machine(monkeypatch, tmp_path, "reader")
    assert files(bucket.fetched(url))["a"][0] == b"2"


def test_a_file_that_shrinks_meanwhile_is_captured_again(tmp_path, monkeypatch, capsys):
    url, pread, is_short = f"file://{tmp_path}/bucket", os.pread, []

    def short(*args):
        found = pread(*args)
        return found if is_short else is_short.append(True) or found[:-1]

    monkeypatch.setattr(mirror, "RETRY_S", 0.01)
    monkeypatch.setattr(mirror.os, "pread", short)
    with bucket.mirrored(url):
        write(bucket.local_folder(url), "a", b"12")
    assert capsys.readouterr().err.count("a became shorter") == 1
    machine(monkeypatch, tmp_path, "other")
    assert files(bucket.fetched(url))["a"][0] == b"12"


def test_a_lost_connection_is_survived(s3, tmp_path, monkeypatch, capsys):
    with proxy.Proxy(s3) as link:
        s3_server.use(monkeypatch, link.url)
        url = f"s3://{s3_server.BUCKET}/{tmp_path.name}"
        monkeypatch.setattr(storage, "TRY_S", 0.5)
        monkeypatch.setattr(mirror, "BACKLOG_S", 1.0)
        with bucket.mirrored(url):
            folder = bucket.local_folder(url)
            write(folder, "a", b"1")
            time.sleep(0.5)
            link.fault = lambda rng: rng.choice(["refuse", "stall", ("reset", 50)])
            write(folder, "b", b"2")
            time.sleep(1.2)
            healed = threading.Timer(1.0, link.heal)
            healed.start()
            begun_s = time.monotonic()
            bucket.pace(folder)  # the next checkpoint waits
            assert time.monotonic() - begun_s > 0.5
        lines = capsys.readouterr().err
        assert f"bucket {url} has not answered for" in lines and "answers again after" in lines
        assert "the run waits for the bucket" in lines
        machine(monkeypatch, tmp_path, "other")
        assert {*files(bucket.fetched(url))} == {"a", "b"}


def test_a_start_waits_for_a_silent_bucket(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "TRY_S", 0.3)
    with proxy.Proxy(s3) as link:
        s3_server.use(monkeypatch, link.url)
        link.fault = lambda rng: "stall"
        threading.Timer(1.0, link.heal).start()
        with bucket.mirrored(f"s3://{s3_server.BUCKET}/{tmp_path.name}"):
            pass


def test_a_reply_that_is_lost_is_not_a_takeover(tmp_path, monkeypatch):
    url, put, is_lost = f"file://{tmp_path}/bucket", storage.Storage.write, []

    def lossy(self, key, data, **options):
        found = put(self, key, data, **options)
        if key == mirror.HEAD and len(is_lost) < 3:
            is_lost.append(key)
            return None  # as for the second try of a request that was done
        return found

    monkeypatch.setattr(storage.Storage, "write", lossy)
    with bucket.mirrored(url):
        write(bucket.local_folder(url), "a", b"1")
    assert len(is_lost) == 3


def test_the_end_waits_for_the_bucket_and_fails_in_one_line(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/bucket"
    monkeypatch.setattr(mirror, "CLOSE_S", 0.5)
    with pytest.raises(journal.Unavailable, match="lacks the last state of the run, which is in"), bucket.mirrored(url):
        folder = bucket.local_folder(url)
        monkeypatch.setattr(mirror.snapshot, "capture", lambda *args: time.sleep(3))
        write(folder, "a", b"1")
    monkeypatch.undo()
    monkeypatch.setenv("INTELLAX_BUCKET_CACHE", str(tmp_path / "machine"))
    with bucket.mirrored(url):  # on the same machine, nothing is lost
        assert {*files(folder)} == {"a"}


def test_a_full_disk_delays_a_capture(tmp_path, monkeypatch, capsys):
    url, capture = f"file://{tmp_path}/bucket", snapshot.capture
    errors = [OSError(errno.ENOSPC, "No space left"), OSError(errno.EDQUOT, "Disk quota exceeded")]
    errors += [sqlite3.OperationalError("database or disk is full")]
    monkeypatch.setattr(mirror, "RETRY_S", 0.01)
    monkeypatch.setattr(
        snapshot, "capture", lambda *args: (_ for _ in ()).throw(errors.pop()) if errors else capture(*args)
    )
    with bucket.mirrored(url):
        write(bucket.local_folder(url), "a", b"1")
    assert capsys.readouterr().err.count("could not be captured for its bucket") == 3
    machine(monkeypatch, tmp_path, "other")
    assert {*files(bucket.fetched(url))} == {"a"}


def test_damaged_and_foreign_objects_are_refused(tmp_path, monkeypatch):
    root, url = tmp_path / "bucket", f"file://{tmp_path}/bucket"
    with bucket.mirrored(url):
        write(bucket.local_folder(url), "a", b"data")
    machine(monkeypatch, tmp_path, "other")
    (block,) = (root / "files/a").iterdir()
    block.write_bytes(b"DATA")
    with pytest.raises(journal.CorruptSource, match="is damaged; put it back"):
        bucket.fetched(url)
    block.unlink()
    for _ in range(2):  # the first one leaves no lease
        with pytest.raises(FileNotFoundError, match="although the newest manifest names it"), bucket.mirrored(url):
            raise AssertionError
        assert json.loads((root / "head.json").read_text())["is_closed"]
    head = json.loads((root / "head.json").read_text())
    manifest = root / "manifests" / head["manifest"]
    manifest.write_bytes(snapshot.encode({}, 1))
    with pytest.raises(journal.CorruptSource, match="manifests/.* is damaged; put it back"):
        bucket.fetched(url)
    rows = [(path, 0, 0o644, 1000) for path in ("../a", "/etc/a", "", "a/../../b", "a//b", "./a", ".lock")]
    rows += [("a", 0, 0o4755, 1000), ("a", 0, -1, 1000), ("a", 10, 0o644, -1), ("a", float("inf"), 0o644, 1000)]
    bad = [snapshot.encode({path: snapshot.File(*numbers, ())}, 1) for path, *numbers in rows]
    for data in (*bad, b"[" * 10**5):
        with pytest.raises(journal.CorruptSource, match="is not the manifest"):
            snapshot.parse(data, "here")
    for text in (json.dumps(head | {"manifest": "../x"}), "[" * 10**5):
        (root / "head.json").write_text(text)
        with pytest.raises(ValueError, match="does not belong to the working directory of a run"):
            bucket.fetched(url)
    write(tmp_path / "other_bucket", "photo.jpg", b"1")
    with (
        pytest.raises(ValueError, match=r"has objects such as photo.jpg, but no run"),
        bucket.mirrored(f"file://{tmp_path}/other_bucket"),
    ):
        raise AssertionError
    with pytest.raises(ValueError, match="is not the working directory of a run"):
        bucket.fetched(f"file://{tmp_path}/nothing")


def test_a_block_that_arrives_damaged_is_read_again(tmp_path, monkeypatch):
    url, read, damaged = f"file://{tmp_path}/bucket", storage.Storage.read, []
    with bucket.mirrored(url):
        write(bucket.local_folder(url), "a", b"data")

    def flipped(self, key, *args):
        data, generation = read(self, key, *args)
        if not key.startswith("files/") or damaged:
            return data, generation
        damaged.append(key)
        return b"DATA", generation

    monkeypatch.setattr(storage.Storage, "read", flipped)
    machine(monkeypatch, tmp_path, "other")
    assert files(bucket.fetched(url))["a"][0] == b"data" and damaged


def test_a_checkpoint_without_a_block_is_left_out(tmp_path, monkeypatch, capsys):
    """But not the parameters that all checkpoints share."""
    url, root = f"file://{tmp_path}/bucket", tmp_path / "bucket/files/checkpoints"
    with bucket.mirrored(url):
        for name in ("config.json", "checkpoints/2/a", "checkpoints/4/a", "checkpoints/frozen/0/a"):
            write(bucket.local_folder(url), name, b"1")
    (block,) = (root / "4/a").iterdir()
    block.unlink()
    machine(monkeypatch, tmp_path, "other")
    with bucket.mirrored(url):
        assert {*files(bucket.local_folder(url))} == {"config.json", "checkpoints/2/a", "checkpoints/frozen/0/a"}
    assert capsys.readouterr().err.count("Going on without checkpoints/4/a\n") == 1
    (block,) = (root / "frozen/0/a").iterdir()
    block.unlink()
    machine(monkeypatch, tmp_path, "third")
    with pytest.raises(FileNotFoundError, match="checkpoints/frozen/0/a/.* does not exist"), bucket.mirrored(url):
        raise AssertionError


def test_paths_and_urls_are_told_apart(tmp_path):
    assert bucket.local_folder("runs/a").is_absolute() and bucket.fetched(tmp_path) == tmp_path
    assert bucket.local_folder("s3://b/runs/a/").name == "a"
    assert bucket.local_folder("s3://b/a") != bucket.local_folder("gs://b/a")
    with bucket.mirrored(tmp_path):
        bucket.pace(tmp_path)
    for wrong in ("http://host/a", "s3://", "s3:///", "S3:///"):
        with pytest.raises(ValueError, match="is not the URL of a bucket; write gs://BUCKET/PATH"):
            bucket.is_url(wrong)


def test_the_region_and_the_server_of_the_environment_are_used(s3, monkeypatch):
    s3_server.use(monkeypatch, s3)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    spec = storage.open_store(f"s3://{s3_server.BUCKET}/a").spec().to_json()
    assert (spec["aws_region"], spec["endpoint"]) == ("eu-west-1", s3)


def test_a_missing_bucket_is_one_line(s3, monkeypatch):
    s3_server.use(monkeypatch, s3)
    with (
        pytest.raises(ValueError, match=r"bucket s3://absent/run: NOT_FOUND.*check its name"),
        bucket.mirrored("s3://absent/run"),
    ):
        raise AssertionError
    monkeypatch.setattr(storage, "START_S", 0.3)
    s3_server.use(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(journal.Unavailable, match="has not answered for 0 s"), bucket.mirrored("s3://absent/run"):
        raise AssertionError

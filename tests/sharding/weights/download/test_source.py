"""Sources hand out verified bytes or a clear error, whichever relay lies, lags or dies."""

import collections
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from sharding.weights.download import range_get, source
from sharding.weights.format import head, journal
from tests.support import proxy

TRUSTED = proxy.public(proxy.KEY)
FAST = range_get.Options(patience_s=3.0, connect_s=1.0, stall_s=1.0, seed=0)
SMALL_RANGES = range_get.Options(patience_s=5.0, connect_s=1.0, stall_s=1.0, range_bytes=10_000, seed=0)


@pytest.fixture
def root(tmp_path):
    proxy.publish(tmp_path / "pub", 0, proxy.contents(0))
    proxy.sign(tmp_path / "pub")
    return tmp_path / "pub"


def tamper(root, target, version=0, flip=100):
    """A copy of a publisher's directory in which every object of some length has one bit wrong."""
    shutil.copytree(root, target)
    for path in (target / journal.dirname(version) / "tensors").rglob("c.*"):
        data = bytearray(path.read_bytes())
        if len(data) > flip:
            data[flip] ^= 1
            path.write_bytes(data)
    return target


BIG = "tensors/t0/c.0"


def read(opened, objects, path):
    return source.read(opened, 0, journal.Object(**proxy.entry(path, objects[path])))


# ---- opening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ([], {}, "no source is given"),
        (["http://a:1", "/tmp"], {}, "are not all relays"),
        (["/a", "/b"], {}, "are not all relays"),
        (
            ["http://a:1", "http://b:1"],
            {},
            "relays http://a:1, http://b:1 are given without a key, .*; pass the run's public",
        ),
        ("ftp://a", {}, "unknown scheme"),
        ("localhost:8200", {}, "write http://localhost:8200"),
        ("http://", {}, "is not a URL"),
        ("http://a/?x=1", {}, "is not a URL"),
        ("/tmp", {"trusted_key": "abc"}, "64 lowercase hex digits"),
    ],
)
def test_what_is_no_source_is_refused(what, options, message):
    with pytest.raises(ValueError, match=message):
        source.open(what, **options)


def test_a_worker_reads_from_relays_without_jax_or_tensorstore():
    code = "import sys, sharding.weights.download.source, sharding.weights.relay.server; sys.exit(any(m in sys.modules for m in ('jax', 'tensorstore')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ENTRY = {"path": "a/b.0", "size": 3, "digest": "0" * 64}


HOSTILE = {
    "path": ("", "a\nb", "a" * 300, 7, *"../x /etc/passwd a//b a/../b a/.part-0 manifest.json objects.jsonl".split()),
    "size": (-1, 1 << 60, 1.0, True),
    "digest": ("0" * 63, "A" * 64, None),
    "more": (1,),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in HOSTILE.items() for value in values])
def test_a_hostile_entry_is_refused(field, value):
    assert journal.Object(**ENTRY).path == "a/b.0"
    with pytest.raises(journal.CorruptSource):
        journal.parse_journal(json.dumps({**ENTRY, field: value}).encode() + b"\n")


def test_a_line_without_its_end_is_not_an_entry_yet():
    line = json.dumps(ENTRY).encode() + b"\n"
    assert journal.parse_journal(line + line[:-1]) == ([journal.Object(**ENTRY)], len(line))
    with pytest.raises(journal.CorruptSource, match="JSONDecodeError"):
        journal.parse_journal(b"{\n")


# ---- a directory and a bucket ----------------------------------------------------------------------------------------


def test_wrong_bytes_never_leave_a_directory(root, tmp_path):
    objects = proxy.contents(0)
    opened = source.open(tamper(root, tmp_path / "bad"))
    with pytest.raises(journal.CorruptSource, match="digest"):
        read(opened, objects, "tensors/t3/c.0")
    path = tmp_path / "bad" / "v00000000" / "tensors/t4/c.0"
    os.truncate(path, 7)
    with pytest.raises(journal.CorruptSource, match="7 bytes, not the 200001"):
        read(opened, objects, "tensors/t4/c.0")
    path.unlink()
    with pytest.raises(journal.CorruptSource, match="missing"):
        read(opened, objects, "tensors/t4/c.0")
    shutil.rmtree(tmp_path / "bad" / "v00000000")
    with pytest.raises(FileNotFoundError, match="deleted while it was read"):
        read(opened, objects, "tensors/t4/c.0")
    with pytest.raises(FileNotFoundError, match="no version 0"):
        opened.manifest(0)


def test_a_directory_lists_what_grows(root):
    (root / head.NAME).unlink()
    opened = source.open(root)
    assert opened.listing() == journal.Listing((0,), ())
    objects = proxy.contents(1)
    threading.Timer(0.1, proxy.begin, (root, 1, dict(list(objects.items())[:2]))).start()
    assert opened.listing(5.0, opened.listing()) == journal.Listing((0,), (1,))
    proxy.wait_until(lambda: (root / "v00000001/objects.jsonl").read_bytes().count(b"\n") == 2)
    assert [e.path for e in opened.entries(1)] == list(objects)[:2]
    assert opened.entries(1, wait_s=0.05) == []
    shutil.rmtree(root / "v00000001")  # the publisher died, and its successor begins anew
    other = proxy.contents(2)
    proxy.publish(root, 1, other)
    assert [e.path for e in opened.entries(1, wait_s=1.0)] == list(other)


def test_a_bucket_lists_what_grows_and_gives_no_wrong_bytes(root, tmp_path):
    opened, objects = source.open(f"file://{root}", trusted_key=TRUSTED), proxy.contents(0)
    proxy.begin(root, 7, objects)
    signed = proxy.sign(root, writing=7)
    assert opened.listing() == journal.Listing((0,), (7,), signed)
    assert [e.path for e in opened.entries(7)] == list(objects) and opened.entries(7) == []
    bad = source.open(f"file://{tamper(root, tmp_path / 'bad')}")
    with pytest.raises(journal.CorruptSource, match="digest"):
        read(bad, objects, "tensors/t3/c.0")


@pytest.mark.parametrize("kind", ["directory", "bucket", "relays", "relays that lie"])
def test_bytes_go_where_they_are_wanted(root, tmp_path, kind, opening):
    """An array of chunks without checksums, each of which has its own place; the bytes around it stay as they were."""
    path, data = "tensors/t4/c.0", proxy.contents(0)["tensors/t4/c.0"]
    entry = journal.Object(**proxy.entry(path, data))
    with proxy.running(root) as good, proxy.running(tamper(root, tmp_path / "bad")) as bad:
        for relay in (good, bad):
            proxy.wait_until(proxy.holds(relay, 0))
        relays = [bad.url, good.url] if kind == "relays that lie" else good.url
        place = {"directory": root, "bucket": f"file://{root}"}.get(kind, relays)
        opened = opening(place, options=SMALL_RANGES, trusted_key=TRUSTED)
        array, checksum = bytearray(b"?" * (len(data) + 6)), bytearray(4)
        into = [memoryview(array)[5 : 5 + len(data) - 4], memoryview(b""), memoryview(checksum)]
        for _ in range(3):
            array[5:-5] = bytes(len(data) - 4)
            opened.read(0, entry, into)
            assert array == b"?????" + data[:-4] + b"?????" and checksum == data[-4:]
        for wrong in (into[:1], [*into, memoryview(bytearray(1))]):
            with pytest.raises(ValueError, match=f"{path} has {len(data)} bytes, the views .*; pass views"):
                opened.read(0, entry, wrong)
        with pytest.raises(ValueError, match="not a relative path of letters"):
            opened.read(0, dataclasses.replace(entry, path="../v00000000/tensors/t4/c.0"), into)


# ---- relays ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def origin(root):
    with proxy.running(root, holding=[0]) as relay:
        yield relay


@pytest.fixture
def opening():
    opened = []

    def open_source(*args, options=FAST, **kwargs):
        opened.append(source.open(*args, options=options, **kwargs))
        return opened[-1]

    yield open_source
    for one in opened:
        one.close()


@pytest.mark.parametrize("kind", ["directory", "bucket", "relays"])
def test_a_source_gives_what_was_published(root, origin, opening, kind):
    place = {"directory": root, "bucket": f"file://{root}", "relays": origin.url}[kind]
    opened = opening(place, trusted_key=TRUSTED, options=SMALL_RANGES)
    assert opened.versions() == [0]
    assert proxy.read_all(opened, 0, proxy.contents(0)) == proxy.contents(0)
    with pytest.raises(FileNotFoundError, match="no version 3"):
        opened.manifest(3)
    missing = (
        (journal.CorruptSource, "missing from its") if kind == "directory" else (FileNotFoundError, "on none|not exist")
    )
    with pytest.raises(missing[0], match=missing[1]):
        source.read(opened, 0, journal.Object("tensors/none", 5, "0" * 64))


def test_a_big_object_comes_from_several_relays(root, origin, opening):
    with proxy.running(root, holding=[0]) as second:
        opened = opening([origin.url, second.url], trusted_key=TRUSTED, options=SMALL_RANGES)
        objects = proxy.contents(0)
        for _ in range(5):
            assert read(opened, objects, "tensors/t4/c.0") == objects["tensors/t4/c.0"]
        assert all(relay["num_bytes"] > 100_000 for relay in opened.stats()["relays"].values())


@pytest.mark.parametrize("options", [FAST, SMALL_RANGES])
def test_a_liar_is_found_and_named(root, origin, opening, tmp_path, options):
    with proxy.running(tamper(root, tmp_path / "bad"), holding=[0]) as liar:
        opened = opening([liar.url, origin.url], trusted_key=TRUSTED, options=options)
        objects, path = proxy.contents(0), "tensors/t4/c.0"
        for seed in range(8):  # where the ranges of an object come from both, the one with the wrong range is at fault
            seeded = dataclasses.replace(options, seed=seed)
            fresh = opening([liar.url, origin.url], trusted_key=TRUSTED, options=seeded)
            assert read(fresh, objects, path) == objects[path]
            found = fresh.stats()
            lies = [found["relays"][relay.url]["num_lies"] for relay in (liar, origin)]
            assert (lies[0] > 0, lies[1]) == (found["num_bad_objects"] > 0, 0)
        assert all(proxy.read_all(opened, 0, objects) == objects for _ in range(3))
        stats = opened.stats()["relays"]
        assert stats[liar.url]["num_lies"] >= 1 and stats[origin.url]["num_lies"] == 0
        # a corrupt reply costs the relay its later requests
        assert stats[origin.url]["num_bytes"] > stats[liar.url]["num_bytes"]


@pytest.mark.parametrize("size", [70_000, 71_000])
def test_a_relay_that_has_a_number_of_a_resumed_run_already_is_no_liar(root, origin, opening, tmp_path, size):
    """Readers of the old objects suspended it for up to a minute: its bytes are not the old ones, and it says so."""
    resumed, trusted = tmp_path / "resumed", head.HeadVerifier(TRUSTED)
    proxy.publish(resumed, 0, proxy.contents(1, (5, 6, 300, size, 200_001)))
    trusted.accept(proxy.sign(root))
    with proxy.running(resumed, holding=[0]) as early:
        objects, path = proxy.contents(0), "tensors/t3/c.0"
        for seed in range(4):
            seeded = dataclasses.replace(SMALL_RANGES, seed=seed)
            opened = opening([early.url, origin.url], trusted_key=trusted, options=seeded)
            assert read(opened, objects, path) == objects[path]
            found = opened.stats()["relays"][early.url]
            assert (found["num_lies"], found["num_failures"], found["success"]) == (0, 0, 1.0)
        with pytest.raises(FileNotFoundError, match="is on none of the relays .* pull the newest version"):
            read(opening(early.url), objects, path)
        opened = opening(early.url, trusted_key=trusted)
        with pytest.raises(journal.CorruptSource, match="version 0"):
            opened.manifest(0)  # a valid one, and not that of the head from before the resume
        assert opened.stats()["relays"][early.url]["num_lies"] == 0


def test_a_version_replaced_in_place_while_it_is_read_gives_no_mixed_bytes(root, origin, opening, monkeypatch):
    """The origin sends the new bytes under the old digest: it knows those that its directory had when it looked last."""
    path, exchange, tags = "tensors/t4/c.0", range_get.Get._exchange, []

    def replacing(get, connection):
        body, headers = exchange(get, connection)
        tags.append(headers["ETag"])
        if len(tags) == 5:
            (root / journal.dirname(0) / path).write_bytes(proxy.contents(1)[path])
        return body, headers

    opened = opening(origin.url, options=SMALL_RANGES)
    monkeypatch.setattr(range_get.Get, "_exchange", replacing)
    with pytest.raises(journal.CorruptSource, match="wrong on every relay"):
        read(opened, proxy.contents(0), path)
    assert len(tags) > 20 and len(set(tags)) == 1


def test_only_liars_is_an_error_in_bounded_time(root, opening, tmp_path):
    with proxy.running(tamper(root, tmp_path / "bad"), holding=[0]) as liar:
        opened = opening(liar.url)
        begun_s = time.monotonic()
        with pytest.raises(journal.CorruptSource, match="wrong on every relay"):
            read(opened, proxy.contents(0), "tensors/t3/c.0")
        assert time.monotonic() - begun_s < 60  # three attempts, two suspensions of at most 1 s between them


def test_an_empty_object_with_another_hash_is_wrong(origin, opening):
    with pytest.raises(journal.CorruptSource, match="not of 0 bytes"):  # without a relay that is blamed
        source.read(opening(origin.url), 0, journal.Object("deltas/d0", 0, "0" * 64))


def test_all_relays_dead_is_an_error_that_names_them(origin, opening):
    dead = proxy.Proxy(origin.url)
    dead.close()
    opened = opening(dead.url, options=range_get.Options(patience_s=1.0))
    with pytest.raises(journal.Unavailable, match=dead.url):
        opened.versions()
    with pytest.raises(journal.Unavailable, match=dead.url):
        opened.manifest(0)
    with pytest.raises(journal.Unavailable, match="was not downloaded in time"):
        source.read(opened, 0, journal.Object(**proxy.entry("a", b"12345")))
    stats = opened.stats()["relays"][dead.url]
    assert not stats["is_alive"] and "refused" in stats["reason"].lower()


def test_a_broken_connection_keeps_what_it_brought(opening, tmp_path):
    objects = proxy.contents(0, (4_000_000,))
    proxy.publish(tmp_path, 0, objects)
    passed = collections.Counter()

    def fault(rng):
        passed["connections"] += (
            1  # closed, not reset: a reset may drop bytes that were sent, all of them on a busy machine
        )
        return ("close", 1_500_000) if passed["connections"] % 2 else None

    with proxy.running(tmp_path) as relay, proxy.Proxy(relay.url, fault) as between:
        proxy.wait_until(proxy.holds(relay, 0))
        opened = opening(between.url)
        assert read(opened, objects, BIG) == objects[BIG]
        assert opened.stats()["num_resumed"] >= 1
        # whole again would be 5.5 MB: 4 MB and the bytes before the reset; slices of 256 kB and buffers may be lost
        assert relay.counters["sent_bytes"] < 2 * 4_000_000


def test_a_straggler_is_overtaken(root, origin, opening):
    objects = proxy.contents(0)
    with proxy.Proxy(origin.url, lambda rng: ("rate", 1000)) as slow:
        options = range_get.Options(patience_s=30.0, seed=3)
        opened = opening([slow.url, origin.url], trusted_key=TRUSTED, options=options)
        begun_s = time.monotonic()
        for _ in range(6):
            assert read(opened, objects, "tensors/t4/c.0") == objects["tensors/t4/c.0"]
        assert time.monotonic() - begun_s < 100  # alone the slow one would need 200 s for each
        stats = opened.stats()
        assert stats["num_hedges_won"] >= 1 and stats["num_hedges"] <= 6
        rates = {url: relay["bytes_per_s"] for url, relay in stats["relays"].items()}
        assert rates[slow.url] < rates[origin.url] / 10


def test_who_is_being_cut_off_is_waited_for():
    """`abort` returns only after the write that it found going on, and no other begins."""
    begun, go_on, calls = threading.Event(), threading.Event(), []

    class Response:
        status, length, headers = 200, 8, {}

        def readinto(self, target):
            calls.append(len(target))
            begun.set()
            go_on.wait(5)
            target[:2] = b"ab"
            return 2

    target = bytearray(8)
    into = range_get.Target([memoryview(target)])
    get = range_get.Get(range_get.Relay("http://r:1", FAST), "/x", stop=8, total=8, target=into)
    failed, returned = [], threading.Event()

    def receive():
        try:
            get._receive(Response(), into)
        except range_get.Failed as error:
            failed.append(error)

    receiver = threading.Thread(target=receive)
    receiver.start()
    begun.wait(5)
    aborter = threading.Thread(target=lambda: (get.abort(), returned.set()))
    aborter.start()
    assert not returned.wait(0.2)
    go_on.set()
    assert returned.wait(5) and bytes(target[:2]) == b"ab"
    receiver.join(5)
    aborter.join(5)
    assert len(calls) == 1 and failed


def test_a_relay_of_another_run_changes_nothing(root, origin, opening, tmp_path):
    proxy.publish(tmp_path / "other", 0, proxy.contents(5), key=proxy.OTHER_KEY)
    proxy.sign(tmp_path / "other", key=proxy.OTHER_KEY)
    with proxy.running(tmp_path / "other", holding=[0]) as other:
        opened = opening([origin.url, other.url], trusted_key=TRUSTED)
        for _ in range(3):
            assert opened.versions() == [0]
            assert proxy.read_all(opened, 0, proxy.contents(0)) == proxy.contents(0)
        with pytest.raises(journal.CorruptSource, match="not signed by the trusted key"):
            opening(other.url, trusted_key=TRUSTED).versions()

"""Under faults of relays, wires and disks, a client gets the right bytes, or a clear error, in bounded time.

Everything is loopback. The wires are `tests/support/proxy.py`; a full disk is `max_bytes` (fast) and a small tmpfs (slow, where it
may be mounted). The slow test draws 200 schedules of faults for a tree of publisher, origin, two relays and two clients.
"""

import contextlib
import os
import random
import shutil
import threading
import time
import urllib.error
import urllib.request

import pytest

from sharding.download import range_get, source
from sharding.format import journal
from sharding.relay import mirror
from tests.support import lying_upstream, proxy

TRUSTED = proxy.public(proxy.KEY)
QUICK = range_get.Options(patience_s=2.0, connect_s=1.0, stall_s=0.5, range_bytes=50_000)
ERRORS = (journal.CorruptSource, journal.Unavailable, FileNotFoundError)  # the only errors that a reader may get

# Faults of one connection, drawn from a schedule's generator.
WIRES = {
    "good": lambda rng: None,
    "resets": lambda rng: ("reset", rng.randrange(150_000)) if rng.random() < 0.3 else None,
    "refusals": lambda rng: "refuse" if rng.random() < 0.3 else None,
    "truncated": lambda rng: ("close", rng.randrange(150_000)) if rng.random() < 0.5 else None,
    "flips": lambda rng: ("flip", rng.randrange(100_000)) if rng.random() < 0.5 else None,
    "crawls": lambda rng: ("rate", 1_000),
    "sluggish": lambda rng: ("rate", 400_000),
    "hangs": lambda rng: "stall" if rng.random() < 0.3 else None,
}


def check(urls, objects_of, *, patience_s=2.0, trusted_key=TRUSTED, seed=0):
    """Reads the newest version; returns its number, or the error. Wrong bytes fail the test, as does anything unforeseen."""
    options = range_get.Options(
        patience_s=patience_s, connect_s=1.0, stall_s=0.5, range_bytes=50_000, parallel=8, seed=seed
    )
    opened = source.open(urls, trusted_key=trusted_key, options=options)
    try:
        versions = opened.versions()
        if not versions:
            return FileNotFoundError("nothing yet")
        assert proxy.read_all(opened, versions[-1], objects_of(versions[-1])) == objects_of(versions[-1])
        return versions[-1]
    except ERRORS as error:
        return error
    finally:
        opened.close()


def assert_whole(directory, objects_of):
    """Every version that looks complete in a directory is so, byte for byte; nothing else has its manifest."""
    for path in sorted(directory.glob("v*")):
        if (path / "manifest.json").exists():
            objects = objects_of(int(path.name[1:]))
            assert (path / "manifest.json").read_bytes() == proxy.manifest(int(path.name[1:]), objects)
            for name, data in objects.items():
                assert (path / name).read_bytes() == data


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    root = tmp_path_factory.mktemp("pub")
    proxy.publish(root, 0, proxy.contents(0))
    proxy.sign(root)
    with proxy.running(root) as relay:
        proxy.wait_until(proxy.holds(relay, 0))
        yield relay


@pytest.mark.parametrize("kind", [k for k in WIRES if k != "good"])
def test_one_bad_wire_of_two_changes_nothing_but_time(origin, kind):
    with proxy.Proxy(origin.url, WIRES[kind], seed=1) as bad, proxy.Proxy(origin.url) as good:
        begun_s = time.monotonic()
        assert check([bad.url, good.url], proxy.contents, patience_s=20.0) == 0
        assert time.monotonic() - begun_s < 20


@pytest.mark.parametrize("kind", ["resets", "refusals", "truncated", "flips", "sluggish"])
def test_a_bad_wire_to_the_only_relay_is_survived(origin, kind):
    with proxy.Proxy(origin.url, WIRES[kind], seed=2) as bad:
        assert check(bad.url, proxy.contents, patience_s=20.0) == 0


@pytest.mark.parametrize("kind", ["crawls", "hangs"])
def test_a_dead_wire_to_the_only_relay_is_an_error_in_bounded_time(origin, kind):
    always = WIRES[kind] if kind == "crawls" else (lambda rng: "stall")
    with proxy.Proxy(origin.url, always) as bad:
        begun_s = time.monotonic()
        assert isinstance(check(bad.url, proxy.contents, patience_s=1.0), journal.Unavailable)
        assert time.monotonic() - begun_s < 15


def test_a_relay_killed_in_the_midst_of_a_transfer(origin):
    first = proxy.Proxy(origin.url, lambda rng: ("rate", 100_000))
    with proxy.Proxy(origin.url, WIRES["sluggish"]) as second:
        threading.Timer(0.3, first.close).start()
        assert check([first.url, second.url], proxy.contents, patience_s=20.0) == 0


def test_a_relay_killed_and_restarted_at_the_same_port(tmp_path):
    proxy.publish(tmp_path, 0, proxy.contents(0, (400_000,) * 3))
    proxy.sign(tmp_path)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(proxy.running(tmp_path))
        proxy.wait_until(proxy.holds(first, 0))
        port = int(first.url.rpartition(":")[2])
        with proxy.Proxy(first.url, WIRES["sluggish"]) as wire:

            def restart():
                first.close()
                time.sleep(0.3)
                stack.enter_context(proxy.running(tmp_path, port=port))

            timer = threading.Timer(0.3, restart)
            timer.start()
            assert check(wire.url, lambda n: proxy.contents(n, (400_000,) * 3), patience_s=20.0) == 0
            timer.join()


def test_a_relay_before_its_first_pass_answers_503(tmp_path, monkeypatch):
    """A 404 would mean that the version was deleted, and a client of this relay alone would believe it."""
    proxy.publish(tmp_path, 0, proxy.contents(0))
    looked, look = threading.Event(), mirror.Mirror._step
    monkeypatch.setattr(mirror.Mirror, "_step", lambda self: looked.wait(20) and look(self))
    with proxy.running(tmp_path) as relay:
        url = f"{relay.url}/v00000000/manifest.json"
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(url, timeout=5)
        refused.value.close()
        looked.set()
        proxy.wait_until(proxy.holds(relay, 0))
        with urllib.request.urlopen(url, timeout=5) as answer:
            assert answer.status == 200


def test_a_stale_relay_hides_nothing(origin, tmp_path):
    shutil.copytree(origin.store.root, tmp_path / "pub")
    proxy.publish(tmp_path / "pub", 1, proxy.contents(1))
    proxy.sign(tmp_path / "pub")
    with proxy.running(tmp_path / "pub") as current:
        proxy.wait_until(proxy.holds(current, 0, 1))
        assert check([origin.url, current.url], proxy.contents, patience_s=10.0) == 1
        assert check(origin.url, proxy.contents) == 0


@pytest.mark.parametrize("what", ["another run's manifest", "a wrong signature", "another version's manifest"])
def test_a_manifest_that_is_not_the_publishers(origin, tmp_path, what):
    root = tmp_path / "bad"
    shutil.copytree(origin.store.root, root)
    good = proxy.manifest(0, proxy.contents(0))
    bad = {
        "another run's manifest": proxy.manifest(0, proxy.contents(7), key=proxy.OTHER_KEY),
        "a wrong signature": good[:-10] + bytes(reversed(good[-10:-2])) + good[-2:],
        "another version's manifest": proxy.manifest(3, proxy.contents(0)),
    }[what]
    (root / "v00000000/manifest.json").write_bytes(bad)

    with lying_upstream.LyingUpstream(root, lying_upstream.Behavior()) as liar:  # not our code
        assert check([liar.url, origin.url], proxy.contents, patience_s=10.0) == 0
        assert isinstance(check(liar.url, proxy.contents), journal.CorruptSource)
        with proxy.running(liar.url, tmp_path / "mirror", trusted_key=TRUSTED, options=QUICK) as relay:
            time.sleep(1.0)
            assert relay.store.listing()["complete"] == []


def test_a_client_touches_no_disk(origin, monkeypatch):
    """A full disk at the client does not matter: every call that would write raises, as on a full disk."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    opened = source.open(origin.url, trusted_key=TRUSTED)
    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "makedirs", "link", "symlink"):
            patch.setattr(os, name, full)
        real = os.open
        patch.setattr(
            os, "open", lambda p, f, *a, **k: full() if f & (os.O_WRONLY | os.O_RDWR) else real(p, f, *a, **k)
        )
        assert proxy.read_all(opened, 0, proxy.contents(0)) == proxy.contents(0)
    opened.close()


@pytest.mark.slow
def test_a_relay_on_a_full_tmpfs(small_disk, tmp_path):
    """A real ENOSPC: 1 MB holds one version of 600 kB, not two."""
    root = tmp_path / "pub"

    def objects_of(number):
        return proxy.contents(number, (5, 200_000, 400_000))

    with proxy.running(root) as up, proxy.running(up.url, small_disk / "a", keep=3, options=QUICK) as relay:
        for number in range(3):
            proxy.publish(root, number, objects_of(number))
            proxy.sign(root)
            with contextlib.suppress(AssertionError):  # the newest may not fit next to the one that is kept
                proxy.wait_until(lambda number=number: relay.store.is_complete(number), timeout_s=5)
            assert_whole(small_disk / "a", objects_of)
            assert check(relay.url, objects_of) in range(3)
        assert any(name.startswith("errors_OSError") for name in relay.mirror.log.counters)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_schedules_of_faults(tmp_path, block):
    """200 schedules, in ten blocks. While faults go on: right bytes or a clear error. When they end: the newest version."""
    for seed in range(20 * block, 20 * block + 20):
        _schedule(seed, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))


def _schedule(seed, directory):
    rng = random.Random(seed)
    root = directory / "pub"
    cache = {}

    def objects_of(number):
        if number not in cache:
            cache[number] = proxy.contents(1000 * seed + number, tuple(rng_sizes))
        return cache[number]

    rng_sizes = [rng.choice((5, 1000, 60_000, 150_000)) for _ in range(rng.randrange(1, 6))]
    proxy.publish(root, 0, objects_of(0))
    proxy.sign(root)
    with contextlib.ExitStack() as stack:
        up = stack.enter_context(proxy.running(root, options=QUICK))
        kinds = [rng.choice(list(WIRES)) for _ in range(4)]
        wires = [stack.enter_context(proxy.Proxy(up.url, WIRES[kind], seed=seed)) for kind in kinds[:2]]
        sizes = sum(map(len, objects_of(0).values())) + len(proxy.manifest(0, objects_of(0)))
        middle = []
        for i, wire in enumerate(wires):
            max_bytes = int(1.5 * sizes) if rng.random() < 0.2 else None
            upstream = [wire.url, up.url] if rng.random() < 0.3 else wire.url
            options = {"options": QUICK, "trusted_key": TRUSTED, "max_bytes": max_bytes}
            middle.append([upstream, directory / f"m{i}", options])
        relays = [stack.enter_context(proxy.running(*m[:2], **m[2])) for m in middle]
        ends = [
            stack.enter_context(proxy.Proxy(r.url, WIRES[k], seed=seed + 1))
            for r, k in zip(relays, kinds[2:], strict=True)
        ]
        time.sleep(rng.uniform(0, 0.5))
        events = [rng.choice(("publish", "die half-way", "kill relay", "rot", "nothing")) for _ in range(2)]

        def harm():
            for number, event in enumerate(events, start=1):
                if event == "publish":
                    proxy.publish(root, number, objects_of(number))
                    proxy.sign(root)
                elif event == "die half-way":
                    whole = objects_of(number)
                    proxy.begin(root, number, dict(list(whole.items())[: len(whole) // 2]))
                elif event == "kill relay":
                    ends[0].close()
                elif event == "rot":
                    for path in (directory / "m0").rglob("c.0"):
                        with contextlib.suppress(FileNotFoundError):
                            data = path.read_bytes()
                            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
                time.sleep(0.1)

        # both threads call `objects_of`: filled before
        for number in range(3):
            objects_of(number)
        thread = threading.Thread(target=harm)
        thread.start()
        begun_s = time.monotonic()
        urls = [end.url for end in ends]
        check(urls, objects_of, patience_s=3.0, seed=seed)
        thread.join()
        check(urls, objects_of, patience_s=3.0, seed=seed)
        seconds = time.monotonic() - begun_s
        # per read: patience, and 8 s for 250 kB at the least rate; a schedule that reads ten slow objects needs many of them
        assert seconds < 120, (seed, kinds, events, seconds)
        if "rot" not in events:
            for i in range(2):
                assert_whole(directory / f"m{i}", objects_of)

        # the second relay was not killed, and its disk is intact; on a disk with too little room the oldest version stays
        for proxied in (*wires, *ends):
            proxied.heal()
        if "rot" in events and middle[1][2]["max_bytes"]:
            return  # then the newest version may be on the spoilt disk alone
        newest = max([0] + [n for n, event in enumerate(events, start=1) if event == "publish"])
        wanted = (0, newest) if middle[1][2]["max_bytes"] else (newest,)
        deadline_s = time.monotonic() + 60
        while (outcome := check(urls, objects_of, patience_s=20.0, seed=seed)) not in wanted:
            assert time.monotonic() < deadline_s, (seed, kinds, events, outcome)
            time.sleep(0.2)


def test_errors_have_one_line_a_minute(capsys, monkeypatch):
    """A full disk fails every object of every version, in every pass, and a liar chooses the text of its errors."""
    log = mirror.ErrorLog("http://a")
    for n in range(50):
        log.note(OSError(28, f"object {n} does not fit"))
    monkeypatch.setattr(mirror, "MINUTE_S", 0.0)
    log.note(ValueError("two\nlines" + "x" * 100_000))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "relay: http://a: [Errno 28] object 0 does not fit" and len(second) < 600
    assert second.startswith("relay: http://a: two lines") and second.endswith(" (and 49 errors in between)")
    assert log.counters["errors_OSError"] == 50

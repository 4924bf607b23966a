"""Under faults of relays and wires, a client gets the right bytes, or a clear error, in bounded time.

Everything is loopback. The wires are `tests/support/proxy.py`. Full disks: test_relay.py; random schedules: test_lying_schedules.py.
"""

import contextlib
import dataclasses
import os
import shutil
import threading
import time
import urllib.error
import urllib.request

import pytest

from sharding.weights.download import range_get, source
from sharding.weights.format import journal
from sharding.weights.relay import mirror
from tests.support import lying_upstream, proxy

TRUSTED = proxy.public(proxy.KEY)
QUICK = range_get.Options(patience_s=2.0, connect_s=1.0, stall_s=0.5, range_bytes=50_000)
ERRORS = (journal.CorruptSource, journal.Unavailable, FileNotFoundError)  # the only errors that a reader may get

# Faults of one connection, drawn from the generator of a proxy.
WIRES = {
    "resets": lambda rng: ("reset", rng.randrange(150_000)) if rng.random() < 0.3 else None,
    "refusals": lambda rng: "refuse" if rng.random() < 0.3 else None,
    "truncated": lambda rng: ("close", rng.randrange(150_000)) if rng.random() < 0.5 else None,
    "flips": lambda rng: ("flip", rng.randrange(100_000)) if rng.random() < 0.5 else None,
    "crawls": lambda rng: ("rate", 1_000),
    "sluggish": lambda rng: ("rate", 400_000),
    "hangs": lambda rng: "stall" if rng.random() < 0.3 else None,
}


def check(urls, objects_of, *, patience_s=2.0):
    """Reads the newest version; returns its number, or the error. Wrong bytes fail the test, as does anything unforeseen."""
    options = dataclasses.replace(QUICK, patience_s=patience_s, parallel=8, seed=0)
    with contextlib.closing(source.open(urls, trusted_key=TRUSTED, options=options)) as opened:
        try:
            newest = opened.versions()[-1]
            assert proxy.read_all(opened, newest, objects_of(newest)) == objects_of(newest)
            return newest
        except ERRORS as error:
            return error


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    root = tmp_path_factory.mktemp("pub")
    proxy.publish(root, 0, proxy.contents(0))
    proxy.sign(root)
    with proxy.running(root, holding=[0]) as relay:
        yield relay


@pytest.mark.parametrize("kind", WIRES)
def test_one_bad_wire_of_two_changes_nothing_but_time(origin, kind):
    with proxy.Proxy(origin.url, WIRES[kind], seed=1) as bad, proxy.Proxy(origin.url) as good:
        assert check([bad.url, good.url], proxy.contents, patience_s=20.0) == 0


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
        assert time.monotonic() - begun_s < 60


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

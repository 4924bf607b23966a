"""An upstream that lies delays nobody but itself: the others' newest version is mirrored and pulled in bounded time and space.

The liars are `tests/support/lying_upstream.py`: real servers, whose numbers the tests vary.
"""

import contextlib
import json
import time
import urllib.request

import pytest

from sharding.download import range_get, source
from sharding.relay import upstream
from tests.support import lying_upstream, proxy
from tests.support.lying_upstream import Behavior

TRUSTED = proxy.public(proxy.KEY)
QUICK = range_get.Options(patience_s=4.0, connect_s=1.0, stall_s=2.0)
HONEST_S = 8.0  # for the honest newest version beside any liar; alone it takes less than one


@pytest.fixture
def pub(tmp_path):
    for number in range(3):
        proxy.publish(tmp_path / "pub", number, proxy.contents(number))
    return tmp_path / "pub"


@contextlib.contextmanager
def beside(pub, *behaviors, **options):
    """Runs an honest relay and liars; yields their URLs, the liars' first, and the liars."""
    with contextlib.ExitStack() as stack:
        origin = stack.enter_context(proxy.running(pub))
        liars = [stack.enter_context(lying_upstream.LyingUpstream(pub, b, i)) for i, b in enumerate(behaviors)]
        proxy.wait_until(lambda: origin.store.complete())
        yield [*(liar.url for liar in liars), origin.url], liars


def mirrored(relay, number, within_s=HONEST_S):
    """Waits for a version; returns the seconds that it took."""
    begun_s = time.monotonic()
    proxy.wait_until(
        lambda: relay.store.is_complete(number), within_s, f"version {number}; {relay.mirror.log.counters}"
    )
    return time.monotonic() - begun_s


PHANTOMS = {
    "64 phantoms": Behavior(phantoms=64),
    "4000 phantoms": Behavior(phantoms=4000),
    "10,000 phantoms": Behavior(phantoms=10_000),
    "9 dripping manifests": Behavior(phantoms=9, phantom_manifest="drip"),
    "1 hanging manifest": Behavior(phantoms=1, phantom_manifest="hang"),
    "9 empty manifests": Behavior(phantoms=9, phantom_manifest="junk"),
    "a trickling journal": Behavior(partials=1, journal="trickle", listing="flap"),
    "a flooding journal": Behavior(partials=1, journal="flood", listing="flap"),
}


@pytest.mark.parametrize("trusted_key", [TRUSTED, None], ids=["key", "no key"])
@pytest.mark.parametrize("kind", PHANTOMS)
def test_a_liar_does_not_starve_a_relay(pub, tmp_path, kind, trusted_key):
    with beside(pub, PHANTOMS[kind]) as (urls, _):
        with proxy.running(urls, tmp_path / "a", trusted_key=trusted_key, options=QUICK) as relay:
            mirrored(relay, 2)
            proxy.publish(pub, 3, proxy.contents(3))
            mirrored(relay, 3)


@pytest.mark.parametrize("kind", [kind for kind in PHANTOMS if "journal" not in kind])
def test_a_liar_does_not_stall_a_client(pub, kind):
    with beside(pub, PHANTOMS[kind]) as (urls, _):
        opened = source.open(urls, trusted_key=TRUSTED)  # with the patience that people use
        begun_s = time.monotonic()
        with contextlib.closing(opened):
            assert opened.versions()[-1] == 2
            assert proxy.read_all(opened, 2, proxy.contents(2)) == proxy.contents(2)
        assert time.monotonic() - begun_s < HONEST_S


@pytest.mark.parametrize("journal_kind", ["trickle", "flood"])
def test_what_nobody_signed_has_bounded_disk_and_log(pub, tmp_path, monkeypatch, capsys, journal_kind):
    """A liar's journal fills its budget once, and is then left alone; so are its errors in the log."""
    monkeypatch.setattr(upstream, "FOLLOWED_BYTES", 2_000_000)
    behavior = Behavior(phantoms=4000, partials=100, journal=journal_kind, listing="flap")
    with beside(pub, behavior) as (urls, (liar,)):
        with proxy.running(urls, tmp_path / "a", trusted_key=TRUSTED, options=QUICK) as relay:
            size = sum(len(data) for n in range(3) for data in proxy.contents(n).values())
            most, deadline_s = 0, time.monotonic() + 5
            while time.monotonic() < deadline_s:
                most = max(most, sum(p.stat().st_size for p in _files(tmp_path / "a")))
                time.sleep(0.05)
            assert most < size + 2_000_000 + 200_000
            assert liar.num_bytes < 10_000_000 and liar.num_requests["manifest"] < 200
            assert relay.store.complete() == [0, 1, 2] and relay.store.partial() == []
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("relay: ")]
    assert len(lines) <= 2 and max(map(len, lines)) < 700


def _files(root):
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.stat():
                yield path


def test_a_bomb_does_not_end_a_mirror(pub, tmp_path):
    """587 bytes raised MemoryError in the only mirror thread, and /health said ok."""
    with beside(pub, Behavior(phantoms=1, phantom_manifest="bomb")) as (urls, _):
        with proxy.running(urls, tmp_path / "a", options=QUICK) as relay:
            mirrored(relay, 2)
            proxy.publish(pub, 3, proxy.contents(3))
            mirrored(relay, 3)


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("a bug"), OSError(5, "Input/output error")])
def test_whatever_ends_a_mirror_is_shown_and_it_goes_on(pub, tmp_path, monkeypatch, error):
    step = upstream.Upstream._prove
    monkeypatch.setattr(upstream.Upstream, "_prove", lambda *args: (_ for _ in ()).throw(error))

    def health():
        with urllib.request.urlopen(f"{relay.url}/health", timeout=5) as answer:
            return json.load(answer)

    with proxy.running(pub, tmp_path / "a", options=QUICK) as relay:
        begun_s = time.time()
        proxy.wait_until(lambda: health()["status"] == "failing")
        found = health()
        assert type(error).__name__ in found["error"] and abs(found["since"] - begun_s) < 5
        time.sleep(0.6)
        assert health()["since"] == found["since"]
        monkeypatch.setattr(upstream.Upstream, "_prove", step)
        mirrored(relay, 2)
        proxy.wait_until(lambda: health()["status"] == "ok")
        assert health()["since"] is None
        assert relay.mirror.log.counters[f"errors_{type(error).__name__}"] >= 1

"""An upstream that lies delays nobody but itself: the others' newest version is mirrored and pulled in bounded time and space.

The liars are `tests/support/lying_upstream.py`: real servers, whose numbers the tests vary.
"""

import contextlib
import dataclasses
import json
import shutil
import time
import urllib.request

import pytest

from sharding.weights.download import range_get, source
from sharding.weights.format import head as head_lib
from sharding.weights.format import journal
from sharding.weights.relay import mirror
from tests.support import lying_upstream, proxy
from tests.support.lying_upstream import Behavior

TRUSTED, SLOW = proxy.public(proxy.KEY), pytest.mark.slow
QUICK = range_get.Options(patience_s=4.0, connect_s=1.0, stall_s=2.0)
HONEST_S = (
    30.0  # for the newest version of the honest upstream, on a busy machine; on an idle one it takes less than one
)


@pytest.fixture
def pub(tmp_path):
    for number in range(3):
        proxy.publish(tmp_path / "pub", number, proxy.contents(number))
    return tmp_path / "pub"


@contextlib.contextmanager
def with_liars(pub, *behaviors):
    """Runs an honest relay and liars; yields their URLs, the liars' first, and the liars."""
    with contextlib.ExitStack() as stack:
        origin = stack.enter_context(proxy.running(pub))
        liars = [stack.enter_context(lying_upstream.LyingUpstream(pub, b, i)) for i, b in enumerate(behaviors)]
        proxy.wait_until(lambda: origin.store.complete())
        yield [*(liar.url for liar in liars), origin.url], liars


def mirrored(relay, number):
    """Waits for a version."""
    proxy.wait_until(
        lambda: relay.store.is_complete(number), HONEST_S, f"version {number}; {relay.mirror.log.counters}"
    )


PHANTOMS = (
    Behavior(phantoms=64),
    Behavior(phantoms=10_000),
    Behavior(phantoms=9, phantom_manifest="drip"),
    Behavior(phantoms=1, phantom_manifest="hang"),
    Behavior(phantoms=9, phantom_manifest="junk"),
    # It once ended the only mirror thread by a MemoryError, while /health stayed "ok".
    Behavior(phantoms=1, phantom_manifest="bomb"),
)
JOURNALS = [Behavior(phantoms=1000, partials=100, journal=kind, listing="flap") for kind in ("trickle", "flood")]


def test_liars_do_not_starve_a_relay(pub, tmp_path):
    proxy.sign(pub)
    with with_liars(pub, *PHANTOMS, *JOURNALS) as (urls, _):
        with proxy.running(urls, tmp_path / "a", trusted_key=TRUSTED, options=QUICK) as relay:
            mirrored(relay, 2)
            proxy.publish(pub, 3, proxy.contents(3))
            proxy.sign(pub)
            mirrored(relay, 3)


def test_liars_do_not_stall_a_client(pub):
    proxy.sign(pub)
    with with_liars(pub, *PHANTOMS) as (urls, _):
        opened = source.open(urls, trusted_key=TRUSTED)  # with the patience that people use
        begun_s = time.monotonic()
        with contextlib.closing(opened):
            assert opened.versions()[-1] == 2
            assert proxy.read_all(opened, 2, proxy.contents(2)) == proxy.contents(2)
        assert time.monotonic() - begun_s < HONEST_S


def test_a_relay_that_drips_does_not_use_up_the_time_of_an_object(pub):
    """One liar spoils what several deliver, so that one relay is asked for all: others drip then, and are never silent."""
    proxy.sign(pub)
    drips = [Behavior(objects="drip")] * 3
    with with_liars(pub, Behavior(objects="corrupt"), *drips) as (urls, _):
        options = dataclasses.replace(QUICK, patience_s=15.0, range_bytes=50_000, seed=0)
        with contextlib.closing(source.open(urls, trusted_key=TRUSTED, options=options)) as opened:
            last = opened.manifest(2)[1].objects[-1]
            assert source.read(opened, 2, last) == proxy.contents(2)[last.path]


def test_unsigned_claims_have_bounded_disk_and_log(pub, tmp_path, monkeypatch, capsys):
    """A liar's journal of the version that is announced fills its budget once, and is then left alone; so are its errors in the log."""
    monkeypatch.setattr(mirror, "FOLLOWED_BYTES", 500_000)
    proxy.sign(pub, writing=2 * lying_upstream.FIRST_PHANTOM)
    with with_liars(pub, *JOURNALS) as (urls, liars):
        with proxy.running(urls, tmp_path / "a", trusted_key=TRUSTED, options=QUICK) as relay:
            size = sum(len(data) for n in range(3) for data in proxy.contents(n).values())
            most, deadline_s = 0, time.monotonic() + 5
            while time.monotonic() < deadline_s:
                most = max(most, sum(p.stat().st_size for p in _files(tmp_path / "a")))
                time.sleep(0.05)
            assert most < size + 500_000 + 100_000
            for liar in liars:
                assert liar.num_bytes < 10_000_000 and liar.num_requests["manifest"] < 200
            assert sum(liar.num_requests["journal"] for liar in liars) > 0
            assert relay.store.complete() == [0, 1, 2]
            left = sum(o.size for n in relay.store.partial() for o in relay.store.versions[n].objects.values())
            assert left <= 10 * lying_upstream.JUNK_BYTES  # objects that were on their way
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("relay: ")]
    assert len(lines) <= 3 and all(
        len(line) < 700 for line in lines
    )  # none if the honest upstream came first each time


def _files(root):
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.stat():
                yield path


@pytest.mark.parametrize("error", [MemoryError("no room"), pytest.param(OSError(5, "Input/output error"), marks=SLOW)])
def test_whatever_ends_a_mirror_is_shown_and_it_goes_on(pub, tmp_path, monkeypatch, error):
    step = mirror.Mirror._prove
    monkeypatch.setattr(mirror.Mirror, "_prove", lambda *args: (_ for _ in ()).throw(error))

    def health():
        with urllib.request.urlopen(f"{relay.url}/health", timeout=5) as answer:
            return json.load(answer)

    with proxy.running(pub, tmp_path / "a", options=QUICK) as relay:
        begun_s = time.time()
        proxy.wait_until(lambda: health()["status"] == "failing")
        found = health()
        assert type(error).__name__ in found["error"] and abs(found["since"] - begun_s) < 5
        time.sleep(0.1)
        assert health()["since"] == found["since"]
        monkeypatch.setattr(mirror.Mirror, "_prove", step)
        mirrored(relay, 2)
        proxy.wait_until(lambda: health()["status"] == "ok")
        assert health()["since"] is None
        assert relay.mirror.log.counters[f"errors_{type(error).__name__}"] >= 1


def test_a_relay_hands_on_the_head_once_it_has_the_version(pub, tmp_path):
    """A version that is announced is followed, and no other; a head is served when its newest version is here."""
    proxy.sign(pub)
    verifier = head_lib.HeadVerifier(TRUSTED)
    with contextlib.ExitStack() as stack:
        origin = stack.enter_context(proxy.running(pub))
        first = stack.enter_context(proxy.running(origin.url, tmp_path / "a", trusted_key=TRUSTED, options=QUICK))
        second = stack.enter_context(proxy.running(first.url, tmp_path / "b", trusted_key=TRUSTED, options=QUICK))
        mirrored(second, 2)
        objects = proxy.contents(3)
        proxy.begin(pub, 3, objects)
        time.sleep(0.5)
        assert 3 not in second.store.versions  # nobody has announced it
        announced = proxy.sign(pub, writing=3)
        proxy.wait_until(lambda: 3 in second.store.versions and len(second.store.versions[3].objects) == len(objects))
        assert second.store.head == announced
        proxy.publish(pub, 4, proxy.contents(4, (3_000_000,) * 5))
        last = proxy.sign(pub)
        while second.store.head != last:
            head = verifier.accept(second.store.listing()["head"].encode())
            assert second.store.is_complete(head.newest.version)
        assert second.store.complete() == [0, 1, 2, 4] and second.store.partial() == []
        with contextlib.closing(source.open(second.url, trusted_key=TRUSTED)) as opened:
            assert opened.head().data == last and opened.versions() == [0, 1, 2, 4]


@pytest.fixture
def old(pub):
    """A copy of the root, with its head, before the run was resumed from version 1."""
    proxy.sign(pub)
    shutil.copytree(pub, pub.parent / "old")
    time.sleep(0.01)  # a head's serial is its time in milliseconds
    return pub.parent / "old"


def resume(pub):
    """Publishes version 2 again, with other weights, in a new epoch, faster than anyone polls."""
    proxy.publish(pub.parent / "again", 2, proxy.contents(22))
    (pub / "v00000002").rename(pub.parent / "gone")
    (pub.parent / "again/v00000002").rename(pub / "v00000002")
    return proxy.sign(pub, epoch=1, epochs={0: 0, 1: 0})


def test_a_version_published_again_is_seen_beside_one_who_holds_the_old(pub, old, tmp_path):
    patient = dataclasses.replace(QUICK, patience_s=30.0, stall_s=30.0)
    with proxy.running(pub) as origin, lying_upstream.LyingUpstream(old, Behavior()) as stale:
        with proxy.running([stale.url, origin.url], tmp_path / "a", trusted_key=TRUSTED, options=patient) as relay:
            mirrored(relay, 2)
            stale.behavior = Behavior(manifest="hang")
            resume(pub)
            new = proxy.manifest(2, proxy.contents(22))
            proxy.wait_until(lambda: relay.store.manifest(2) == new, HONEST_S)
            stale.behavior = Behavior()
            with contextlib.closing(source.open([stale.url, relay.url], trusted_key=TRUSTED)) as opened:
                assert opened.head().order == (1, 2)
                assert proxy.read_all(opened, 2, proxy.contents(22)) == proxy.contents(22)


def test_a_relay_never_goes_back(pub, old, tmp_path):
    """Neither while it runs nor after a restart does an older head, or a head that it cannot verify, change the versions of a relay."""
    data, new = resume(pub), proxy.manifest(2, proxy.contents(22))
    other = tmp_path / "other"
    for number in range(3, 6):
        proxy.publish(other, number, proxy.contents(number), key=proxy.OTHER_KEY)
    proxy.sign(other, epoch=7, key=proxy.OTHER_KEY)
    options = {"trusted_key": TRUSTED, "options": QUICK}
    with contextlib.ExitStack() as stack:
        liars = [stack.enter_context(lying_upstream.LyingUpstream(root, Behavior())).url for root in (old, other)]
        with proxy.running(pub) as origin, proxy.running([*liars, origin.url], tmp_path / "a", **options) as relay:
            proxy.wait_until(lambda: relay.store.head == data and relay.store.complete() == [0, 1, 2])
            assert relay.store.manifest(2) == new
        with proxy.running(liars, tmp_path / "a", **options) as relay:
            proxy.wait_until(lambda: relay.store.head == data)
            time.sleep(0.5)
            assert relay.store.complete() == [0, 1, 2] and relay.store.head == data
            assert relay.store.manifest(2) == new
            assert relay.mirror.log.counters["replaced_versions"] == 0


def test_a_relay_reports_an_upstream_that_stays_behind(pub, old, tmp_path, monkeypatch, capsys):
    """An older version is one line and a metric, and in /health until the upstream has the newest one; an older signature is neither."""
    monkeypatch.setattr(mirror, "BEHIND_S", 0.3)
    monkeypatch.setattr(mirror, "RECENT_S", 0.0)
    options = {"trusted_key": TRUSTED, "options": QUICK}
    data = resume(pub)
    shutil.copytree(pub, tmp_path / "earlier")
    with lying_upstream.LyingUpstream(pub, Behavior()) as upstream:
        with proxy.running(upstream.url, tmp_path / "a", **options) as relay:
            proxy.wait_until(lambda: relay.store.head == data)
            upstream.root = old
            proxy.wait_until(lambda: "has been stale" in relay.mirror.health()["error"])
            assert relay.mirror.health()["upstream"] and relay.store.head == data
            assert relay.mirror.log.counters["errors_StaleHead"] == 1
            lines = [line for line in capsys.readouterr().err.splitlines() if "has been stale" in line]
            assert len(lines) == 1 and "the head is of epoch 0, version 2" in lines[0] and upstream.url in lines[0]
            time.sleep(0.01)  # a head's serial is its time in milliseconds
            data = proxy.sign(pub, epoch=1, epochs={0: 0, 1: 0})
            upstream.root = pub
            proxy.wait_until(lambda: relay.store.head == data and not relay.mirror.health()["error"])
            monkeypatch.setattr(mirror, "MINUTE_S", 0.0)
            upstream.root = tmp_path / "earlier"
            time.sleep(1.0)
            assert not relay.mirror.health()["error"] and relay.mirror.log.counters["errors_StaleHead"] == 1


def test_a_full_disk_is_not_the_liars(tmp_path, monkeypatch):
    """Room for two versions suffices: neither journals nor invented versions keep the newest out."""
    monkeypatch.setattr(mirror, "FOLLOWED_BYTES", 10_000_000)
    size = sum(map(len, proxy.contents(0).values())) + 5_000
    pub, invented = tmp_path / "pub", tmp_path / "invented"
    pub.mkdir()
    for number in (903, 904):
        proxy.publish(invented, number, proxy.contents(number, (100_000,)), key=proxy.OTHER_KEY)
    with proxy.running(pub) as origin, contextlib.ExitStack() as stack:
        behavior = Behavior(partials=1, journal="flood", listing="flap")
        liar = stack.enter_context(lying_upstream.LyingUpstream(invented, behavior))
        options = {"trusted_key": TRUSTED, "options": QUICK, "max_bytes": 2 * size}
        with proxy.running([liar.url, origin.url], tmp_path / "a", **options) as relay:
            proxy.sign(pub, writing=2 * lying_upstream.FIRST_PHANTOM)
            proxy.wait_until(lambda: liar.num_requests["journal"] > 0)
            for number in range(3):
                proxy.publish(pub, number, proxy.contents(number))
                proxy.sign(pub, writing=2 * lying_upstream.FIRST_PHANTOM)
                mirrored(relay, number)
                assert relay.store.num_bytes <= options["max_bytes"]


@pytest.mark.parametrize(
    "lie",
    [Behavior(manifest="hang"), pytest.param(Behavior(manifest="missing"), marks=SLOW), Behavior(objects="missing")],
    ids=str,
)
def test_a_version_that_a_liar_withholds_holds_nothing_up(pub, tmp_path, lie):
    """The liar has the newest head. Its version is mirrored, and the head handed on, once an honest relay has them, too."""
    before = proxy.sign(pub)
    ahead, route = shutil.copytree(pub, tmp_path / "ahead"), "objects" if lie.objects == "missing" else "manifest"
    with with_liars(pub) as ([origin], _), lying_upstream.LyingUpstream(ahead, lie) as liar:
        with proxy.running([liar.url, origin], tmp_path / "a", trusted_key=TRUSTED, options=QUICK) as relay:
            for number in (2, 1, 0):
                mirrored(relay, number)
            proxy.publish(ahead, 3, proxy.contents(3))
            after = proxy.sign(ahead)
            asked = liar.num_requests[route]
            proxy.wait_until(lambda: liar.num_requests[route] > asked)
            time.sleep(0.5)
            assert relay.store.head == before
            with contextlib.closing(source.open(relay.url, trusted_key=head_lib.HeadVerifier(TRUSTED))) as opened:
                assert opened.versions() == [0, 1, 2]
            shutil.copytree(ahead / "v00000003", pub / "v00000003")
            shutil.copy(ahead / "head.jsonl", pub / "head.jsonl")
            mirrored(relay, 3)
            proxy.wait_until(lambda: relay.store.head == after)


def test_a_resume_in_the_middle_of_a_step_is_not_held_against_the_upstream(pub, tmp_path, monkeypatch):
    def resume(number):
        monkeypatch.undo()
        shutil.rmtree(pub / "v00000003")
        proxy.publish(pub, 3, proxy.contents(33))
        head = proxy.sign(pub, epoch=1, epochs={0: 0, 1: 0, 2: 0})
        proxy.wait_until(lambda: origin.store.head == head)
        raise journal.CorruptSource(f"the manifest of version {number} has changed")

    proxy.sign(pub)
    with proxy.running(pub, trusted_key=TRUSTED) as origin:
        with proxy.running(origin.url, tmp_path / "a", trusted_key=TRUSTED, holding=[0, 1, 2]) as relay:
            monkeypatch.setattr(relay.mirror.source, "manifest", resume)
            proxy.publish(pub, 3, proxy.contents(3))
            proxy.sign(pub)
            mirrored(relay, 3)
            assert relay.store.manifest(3) == (pub / "v00000003" / "manifest.json").read_bytes()
            assert relay.mirror.log.counters["errors_CorruptSource"] == 0
            monkeypatch.setattr(relay.store, "finish", lambda *_: None)  # the next epoch's versions take time
            for number in (2, 3):
                shutil.rmtree(pub / f"v{number:08d}")
            proxy.publish(pub, 2, proxy.contents(22))
            head = proxy.sign(pub, epoch=2, epochs={0: 0, 1: 0})
            proxy.wait_until(lambda: relay.store.head == head)  # is handed on at once
            assert relay.store.complete() == [0, 1]


def test_a_version_that_a_newer_head_withdraws_is_not_completed(pub, tmp_path, monkeypatch):
    proxy.sign(pub)
    other = shutil.copytree(pub, tmp_path / "other")
    with proxy.running(pub, trusted_key=TRUSTED) as origin:
        with proxy.running(origin.url, tmp_path / "a", trusted_key=TRUSTED, holding=[0, 1, 2]) as relay:
            mirrored_from, finished, heads, turns = relay.mirror.source, [], [], iter([True])
            read, finish = mirrored_from.read, relay.store.finish

            def read_during_a_resume(*arguments):
                if next(turns, False):  # as the reply of another relay brings it
                    heads.append(proxy.sign(other, epoch=1, epochs={0: 0, 1: 0, 2: 0}))
                    mirrored_from.trusted.accept(heads[0])
                read(*arguments)

            monkeypatch.setattr(mirrored_from, "read", read_during_a_resume)
            monkeypatch.setattr(relay.store, "finish", lambda *a: (finished.append(a[0]), finish(*a)))
            proxy.publish(pub, 3, proxy.contents(3))
            proxy.sign(pub)
            proxy.wait_until(lambda: heads and relay.store.partial() == [] and relay.store.head == heads[0])
            assert finished == [] and relay.store.complete() == [0, 1, 2]


def test_a_resumed_run_replaces_the_versions_that_a_relay_is_downloading(pub, tmp_path):
    """Its old versions are gone in the middle of their download; a relay left its upstream alone for up to a minute then."""
    epochs = {number: 0 for number in range(10)}
    for number in range(3, 10):
        proxy.publish(pub, number, proxy.contents(number))
    proxy.sign(pub, epochs=epochs)
    with proxy.running(pub, trusted_key=TRUSTED) as origin:
        address, port = origin.url, int(origin.url.rsplit(":", 1)[1])
        stack = contextlib.ExitStack()
        relay = stack.enter_context(proxy.running(address, tmp_path / "a", trusted_key=TRUSTED, keep=5))
        proxy.wait_until(lambda: 9 in relay.store.complete())
    for number in range(5, 10):
        shutil.rmtree(pub / f"v{number:08d}")
        del epochs[number]
    proxy.publish(pub, 5, proxy.contents(55))
    head = proxy.sign(pub, epoch=1, epochs=epochs)
    with stack, proxy.running(pub, port=port, trusted_key=TRUSTED):
        proxy.wait_until(lambda: relay.store.head == head and 5 in relay.store.complete(), HONEST_S)
        assert relay.store.manifest(5) == (pub / "v00000005" / "manifest.json").read_bytes()

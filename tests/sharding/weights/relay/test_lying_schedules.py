"""The property: beside up to n - 1 liars of n upstreams the newest honest version is mirrored and pulled within stated bounds.

Each schedule draws the number of upstreams, the lies of all but one of them, and the sizes. The bounds (docs/decisions/broadcast.md): the
honest version alone, and time for the liars; disk for its versions and the budget of a journal; one line of the log per minute.
"""

import contextlib
import random
import resource
import shutil
import time

import pytest

from sharding.weights.download import range_get, source
from sharding.weights.format import head as head_lib
from sharding.weights.relay import mirror
from tests.support import lying_upstream, proxy

TRUSTED = proxy.public(proxy.KEY)
PATIENCE_S, STALL_S = 6.0, 1.0
OPTIONS = range_get.Options(patience_s=PATIENCE_S, connect_s=1.0, stall_s=STALL_S, range_bytes=100_000)
FOLLOWED_BYTES = 1_000_000
KEEP = 3
MAX_ASKED = 200  # manifests, of one liar, by a relay and a client together


def bound_s(num_upstreams, num_bytes):
    """An object may take its patience at each liar once."""
    return 20.0 + 2 * STALL_S * num_upstreams + PATIENCE_S + num_bytes / 1e6


BLOCKS = [pytest.param(range(20 * i, 20 * i + 20), marks=pytest.mark.slow) for i in range(25)]


@pytest.mark.parametrize("seeds", [range(3), *BLOCKS])
def test_the_newest_honest_version_arrives(tmp_path, monkeypatch, capsys, seeds):
    """500 schedules, 3 of them in CI. Prints the times of each block, and the most requests for manifests to a liar."""
    monkeypatch.setattr(mirror, "FOLLOWED_BYTES", FOLLOWED_BYTES)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for seed in seeds:
        times.append(_schedule(seed, tmp_path / str(seed), capsys))
        shutil.rmtree(tmp_path / str(seed))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss) * 1024
    assert grown < 150e6, grown
    print(f"grown: {grown / 1e6:.0f}")
    for name, values in zip(("mirrored", "pulled", "requests"), zip(*times, strict=True), strict=True):
        print(f"{name}: " + " ".join(f"{value:.2f}" for value in sorted(values)))


def _schedule(seed, directory, capsys):
    rng = random.Random(seed)
    num_liars = rng.choice((1, 1, 2, 3, 5))
    sizes = tuple(rng.choice((5, 1000, 60_000, 300_000)) for _ in range(rng.randrange(1, 6)))
    size = sum(sizes)
    behaviors = [lying_upstream.draw(rng) for _ in range(num_liars)]
    root = directory / "pub"
    text = f"seed {seed}: {'; '.join(map(str, behaviors))}"

    def publish(number):
        objects = proxy.contents(1000 * seed + number, sizes)
        proxy.sign(root, writing=number)
        proxy.begin(root, number, objects)
        time.sleep(rng.uniform(0, 0.2) * (number == 2))
        (root / f"v{number:08d}" / "objects.jsonl").unlink()
        proxy.publish(root, number, objects)
        proxy.sign(root)

    root.mkdir(parents=True)
    for number in range(2):
        publish(number)
    with contextlib.ExitStack() as stack:
        origin = stack.enter_context(proxy.running(root))
        old = shutil.copytree(root, directory / "old")
        liars = [stack.enter_context(lying_upstream.LyingUpstream(rng.choice((root, old)), b, seed)) for b in behaviors]
        urls = [liar.url for liar in liars]
        urls.insert(rng.randrange(len(urls) + 1), origin.url)
        limit_s = bound_s(len(urls), size)
        relay = stack.enter_context(
            proxy.running(urls, directory / "m", trusted_key=TRUSTED, options=OPTIONS, keep=KEEP)
        )
        time.sleep(rng.uniform(0, 0.4))
        publish(2)
        begun_s, most_bytes = time.monotonic(), 0
        while not relay.store.is_complete(2):
            assert time.monotonic() < begun_s + limit_s, f"not mirrored; {text}"
            most_bytes = max(most_bytes, relay.store.num_bytes)
            time.sleep(0.02)
        mirrored_s = time.monotonic() - begun_s
        assert most_bytes < 2 * KEEP * (size + 20_000) + FOLLOWED_BYTES, text
        held = {path: data for path, data in proxy.contents(1000 * seed + 2, sizes).items()}
        assert all((directory / "m/v00000002" / path).read_bytes() == data for path, data in held.items()), text
        begun_s = time.monotonic()
        opened = stack.enter_context(
            contextlib.closing(source.open(urls, trusted_key=head_lib.HeadVerifier(TRUSTED), options=OPTIONS))
        )
        assert opened.versions()[-1] == 2, text
        assert proxy.read_all(opened, 2, held) == held
        pulled_s = time.monotonic() - begun_s
        assert pulled_s < limit_s, f"pulled after {pulled_s} s; {text}"
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("relay: ")]
    assert len(lines) <= 3 and max(map(len, lines), default=0) < 700, lines  # two of the origin
    asked = max(liar.num_requests["manifest"] for liar in liars)
    assert asked < MAX_ASKED, text
    return mirrored_s, pulled_s, asked

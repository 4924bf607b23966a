"""Timelines: whatever kills a learner, nobody gets weights under a name (epoch, version) that were not published under it.

A learner without a model is killed at random file operations and resumes from an earlier version, above real relays with slow links.
Readers of all kinds pull all the time. The weights name the attempt that made them, which is the oracle: each epoch is one attempt.
"""

import collections
import contextlib
import json
import random
import threading
import time
import types

import numpy as np
import pytest

from inference.server import inference_server
from sharding import broadcast
from sharding.download import range_get, source
from sharding.format import head
from sharding.relay import store
from tests.support import learner_double, proxy
from tests.test_rollback import Scheduler

OPTIONS = range_get.Options(patience_s=5.0, connect_s=5.0, stall_s=5.0)
TRUSTED = learner_double.PUBLIC


class Readers:
    """Threads that pull from `urls` until `stop`; `got` has (kind, epoch, version, value) of each pull, `asked` its policy or None."""

    def __init__(self, urls, root, lag, monkeypatch):
        self.urls, self.root, self.lag, self.got, self.errors, self.last = urls, root, lag, [], [], {}
        monkeypatch.setattr(inference_server, "check_params", lambda params, model: None)
        monkeypatch.setattr(inference_server, "RELAY_LAG_S", 3.0)
        self.verifiers = [head.HeadVerifier(TRUSTED) for _ in range(3)]
        opened = source.open(urls, trusted_key=self.verifiers[2], options=OPTIONS)
        fields = (
            types.SimpleNamespace(load_shardings=None, keep=lambda params: params),
            types.SimpleNamespace(model=None),
        )
        self.server = inference_server.InferenceServer(opened, Scheduler(), fields[1], fields[0], "", opened.trusted)
        kinds = (self.pinned, self.newest, self.stranger, self.by_number, self.serve)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(kind,), daemon=True) for kind in kinds]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._ended.set()
        for thread in self._threads:
            thread.join(60)
        self.server.weights.close()

    def have(self, *published):
        """True if a reader has got each of these versions."""
        return all((epoch, version) in [one[1:3] for one in self.got[-20:]] for _, epoch, version, _ in published)

    def pinned(self, rng):
        """Knows the name of a policy, and may get no other."""
        attempt, epoch, version, digest = rng.choice(learner_double.log(self.root)[-1 - self.lag :])
        found = self.pull(self.verifiers[0], version, epoch=epoch, digest=digest)
        assert (found.epoch, found.version, found.sha256) == (epoch, version, digest)
        return found

    def newest(self, rng):
        return self.pull(self.verifiers[1])

    def stranger(self, rng):
        """A process that has seen no head before."""
        return self.pull(head.HeadVerifier(TRUSTED))

    def by_number(self, rng):
        """Knows a number alone, as servers did before policies had names."""
        version = rng.choice(learner_double.log(self.root)[-1 - self.lag :])[2]
        return self.pull(None, broadcast.wait_for(self.urls, version, 0.2))

    def pull(self, key, version=None, **name):
        with contextlib.closing(source.open(self.urls, trusted_key=key, options=OPTIONS)) as opened:
            return broadcast.pull(opened, version, **name)

    def serve(self, rng):
        """Loads each policy in a server."""
        attempt, epoch, version, digest = learner_double.log(self.root)[-1]
        self.server.update(version, epoch=epoch, digest=digest)
        assert self.server.have.sha256 == digest and self.server.scheduler.epoch == epoch
        return self.server.have

    def _run(self, kind):
        rng = random.Random(kind.__name__)
        while not self._ended.is_set():
            try:
                found = kind(rng)
                values = {float(x) for x in (*np.unique(found.params["a"]), *np.unique(found.params["b"]["c"]))}
                self.got.append((kind.__name__, found.epoch, found.version, values))
            except (
                OSError,
                ValueError,
                IndexError,
            ) as error:  # not here yet, withdrawn meanwhile; nothing was published yet
                self.last[kind.__name__] = repr(error)
            except BaseException as error:
                self.errors.append(f"{kind.__name__}: {error!r}")
                return
            time.sleep(0.05)  # the relays are in this process, too


def check_listings(monkeypatch, errors):
    """Every reply to /versions is checked: the epochs of the manifests that it lists ascend with their numbers."""
    listing = store.Store.listing

    def checked(self, tag="", wait_s=0.0):
        with self.lock:  # a wait releases it
            found = listing(self, tag, wait_s)
            epochs = [json.loads(self.versions[number].manifest).get("epoch") for number in found["complete"]]
            if epochs != sorted(epochs):
                errors.append(f"{self.root} lists {found['complete']} of the epochs {epochs}")
            return found

    monkeypatch.setattr(store.Store, "listing", checked)


@contextlib.contextmanager
def relays(root, folder, depth, delay_s):
    """Yields the URL of the last of `depth` relays below the learner's own; each link delays every read."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(proxy.running(root, trusted_key=TRUSTED)).url
        for number in range(depth):
            link = stack.enter_context(proxy.Proxy(url, lambda rng: ("delay", delay_s) if delay_s else None))
            options = {"trusted_key": TRUSTED, "options": OPTIONS, "keep": 6}
            url = stack.enter_context(proxy.running(link.url, folder / f"relay{number}", **options)).url
        yield url


CASES = [(depth, delay_s, lag) for depth in (1, 2) for delay_s in (0.0, 0.3, 2.0) for lag in (1, 2)]
SLOW = [pytest.param(*case, 50, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("depth", "delay_s", "lag", "num_kills"), [(1, 0.0, 1, 4), *SLOW])
def test_no_pull_gives_weights_that_were_not_published_under_their_name(
    tmp_path, monkeypatch, depth, delay_s, lag, num_kills
):
    root, rng, errors = tmp_path / "weights", random.Random(f"{depth} {delay_s} {lag}"), []
    root.mkdir()
    check_listings(monkeypatch, errors)
    with relays(root, tmp_path, depth, delay_s) as url:
        readers = Readers([url], root, lag, monkeypatch)
        for attempt in range(num_kills + 1):
            published = learner_double.log(root)
            first = max(0, published[-1][2] - rng.randint(0, lag + 1)) if published else 0
            is_last = attempt == num_kills
            kill_at, count = (-1, 3) if is_last else (rng.randint(1, 300), 20)
            process = learner_double.start(root, attempt, first, count, kill_at)
            process.join(120)
            assert process.exitcode == (0 if is_last else -9)
            until_s = time.monotonic() + rng.choice([0.0, 1.0 + 4 * delay_s])  # often readers come to its last version
            while time.monotonic() < until_s and not readers.have(*learner_double.log(root)[-1:]):
                time.sleep(0.02)
        *_, (attempt, epoch, version, _) = learner_double.log(root)
        for kind in ("pinned", "newest", "stranger", "serve"):  # all come to the last policy
            has_last = lambda kind=kind: (kind, epoch, version) in [one[:3] for one in readers.got]  # noqa: E731
            proxy.wait_until(lambda: readers.errors or has_last(), 90 + 40 * delay_s, readers.last)  # noqa: B023
        readers.stop()
    assert not errors and not readers.errors, (errors[:3], readers.errors)
    attempts = {epoch: attempt for attempt, epoch, _, _ in learner_double.log(root)}
    for kind, epoch, version, values in readers.got:
        (value,) = values
        attempt, number = divmod(int(value), 1000)
        assert number == version and attempts.setdefault(epoch, attempt) == attempt, (kind, epoch, version, value)
    assert len({*attempts.values()}) == len(attempts)
    print(
        f"{len(attempts)} epochs, {collections.Counter(kind for kind, *_ in readers.got)} of {len({e for _, e, *_ in readers.got})}"
    )

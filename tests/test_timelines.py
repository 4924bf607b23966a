"""Timelines: whatever kills a learner, nobody gets weights under a name (epoch, version) that were not published under it.

A learner without a model is killed at random file operations and resumes from an earlier version, above real relays with slow links.
Readers of all kinds pull all the time. The weights name the attempt that made them, which is the oracle: each epoch is one attempt.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import random
import threading
import time

import numpy as np
import pytest

from inference.engine import weights as weights_lib
from inference.server import startup
from sharding.weights import broadcast
from sharding.weights.download import range_get, source
from sharding.weights.format import head, journal
from sharding.weights.relay import store
from tests.support import doubles, engines, learner_double, proxy, tiny

OPTIONS = range_get.Options(patience_s=5.0, connect_s=5.0, stall_s=5.0)
TRUSTED = learner_double.PUBLIC


@pytest.fixture(autouse=True)
def any_params(monkeypatch):
    monkeypatch.setattr(weights_lib, "check_params", lambda *args: None)


def server_of(urls, key):
    """A server whose engine takes all weights, with this key or verifier or without one."""
    opened = source.open(urls, trusted_key=key, options=OPTIONS)
    return engines.without_engine(opened, engines.Scheduler(), opened.trusted)


class Readers:
    """Threads that pull from `urls` until `stop`; `got` has (kind, epoch, version, values) of each pull, `last` the kinds' last errors."""

    def __init__(self, urls, root, lag, monkeypatch):
        self.urls, self.root, self.lag, self.got, self.errors, self.last = urls, root, lag, [], [], {}
        monkeypatch.setattr(weights_lib, "RELAY_LAG_S", 3.0)
        self.verifiers = [head.HeadVerifier(TRUSTED) for _ in range(3)]
        self.server = server_of(urls, self.verifiers[2])
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

    def have(self, kind, published):
        """True if the reader of this kind has got a policy of the log, or any reader has failed."""
        return self.errors or (kind, *published[1:3]) in [one[:3] for one in self.got]

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
                self.last.pop(kind.__name__, None)
            except (OSError, ValueError, IndexError) as error:  # withdrawn, not here yet, or not published yet
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
def relays(root, folder, depth, delay_s, key=TRUSTED):
    """Yields the URL of the last of `depth` relays below the learner's own; each link delays every read."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(proxy.running(root, trusted_key=key)).url
        for number in range(depth):
            link = stack.enter_context(proxy.Proxy(url, lambda rng: ("delay", delay_s) if delay_s else None))
            options = {"trusted_key": key, "options": OPTIONS, "keep": 6}
            url = stack.enter_context(proxy.running(link.url, folder / f"relay{number}", **options)).url
        yield url


@pytest.mark.parametrize("key", [TRUSTED, pytest.param(None, marks=pytest.mark.slow)])
def test_numbers_that_a_resume_publishes_again_bring_its_weights(tmp_path, key):
    """Finding D1: a server below two relays asked for a number right after a resume had published it again."""
    root, late = tmp_path / "weights", head.HeadVerifier(TRUSTED)
    root.mkdir()
    with relays(root, tmp_path, 1, 0.3, key) as url:
        server = server_of([url], key and head.HeadVerifier(key))
        for attempt, first in enumerate((0, 2)):
            publisher = broadcast.Publisher(root, broadcast.PublishOptions(key=learner_double.KEY, keep=12))
            publisher.forget(first)
            for version in range(first, 4):
                written = publisher.publish(learner_double.weights(attempt, version), version)
                data = (root / journal.dirname(version) / "manifest.json").read_bytes()
                name = {"epoch": written.epoch, "digest": hashlib.sha256(data).hexdigest()}
                server.update(version, **name)
                assert server.scheduler.params["a"][0] == 1000 * attempt + version
            with contextlib.closing(source.open([url], trusted_key=late, options=OPTIONS)) as opened:
                found = broadcast.pull(opened, 3, **name)  # the second time, `late` has a head from before the resume
                assert found.params["a"][0] == 1000 * attempt + 3
                for wrong in ({"epoch": written.epoch + 1}, {"digest": "0" * 64}):
                    with pytest.raises(FileNotFoundError, match="version 3 .* is of epoch"):
                        broadcast.pull(opened, 3, **name | wrong)
                    with pytest.raises(TimeoutError, match="no version|is of epoch"):
                        broadcast.wait_for(opened, 3, 0.1, **wrong)
        server.weights.close()


def resume(root, attempt):
    """Publishes version 1 again, in a new epoch; returns its manifest."""
    publisher = broadcast.Publisher(root, broadcast.PublishOptions(key=learner_double.KEY, keep=12))
    publisher.forget(1)
    return publisher.publish(learner_double.weights(attempt, 1), 1)


def test_a_number_that_is_published_again_while_a_server_reads_it_is_refused(tmp_path, monkeypatch):
    """Between the check of its manifest and the pull; the epoch alone names it, and the order holds to the end."""
    first, read, pull = resume(tmp_path, 0), broadcast.read_manifest, broadcast.pull
    server = server_of(str(tmp_path), head.HeadVerifier(TRUSTED))
    with monkeypatch.context() as patch:
        patch.setattr(broadcast, "read_manifest", lambda *a, **options: (read(*a, **options), resume(tmp_path, 1))[0])
        with pytest.raises(FileNotFoundError, match=f"version 1 under .*, not of epoch {first.epoch}"):
            server.update(1, epoch=first.epoch)
    assert server.have is None and server.update(1) == 1
    assert (epoch := server.have.epoch) > first.epoch
    resume(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(broadcast, "pull", lambda *a, **options: dataclasses.replace(pull(*a, **options), epoch=1))
        with pytest.raises(ValueError, match="version 1 of epoch 1 is older than version 1 of epoch"):
            server.update(1)
    assert server.have.epoch == epoch


def test_a_server_that_joins_takes_a_newer_version_if_its_first_is_deleted_meanwhile(tmp_path, monkeypatch, capsys):
    exp, pull = doubles.experiment(prompts=2), broadcast.pull
    publisher = broadcast.Publisher(tmp_path, broadcast.PublishOptions(key=learner_double.KEY, keep=1))
    publish = functools.partial(publisher.publish, tiny.params(exp.model, 1), metadata=exp.broadcast_metadata)

    def late(source, version, **options):
        if version == 0:
            publish(1)
        return pull(source, version, **options)

    publish(0)
    monkeypatch.setattr(startup.broadcast, "pull", late)
    assert startup.prepare(str(tmp_path), exp.engine, key=TRUSTED).version == 1
    assert "loading policy version 0\n" in (said := capsys.readouterr().err) and "; loading policy version 1\n" in said


def test_a_wait_for_a_named_version_outlasts_a_damaged_manifest(tmp_path):
    resume(tmp_path, 0)
    file = tmp_path / journal.dirname(1) / "manifest.json"
    data = file.read_bytes()
    file.write_bytes(data[:-9])
    digest, key = hashlib.sha256(data).hexdigest(), head.HeadVerifier(TRUSTED)
    with pytest.raises(TimeoutError, match="signed head lists .* compare the source with the one that the run"):
        broadcast.wait_for(str(tmp_path), 1, 0.1, key=key, digest=digest)
    threading.Timer(0.3, file.write_bytes, [data]).start()
    assert broadcast.wait_for(str(tmp_path), 1, 30, key=key, digest=digest) == 1


CASES = [(depth, delay_s, lag) for depth in (1, 2) for delay_s in (0.0, 0.3, 2.0) for lag in (1, 2)]
SLOW = [pytest.param(*case, 5, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("depth", "delay_s", "lag", "num_kills"), [(2, 0.0, 1, 2), *SLOW])
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
            assert process.exitcode == (0 if is_last else -9), (attempt, kill_at)
            until_s, written = time.monotonic() + rng.choice([0.0, 1.0 + 12 * delay_s]), learner_double.log(root)
            while time.monotonic() < until_s and written and not readers.have("newest", written[-1]):
                time.sleep(0.02)
        for kind in ("pinned", "newest", "stranger", "serve"):  # all come to the last policy
            proxy.wait_until(lambda kind=kind: readers.have(kind, written[-1]), 90 + 40 * delay_s, readers.last)
        readers.stop()
    assert not errors and not readers.errors, (errors[:3], readers.errors)
    attempts = {epoch: attempt for attempt, epoch, _, _ in learner_double.log(root)}
    for kind, epoch, version, values in readers.got:
        (value,) = values
        attempt, number = divmod(int(value), 1000)
        assert number == version and attempts.setdefault(epoch, attempt) == attempt, (kind, epoch, version, value)
    assert len({*attempts.values()}) == len(attempts)
    pulls = collections.Counter(kind for kind, *_ in readers.got)
    print(
        f"{num_kills} kills, {len(attempts)} epochs; pulls of {len({one[1] for one in readers.got})} epochs: {dict(pulls)}"
    )

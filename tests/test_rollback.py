"""The property: no client, server, validator or relay that has seen (epoch, version) accepts less, or a second manifest of a number.

Colluding relays serve the same four readers: old states of the honest publisher, expired heads, and forgeries of thieves who have its
key or revoked ones. Readers restart from their floors. Signatures, and the values that arrive, are the oracle.
"""

import contextlib
import dataclasses
import random
import shutil
import time

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata

from inference.engine import weights as weights_lib
from rl.trust.verification import verifier
from sharding.weights import broadcast
from sharding.weights.download import range_get, source
from sharding.weights.format import head, manifest, roots
from tests.support import engines, lying_upstream, proxy

ROOT = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
OPTIONS = range_get.Options(patience_s=0.3, connect_s=1.0, stall_s=0.3)


class World:
    """A run over time: `places` are the directories that its publisher, or a thief, has signed."""

    def __init__(self, directory, rng):
        self.directory, self.rng, self.places, self.version = directory, rng, [], -1
        self.keys = [ed25519.Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)) for _ in range(4)]
        self.roots, self.file = [], directory / "root.json"
        self.rotate()
        (directory / "reader.json").write_bytes(self.roots[0])
        self.publish()

    def rotate(self):
        if len(self.roots) < len(self.keys):
            before, online = (self.roots or [b""])[-1], [proxy.public(self.keys[len(self.roots)])]
            new = [proxy.public(ROOT)] if not before else []
            self.roots.append(roots.amend(before, [ROOT], root=new, online=online, expires_s=time.time() + 1e6))
            self.file.write_bytes(self.roots[-1])
            self.resume(0)

    def resume(self, back=2):
        options = broadcast.PublishOptions(key=self.keys[len(self.roots) - 1], root_file=str(self.file), keep=3)
        self.publisher, self.version = (
            broadcast.Publisher(self.directory / "run", options),
            max(self.version - back, -1),
        )
        self.publisher.forget(self.version + 1)

    def publish(self):
        self.version += 1
        self.publisher.publish(self.weights(), self.version)
        self.places.append(shutil.copytree(self.directory / "run", self.directory / f"{len(self.places)}"))

    def weights(self):
        return {"w": np.frombuffer(self.rng.randbytes(8), np.uint8)}

    def steal(self):
        """Signs a copy of a place with a revoked or the current key: an expired head, other epochs, second manifests."""
        place = shutil.copytree(self.rng.choice(self.places), self.directory / f"{len(self.places)}")
        which = self.rng.randrange(len(self.roots))
        old = head.HeadVerifier(self.file, first_root=True).accept((place / head.NAME).read_bytes(), expired=True)
        entries, epoch = dict(old.versions), old.epoch + self.rng.choice([0, 0, 1, 1000])
        for version in self.rng.choice([[], [*entries][:1], [*entries][-1:], [self.version + 1]]):
            shutil.rmtree(place / "forged", ignore_errors=True)
            written = broadcast.publish(self.weights(), version, place / "forged")
            shutil.rmtree(place / f"v{version:08d}", ignore_errors=True)
            (place / "forged" / f"v{version:08d}").rename(place / f"v{version:08d}")
            at = entries[version].epoch if version in entries else epoch
            data = manifest.encode(dataclasses.replace(written, epoch=at), self.keys[which])
            (place / f"v{version:08d}" / "manifest.json").write_bytes(data)
            entries[version] = head.Entry.of(data, at, version)
        now_s, lines = time.time(), self.roots[which].splitlines()[1:]
        fields = dict(serial=int(now_s * 1000), epoch=epoch, expires_s=now_s + self.rng.choice([-5, 50, 50]))
        (place / head.NAME).write_bytes(head.sign(self.keys[which], entries.values(), roots=lines, **fields))
        self.places.append(place)

    def mix(self):
        """The versions of one place under the head of another."""
        place = shutil.copytree(self.rng.choice(self.places), self.directory / f"{len(self.places)}")
        shutil.copyfile(self.rng.choice(self.places) / head.NAME, place / head.NAME)
        self.places.append(place)


class Readers:
    """Four readers, each with a verifier of its own, as in four processes. `got` lists (reader, verifier, order, bytes)."""

    def __init__(self, world, urls, stack):
        self.world, self.urls, self.stack, self.got = world, urls, stack, []
        self.trusted, self.directory = world.directory / "reader.json", world.directory
        self.client, self.relay, self.validated = self.open(None), contextlib.ExitStack(), self.open(None)
        self.weights = verifier.published(self.validated, keep=2, key=self.validated.trusted)
        stack.callback(lambda: self.relay.close())
        self.scheduler, self.server = engines.Scheduler(), None
        self.restart()

    def open(self, floor):
        trusted = head.HeadVerifier(self.trusted, floor)
        opened = source.open(self.urls, trusted_key=trusted, options=OPTIONS)
        return self.stack.enter_context(contextlib.closing(opened))

    def restart(self):
        """The relay and the server start again; the server keeps its weights and its floor."""
        self.relay.close()
        options = dict(trusted_key=str(self.trusted), options=OPTIONS, keep=3)
        self.relay.enter_context(proxy.running(self.urls, self.directory / "mirror", **options))
        opened, have = self.open(self.directory / "floor"), self.server and self.server.have
        self.server = engines.without_engine(opened, self.scheduler, opened.trusted, have)

    def read(self, rng):
        versions = range(max(0, self.world.version - 2), self.world.version + 2)
        self.attempt("client", self.client.trusted, lambda: broadcast.pull(self.client, key=self.client.trusted))
        version, epoch = rng.choice([(None, None), (rng.choice(versions), rng.choice([None, 0, 1]))])
        before = self.server.have

        def update():
            self.server.update(version, epoch=epoch)
            return self.server.have if self.server.have is not before else None

        self.attempt("server", self.server.key, update)
        version = rng.choice(versions)

        def judge():
            params = self.weights(version)
            entry = broadcast.entry_of(self.validated, version, key=self.validated.trusted)
            return entry and broadcast.Pulled(version, params, {}, "", epoch=entry.epoch)

        self.attempt("validator", self.validated.trusted, judge)

    def attempt(self, name, trusted, call):
        now_s = time.time()
        with contextlib.suppress(ValueError, OSError):
            if (found := call()) is not None:
                assert trusted.head.expires_s > now_s, "an expired head was followed"
                root, value = trusted._root.version, np.asarray(found.params["w"]).tobytes()
                self.got.append((name, root, (found.epoch, found.version), value))


def run(seed, directory, accepted):
    """One schedule. Returns (values that arrived, heads that verifiers accepted) after checking both."""
    rng = random.Random(seed)
    directory.mkdir()
    world, first = World(directory, rng), len(accepted)
    with contextlib.ExitStack() as stack:
        relays = [
            lying_upstream.LyingUpstream(world.places[0], lying_upstream.Behavior())
            for _ in range(rng.choice([1, 2, 3]))
        ]
        urls = [stack.enter_context(relay).url for relay in relays]
        readers = Readers(world, urls, stack)
        for _ in range(10):
            rng.choice([world.publish] * 4 + [world.steal] * 3 + [world.mix, world.rotate, world.resume])()
            for relay in relays:
                relay.root = rng.choice(world.places[-rng.choice([1, 2, 100]) :])
            if rng.random() < 0.15:
                readers.restart()
            readers.read(rng)
    for name in ("client", "server", "validator"):
        last, values, newest_root = (-1, -1), {}, 0
        for _, root, order, value in (one for one in readers.got if one[0] == name):
            if root > newest_root:
                newest_root, values, last = root, {}, (-1, -1)
            assert order >= last or name == "validator", (seed, name, order, last)
            assert values.setdefault(order, value) == value, (seed, name, order)
            last = order
    heads = {}
    for trusted, root, found in accepted[first:]:
        heads.setdefault(str(trusted._floor or id(trusted)), []).append((root, found))
    assert any("mirror" in name for name in heads) and any("floor" in name for name in heads)
    for name, sequence in heads.items():
        last, listed, newest_root = (-1, -1), {}, 0
        for root, found in sequence:
            assert root >= newest_root, (seed, name)
            if root > newest_root:
                last, listed, newest_root = (-1, -1), {}, root
            signature = Metadata.from_bytes(found.data.split(b"\n")[-4]).signatures
            assert set(signature) == {CryptoSigner(world.keys[root - 1]).public_key.keyid}, (seed, name)
            assert found.order >= last, (seed, name, found.order, last)
            last = found.order
            for entry in found.versions.values():
                assert listed.setdefault((entry.epoch, entry.version), entry.sha256) == entry.sha256, (seed, name)
    return readers.got, heads


@pytest.mark.parametrize(
    "seeds", [range(2), *(pytest.param(range(i, i + 40), marks=pytest.mark.slow) for i in range(2, 200, 40))]
)
def test_schedules_of_colluding_relays_never_bring_a_reader_back(tmp_path, monkeypatch, seeds):
    accepted, accept = [], head.HeadVerifier.accept

    def note(self, data, **options):
        with self._lock:
            found = accept(self, data, **options)
            accepted.append((self, self._root.version, found))
            return found

    monkeypatch.setattr(weights_lib, "check_params", lambda *args: None)
    monkeypatch.setattr(weights_lib, "RELAY_LAG_S", 0.1)
    arrived, num_heads = {"client": 0, "server": 0, "validator": 0}, {"mirror": 0, "floor": 0}
    for seed in seeds:
        with monkeypatch.context() as patch:
            patch.setattr(head.HeadVerifier, "accept", note)
            got, heads = run(seed, tmp_path / str(seed), accepted)
        for name, *_ in got:
            arrived[name] += 1
        for kind in num_heads:
            num_heads[kind] += sum(len({h.serial for _, h in found}) for name, found in heads.items() if kind in name)
        shutil.rmtree(tmp_path / str(seed))
    print(f"{len(seeds)} schedules: arrived {arrived}, heads accepted by relays and servers {num_heads}")
    assert min(arrived.values()) >= len(seeds) and min(num_heads.values()) >= 2 * len(seeds)

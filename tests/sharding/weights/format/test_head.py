"""Signed heads: the floor, expiry, rotation and revocation of keys, hostile bytes, and agreement with TUF's own client."""

import hashlib
import random
import shutil
import threading
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from securesystemslib.signer import CryptoSigner
from tuf import ngclient
from tuf.api import exceptions
from tuf.api.metadata import Metadata
from tuf.api.serialization.json import JSONSerializer

from sharding.weights.format import head, journal, manifest, roots

KEY, OTHER, THIRD = (ed25519.Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
ROOT = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
NOW = 1_800_000_000.0


def hex_of(key):
    return key.public_key().public_bytes_raw().hex()


def entry(version, epoch=0, content=b""):
    data = f"manifest of {version} of {epoch}".encode() + content
    return head.Entry(epoch, version, len(data), hashlib.sha256(data).hexdigest())


def signed(entries, serial, *, key=KEY, epoch=None, expires_s=NOW + 100, **options):
    epoch = max((e.epoch for e in entries), default=0) if epoch is None else epoch
    return head.sign(key, entries, serial=serial, epoch=epoch, expires_s=expires_s, **options)


def verifier(trusted=PUBLIC, floor=None, now=NOW):
    return head.HeadVerifier(trusted, floor, clock=lambda: now)


def test_a_head_says_what_is_newest(monkeypatch):
    found = verifier().accept(signed([entry(3), entry(4), entry(2, epoch=1)], 7, writing=3))
    assert (found.serial, found.epoch, found.writing, found.expires_s) == (7, 1, 3, NOW + 100)
    assert found.newest == entry(2, epoch=1) and found.order == (1, 2)
    assert set(found.versions) == {2, 3, 4}
    found.versions[4].check(b"manifest of 4 of 0")
    with pytest.raises(
        journal.CorruptSource, match="of version 4 has 18 bytes with SHA-256 .*but the signed head lists"
    ):
        found.versions[4].check(b"manifest of 4 of 1")
    begun = verifier().accept(signed([entry(3)], 7, epoch=1))
    assert begun.newest is None and begun.order == (1, -1)
    monkeypatch.setattr(roots, "NEVER", roots.NEVER.fromtimestamp(NOW + 50, roots.NEVER.tzinfo))
    assert verifier().accept(signed([entry(3)], 7)).expires_s == NOW + 50  # of the role that ends first


@pytest.mark.parametrize(
    "data, error, match",
    [
        (
            signed([entry(4), entry(5)], 8),
            head.StaleHead,
            "version 5, serial 8, older than epoch 0, version 5, serial 9",
        ),
        (signed([entry(2)], 10), head.StaleHead, "epoch 0, version 2, serial 10, older than"),
        (
            signed([entry(5, content=b"!")], 10),
            journal.CorruptSource,
            "two manifests of version 5 of epoch 0 are signed",
        ),
        (
            signed([entry(4, content=b"!"), entry(6)], 10),
            journal.CorruptSource,
            "two manifests of version 4 of epoch 0",
        ),
        (signed([entry(6)], 10, key=OTHER), journal.CorruptSource, "not signed by the trusted key .* signed by 0/1"),
        (signed([entry(6)], 10, expires_s=NOW), head.ExpiredHead, "has expired at 2027-01-15.*, our clock is at 2027-"),
        (signed([entry(6, epoch=2)], 10, epoch=1), journal.CorruptSource, "of epoch 2, newer than the head's epoch 1"),
    ],
)
def test_the_floor_holds_also_in_the_next_process(tmp_path, data, error, match):
    keeper = verifier(floor=tmp_path / "head.jsonl")
    accepted = keeper.accept(signed([entry(4), entry(5)], 9))
    for checked in (keeper, verifier(floor=tmp_path / "head.jsonl")):
        with pytest.raises(error, match=match):
            checked.accept(data)
        assert checked.head == accepted or error is head.ExpiredHead
    for damaged in (accepted.data[:-9], accepted.data.replace(b'"epoch":0', b'"epoch":1', 1), b""):
        (tmp_path / "head.jsonl").write_bytes(damaged)
        with pytest.raises(ValueError, match="head.jsonl, is damaged .* delete it, which forgets them"):
            verifier(floor=tmp_path / "head.jsonl")


def test_a_restart_remembers_the_manifests_of_numbers_that_the_newest_head_no_longer_lists(tmp_path, monkeypatch):
    floor, write, synced = tmp_path / "head.jsonl", head.atomic_file.write, []
    monkeypatch.setattr(head.atomic_file, "write", lambda *a, **o: (synced.append(o.get("durable")), write(*a, **o)))
    verifier(floor=floor).accept(signed([entry(3), entry(4)], 1))
    assert synced == [True, True]  # a power failure lowers no floor
    (tmp_path / "head.jsonl.manifests").unlink()  # it is written again
    verifier(floor=floor).accept(signed([entry(4), entry(5)], 2))
    for content, serial in ((b"", 3), (b"!", 4)):
        restarted, data = verifier(floor=floor), signed([entry(3, content=content), entry(6)], serial)
        if content:
            with pytest.raises(journal.CorruptSource, match="two manifests of version 3 of epoch 0 are signed"):
                restarted.accept(data)
        else:
            assert set(restarted.accept(data).versions) == {3, 6}
    monkeypatch.setattr(head, "MAX_REMEMBERED", 3)
    keeper = verifier(floor=floor)
    keeper.accept(signed([entry(4), entry(7), entry(8)], 5))  # a listed one stays, in place of 3
    for checked in (keeper, verifier(floor=floor)):
        for version in (3, 1):
            with pytest.raises(journal.CorruptSource, match=f"version {version} of epoch 0 is older than the last 3"):
                checked.accept(signed([entry(version), entry(9)], 6))
    assert keeper.accept(signed([entry(4), entry(9)], 6)).versions == {4: entry(4), 9: entry(9)}
    lines = (tmp_path / "head.jsonl.manifests").read_bytes()
    (tmp_path / "head.jsonl.manifests").write_bytes(lines[:-9])
    with pytest.raises(ValueError, match="head.jsonl.manifests, is damaged .* delete it, which forgets them"):
        verifier(floor=floor)
    floor.unlink()  # the remedy in the error for a damaged head: without the file, nothing is remembered
    assert verifier(floor=floor).accept(signed([entry(4, content=b"!")], 1)).versions


def test_of_two_threads_the_one_with_the_older_head_is_refused_or_first():
    client = verifier()
    check, checked = client._check_floor, threading.Event()
    client._check_floor = lambda found: (check(found), checked.set(), time.sleep(0.3 * (found.serial == 9)))
    slow = threading.Thread(target=client.accept, args=[signed([entry(5)], 9)])
    slow.start()
    assert checked.wait(10) and client.accept(signed([entry(6)], 10)).serial == 10
    slow.join()
    assert client.head.serial == 10


def test_an_expired_head_serves_where_its_owner_could_sign_anyway():
    checked, old = verifier(now=NOW + 101), signed([entry(5)], 9)
    assert checked.accept(old, expired=True).newest == entry(5)
    with pytest.raises(head.ExpiredHead):  # the same bytes, from a relay
        checked.accept(old)


def test_a_manifest_that_no_head_lists_is_refused():
    checked = verifier()
    for data in (manifest_of(3, KEY), manifest_of(3, KEY, epoch=0), manifest_of(3, OTHER)):
        with pytest.raises(journal.CorruptSource, match="without the signed head"):
            checked.manifest(data, 3)
    checked.accept(signed([entry(1)], 1))
    with pytest.raises(journal.CorruptSource, match="version 3 is not in the signed head"):
        checked.manifest(manifest_of(3, KEY), 3)


def manifest_of(version, key, epoch=None):
    fields = dict(base=None, delta_of=None, encodings=("zarr3",), digest_before=None, tensors=(), objects=())
    fields |= dict(digest_after=manifest.digest(()), containers={}, metadata={}, epoch=epoch)
    return manifest.encode(manifest.Manifest(version=version, **fields), key)


class World:
    """A run over time: roots that change the online key, heads of its key, and heads of a thief of older ones."""

    def __init__(self, rng, now):
        self.rng, self.now, self.serial, self.epoch, self.version = rng, now, 1000, 0, 0
        self.keys = [ed25519.Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)) for _ in range(5)]
        self.root_file = roots.amend(
            b"", [ROOT], root=[hex_of(ROOT)], online=[hex_of(self.keys[0])], expires_s=now + 1e6
        )
        self.current, self.entries, self.heads = 0, [], []
        self.publish()

    def sign(self, which, entries, epoch, **options):
        self.serial += self.rng.choice([1, 1, 5])
        roots_of = self.root_file.splitlines()[1 : which + 1]
        options = {"expires_s": self.now + self.rng.choice([50, 500, -5]), "roots": roots_of} | options
        data = head.sign(self.keys[which], entries, serial=self.serial, epoch=epoch, **options)
        self.heads.append((which, data))
        return data

    def publish(self):
        if self.rng.random() < 0.2:
            self.epoch, self.version = self.epoch + 1, max(0, self.version - 2)
            self.entries = [e for e in self.entries if e.version < self.version]
        self.entries = [*self.entries[-3:], entry(self.version, self.epoch)]
        self.version += 1
        return self.sign(self.current, self.entries, self.epoch)

    def rotate(self):
        if self.current + 1 < len(self.keys):
            self.current += 1
            online = [hex_of(self.keys[self.current])]
            self.root_file = roots.amend(self.root_file, [ROOT], online=online, expires_s=self.now + 1e6)

    def steal(self):
        """A head that an old or the current key signs for a thief: any epoch, any contents."""
        which = self.rng.randrange(self.current + 1)
        epoch = self.rng.choice([self.epoch, self.epoch + 1000])
        content = self.rng.choice([b"", b"!"])
        return self.sign(which, [entry(self.rng.randrange(self.version + 3), epoch, content)], epoch)

    def served(self):
        """A colluding source serves an honest or stolen head, old or new, or something made of such."""
        which, data = self.rng.choice(self.heads[-self.rng.choice([1, 3, 1000]) :])
        lines = data.split(b"\n")
        kind = self.rng.choice(["whole", "whole", "whole", "flipped", "mixed", "rootless", "cut", "unsigned"])
        if kind == "flipped":
            position = self.rng.randrange(len(data))
            return data[:position] + bytes([data[position] ^ 1 << self.rng.randrange(8)]) + data[position + 1 :]
        if kind == "mixed":
            other = self.rng.choice(self.heads)[1].split(b"\n")
            place = self.rng.choice([-2, -3, -4])
            lines[place] = other[place]
        if kind == "rootless":
            lines = lines[-4:]
        if kind == "cut":
            return data[: self.rng.randrange(len(data))]
        if kind == "unsigned":
            lines[-2] = self.rng.choice(
                [b"{}", b"[" * 5000, b"null", b'{"signed":{}}', lines[-2].replace(b'"sig"', b'"sog"')]
            )
        return b"\n".join(lines)


@pytest.mark.parametrize(
    "signers, version, match",
    [
        ([OTHER], 2, "root was signed by 0/1 keys"),  # its own key has signed it, and not the one before
        ([ROOT], 2, "root was signed by 0/1 keys"),  # the one before, and not its own
        ([ROOT, OTHER], 3, "root 2 is missing in the head"),
        ([ROOT, OTHER], 2, None),
    ],
)
def test_a_root_counts_if_the_one_before_and_its_own_keys_have_signed_it(tmp_path, signers, version, match):
    first = roots.amend(b"", [ROOT], root=[hex_of(ROOT)], online=[PUBLIC], expires_s=NOW + 1e6)
    (tmp_path / "root").write_bytes(first)
    client, stolen = verifier(tmp_path / "root", tmp_path / "floor"), entry(7, 3, b"of a thief")
    assert client.accept(signed([stolen], 5)).versions == {7: stolen}
    line = first + roots.amend(b"", [OTHER], root=[hex_of(OTHER)], online=[hex_of(THIRD)], expires_s=NOW + 1e6)
    second = Metadata.from_bytes(line.splitlines()[1])
    second.signed.version = version
    data = signed([entry(7, 3)], 4, key=THIRD, roots=[_signed_root(second, signers)])
    if match:
        with pytest.raises(journal.CorruptSource, match=match):
            client.accept(data)
        assert client.keys == {PUBLIC} and client.head.newest == stolen
    else:  # the new key starts afresh: all that the old one has signed may be a thief's
        with pytest.raises(journal.CorruptSource, match="timestamp was signed by 0/1 keys"):
            client.accept(signed([stolen], 6, roots=[_signed_root(second, signers)]))
        for one in (verifier(tmp_path / "root", tmp_path / "floor"), client):
            assert one.keys == {hex_of(THIRD)} and one.accept(data).newest == entry(7, 3)
        again = verifier(tmp_path / "root", tmp_path / "floor")
        assert again.keys == {hex_of(THIRD)} and again.head.newest == entry(7, 3)


def test_a_root_that_keeps_the_keys_keeps_the_floor_and_expires(tmp_path):
    """Attack: a renewed root, which revokes nothing, comes with a head from before."""
    first = roots.amend(b"", [ROOT], root=[hex_of(ROOT)], online=[PUBLIC], expires_s=NOW + 10)
    second = roots.amend(first, [ROOT], expires_s=NOW + 20).splitlines()[1]
    (tmp_path / "root").write_bytes(first)
    client = verifier(tmp_path / "root")
    accepted = client.accept(signed([entry(5)], 5))
    with pytest.raises(head.StaleHead):
        client.accept(signed([entry(4)], 4, roots=[second]))
    assert client.head == accepted and client._root.version == 2
    assert verifier().accept(signed([entry(5)], 5, roots=[second])).newest == entry(5)  # the key alone reads no roots
    with pytest.raises(head.ExpiredHead, match="the root of key .* has expired"):  # the head has not
        verifier(tmp_path / "root", now=NOW + 10).accept(accepted.data)
    assert client.accept(accepted.data) == accepted
    client._clock = lambda: NOW + 20
    with pytest.raises(head.ExpiredHead, match="the root of key .* has expired"):
        client.accept(accepted.data)


def _signed_root(metadata, signers):
    metadata.signatures.clear()
    for key in signers:
        metadata.sign(CryptoSigner(key), append=True)
    return metadata.to_bytes(JSONSerializer(compact=True))


class Files(ngclient.FetcherInterface):
    """Serves the lines of a head as the four kinds of files that TUF's own client asks for."""

    def __init__(self, data):
        *root_lines, timestamp, snapshot, targets, end = data.split(b"\n")
        assert not end
        self.files = {"timestamp.json": timestamp, "snapshot.json": snapshot, "targets.json": targets}
        self.files |= {f"{i}.root.json": line for i, line in enumerate(root_lines, 2)}

    def _fetch(self, url):
        name = url.removeprefix("tuf://")
        if name not in self.files:
            raise exceptions.DownloadHTTPError(name, 404)
        return iter([self.files[name]])


@pytest.mark.parametrize("seed", range(4))
def test_verdicts_agree_with_tufs_own_client(tmp_path, seed):
    """The oracle is `tuf.ngclient.Updater`, without the floor in (epoch, version) that TUF does not have."""
    rng, verdicts = random.Random(seed), []
    world, kept = World(rng, time.time()), tmp_path / "kept"
    first = world.root_file.splitlines()[0]
    (tmp_path / "root").write_bytes(first + b"\n")
    client = head.HeadVerifier(tmp_path / "root")
    client._check_floor = lambda found: None if client.head is None or found.serial > client.head.serial else stale()
    kept.mkdir()
    for _ in range(80):
        rng.choice([world.publish, world.publish, world.steal])()
        if rng.random() < 0.08:
            world.rotate()
        data = world.served()
        try:
            fetcher = Files(data)
        except (AssertionError, ValueError):  # not even lines
            with pytest.raises(journal.CorruptSource):
                client.accept(data)
            continue
        tried = tmp_path / "tried"
        shutil.copytree(kept, tried)
        try:
            config = ngclient.UpdaterConfig(prefix_targets_with_hash=False)
            ngclient.Updater(str(tried), "tuf://", fetcher=fetcher, config=config, bootstrap=first).refresh()
            theirs = True
        except (exceptions.RepositoryError, exceptions.DownloadError) as error:
            theirs, why = False, error
        before = client.head
        try:
            client.accept(data)
            ours = True
        except head.ExpiredHead as error:  # it raises the floor all the same
            ours, why, client.head = False, error, before if client.head is not None else None
        except journal.CorruptSource as error:
            ours, why = False, error
        # TUF does not ask for a root that it has, and so does not see that one is damaged.
        assert ours == theirs or (theirs and str(why).startswith("a line is not TUF metadata")), (seed, why)
        if ours:
            shutil.rmtree(kept)
            shutil.copytree(tried, kept, symlinks=True)
        else:  # its copy of a head that it refuses in the end is not ours to compare; new roots are
            shutil.copytree(tried / "root_history", kept / "root_history", dirs_exist_ok=True)
        shutil.rmtree(tried)
        verdicts.append(ours)
    assert 10 < sum(verdicts) < len(verdicts) - 10


LINES, TWIN = (signed([entry(version)], 1).split(b"\n") for version in (1, 2))


def stale():
    raise head.StaleHead("older")


@pytest.mark.parametrize(
    "data",
    [b"", b"\n" * 3, b"\n" * 100_000, b"x" * (head.MAX_HEAD_BYTES + 1), b"[" * 100_000 + b"\n" * 3, b"{}\n{}\n{}\n"]
    + [b"\n".join([LINES[i], *LINES[1:]]) for i in (1, 2)]  # snapshot or targets in the place of the timestamp
    + [b"\n".join([*LINES[:i], *TWIN[i:]]) for i in (1, 2)]  # a snapshot or targets with the number, not the hash
    + [b"\n".join([LINES[0][:-1] + b" " * head.MAX_TIMESTAMP_BYTES + b"}", *LINES[1:]])]  # the signature is still good
    + [signed([head.Entry(0, 1, journal.MAX_MANIFEST_BYTES + 1, "0" * 64)], 1)]
    + [
        b'{"signatures":[],"signed":{"_type":"timestamp","version":1e999}}\n{}\n{}\n',
        b"null\nnull\nnull\n",
        b"\xff\n\n\n",
    ],
)
def test_hostile_bytes_are_refused_and_nothing_else_happens(data):
    with pytest.raises(journal.CorruptSource):
        verifier().accept(data)

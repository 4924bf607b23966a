"""Heads as publishers write them and clients read them: epochs, one manifest of a number, the floor, expiry, keys that change."""

import itertools
import os
import shutil
import time

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.weights import broadcast
from sharding.weights.broadcast import head_writer
from sharding.weights.format import head, roots
from tests.support import commands, proxy

KEY, OTHER, ROOT = (ed25519.Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
PUBLIC, OTHER_PUBLIC, ROOT_PUBLIC = map(proxy.public, (KEY, OTHER, ROOT))
PEM = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Epochs are counted from 0, unless a test has its own clock."""
    monkeypatch.setattr(head_writer.time, "time_ns", lambda: 0)


def command(*argv):
    return commands.run("sharding.broadcast", *argv)


def publisher(root, **options):
    return broadcast.Publisher(str(root), broadcast.PublishOptions(key=KEY, **options), snapshot_every=3)


def publish(to, *versions, value=0.0):
    return [to.publish({"w": np.full(4, version + value)}, version) for version in versions][-1]


def read(root, **options):
    return head.HeadVerifier(PUBLIC).accept((root / head.NAME).read_bytes(), **options)


def test_a_resumed_run_begins_an_epoch(tmp_path):
    with publisher(tmp_path) as first:
        publish(first, *range(4))
        watched = broadcast.watch(tmp_path, key=PUBLIC)
        assert next(watched) == 3
    assert read(tmp_path).order == (0, 3)
    resumed = publisher(tmp_path)
    resumed.forget(2)
    begun = read(tmp_path)
    assert (begun.order, sorted(begun.versions)) == ((1, -1), [0, 1])
    assert broadcast.latest(tmp_path, key=PUBLIC) is None and broadcast.versions(tmp_path) == [0, 1]
    with pytest.raises(FileNotFoundError, match="call wait_for"):
        broadcast.pull(tmp_path, key=PUBLIC)
    publish(resumed, 2, value=0.5)
    assert next(watched) == 2  # although its number is lower
    pulled = broadcast.pull(tmp_path, key=PUBLIC)
    assert (pulled.version, pulled.params["w"][0]) == (2, 2.5) and read(tmp_path).order == (1, 2)
    assert broadcast.pull(tmp_path, 1, key=PUBLIC).params["w"][0] == 1  # an older one that the head lists


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_run_in_a_backup_of_its_directory_uses_no_epoch_a_second_time(tmp_path, monkeypatch, is_lost):
    """Both gave version 2 of one epoch to different weights: a reader took either, and refused the other for ever."""
    monkeypatch.setattr(head_writer.time, "time_ns", itertools.count(10**18, 10**6).__next__)
    run, backup, reader = tmp_path / "run", tmp_path / "backup", head.HeadVerifier(PUBLIC)
    publish(publisher(run), 0, 1)
    if not is_lost:  # else a backup of all but the weights
        shutil.copytree(run, backup)
    for root in (run, backup):
        resumed = publisher(root)
        resumed.forget(2)
        publish(resumed, 2, value=root is backup)
        assert broadcast.pull(root, 2, key=reader).params["w"][0] == 2 + (root is backup)


def test_all_reads_of_a_process_share_one_floor_per_key(tmp_path):
    """A client that held v5 took v2 from colluding sources."""
    to, evil = publisher(tmp_path / "a", keep=9), tmp_path / "b"
    publish(to, 1, 2)
    shutil.copytree(tmp_path / "a", evil)
    publish(to, 3, 4, 5)
    assert broadcast.pull(tmp_path / "a", key=PUBLIC).version == 5
    for call in (broadcast.pull, broadcast.latest, lambda root, key: broadcast.pull(root, 2, key=key)):
        with pytest.raises(broadcast.CorruptSource, match="version 2, serial .* older than epoch 0, version 5"):
            call(evil, key=PUBLIC)
    assert broadcast.pull(tmp_path / "a", 2, key=PUBLIC).version == 2  # an older one that the newest head lists
    assert broadcast.pull(evil).version == 2  # who trusts no key has no floor


def test_a_publisher_signs_no_number_twice_in_an_epoch(tmp_path):
    options = broadcast.PublishOptions(key=KEY)
    for expected in (0, 1):
        assert broadcast.publish({"w": np.full(3, expected)}, 4, tmp_path, options).version == 4
        assert read(tmp_path).order == (expected, 4)
        broadcast.remove(tmp_path, 4)
    for version in (5, 6):
        broadcast.publish({"w": np.ones(3)}, version, tmp_path, options)
        assert read(tmp_path).order == (2, version)  # newer ones belong to the same epoch
    one, two = publisher(tmp_path), publisher(tmp_path)
    publish(one, 7)
    publish(two, 8)
    match = "another publisher has begun epoch 4 under .* after this one's 3; only the newest"
    with pytest.raises(ValueError, match=match):
        publish(one, 9)
    broadcast.remove(tmp_path, 8)
    with pytest.raises(ValueError, match="version 8 of epoch 4 is not newer than version 8 of epoch 4"):
        publish(two, 8)


def test_the_head_announces_a_version_lists_it_after_its_manifest_and_drops_what_is_deleted(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        head_writer.destination,
        "write",
        lambda root, name, data, durable=False: (
            seen.append((name, durable, sorted(os.listdir(root)))),
            (tmp_path / name).write_bytes(data),
        ),
    )
    to = publisher(tmp_path, keep=1)
    publish(to, 7)
    begun, durable = head.NAME, head_writer.EPOCH_NAME
    assert [(name, synced) for name, synced, _ in seen] == [(durable, True), (begun, False), (begun, False)]
    assert "v00000007" not in seen[1][2] and "v00000007" in seen[2][2]
    assert head.HeadVerifier(PUBLIC).accept((tmp_path / durable).read_bytes()).writing == 7
    for version in (8, 9, 10):
        publish(to, version)
        assert sorted(read(tmp_path).versions) == broadcast.versions(tmp_path)
    assert broadcast.versions(tmp_path) == [10] and len(seen) == 3 + 3 * 2


def test_a_head_is_signed_again_while_the_run_lives_and_for_years_at_its_end(tmp_path, capfd, monkeypatch):
    with publisher(tmp_path, head_s=1.0) as to:
        publish(to, 0)
        first = read(tmp_path, expired=True)
        proxy.wait_until(lambda: read(tmp_path, expired=True).serial > first.serial)
        again = read(tmp_path, expired=True)
        assert again.versions == first.versions and 0 <= again.expires_s - again.serial / 1000 <= 1
    assert read(tmp_path).expires_s > time.time() + 9 * 365 * 86400 and read(tmp_path).serial > again.serial
    assert not to._refresher.is_alive()
    to._heads.begin(1, [0])
    with monkeypatch.context() as patch:
        patch.setattr(head_writer.time, "time", lambda: 1.0)  # a clock that was set back
        for _ in range(2):
            last = read(tmp_path, expired=True)
            to._heads.refresh()
            assert (read(tmp_path, expired=True).serial, last.writing) == (last.serial + 1, 1)
    with pytest.raises(ZeroDivisionError), publisher(tmp_path, head_s=1.0) as to:
        publish(to, 1)
        raise ZeroDivisionError
    proxy.wait_until(lambda: time.time() > read(tmp_path, expired=True).expires_s)  # a run that failed may be resumed
    assert broadcast.pull(tmp_path, key=PUBLIC).version == broadcast.latest(tmp_path, key=PUBLIC) == 1
    assert capfd.readouterr().err.count("has expired at") == 2  # a notice per source
    with proxy.running(tmp_path) as relay:
        proxy.wait_until(lambda: not relay.store.is_recovering)
        with pytest.raises(broadcast.CorruptSource, match="has expired at .* may withhold newer weights"):
            broadcast.pull(relay.url, key=PUBLIC)
        assert command("renew", str(tmp_path), "--key-file", str(pem(tmp_path, KEY))) == 0
        assert command("renew", str(tmp_path / "none"), "--key-file", str(tmp_path / "key.pem")) == 1
        proxy.wait_until(lambda: pulls(relay.url))
    assert read(tmp_path).order == (1, 1)


def pulls(url):
    try:
        return broadcast.pull(url, key=PUBLIC).version == 1
    except head.ExpiredHead:
        return False


def pem(directory, key, name="key.pem"):
    (directory / name).write_bytes(key.private_bytes(*PEM))
    return directory / name


@pytest.mark.parametrize("torn", [b"", b"{", None])
def test_a_power_failure_that_tears_the_head_repeats_no_epoch(tmp_path, torn):
    publish(publisher(tmp_path), 0, 1)
    second = publisher(tmp_path)
    second.forget(1)
    publish(second, 1)
    if torn is None:
        (tmp_path / head.NAME).unlink()
    else:
        (tmp_path / head.NAME).write_bytes(torn)
    resumed = publisher(tmp_path)
    resumed.forget(1)
    publish(resumed, 1)
    assert read(tmp_path).order == (2, 1) and sorted(read(tmp_path).versions) == [0, 1]
    (tmp_path / head.NAME).write_bytes(b"{")
    (tmp_path / head_writer.EPOCH_NAME).unlink()
    with pytest.raises(ValueError, match="head.jsonl cannot be followed .* publish with the key that signed it"):
        publish(publisher(tmp_path), 2)


def test_versions_of_our_key_that_no_head_lists_are_listed_by_the_next_publisher(tmp_path, monkeypatch):
    """As a publisher leaves one that is killed between the manifest and the head."""
    for version, key in ((0, KEY), (1, OTHER), (2, KEY)):
        proxy.publish(tmp_path, version, proxy.contents(version), key=key)
    assert broadcast.latest(tmp_path, key=PUBLIC) is None
    with pytest.raises(broadcast.CorruptSource, match="version 0 comes without the signed head"):
        broadcast.verify(tmp_path, 0, key=PUBLIC)
    monkeypatch.setattr(head_writer.time, "time_ns", lambda: 7 * 10**6)
    publish(publisher(tmp_path), 3)
    assert {v: e.epoch for v, e in read(tmp_path).versions.items()} == {0: 0, 2: 0, 3: 7}
    assert broadcast.verify(tmp_path, 0, key=PUBLIC) and broadcast.latest(tmp_path, key=PUBLIC) == 3
    (tmp_path / head.NAME).unlink()  # the versions that the head listed are proven, and no others exist
    assert broadcast.verify(tmp_path, 2, key=PUBLIC) and broadcast.latest(tmp_path, key=PUBLIC) == 3
    proxy.publish(tmp_path, 4, proxy.contents(4))
    with pytest.raises(broadcast.CorruptSource, match="version 4 is not in the signed head"):
        broadcast.verify(tmp_path, 4, key=PUBLIC)


def test_a_root_file_replaces_the_key_of_a_run_and_revokes_the_old_one(tmp_path, capsys):
    root_key, first, second = (pem(tmp_path, key, f"{i}.pem") for i, key in enumerate((ROOT, KEY, OTHER)))
    file, weights = tmp_path / "root.json", tmp_path / "weights"
    keys = ["keys", str(file), "--sign", str(root_key)]
    assert command(*keys, "--root", str(root_key), "--online", PUBLIC) == 0
    shutil.copyfile(file, tmp_path / "reader.json")
    publish(publisher(weights, root_file=str(file)), 0, 1)
    reader, given = (
        head.HeadVerifier(tmp_path / "reader.json"),
        broadcast.PublishOptions(key=OTHER, root_file=str(file)),
    )
    assert broadcast.pull(weights, key=reader).version == 1
    with pytest.raises(ValueError, match=f"root.json names .*{PUBLIC}.*, not this publisher's {OTHER_PUBLIC}"):
        broadcast.Publisher(weights, given)
    running = publisher(weights, root_file=str(file))
    stolen = publisher(weights, root_file=str(tmp_path / "reader.json"))
    publish(stolen, 1000)
    assert broadcast.latest(weights, key=reader) == 1000
    assert command(*keys, "--online", str(second)) == 0 and "root 2, until" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the key was revoked"):
        publish(running, 1001)
    resumed = broadcast.Publisher(weights, given)
    resumed.forget(2)
    publish(resumed, 2)
    # The floor that the stolen key had raised is forgotten with it.
    assert broadcast.pull(weights, key=reader).version == 2 and reader.keys == {OTHER_PUBLIC}
    assert sorted(head.HeadVerifier(file).accept((weights / head.NAME).read_bytes()).versions) == [0, 1, 2]
    revoked = stolen._heads._verifier.head.data
    for trusted in (reader, head.HeadVerifier(file)):
        with pytest.raises(broadcast.CorruptSource, match="timestamp was signed by 0/1 keys"):
            trusted.accept(revoked)
    (weights / head.NAME).unlink()
    with pytest.raises(broadcast.CorruptSource, match="without the signed head"):  # a root file always needs one
        broadcast.pull(weights, 2, key=tmp_path / "reader.json")


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["--online", PUBLIC], "must be signed; give --sign"),
        ([], "does not exist; give --root, --online and --sign"),
        (["--root", ROOT_PUBLIC, "--sign", "KEY"], "one online key"),
        (["--online", "abc", "--sign", "KEY"], "abc has 3 hex digits, but a public key has 64"),
        (["--root", "nothing.pem", "--sign", "KEY"], "openssl genpkey -algorithm ed25519 -out nothing.pem"),
        *((["--online", PUBLIC, "--root", "KEY", "--sign", "KEY", "--days", d], "--days") for d in ("0", "nan", "1e9")),
    ],
)
def test_mistakes_with_keys(tmp_path, capsys, arguments, match):
    file, key = tmp_path / "root.json", str(pem(tmp_path, ROOT))
    assert command("keys", str(file), *(key if a == "KEY" else a for a in arguments)) == 1
    assert match in capsys.readouterr().err and not file.exists()


def test_the_root_key_is_replaced_by_both(tmp_path, capsys):
    a, b = (str(pem(tmp_path, key, name)) for key, name in ((ROOT, "a.pem"), (OTHER, "b.pem")))
    file = tmp_path / "root.json"
    keys = ["keys", str(file)]
    command(*keys, "--root", a, "--online", PUBLIC, "--sign", a)
    before = file.read_bytes()
    for signer in (a, b):
        assert command(*keys, "--root", b, "--sign", signer) == 1 and file.read_bytes() == before
        assert "root was signed by 0/1 keys; give --sign" in capsys.readouterr().err
    assert command(*keys, "--root", b, "--sign", a, b) == 0 and head.HeadVerifier(file).keys == {PUBLIC}
    assert len(roots.read(file.read_bytes())) == 2
    file.write_text("nothing")
    assert command(*keys) == 1 and "a line is not TUF metadata" in capsys.readouterr().err

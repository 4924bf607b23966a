"""Signed heads: the floor, expiry, rotation and revocation of keys, hostile bytes, and agreement with TUF's own client."""

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.format import head, journal

KEY, OTHER, THIRD = (ed25519.Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
NOW = 1_800_000_000.0


def entry(version, epoch=0, content=b""):
    data = f"manifest of {version} of {epoch}".encode() + content
    return head.Entry(epoch, version, len(data), hashlib.sha256(data).hexdigest())


def signed(entries, serial, *, key=KEY, epoch=None, expires_s=NOW + 100, **options):
    epoch = max((e.epoch for e in entries), default=0) if epoch is None else epoch
    return head.sign(key, entries, serial=serial, epoch=epoch, expires_s=expires_s, **options)


def verifier(trusted=PUBLIC, floor=None, now=NOW):
    return head.HeadVerifier(trusted, floor, clock=lambda: now)


def test_a_head_says_what_is_newest():
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
        (signed([entry(6)], 10, expires_s=NOW), head.ExpiredHead, "head of key .* has expired at 2027-01-15"),
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
    (tmp_path / "head.jsonl").write_bytes(accepted.data[:-9])
    with pytest.raises(ValueError, match="head.jsonl, is damaged .* delete it, which forgets that head"):
        verifier(floor=tmp_path / "head.jsonl")


def test_an_expired_head_serves_where_its_owner_could_sign_anyway():
    checked, old = verifier(now=NOW + 101), signed([entry(5)], 9)
    assert checked.accept(old, expired=True).newest == entry(5)
    with pytest.raises(head.ExpiredHead):  # the same bytes, from a relay
        checked.accept(old)


def test_a_source_without_a_head_serves_only_versions_of_earlier_releases():
    checked = verifier()
    checked.check_headless(3, None, PUBLIC)
    for epoch, key, match in ((0, PUBLIC, "without the signed head"), (None, "ab" * 32, "is signed by abab")):
        with pytest.raises(journal.CorruptSource, match=match):
            checked.check_headless(3, epoch, key)
    checked.accept(signed([entry(1)], 1))
    with pytest.raises(journal.CorruptSource, match="version 3 comes without the signed head"):
        checked.check_headless(3, None, PUBLIC)

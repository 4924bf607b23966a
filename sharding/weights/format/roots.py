"""Roots of trust for signed heads: the keys that may sign each role, in TUF's metadata (python-tuf).

A root names the keys of every role, and how many of them must sign. The roles besides `root` belong to the online key of the run.
A root file has one root per line, oldest first; each is signed by the keys of the one before and by its own, so that keys are
replaced and revoked by a new line. A reader that trusts an old line can follow to the newest. Imports no jax.
"""

# pyright: reportPrivateImportUsage=false
import datetime
import itertools
import os
import pathlib
from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric import ed25519
from securesystemslib.signer import CryptoSigner, SSlibKey
from tuf.api import exceptions
from tuf.api.metadata import Metadata, Root, Snapshot, Targets, Timestamp
from tuf.api.serialization.json import JSONSerializer

from sharding.system import text as text_lib
from sharding.weights.format import journal

ONLINE = (Targets.type, Snapshot.type, Timestamp.type)
MAX_ROOTS = 256
NEVER = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


def trusted(name: str | os.PathLike, *, first: bool = False) -> tuple[Root, bool]:
    """Returns (the root that a key in hex or a root file names, True if it is a file, whose later roots heads bring).

    For a root file, returns the newest root, or with `first` the oldest.
    """
    if text_lib.is_hex(str(name)):  # it has all roles, and never expires
        root = Root(version=1, expires=NEVER, consistent_snapshot=False)
        for role in (Root.type, *ONLINE):
            root.add_key(_key(str(name)), role)
        return root, False
    if not os.path.isfile(name):
        text = f"the trusted key {str(name)!r} is neither 64 lowercase hex digits nor a root file"
        raise ValueError(f"{text}; pass the publisher's public key, or its root file")
    return read(pathlib.Path(name).read_bytes())[0 if first else -1].signed, True


def parse(line: bytes) -> Metadata[Root]:
    """Returns the root in one line of a root file or head. Checks no signature. Raises CorruptSource."""
    try:
        found = Metadata[Root].from_bytes(line)
    except exceptions.RepositoryError as error:
        raise journal.CorruptSource(f"a line is not TUF metadata: {error.__cause__}") from error
    journal.require(found.signed.type == Root.type, f"a line has {found.signed.type[:80]!r} in the place of a root")
    return found


def read(data: bytes) -> list[Metadata[Root]]:
    """Returns the roots of a root file, one per line, oldest first, each checked against the one before. Raises ValueError."""
    try:
        roots = [parse(line) for line in data.splitlines()]
        journal.require(0 < len(roots) <= MAX_ROOTS + 1, f"it has {len(roots)} roots, not 1 to {MAX_ROOTS + 1}")
        check_next(roots[0].signed, roots[0])
        for before, root in itertools.pairwise(roots):
            check_next(before.signed, root)
            text = f"root {root.signed.version} follows root {before.signed.version}"
            journal.require(root.signed.version == before.signed.version + 1, text)
        return roots
    except (exceptions.RepositoryError, ValueError) as error:
        text = f"not a root file: {error}; pass one that `python -m sharding.broadcast keys` wrote"
        raise ValueError(text) from error


def check_next(before: Root, root: Metadata[Root]) -> None:
    """Raises RepositoryError unless the keys of `before` and its own have signed `root`."""
    before.verify_delegate(Root.type, root.signed_bytes, root.signatures)
    root.signed.verify_delegate(Root.type, root.signed_bytes, root.signatures)


def online_keys(root: Root) -> frozenset[str]:
    """Returns the hex public keys that may sign heads and manifests."""
    return _hexes(root, Targets.type)


def amend(
    data: bytes,
    signers: Sequence[ed25519.Ed25519PrivateKey],
    *,
    expires_s: float,
    online: Sequence[str] = (),
    root: Sequence[str] = (),
) -> bytes:
    """Returns the root file `data` with one root more, or a new one if `data` is empty, signed by `signers`. The new root expires at `expires_s` (Unix time).

    `online` and `root` are hex public keys. They replace all keys that had the role before; an empty list keeps those. `signers` are private
    keys: enough root keys of the root before, and of the new one. Raises ValueError if these are not enough, if a role has no key, and if
    `data` or a key is malformed.
    """
    before = read(data)[-1].signed if data else Root(version=1, expires=NEVER)
    until = datetime.datetime.fromtimestamp(expires_s, datetime.UTC)
    new = Root(version=before.version + bool(data), expires=until, consistent_snapshot=False)
    for role, given in ((Root.type, root), *((name, online) for name in ONLINE)):
        for key in map(_key, given) if given else (before.keys[keyid] for keyid in before.roles[role].keyids):
            new.add_key(key, role)
    if not new.roles[Root.type].keyids or not new.roles[Targets.type].keyids:
        raise ValueError("a root file names at least one root key and one online key; give --root and --online")
    metadata = Metadata(new)
    for key in signers:
        metadata.sign(CryptoSigner(key), append=True)
    try:
        check_next(before if data else new, metadata)
    except exceptions.RepositoryError as error:
        raise ValueError(f"{error}; give --sign the private keys of the old and the new root keys") from error
    amended = data + metadata.to_bytes(JSONSerializer(compact=True)) + b"\n"
    read(amended)
    return amended


def describe(data: bytes) -> str:
    """Returns a line on each root of the root file `data`. Raises ValueError if it is malformed."""
    lines = []
    for root in (metadata.signed for metadata in read(data)):
        changers, signers = (", ".join(sorted(_hexes(root, role))) for role in (Root.type, Targets.type))
        lines.append(
            f"root {root.version}, until {root.expires:%Y-%m-%d}: {signers} signs weights; {changers} may change it"
        )
    return "\n".join(lines)


def _hexes(root: Root, role: str) -> frozenset[str]:
    return frozenset(root.keys[keyid].keyval["public"] for keyid in root.roles[role].keyids)


def _key(public_key: str) -> SSlibKey:
    return SSlibKey.from_crypto(ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)))

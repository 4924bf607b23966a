"""Drops or encrypts the trajectories of a run after it has trained on them; their hashes stay, so that the ledger can still be checked.

1. The rollouts of a step are WORKDIR/rollouts/step_N/accepted.parquet. In their place, `redacted.json` has the SHA-256 of the file and the digest of each
   group, which the ledger has, too: `rl.audit` compares them, and counts the batch as redacted.
2. mode "drop" removes it, and one that was encrypted before; mode "encrypt": `accepted.parquet.sealed` has the file, encrypted for the public key `recipient` (X25519, HKDF-SHA256, AES-256-GCM). This machine
   cannot read it any more. `open_sealed` puts the file back with the private key.
3. A kill leaves the file, or both: the next `apply` goes on. Only steps up to `last_step - keep_steps` are touched: a resume needs none of them.

Held-out samples (WORKDIR/samples, evaluations.json, report.html) and the log of open groups stay; the orchestrator removes the latter itself.
"""

import collections
import dataclasses
import hashlib
import json
import os
import pathlib

from cryptography import exceptions
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import x25519
from cryptography.hazmat.primitives.ciphers import aead
from cryptography.hazmat.primitives.kdf import hkdf

from inference.rollouts import parquet
from rl.protocol import verdict
from sharding.system import atomic_file
from sharding.system import text as text_lib

MODES = ("keep", "drop", "encrypt")
FILE, HASHES, SEALED = "accepted.parquet", "redacted.json", "accepted.parquet.sealed"
_MAGIC = b"INTELLAXSEALED1\n"


@dataclasses.dataclass(frozen=True)
class Rule:
    """The fields of `config.retention`."""

    mode: str = "keep"
    keep_steps: int = 100
    recipient: str = ""  # hex of an X25519 public key, for "encrypt"

    def __post_init__(self):
        """Raises ValueError for an unknown mode, a negative number, or a recipient that is missing or has no effect."""
        if self.mode not in MODES:
            raise ValueError(f"retention.mode = {self.mode!r} is unknown; choose one of {', '.join(MODES)}")
        if self.keep_steps < 0:
            raise ValueError(f"retention.keep_steps = {self.keep_steps} must be at least 0; raise it")
        if (self.mode == "encrypt") != bool(self.recipient):
            remedy = "set it to the key that python -m rl.rollouts key prints, with retention.mode = 'encrypt' alone"
            raise ValueError(f"retention.recipient = {self.recipient!r} and retention.mode = {self.mode!r}; {remedy}")
        if self.recipient and not text_lib.is_hex(self.recipient):
            raise ValueError(f"retention.recipient = {self.recipient!r} is not a public key; write 64 hex digits")


def apply(workdir: pathlib.Path, last_step: int, rule: Rule) -> list[int]:
    """Redacts the rollouts of the steps up to `last_step - keep_steps`; returns these steps. `last_step` is that of a complete checkpoint."""
    if rule.mode == "keep":
        return []
    found, names = set(), (FILE, SEALED) if rule.mode == "drop" else (FILE,)
    for path in [path for name in names for path in (workdir / "rollouts").glob(f"step_*/{name}")]:
        step = int(path.parent.name.removeprefix("step_"))
        if step <= last_step - rule.keep_steps:
            _redact(path, rule) if path.name == FILE else path.unlink()
            found.add(step)
    return sorted(found)


def digests(folder: pathlib.Path) -> dict[int, str] | None:
    """Returns the digest of each group of a step that was redacted, by its number; None for a step that was not. Raises ValueError for a malformed file."""
    path = folder / HASHES
    if not path.exists():
        return None
    try:
        return {int(number): str(digest) for number, digest in json.loads(path.read_bytes())["groups"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a list of digests ({error})") from error


def open_sealed(path: pathlib.Path, key: x25519.X25519PrivateKey) -> pathlib.Path:
    """Puts back the rollouts in a sealed file; returns their path. Raises ValueError for another key, or a file that was changed."""
    data = path.read_bytes()
    head = len(_MAGIC)
    public, nonce, body = data[head : head + 32], data[head + 32 : head + 44], data[head + 44 :]
    try:
        if data[:head] != _MAGIC:
            raise ValueError("its beginning is wrong")
        shared = key.exchange(x25519.X25519PublicKey.from_public_bytes(public))
        plain = aead.AESGCM(_derived(shared, public, _public(key))).decrypt(nonce, body, _MAGIC)
    except (exceptions.InvalidTag, ValueError) as error:
        raise ValueError(
            f"{path} cannot be opened with this key ({error or 'the tag is wrong'}); give the recipient's"
        ) from error
    expected = json.loads((path.parent / HASHES).read_bytes())["sha256"]
    if hashlib.sha256(plain).hexdigest() != expected:
        raise ValueError(f"{path} is not the file that {HASHES} names; put the right one back")
    atomic_file.write(path.parent / FILE, plain, durable=True)
    return path.parent / FILE


def load_or_create_key(path: str | os.PathLike) -> x25519.X25519PrivateKey:
    """Returns the private key in a PEM file, which is created if it does not exist. Raises ValueError for another file."""
    if not pathlib.Path(path).exists():
        key = x25519.X25519PrivateKey.generate()
        how = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        atomic_file.write(path, key.private_bytes(*how), secret=True)
    try:
        key = serialization.load_pem_private_key(pathlib.Path(path).read_bytes(), None)
    except (ValueError, TypeError, exceptions.UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} is not a private key ({error}); give a file of python -m rl.rollouts key") from error
    if not isinstance(key, x25519.X25519PrivateKey):
        raise ValueError(f"{path} is a key of another kind; give a file of python -m rl.rollouts key")
    return key


def public_hex(key: x25519.X25519PrivateKey) -> str:
    """Returns the public key of `retention.recipient`."""
    return _public(key).hex()


def _redact(path: pathlib.Path, rule: Rule) -> None:
    data, groups = path.read_bytes(), collections.defaultdict(list)
    for rollout in parquet.read(path):
        groups[rollout.task.group].append(rollout)
    names = {str(number): verdict.group_digest(groups[number]) for number in sorted(groups)}
    content = {"sha256": hashlib.sha256(data).hexdigest(), "groups": names}
    atomic_file.write(path.parent / HASHES, json.dumps(content).encode(), durable=True)
    if rule.mode == "encrypt":
        own, recipient = x25519.X25519PrivateKey.generate(), bytes.fromhex(rule.recipient)
        shared = own.exchange(x25519.X25519PublicKey.from_public_bytes(recipient))
        nonce = os.urandom(12)
        sealed = aead.AESGCM(_derived(shared, _public(own), recipient)).encrypt(nonce, data, _MAGIC)
        atomic_file.write(path.parent / SEALED, _MAGIC, _public(own), nonce, sealed, durable=True)
    path.unlink()
    atomic_file.sync_directory(path.parent)


def _public(key: x25519.X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _derived(shared: bytes, ephemeral: bytes, recipient: bytes) -> bytes:
    return hkdf.HKDF(hashes.SHA256(), 32, None, b"intellax/sealed/1" + ephemeral + recipient).derive(shared)

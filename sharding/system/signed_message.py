"""Signs and verifies JSON objects with ed25519 keys. Imports no jax."""

import json
import os
import pathlib

from cryptography import exceptions
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519


def sign(private: ed25519.Ed25519PrivateKey, message: dict) -> dict:
    """Returns a copy of a JSON object with the field `signature`, made by a key over all other fields."""
    return message | {"signature": private.sign(_bytes(message)).hex()}


def is_signed(signer: str, message: object) -> bool:
    """Returns True if `message`, maybe any JSON value, is an object that was signed by the key with this public half. Never raises."""
    try:
        assert isinstance(message, dict)
        unsigned = {name: value for name, value in message.items() if name != "signature"}
        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
        public.verify(bytes.fromhex(message["signature"]), _bytes(unsigned))
        return True
    except (exceptions.InvalidSignature, AssertionError, KeyError, TypeError, ValueError, RecursionError):
        return False


def load_key(path: str | os.PathLike) -> ed25519.Ed25519PrivateKey:
    """Returns the private key in a file. Raises FileNotFoundError, or ValueError if it is not an unencrypted ed25519 PEM file."""
    if not os.path.isfile(path):
        make = f"make a key with `openssl genpkey -algorithm ed25519 -out {path}`"
        raise FileNotFoundError(f"no file {path}: pass a PEM file with a private key, or {make}")
    try:
        key = serialization.load_pem_private_key(pathlib.Path(path).read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not an unencrypted PEM private key ({error}): pass such a file") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{path} contains {type(key).__name__}: pass an ed25519 key")
    return key


def _bytes(message: dict) -> bytes:
    return b"intellax/message/1" + json.dumps(message, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

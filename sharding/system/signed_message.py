"""Signs and verifies JSON objects with ed25519 keys, and requests to the orchestrator of a run. Imports no jax.

A request is signed over run, session, signer, and time: it is worth nothing to another orchestrator, nor to this one after a restart.
"""

import json
import os
import pathlib
import time

from cryptography import exceptions
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.system import atomic_file

MAX_CLOCK_SKEW_S = 300.0
_last_s = 0.0  # returned last by `steady_time`


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


def steady_time() -> float:
    """Returns the Unix time in seconds, but later than in the previous call, unless the clock was set back by minutes.

    The monotonic clock is not used: it stops while a laptop sleeps, and the requests of a node would be too old forever.
    """
    global _last_s
    now_s = time.time()
    if now_s < _last_s - MAX_CLOCK_SKEW_S:  # corrected: requests with the old time are refused
        _last_s = now_s
    _last_s = max(_last_s + 2e-6, now_s)  # two: float64 resolves 0.24 us, so one could round to the same us
    return _last_s


def request(private: ed25519.Ed25519PrivateKey, run: str, session: str, *, clock=steady_time, **fields) -> dict:
    """Returns the signed JSON body of a request: `fields`, and those that bind it to a key, a run, a session, and a time."""
    signer = private.public_key().public_bytes_raw().hex()
    bound = {"run": run, "session": session, "worker": signer, "time_us": int(clock() * 1e6)}
    return sign(private, bound | fields)


def check_reply(run: str, reply: object, sent: dict) -> None:
    """Raises ValueError unless `reply` is signed by `run`, as the reply to the request `sent`."""
    if not is_signed(run, reply) or not isinstance(reply, dict) or reply.get("request") != sent["signature"]:
        raise ValueError(f"the reply is not signed by run {run}; correct --orchestrator or --run")


def open_session(reply: dict, nonce: str, trusted: str) -> tuple[str, str, dict]:
    """Returns (run, session, description of the run) of a reply to GET /run. Raises ValueError if another run than `trusted` signed it.

    "" trusts any run. `nonce` is that of the request.
    """
    try:
        run, session, described = str(reply["id"]), str(reply["session"]), {**reply["run"]}
        is_valid = reply["nonce"] == nonce and is_signed(run, reply)
    except (KeyError, TypeError) as error:
        raise not_an_orchestrator(reply) from error
    if trusted not in ("", run):
        raise ValueError(f"it serves run {run}, and --run is {trusted}; correct one of them")
    if not is_valid:
        raise ValueError(f"the reply to GET /run is not signed by run {run} for this request; correct --orchestrator")
    return run, session, described


def not_an_orchestrator(reply: object) -> ValueError:
    """Returns the error about a reply to GET /run of another kind of server."""
    found = f"GET /run returned {str(reply)[:200]}, which is not the reply of an orchestrator"
    return ValueError(f"{found}; correct --orchestrator")


def load_key(path: str | os.PathLike, role: str = "key") -> ed25519.Ed25519PrivateKey:
    """Returns the private key in a file, which errors call `role`.

    Raises FileNotFoundError, or ValueError if it is not an unencrypted ed25519 PEM file.
    """
    try:
        data = pathlib.Path(path).read_bytes()
    except FileNotFoundError as error:
        make = f"make a key with `openssl genpkey -algorithm ed25519 -out {path}`"
        raise FileNotFoundError(f"no file {path}; pass a PEM file with a private key, or {make}") from error
    except (PermissionError, IsADirectoryError) as error:
        found = f"{role} {path} cannot be read: {error.strerror}"
        raise ValueError(f"{found}; name a file that this user may read") from error
    try:
        private = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, exceptions.UnsupportedAlgorithm) as error:
        found = f"{role} {path} is not an unencrypted PEM private key ({error if data.strip() else 'it is empty'})"
        raise ValueError(f"{found}; name another file, or put this one back from a backup") from error
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{role} {path} is a {type(private).__name__}, but must be ed25519; name another file")
    return private


def load_or_create_key(path: str | os.PathLike, role: str = "key") -> ed25519.Ed25519PrivateKey:
    """Returns the private key in a file, as `load_key` does. A file that does not exist is created with a new key."""
    if not pathlib.Path(path).exists():
        save_key(ed25519.Ed25519PrivateKey.generate(), path)
    return load_key(path, role)


def save_key(private: ed25519.Ed25519PrivateKey, path: str | os.PathLike) -> None:
    """Writes a private key to a PKCS8 PEM file that only the owner can read, completely or not at all.

    Raises FileExistsError if `path` exists.
    """
    how = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, private.private_bytes(*how), secret=True)


def _bytes(message: dict) -> bytes:
    return b"intellax/message/1" + json.dumps(message, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

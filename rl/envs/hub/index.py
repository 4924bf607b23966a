"""A signed index of environment packages: a JSON file, local or at a URL, with wheels and reports in folders of the same place.

    {"format": "intellax/environment-index/1", "sequence": 2, "signer": KEY, "signature": ...,
     "environments": {"sort_letters": {"0.1.0": {"number": 1, "wheel": "wheels/sort_letters-0.1.0-py3-none-any.whl", "sha256": ..., "digest": ...,
                                                  "report": "reports/sort_letters-0.1.0.json", "kind": "pure", ...}}}}

1. One ed25519 key signs the whole index, so a reader who trusts that key trusts each wheel by its digest, wherever it is stored.
2. A published version never changes: `add` refuses another wheel for it.
3. `sequence` grows with each change. `newest` keeps, per key, the largest one seen on this machine, and refuses an older index.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

import httpx

from inference.rollouts import rollout as rollout_lib
from rl.envs.hub import manifest as manifest_lib
from sharding.system import atomic_file, bounded_reply, signed_message, sockets
from sharding.system import files as files_lib

FORMAT = "intellax/environment-index/1"
MAX_BYTES = 2**24
MAX_WHEEL_BYTES = 2**29
LIMIT_S = 120.0
_TEXTS = ("wheel", "sha256", "digest", "report", "kind", "summary", "function")


@dataclasses.dataclass(frozen=True)
class Index:
    """A verified index: {name: {version: entry}}. `place` is its path or URL."""

    place: str
    signer: str
    sequence: int
    environments: Mapping[str, Mapping[str, dict]]

    def entry(self, name: str, version: str = "") -> tuple[str, dict]:
        """Returns (version, entry) of an environment; "" as version: the one published last. Raises ValueError if there is none."""
        versions = self.environments.get(name)
        if not versions:
            known = ", ".join(self.environments) or "none"
            raise ValueError(f"{self.place} has no environment {name!r}; choose one of {known}")
        if version and version not in versions:
            raise ValueError(f"{self.place} has no {name}@{version}; choose one of {', '.join(versions)}")
        version = version or max(versions, key=lambda one: versions[one]["number"])
        return version, versions[version]

    def fetch(self, path: str, limit: int = MAX_WHEEL_BYTES) -> bytes:
        """Returns the file `path` of the index's place. Raises ValueError if it cannot be read."""
        if sockets.is_url(self.place):
            return _read(urllib.parse.urljoin(self.place, path), limit)
        return _read(os.path.join(os.path.dirname(self.place), path), limit)


def read(place: str, signer: str = "") -> Index:
    """Returns the index in a file or at a URL. Raises ValueError if it is malformed, or not signed by `signer` (hex; "": any key)."""
    data = _read(place, MAX_BYTES)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not an index: {error}; correct --index") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("signer"), str):
        raise ValueError(f"{place} is not an index of the format {FORMAT}; correct --index")
    if not signed_message.is_signed(found["signer"], found):
        raise ValueError(
            f"{place}: the signature of {found['signer'][:16]} does not fit its content; get the index again"
        )
    if signer not in ("", found["signer"]):
        raise ValueError(f"{place} is signed by {found['signer']}, not by --signer {signer}; correct one of them")
    if type(found.get("sequence")) is not int or reason_malformed(found.get("environments")):
        reason = reason_malformed(found.get("environments")) or "sequence"
        raise ValueError(f"{place} is malformed ({reason}); its publisher must correct it")
    return Index(place, found["signer"], found["sequence"], found["environments"])


def newest(found: Index, memory: pathlib.Path) -> Index:
    """Returns the index, and remembers its sequence in the file `memory`. Raises ValueError if a newer index of the same key was seen."""
    memory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(memory):
        seen = atomic_file.read_json(memory, dict)
        if found.sequence < seen.get(found.signer, 0):
            text = f"{found.place} has the sequence {found.sequence}, and {seen[found.signer]} was seen before"
            raise ValueError(f"{text}: it is an old copy; use the current one, or delete {memory}")
        atomic_file.write(memory, json.dumps(seen | {found.signer: found.sequence}).encode())
    return found


def add(
    path: pathlib.Path, key: rollout_lib.WorkerKey, name: str, version: str, entry: dict, files: Mapping[str, bytes]
) -> Index:
    """Adds a version to the index file `path`, which is created if it does not exist, and its files to the same folder; returns the index.

    Raises ValueError if the version is published already with another content, or if another key has signed the index.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        old = read(str(path), key.worker) if path.exists() else Index(str(path), key.worker, 0, {})
        if before := old.environments.get(name, {}).get(version):
            if before["sha256"] == entry["sha256"]:
                return old
            text = f"{name}@{version} is published with the wheel {before['sha256'][:16]}, and this one is {entry['sha256'][:16]}"
            raise ValueError(f"{text}; a published version cannot change, so raise project.version")
        made = {one: dict(versions) for one, versions in old.environments.items()}
        made.setdefault(name, {})[version] = entry | {"number": old.sequence + 1}
        assert not reason_malformed(made)
        for relative, data in files.items():
            file = path.parent / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write(file, data, durable=True)
        body = {"format": FORMAT, "sequence": old.sequence + 1, "environments": made, "signer": key.worker}
        atomic_file.write(path, json.dumps(signed_message.sign(key.private, body), indent=1).encode(), durable=True)
        return read(str(path), key.worker)


def reason_malformed(environments: Any) -> str:
    """Returns the first malformed place in the field `environments` of an index, or ""."""
    if not isinstance(environments, dict):
        return "environments"
    for name, versions in environments.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name) or not isinstance(versions, dict):
            return f"environment {name[:80]!r}"
        for version, entry in versions.items():
            is_shaped = manifest_lib.VERSION.fullmatch(version) and isinstance(entry, dict)
            if not is_shaped or not all(isinstance(entry.get(field), str) for field in _TEXTS):
                return f"{name}@{version[:80]}"
            paths = (entry["wheel"], entry["report"])
            if not all(re.fullmatch(r"(wheels|reports)/[\w.+!-]+", path) for path in paths):
                return f"{name}@{version}: a path"
            if type(entry.get("number")) is not int or not re.fullmatch(r"[\w.]+:\w+", entry["function"]):
                return f"{name}@{version}"
    return ""


def _locked(path: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    return files_lib.locked(path.with_name(f".{path.name}.lock"))


def _read(place: str, limit: int) -> bytes:
    """Returns the bytes of a file or URL, at most `limit`. Raises ValueError."""
    try:
        if sockets.is_url(place):
            reply = asyncio.run(bounded_reply.get(place, limit, LIMIT_S, follow_redirects=True))
            return reply.raise_for_status().content
        with open(place, "rb") as file:
            data = file.read(limit + 1)
    except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(f"{place} cannot be read: {error}; correct --index") from None
    if len(data) > limit:
        raise ValueError(f"{place} has more than {limit} bytes, the maximum; it is not the file of an index")
    return data

"""Writes versions: `publish`, and `Publisher`, which keeps the base of the next delta."""

import dataclasses
import os
from concurrent import futures
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.broadcast import assemble, destination, encode
from sharding.broadcast.pull import Manifest, Pulled
from sharding.format import chunks, manifest


class Publisher:
    """Publishes a run's versions: a snapshot every `snapshot_every` versions, between them deltas.

    Keeps the last version on the host (each host its own shards) as the base of the next delta. With `snapshot_every=1`
    nothing is kept and no delta is written.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        *,
        key: ed25519.Ed25519PrivateKey | None = None,
        snapshot_every: int = 1,
        keep: int = 8,
        dtype: str | None = None,
        run: str = "",
    ):
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every={snapshot_every}: pass 1 for snapshots only, 8 for one in eight versions")
        self._root, self._snapshot_every = root, snapshot_every
        self._options = {"key": key, "keep": keep, "dtype": dtype, "run": run}
        self._base: Pulled | None = None
        self._num_since = 0

    def publish(self, params: Any, version: int, *, metadata: dict | None = None) -> Manifest:
        base, self._base = self._base, None  # after a failure the copy may be half of the new version: not kept
        due = base is None or self._num_since + 1 >= self._snapshot_every
        kept = None
        if self._snapshot_every > 1:
            kept = encode.Kept({}) if base is None else base.params
        written = encode.write(
            params, version, self._root, base=base, snapshot=due, metadata=metadata, kept=kept, **self._options
        )
        if kept is not None:
            kept.written = written
            self._base = Pulled(version, kept, {}, written.digest)
        self._num_since = 0 if written.base is None else self._num_since + 1
        return written


def publish(
    params: Any,
    version: int,
    root: str | os.PathLike,
    *,
    base: Pulled | None = None,
    snapshot: bool | None = None,
    key: ed25519.Ed25519PrivateKey | None = None,
    metadata: dict | None = None,
    keep: int = 8,
    dtype: str | None = None,
    run: str = "",
) -> Manifest:
    """Writes `params` (dicts, lists, tuples of numpy or jax arrays) as `<root>/v<version>`, whole or not at all.

    `root` is a directory (of all hosts, if there are several) or a bucket URL; over several hosts all must call. With
    `base`, an older version still under `root`, deltas are written, and a snapshot too if `snapshot`; without, a snapshot.
    `dtype` casts wider floats on the device. `metadata` is any JSON object; as JSON, its tuples come back as lists. `run`
    names the run, so that readers may insist on it. Versions only grow: after a resume from an older checkpoint, `remove`
    the newer versions first. `keep` counts versions; those that they are built on stay as well.
    """
    return encode.write(
        params, version, root, base=base, snapshot=snapshot, key=key, metadata=metadata, keep=keep, dtype=dtype, run=run
    )


def remove(root: str | os.PathLike, version: int) -> None:
    """Deletes a version: first invisible, then gone. Versions that are built on it can no longer be pulled."""
    destination.remove(root, version)


def tree_digest(params: Any) -> str:
    """The digest that `publish` would give this tree (see `manifest.digest`); whole arrays must be at hand."""
    leaves, _, ties = encode.walk(params, None)

    def describe(name: str) -> manifest.Tensor:
        tensor = encode.blank(name, leaves[name], leaves[name].dtype, ties.get(name))
        if tensor.tied_to is not None:
            return tensor
        array = chunks.host(leaves[name])
        cells = (chunks.raw(array, region, tensor.chunk) for _, region in tensor.cells())
        return dataclasses.replace(tensor, chunks=tuple(chunks.encoded_digest(cell)[1] for cell in cells))

    with futures.ThreadPoolExecutor(assemble.NUM_THREADS) as pool:
        return manifest.digest(tuple(pool.map(describe, leaves)))

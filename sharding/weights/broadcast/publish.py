"""Publishes weights: every policy version leaves the learner here, as a snapshot, as deltas, or as both.

Each host writes its own chunks (`sharding/weights/broadcast/encode.py`). The first host merges them into a signed manifest
(`sharding/weights/format/manifest.py`), which makes the version visible, and deletes versions that are no longer kept.
"""

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519
from jax.experimental import multihost_utils

from sharding.system.multihost import transport
from sharding.weights.broadcast import destination, encode, head_writer, pull
from sharding.weights.format import chunks, manifest

Manifest = manifest.Manifest


@dataclasses.dataclass(frozen=True)
class PublishOptions:
    """The options for publishing weights that all versions of a run share.

    `key` signs the manifests and the head (sharding/weights/format/head.py), which expires after `head_s` seconds unless it is signed again.
    With `root_file`, readers trust that file, by which the key can be replaced. The newest `keep` versions are kept, and older ones
    that their deltas need. Floats wider than `dtype` are cast to it; a mapping has a dtype for each tensor by its name. `run` is the
    name of the run; readers may require it.
    """

    key: ed25519.Ed25519PrivateKey | None = None
    keep: int = 8
    dtype: str | Mapping[str, str] | None = None
    run: str = ""
    head_s: float = 86400.0
    root_file: str = ""

    def __post_init__(self):
        if not 1 <= self.head_s <= head_writer.FINISHED_S:
            most = head_writer.FINISHED_S
            raise ValueError(f"head_s={self.head_s} must be 1 to {most:.0f} seconds; pass 86400 for a day")
        if self.keep < 1:
            raise ValueError(f"keep={self.keep} would delete the version just published; set keep to 1 or more")
        given = self.dtype or "float32"
        for name in {given} if isinstance(given, str) else {*given.values()}:
            if name not in manifest.ITEM_BYTES or not jax.numpy.issubdtype(chunks.dtype(name), np.floating):
                raise ValueError(f"dtype {name!r} is not a floating dtype of a tensor; pass 'bfloat16' or None")
        if not isinstance(self.run, str) or len(self.run) > manifest.MAX_RUN_LENGTH:
            found = f"run {str(self.run)[:80]!r} has more than {manifest.MAX_RUN_LENGTH} characters"
            raise ValueError(f"{found}; shorten it")


class Publisher:
    """Publishes the weights of a run: a complete snapshot every `snapshot_every` versions, and deltas in between.

    Keeps a copy of the last version in host memory (each host its own shards), from which the next deltas are computed. With
    `snapshot_every=1`, every version is a snapshot, without a copy unless tensors are `fixed`. Within a `with` block, the head is
    signed again before it expires.

    Tensors below `fixed`, a name in the tree, never change. Only the first version that this publisher writes reads and stores them.
    Later snapshots link the files of that version, unless these were removed. The publisher keeps no copy of these tensors.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        options: PublishOptions = PublishOptions(),
        *,
        snapshot_every: int = 1,
        fixed: str = "",
    ):
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every={snapshot_every} must be at least 1; pass 1 for snapshots only")
        self._root, self._options, self._snapshot_every = root, options, snapshot_every
        self._copy: encode.HostCopy | None = None
        self._num_deltas = 0  # since the last snapshot
        self._fixed, self._same = fixed, None
        self._heads = _head_writer(root, options, head_s=options.head_s, is_run=True)
        self._ended = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, name="head", daemon=True)

    def __enter__(self) -> "Publisher":
        self._refresher.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        """Ends the renewal of the head; unless the block failed, signs it for years: finished weights may be served later."""
        self._ended.set()
        self._refresher.join()
        if error is None:
            self._sign_again(is_last=True)

    def forget(self, first: int) -> None:
        """Deletes the versions from `first` on, which a resumed run publishes again, and begins an epoch. One host calls it."""
        with destination.locked(self._root):
            existing = pull.versions(self._root)
            if self._heads is not None:
                self._heads.forget(first, existing)
            for version in existing:
                if version >= first:
                    destination.remove(self._root, version)

    def publish(self, params: Any, version: int, *, metadata: dict | None = None) -> Manifest:
        """Publishes the parameter tree `params` as `version`, and returns its manifest. Raises ValueError or OSError."""
        plan = self._with_fixed(_plan(params, version, self._options, metadata))
        has_deltas = self._snapshot_every > 1 or plan.fixed
        copy = self._copy or (encode.HostCopy() if has_deltas else None)
        self._copy = None  # after an error it may be partly the new version: not kept
        snapshot = self._num_deltas + 1 >= self._snapshot_every
        try:
            written = _publish(plan, self._root, self._options, self._heads, copy=copy, snapshot=snapshot)
        except FileNotFoundError as error:
            if plan.same is None or jax.process_count() > 1:
                raise
            print(f"notice: {error}; version {version} is written whole", file=sys.stderr, flush=True)
            self._same = None
            return self.publish(params, version, metadata=metadata)
        if copy is not None:
            copy.written = written
        self._copy = copy
        self._num_deltas = 0 if written.base is None else self._num_deltas + 1
        if written.base is None:
            self._same = written
        return written

    def _with_fixed(self, plan: encode.Plan) -> encode.Plan:
        """Returns `plan` with its fixed tensors as they are in the last snapshot, unless that is gone."""
        fixed = frozenset(t.name for t in plan.tensors if self._fixed and t.name.startswith(f"{self._fixed}/"))
        same = self._same
        if same is None or same.version not in pull.versions(self._root):
            return dataclasses.replace(plan, fixed=fixed)
        blank = {t.name: dataclasses.replace(t, chunks=(), deltas=None) for t in same.tensors}
        if bad := sorted(t.name for t in plan.tensors if t.name in fixed and blank.get(t.name) != t):
            text = f"fixed tensor {bad[0]!r} has another shape, dtype or tie than in version {same.version}"
            raise ValueError(f"{text}; create a new Publisher")
        return dataclasses.replace(plan, fixed=fixed, same=same)

    def _refresh(self) -> None:
        while not self._ended.wait(self._options.head_s / 4):
            try:
                self._sign_again()
            except (OSError, ValueError) as error:
                print(f"the signed head was not renewed: {error}", file=sys.stderr, flush=True)

    def _sign_again(self, is_last: bool = False) -> None:
        if self._heads is not None and self._heads.epoch is not None:
            with destination.locked(self._root):
                self._heads.refresh(is_last)


def publish(
    params: Any,
    version: int,
    root: str | os.PathLike,
    options: PublishOptions = PublishOptions(),
    *,
    metadata: dict | None = None,
) -> Manifest:
    """Publishes the weights `params` as the snapshot `<root>/v<version>`, completely or not at all. Returns the manifest.

    A version must be newer than those under `root`: after a resume from an older checkpoint, `remove` the newer versions
    first. With several hosts, every host must call this function, with a root that all of them share.

    Args:
      params: dicts, lists and tuples of numpy or jax arrays.
      version: the version number, an integer >= 0.
      root: a directory or a bucket URL.
      options: the options that all versions share.
      metadata: any JSON object that readers get with the version; tuples in it come back as lists.

    Raises:
      ValueError: params, version or metadata that cannot be published; nothing was written.
      OSError: no space left, or another host failed; the version was deleted.
    """
    return _publish(_plan(params, version, options, metadata), root, options, _head_writer(root, options))


def _plan(params: Any, version: int, options: PublishOptions, metadata: dict | None) -> encode.Plan:
    """Returns the plan that writes a snapshot. Raises ValueError, before any work, if something cannot be published."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"version {version!r} must be an integer >= 0; pass the learner's step")
    metadata = manifest.readable(metadata)
    leaves, containers, ties = encode.named_leaves(params)
    tensors = [encode.blank_tensor(name, leaf, options.dtype, ties.get(name)) for name, leaf in leaves.items()]
    return encode.Plan(version, leaves, containers, tensors, metadata)


def _head_writer(root, options: PublishOptions, **fields) -> head_writer.HeadWriter | None:
    """Returns the writer of heads; None without a key, and on hosts other than the first."""
    if options.key is None or jax.process_index() != 0:
        return None
    return head_writer.HeadWriter(root, options.key, root_file=options.root_file, **fields)


def _publish(plan: encode.Plan, root, options: PublishOptions, heads, copy=None, snapshot=False) -> Manifest:
    """Publishes a version: deltas from `copy` if possible, a snapshot if not, or if `snapshot`. Updates `copy`. All hosts call it."""
    with contextlib.closing(destination.create(root, plan.version)) as out:
        if jax.process_index() == 0:
            return _publish_first(out, plan, root, options, heads, copy, snapshot)
        return _publish_other(out, plan, root, options, copy, snapshot)


def _publish_first(out, plan: encode.Plan, root, options: PublishOptions, heads, copy, snapshot) -> Manifest:
    """Publishes on the first host, which begins the version, makes it visible, and deletes old ones, or this one after an error."""
    stage = functools.partial(_stage, plan.version, root, options.keep)
    with stage():
        out.lock()
        existing = _check_is_newer(root, plan.version)
        epoch = None if heads is None else heads.begin(plan.version, existing)
        out.begin()
    try:
        with stage():
            plan, part = _write_part(out, plan, root, copy, snapshot, epoch)
        with stage():
            parts = _parts(out, part)
            written = _merge(plan, options, parts)
            data = manifest.encode(written, options.key)
            for entry in itertools.chain.from_iterable(part.objects for part in parts[1:]):
                out.note(entry)  # two hosts must not append to one file of a network drive
            out.finish(data)
            existing = pull.versions(root)
            unneeded = _unneeded(root, existing, options.keep)
            if heads is not None:
                heads.add(plan.version, data, {*existing} - {*unneeded})
    except BaseException:
        out.abort()
        raise
    for i in range(len(parts)) if len(parts) > 1 else ():
        out.delete(_part_name(i))  # every host has read them
    for old in unneeded:
        destination.remove(root, old)
    return written


def _publish_other(out, plan: encode.Plan, root, options: PublishOptions, copy, snapshot) -> Manifest:
    """Publishes on a host other than the first: waits for it at each stage, and writes its own chunks."""
    stage = functools.partial(_stage, plan.version, root, options.keep)
    with stage():  # the first host begins the version
        pass
    with stage():
        plan, part = _write_part(out, plan, root, copy, snapshot)
    with stage():
        written = _merge(plan, options, _parts(out, part))
    return written


@contextlib.contextmanager
def _stage(version: int, root: str | os.PathLike, keep: int) -> Iterator[None]:
    """Runs a stage of publishing on every host, then waits for all hosts. Raises on every host if one of them failed."""
    failed = True
    try:
        yield
        failed = False
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"no space left to publish version {version}, which was deleted"
        remedy = f"free space, or keep fewer than {keep} versions (in a run: lower rl.max_off_policy)"
        raise OSError(errno.ENOSPC, f"{text}; {remedy}", str(root)) from error
    finally:
        if jax.process_count() > 1:
            others = np.flatnonzero(multihost_utils.process_allgather(np.array(failed)))
            if not failed and len(others):
                found = f"hosts {others.tolist()} could not publish version {version}, so it is not published"
                raise transport.RemoteHostError(f"{found}; see their logs")


def _check_is_newer(root: str | os.PathLike, version: int) -> list[int]:
    """Returns the versions under `root`. Raises ValueError unless `version` is newer."""
    existing = pull.versions(root)
    if version in existing:
        raise ValueError(f"version {version} exists under {root} and cannot change; remove() it, or pass a newer one")
    if existing and version < existing[-1]:
        raise ValueError(f"version {version} is older than {existing[-1]} under {root}; remove() the newer ones first")
    return existing


def _plan_deltas(plan: encode.Plan, root, copy: encode.HostCopy | None, snapshot: bool) -> encode.Plan:
    """Returns `plan` with deltas from `copy`, and a snapshot if `snapshot`; unchanged if there are no such deltas.

    Raises ValueError if the copy's tensors are others than the plan's.
    """
    if copy is None:
        return plan
    before = copy.written
    if before is not None and before.version in pull.versions(root):
        old, new = ({t.name: (t.shape, t.dtype, t.tied_to) for t in found} for found in (before.tensors, plan.tensors))
        if bad := sorted(name for name in old | new if old.get(name) != new.get(name)):
            text = f"tensor {bad[0]!r} has another shape, dtype or tie than in version {before.version}"
            raise ValueError(f"{text}; create a new Publisher")
        if all(chunks.fits(b.chunk, plan.leaves[b.name]) for b in before.tensors):
            tensors = [dataclasses.replace(t, chunk=b.chunk) for t, b in zip(plan.tensors, before.tensors, strict=True)]
            return dataclasses.replace(plan, tensors=tensors, before=before, writes_arrays=snapshot)
    copy.chunks.clear()
    return plan


def _write_part(
    out, plan: encode.Plan, root, copy: encode.HostCopy | None, snapshot: bool, epoch: int | None = None
) -> tuple[encode.Plan, encode.HostPart]:
    """Writes this host's chunks. Returns the plan, with deltas if possible, and the part."""
    plan = _plan_deltas(plan, root, copy, snapshot)
    part = dataclasses.replace(encode.write_chunks(out, plan, copy), epoch=epoch)
    if jax.process_count() > 1:
        out.put(_part_name(jax.process_index()), [encode.HOST_PART.dump_json(part)])
    return plan, part


def _parts(out, part: encode.HostPart) -> list[encode.HostPart]:
    """Returns the parts of all hosts: `part` alone, if there is one host."""
    if jax.process_count() == 1:
        return [part]
    return [encode.HOST_PART.validate_json(out.get(_part_name(i))) for i in range(jax.process_count())]


def _merge(plan: encode.Plan, options: PublishOptions, parts: list[encode.HostPart]) -> Manifest:
    """Returns the manifest of a version that consists of `parts`."""
    before, merged = plan.before, encode.merge(plan, parts)
    return Manifest(
        version=plan.version,
        base=None if before is None or plan.writes_arrays else before.version,
        delta_of=None if before is None else before.version,
        encodings=tuple(name for name, used in (("xor", before is not None), ("zarr3", plan.writes_arrays)) if used),
        digest_before=None if before is None else before.digest,
        digest_after=manifest.digest(merged),
        tensors=merged,
        objects=tuple(o for part in parts for o in part.objects),
        containers=plan.containers,
        metadata=plan.metadata,
        run=options.run,
        public_key=None if options.key is None else options.key.public_key().public_bytes_raw().hex(),
        epoch=parts[0].epoch,
    )


def _part_name(process: int) -> str:
    return f".part-{process:05d}.json"


def _unneeded(root: str | os.PathLike, existing: list[int], keep: int) -> list[int]:
    """Returns those of the `existing` versions that are neither among the newest `keep` nor needed to read one of these."""
    needed: set[int] = set()
    for version in existing[-keep:]:
        while version in existing and version not in needed:
            needed.add(version)
            version = destination.base_of(root, version)
    return [v for v in existing if v not in needed]

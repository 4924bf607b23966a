"""Checkpoints: saves and restores train state, data cursor and orchestrator state, so that a resume is bitwise.

`save` returns while orbax writes. Leaves below `frozen`, which no step changes, are saved once, before the first checkpoint, as one of
their own. `seal.json` has the SHA-256 of each file of a step; `restore` checks these before orbax
parses any. A damaged step is renamed to `torn-<step>`, and the one before is used.

The seal exists because orbax does not notice a flipped bit (zstd chunks carry no checksum here), and raises a bare `Exception`
for a truncated file. The dtype check exists because orbax casts silently. The room is checked beforehand because a write that fails in
tensorstore prints tracebacks of orbax's closed event loop.

All hosts share one directory. Each writes and reads its own shards; the first seals, and decides for all which steps are saved,
restored and renamed, since a network disk may show the others an older state.
"""

import contextlib
import errno
import json
import logging
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from sharding.system import atomic_file
from sharding.system import files as files_lib
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import bucket

# orbax logs each failure several times with its stack; all of them also reach the caller as exceptions.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)
_log = logging.getLogger(__name__)
FROZEN = "frozen"  # the field of the state, and the directory next to the checkpoints
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # a disk, a quota, and a limit on the size of a file
_OVERHEAD_BYTES = 1 << 16  # orbax's metadata and the seal of a small tree


class Checkpointer:
    """Saves and restores the train state of one run in a directory. As a context manager, finishes the last save at exit."""

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 3,
        every: int = 1,
        every_minutes: float = 0.0,
        hosts: hosts_lib.Hosts = hosts_lib.ALONE,
    ):
        if keep < 1 or every < 1:
            raise ValueError(f"keep={keep} and every={every} must both be at least 1; correct config.checkpoint")
        self._directory = pathlib.Path(directory).absolute()
        self._every, self._every_s, self._keep, self._hosts = every, 60 * every_minutes, keep, hosts
        self._saved_s = time.monotonic()
        self._last_saved: int | None = None
        callback = ocp.options.AsyncOptions(post_finalization_callback=self._seal)
        options = ocp.CheckpointManagerOptions(preservation_policy=self, async_options=callback)
        with _disk_errors(self._directory):
            self._manager = ocp.CheckpointManager(self._directory, options=options)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, error, *_) -> None:
        if error is None or self._hosts.count == 1:  # else the save in flight would wait for hosts that have failed
            with _disk_errors(self._directory):
                self._manager.close()

    def save(self, step: int, state: Any, host_state: dict, *, force: bool = False) -> bool:
        """Starts to save a checkpoint if `step` is a multiple of `every`, `every_minutes` after the last one, or with `force`.

        Returns True if a save started. All hosts must call it. `state` is a tree of jax arrays, `host_state` any JSON object. Blocks
        until the previous save is complete, and raises its error, such as a full disk. Raises ValueError for a step older than the
        newest saved one, and where another run has taken the bucket of the directory over.
        """
        bucket.check(self._directory.parent)
        if step % self._every and not force and not self._is_late():
            return False
        self.wait()
        bucket.pace(self._directory.parent)
        if not self._hosts.broadcast(self._hosts.is_first and self._is_due(step)):
            return False
        state = self._without_frozen(state)
        if self._hosts.is_first:
            self._check_room(state)
        self._last_saved, self._saved_s = step, time.monotonic()
        with _disk_errors(self._directory):
            items = {"state": ocp.args.StandardSave(state), "host": ocp.args.JsonSave(host_state)}
            return self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def score(self, step: int, value: float) -> None:
        """Records the score of a saved step. The step with the highest score (the latest of equals) is never deleted.

        A score that comes after the deletion of its step is not recorded.
        """
        steps = complete_steps(self._directory)
        if step not in steps and step < max(steps, default=0):
            return
        best = _best(self._directory)
        is_kept = best is not None and best["step"] in (*complete_steps(self._directory), step)
        if best is None or not is_kept or (value, step) > (best["score"], best["step"]):
            atomic_file.write(
                self._directory / "best.json", json.dumps({"step": step, "score": value}).encode() + b"\n"
            )

    def wait(self) -> None:
        """Blocks until the save in progress is complete. Raises the error of that save if it failed."""
        with _disk_errors(self._directory):
            self._manager.wait_until_finished()

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None if none exists."""
        return max(complete_steps(self._directory), default=None)

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any, dict] | None:
        """Returns (step, state, host_state) of the newest intact checkpoint, or of `step`; None if no checkpoint exists.

        `abstract_state` has a `jax.ShapeDtypeStruct` with a sharding per leaf. Raises ValueError if the saved state has other
        names, shapes or dtypes, or if `step` or every checkpoint is damaged; FileNotFoundError if `step` does not exist.
        """
        self.wait()
        found, has_changed = self._hosts.broadcast(self._find(step) if self._hosts.is_first else None)
        if has_changed:
            self._manager.reload()
        if found is None:
            return None
        path, frozen = self._directory / str(found) / "state", getattr(abstract_state, FROZEN, None)
        if frozen:
            with Checkpointer(self._directory / FROZEN, keep=1, hosts=self._hosts) as apart:
                frozen = apart.restore(frozen)
            if frozen is None:
                raise ValueError(f"{self._directory / FROZEN} has no parameters, which step {found} needs; put it back")
            abstract_state = abstract_state.replace(frozen={})
        _check(path, abstract_state, prefix="")
        items = {"state": ocp.args.StandardRestore(abstract_state), "host": ocp.args.JsonRestore()}
        restored = self._manager.restore(found, args=ocp.args.Composite(**items))
        state = restored["state"].replace(frozen=frozen[1]) if frozen else restored["state"]
        return found, state, restored["host"]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns True for each checkpoint that orbax must keep: the newest `keep` and the best so far. Oldest comes first."""
        best = _best(self._directory)
        newest = [c.step for c in checkpoints][-self._keep :]
        return [c.step in newest or (best is not None and c.step == best["step"]) for c in checkpoints]

    def _is_late(self) -> bool:
        """Returns True if host 0's last save was longer ago than `every_minutes`, for all hosts."""
        return self._every_s > 0 and self._hosts.broadcast(time.monotonic() - self._saved_s >= self._every_s)

    def _without_frozen(self, state: Any) -> Any:
        """Returns the state without its frozen leaves, after they were saved, unless an earlier checkpoint did that."""
        if not getattr(state, FROZEN, None):
            return state
        path = self._directory / FROZEN
        if self._hosts.broadcast(self.latest_step() is None or not complete_steps(path)):
            if self._hosts.is_first:
                shutil.rmtree(path, ignore_errors=True)  # of a start that was killed
            self._hosts.broadcast()
            with Checkpointer(path, keep=1, hosts=self._hosts) as apart:
                apart.save(0, state.frozen, {}, force=True)
        return state.replace(frozen={})

    def _is_due(self, step: int) -> bool:
        newest = self.latest_step()
        if newest is not None and step == newest == self._last_saved:
            return False
        if newest is not None and step <= newest:
            raise ValueError(f"step {step} is not newer than {newest} in {self._directory}; delete newer steps first")
        return True

    def _check_room(self, state: Any) -> None:
        arrays = (leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
        needed = sum(array.nbytes for array in arrays) + _OVERHEAD_BYTES  # of all hosts, uncompressed
        with _disk_errors(self._directory):
            if needed > shutil.disk_usage(self._directory).free:
                raise OSError(errno.ENOSPC, "full")

    def _find(self, step: int | None) -> tuple[int | None, bool]:
        """Returns (step to restore, or None if no checkpoint exists; True if newer, damaged checkpoints were renamed)."""
        found = _pick(self._directory, step)
        if step is not None:
            return found, False
        torn = [number for number in _numbered(self._directory) if found is None or number > found]
        for number in torn:
            num_taken = len(list(self._directory.glob(f"torn-{number}*")))
            name = f"torn-{number}" + (f".{num_taken}" if num_taken else "")
            self._directory.joinpath(str(number)).rename(self._directory / name)
        best = _best(self._directory)
        if found is not None and best is not None and best["step"] > found:  # a step that will be taken again
            (self._directory / "best.json").unlink()
        return found, bool(torn)

    def _seal(self) -> None:
        """Writes seal.json. Called by orbax in the thread of a save, after the last byte and before the final rename."""
        if jax.process_index() != 0:
            return
        (path,) = self._directory.glob(f"{self._last_saved}.*tmp*")
        # orbax is still writing its own metadata at the top, which `restore` does not need.
        inside = (p for item in ("state", "host") for p in sorted(path.joinpath(item).rglob("*")))
        files = {str(p.relative_to(path)): files_lib.sha256(p) for p in inside if p.is_file()}
        atomic_file.write(path / "seal.json", json.dumps(files, indent=1).encode(), durable=True)


def restore_params(directory: str | os.PathLike, abstract_params: Any, step: int | None = None) -> tuple[int, Any]:
    """Returns (step, params) of the newest intact checkpoint, or of `step`, without reading the optimizer state.

    Raises FileNotFoundError if no such checkpoint exists, and ValueError if it is damaged or does not fit `abstract_params`.
    """
    root = pathlib.Path(directory).absolute()
    found = _pick(root, step)
    if found is None:
        raise FileNotFoundError(f"no checkpoint in {directory}; pass the directory that a Checkpointer writes to")
    path = root / str(found) / "state"
    _check(path, abstract_params, prefix="params/")
    item = {"params": abstract_params}
    how = ocp.checkpoint_utils.construct_restore_args(item)
    with ocp.PyTreeCheckpointer() as reader:
        restored = reader.restore(path, args=ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True))
    return found, restored["params"]


def complete_steps(directory: str | os.PathLike) -> list[int]:
    """Returns the steps with a complete checkpoint in `directory`, ascending."""
    root = pathlib.Path(directory)
    return [step for step in _numbered(root) if (root / str(step) / "seal.json").is_file()]


def best_step(directory: str | os.PathLike) -> int:
    """Returns the step of the checkpoint with the highest score. Raises FileNotFoundError if no checkpoint has a score."""
    best, steps = _best(pathlib.Path(directory)), complete_steps(directory)
    if best is None or best["step"] not in steps:
        raise FileNotFoundError(f"no checkpoint in {directory} has a score yet; choose one of {steps}")
    return best["step"]


def _best(directory: pathlib.Path) -> dict | None:
    path = directory / "best.json"
    best = atomic_file.read_json(path, dict)
    if best and best.keys() != {"step", "score"}:
        raise ValueError(f"{path} has the fields {sorted(best)}, not step and score; correct or remove it")
    return best or None


def _numbered(directory: pathlib.Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if re.fullmatch("[0-9]+", p.name))


def _pick(directory: pathlib.Path, step: int | None) -> int | None:
    """Returns `step`, or the newest intact step (None: no checkpoint exists). Raises ValueError if all, or `step`, are damaged."""
    steps = complete_steps(directory)
    if step not in (None, *steps):
        raise FileNotFoundError(f"no checkpoint of step {step} in {directory}; choose one of {steps}")
    for candidate in reversed(steps) if step is None else [step]:
        damage = _damage(directory / str(candidate))
        if not damage:
            return candidate
        if step is not None:
            raise ValueError(f"checkpoint {step} is damaged ({damage}); restore another of {steps}")
        _log.warning("checkpoint %d is damaged and skipped: %s", candidate, damage)
    if steps:
        raise ValueError(f"every checkpoint in {directory} is damaged ({steps}); move them away to start over")
    return None


def _damage(path: pathlib.Path) -> str | None:
    """Returns a description of the damage of the checkpoint at `path`, or None if all files have the digests in seal.json."""
    try:
        files = atomic_file.read_json(path / "seal.json", dict)
    except ValueError as error:
        return str(error)
    for name, expected in files.items():
        if not (path / name).is_file():
            return f"{path / name} is missing"
        if files_lib.sha256(path / name) != expected:
            return f"{path / name} differs from the file that was saved"
    return None


def _check(path: pathlib.Path, abstract: Any, *, prefix: str) -> None:
    """Raises ValueError unless the saved leaves below `prefix` have the names, shapes and dtypes of `abstract`."""
    saved = {name.removeprefix(prefix): leaf for name, leaf in _saved(path).items() if name.startswith(prefix)}
    expected = _named(abstract)
    for name in sorted(saved.keys() ^ expected.keys()):
        where = "is in the checkpoint but not in" if name in saved else "is not in the checkpoint but in"
        text = f"{path}: array {prefix}{name} {where} the config's state; restore with the config that saved it"
        raise ValueError(text)
    for name, leaf in expected.items():
        was, now = (tuple(saved[name].shape), saved[name].dtype), (tuple(leaf.shape), leaf.dtype)
        if was != now:
            text = f"{path}: array {prefix}{name} was saved as {was}, not {now}; restore with the config that saved it"
            raise ValueError(text)


def _saved(path: pathlib.Path) -> dict[str, Any]:
    """Returns {name: metadata of the leaf} of a saved state."""
    with ocp.PyTreeCheckpointer() as reader:
        return _named(reader.metadata(path).item_metadata.tree)


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@contextlib.contextmanager
def _disk_errors(directory: pathlib.Path) -> Iterator[None]:
    """Turns the errors that orbax raises for a disk that is full or fails into one OSError, and deletes the unfinished save."""
    try:
        yield
    except (OSError, ValueError) as error:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        code = int(found[1]) if found else getattr(error, "errno", None)
        if code is None or not (found or code in FULL):
            raise
        for leftover in directory.glob("*.orbax-checkpoint-tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        text = "no space left for a checkpoint (the earlier ones are intact); free disk space, or lower checkpoint.keep"
        if code not in FULL:
            text = (
                f"the checkpoint was not written (the earlier ones are intact): {os.strerror(code)}; look at the disk"
            )
        raise OSError(code, text, str(directory)) from error

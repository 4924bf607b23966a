"""The learner's memory on disk: train state, data cursor and orchestrator state, so that a resume is bitwise.

In time:

1. `save` waits for the save before it, refuses where the disk has no room for this one, copies the state to the host,
   and returns; orbax writes behind its back.
2. When every array is on disk, still under the temporary name, `seal.json` records the SHA-256 of every file of theirs.
3. orbax renames the step's directory and deletes all but the newest `keep` and the best. No rename: no checkpoint.
   Which is best is said afterwards (`score`), and kept in `best.json`.
4. `restore` re-hashes the newest step before orbax parses any of it. A torn one is logged, moved aside as
   `torn-<step>`, and the one before is used. What was saved is compared with what is asked for by name, shape and
   dtype, then read straight into the shardings asked for, whatever mesh wrote it.

The seal is there because orbax does not notice a flipped bit (zstd chunks carry no checksum here), returns the wrong
tree, and raises bare `Exception` for a truncated one. The dtype check is there because it casts in silence. The disk is
asked beforehand because a write that fails in tensorstore prints tracebacks of orbax's closed event loop.

Over several hosts the directory is one that all share. Each writes and reads its own shards; the first seals, and decides for all what
is saved, restored and moved aside (`hosts.broadcast`), since a network disk may show the others an older state of things.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from sharding.multihost import hosts as hosts_lib
from sharding.system import atomic_file

# orbax logs each failure several times with its stack; all of them also reach the caller as exceptions.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)
_log = logging.getLogger(__name__)
_OVERHEAD_BYTES = 1 << 16  # orbax's metadata and the seal, of a small tree


class Checkpointer:
    """Saves and restores one run. Close it (or use `with`): closing waits for the save in flight."""

    def __init__(self, directory: str, *, keep: int = 3, every: int = 1, hosts: hosts_lib.Hosts = hosts_lib.ALONE):
        if keep < 1 or every < 1:
            raise ValueError(f"keep={keep} and every={every} must be >= 1")
        self._directory = pathlib.Path(directory).absolute()
        self._every = every
        self._keep = keep
        self._hosts = hosts
        self._last_saved: int | None = None
        with _full_disk(self._directory):
            self._manager = ocp.CheckpointManager(self._directory, options=self._options())

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, error, *_) -> None:
        if error is None or self._hosts.count == 1:  # else the save in flight would wait for hosts that come no more
            self.close()

    def save(self, step: int, state: Any, host_state: dict, *, force: bool = False) -> bool:
        """Starts a save when `step` is a multiple of `every` (or `force`); False where there was nothing to do.

        `host_state` is any JSON object. An error of the save before (a full disk) is raised here, or by `wait`.
        """
        if step % self._every and not force:
            return False
        self.wait()
        if not self._hosts.broadcast(self._hosts.is_first and self._is_due(step, state)):
            return False
        self._last_saved = step
        with _full_disk(self._directory):
            items = {"state": ocp.args.StandardSave(state), "host": ocp.args.JsonSave(host_state)}
            return self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def _is_due(self, step: int, state: Any) -> bool:
        newest = self.latest_step()
        if newest is not None and step == newest == self._last_saved:
            return False
        if newest is not None and step <= newest:
            raise ValueError(
                f"step {step} <= {newest} in {self._directory}: delete the newer steps to take another path"
            )
        with _full_disk(self._directory):
            _check_room(self._directory, state)
        return True

    def score(self, step: int, value: float) -> None:
        """Says how good a saved step is: the first of the highest value is kept, however old it becomes."""
        best = _best(self._directory)
        if best is None or value > best["score"] or best["step"] not in (*complete_steps(self._directory), step):
            text = json.dumps({"step": step, "score": value}) + "\n"
            atomic_file.write(self._directory / "best.json", text.encode())

    def wait(self) -> None:
        """Returns when the save in flight is a complete checkpoint; raises if it failed."""
        with _full_disk(self._directory):
            self._manager.wait_until_finished()

    def latest_step(self) -> int | None:
        """The newest complete step on disk."""
        return max(complete_steps(self._directory), default=None)

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any, dict] | None:
        """(step, state, host_state) of the newest intact checkpoint, or of `step`; None where nothing was ever saved.

        `abstract_state` has a `jax.ShapeDtypeStruct` with a sharding per leaf.
        """
        self.wait()
        found, has_changed = self._hosts.broadcast(self._find(step) if self._hosts.is_first else None)
        if has_changed:
            self._manager.reload()
        if found is None:
            return None
        _check(self._directory / str(found) / "state", abstract_state, prefix="")
        items = {"state": ocp.args.StandardRestore(abstract_state), "host": ocp.args.JsonRestore()}
        restored = self._manager.restore(found, args=ocp.args.Composite(**items))
        return found, restored.state, restored.host

    def _find(self, step: int | None) -> tuple[int | None, bool]:
        """The step to restore, and whether newer ones, which are torn, were moved aside."""
        found = _pick(self._directory, step)
        if step is not None:
            return found, False
        torn = [number for number in _numbered(self._directory) if found is None or number > found]
        for number in torn:
            self._directory.joinpath(str(number)).rename(_free_name(self._directory / f"torn-{number}"))
        best = _best(self._directory)
        if found is not None and best is not None and best["step"] > found:  # of steps that will be taken again
            (self._directory / "best.json").unlink()
        return found, bool(torn)

    def close(self) -> None:
        with _full_disk(self._directory):
            self._manager.close()

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """orbax's question after each save; `checkpoints` ascend."""
        best = _best(self._directory)
        newest = [c.step for c in checkpoints][-self._keep :]
        return [c.step in newest or (best is not None and c.step == best["step"]) for c in checkpoints]

    def _options(self) -> ocp.CheckpointManagerOptions:
        callback = ocp.options.AsyncOptions(post_finalization_callback=self._seal)
        return ocp.CheckpointManagerOptions(preservation_policy=self, async_options=callback)

    def _seal(self) -> None:
        """Runs in the save's thread, after the last byte and before the rename that makes the step visible."""
        if jax.process_index() != 0:
            return
        (path,) = self._directory.glob(f"{self._last_saved}.*tmp*")
        # orbax still writes into its own metadata at the top, on which `restore` does not depend.
        inside = (p for item in ("state", "host") for p in sorted(path.joinpath(item).rglob("*")))
        files = {str(p.relative_to(path)): _sha256(p) for p in inside if p.is_file()}
        with open(path / "seal.json", "w") as file:
            json.dump(files, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def restore_params(directory: str, abstract_params: Any, step: int | None = None) -> tuple[int, Any]:
    """(step, params) of the newest intact checkpoint, or of `step`, without the optimizer or its structure."""
    root = pathlib.Path(directory).absolute()
    found = _pick(root, step)
    if found is None:
        raise FileNotFoundError(f"no checkpoint in {directory}: pass the directory a Checkpointer writes to")
    path = root / str(found) / "state"
    _check(path, abstract_params, prefix="params/")
    item = {"params": abstract_params}
    how = ocp.checkpoint_utils.construct_restore_args(item)
    with ocp.PyTreeCheckpointer() as reader:
        restored = reader.restore(path, args=ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True))
    return found, restored["params"]


def complete_steps(directory: str | pathlib.Path) -> list[int]:
    """The steps whose save finished, ascending."""
    return [step for step in _numbered(pathlib.Path(directory)) if _seal_path(directory, step).is_file()]


def best_step(directory: str | pathlib.Path) -> int:
    """The complete step that scored highest; FileNotFoundError where none has a score."""
    best = _best(pathlib.Path(directory))
    if best is None or best["step"] not in complete_steps(directory):
        raise FileNotFoundError(
            f"no checkpoint in {directory} has a score yet; name one of {complete_steps(directory)}"
        )
    return best["step"]


def _best(directory: pathlib.Path) -> dict | None:
    path = directory / "best.json"
    return json.loads(path.read_text()) if path.exists() else None


def _numbered(directory: pathlib.Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if re.fullmatch("[0-9]+", p.name))


def _seal_path(directory: str | pathlib.Path, step: int) -> pathlib.Path:
    return pathlib.Path(directory) / str(step) / "seal.json"


def _pick(directory: pathlib.Path, step: int | None) -> int | None:
    """The step to read, intact: `step`, or the newest; ValueError where everything that was saved is damaged."""
    steps = complete_steps(directory)
    if step is not None:
        if step not in steps:
            raise FileNotFoundError(f"no checkpoint of step {step} in {directory}; it holds {steps}")
        damage = _damage(directory, step)
        if damage:
            raise ValueError(f"checkpoint {step} is damaged: {damage}; restore another of {steps}")
        return step
    for candidate in reversed(steps):
        damage = _damage(directory, candidate)
        if not damage:
            return candidate
        _log.warning("checkpoint %d is damaged and skipped: %s", candidate, damage)
    if steps:
        raise ValueError(f"every checkpoint in {directory} is damaged ({steps}): move them away to start over")
    return None


def _damage(directory: pathlib.Path, step: int) -> str | None:
    """What is wrong with a step, or None. Files that are not in the seal are not read by anyone."""
    seal = _seal_path(directory, step)
    try:
        files = json.loads(seal.read_text())
    except ValueError as error:
        return f"{seal}: {error}"
    for name, expected in files.items():
        path = seal.parent / name
        if not path.is_file():
            return f"{path} is missing"
        if _sha256(path) != expected:
            return f"{path} is not what was written"
    return None


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _free_name(path: pathlib.Path) -> pathlib.Path:
    taken = sum(1 for _ in path.parent.glob(f"{path.name}*"))
    return path.with_name(f"{path.name}.{taken}") if taken else path


def _check(path: pathlib.Path, abstract: Any, *, prefix: str) -> None:
    """Compares by name, shape and dtype; below `prefix` both sides must hold the same names."""
    with ocp.PyTreeCheckpointer() as reader:
        saved = _named(reader.metadata(path).item_metadata.tree)
    saved = {name.removeprefix(prefix): leaf for name, leaf in saved.items() if name.startswith(prefix)}
    wanted = _named(abstract)
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "is in the checkpoint but not in" if name in saved else "is not in the checkpoint but in"
        raise ValueError(f"{path}: {prefix}{name} {where} the config's state: restore with the config that saved it")
    for name, leaf in wanted.items():
        have, want = (tuple(saved[name].shape), saved[name].dtype), (tuple(leaf.shape), leaf.dtype)
        if have != want:
            raise ValueError(
                f"{path}: {prefix}{name} was saved as {have}, not {want}: restore with the config that saved it"
            )


def _check_room(directory: pathlib.Path, state: Any) -> None:
    """Raises the OSError of a full disk when `state`, all hosts' part of it, does not fit uncompressed."""
    arrays = (leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
    needed = sum(array.nbytes for array in arrays) + _OVERHEAD_BYTES
    if needed > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, "full")


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@contextlib.contextmanager
def _full_disk(directory: pathlib.Path) -> Iterator[None]:
    """The one place where tensorstore's ValueError for a full disk becomes the OSError it is."""
    try:
        yield
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) != errno.ENOSPC and f"os_error_code='{errno.ENOSPC}'" not in str(error):
            raise
        for leftover in directory.glob("*.orbax-checkpoint-tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        what = "no space left for a checkpoint, the earlier ones are intact: free some or lower keep"
        raise OSError(errno.ENOSPC, what, str(directory)) from error

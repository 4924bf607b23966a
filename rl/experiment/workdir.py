"""The working directory of a run: whose it is, and the keys that it keeps.

1. `open_workdir` locks the directory, refuses one that belongs to another config, and saves the resolved config; `read_workdir`
   does so for who looks at a run, and saves nothing.
2. `secret` and `signing_key` are made at their first use, and found again by whoever resumes.

Over several hosts only the first touches the directory here.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata

from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment as experiment_lib
from sharding.multihost import hosts as hosts_lib
from sharding.system import atomic_file


@contextlib.contextmanager
def open_workdir(
    workdir: str, experiment: experiment_lib.Experiment, hosts: hosts_lib.Hosts = hosts_lib.ALONE
) -> Iterator[pathlib.Path]:
    """Creates or reopens `workdir` for this experiment alone, while the block runs; the first host does, for all.

    Raises:
      ValueError: it belongs to another config (the fields that differ are named), another process runs in it, or this host
        was started with another config than the first.
    """
    if not workdir:
        raise ValueError("--workdir is empty; give a directory for the run")
    path = pathlib.Path(workdir).absolute()
    if not hosts.is_first:
        _check_same(hosts.agree(), experiment)
        yield path
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"workdir {path} is a file; give a directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"workdir {path} cannot be made: {error.strerror}; give another --workdir") from error
    with _locked(path):
        _claim(path, experiment)
        hosts.agree(experiment.config.to_json())
        yield path


@contextlib.contextmanager
def read_workdir(workdir: str, experiment: experiment_lib.Experiment) -> Iterator[pathlib.Path]:
    """`workdir` of a run that has taken steps, for this process alone while the block runs. What made its policy must be the same;
    what a look at it depends on (`READ_BY_RUNS`) may differ, and config.json stays as the run left it."""
    path = pathlib.Path(workdir).absolute()
    with _locked(path):
        if differs := [name for name in differences(path, experiment) if not name.startswith(READ_BY_RUNS)]:
            raise ValueError(_another(path, experiment, differs))
        yield path


# A run's way to its rollouts: another may be taken to its checkpoints.
READ_BY_RUNS = ("evaluation.", "inference.", "sampling.", "trust.", "train.", "broadcast.", "rl.num_steps")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with open(path / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"workdir {path} is in use by another run; wait for it or give another --workdir"
            ) from None
        yield


def _check_same(firsts: str, experiment: experiment_lib.Experiment) -> None:
    first, own = experiment_lib.flat(json.loads(firsts)), experiment_lib.fields(experiment)
    for name in sorted(first.keys() | own.keys()):
        if first.get(name) != own.get(name) and name != "topology.process_id":
            raise ValueError(
                f"{name} is {own.get(name)!r} here and {first.get(name)!r} on host 0; give every host the same command and checkout"
            )


def _claim(path: pathlib.Path, experiment: experiment_lib.Experiment) -> None:
    """Saves the resolved config, or checks that the one saved is the same but for where things run, and how long.

    The config of a run that ended before its first step binds nobody: a mistake in it may be corrected.
    """
    wanted = json.loads(experiment.config.to_json())
    file, steps = path / "config.json", path / "metrics.jsonl"
    if file.exists() and steps.exists() and steps.stat().st_size:
        if differs := differences(path, experiment):
            raise ValueError(_another(path, experiment, differs))
    elif not file.exists() and any(p.name not in (".lock", ".hosts") for p in path.iterdir()):
        raise ValueError(f"workdir {path} holds files but no config.json: it is not a run; give an empty --workdir")
    saved = {"config": wanted, "command": _command(), "versions": _versions()}
    atomic_file.write(file, (json.dumps(saved, indent=2) + "\n").encode())


def _command() -> str:
    """This process's, to be typed again."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec else [sys.argv[0]]
    return shlex.join([*program, *sys.argv[1:]])


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in ("jax", "jaxlib", "optax")}


def differences(path: pathlib.Path, experiment: experiment_lib.Experiment) -> list[str]:
    """Fields that the config saved in a workdir has otherwise, but for where things run and how long; sorted."""
    free = ["topology.", "mesh.", "inference.mesh.", "checkpoint.", "evaluation.every", "trust.max_attempts"]
    if experiment.optimizer.schedule == "constant":  # then no step depends on how many follow
        free.append("rl.num_steps")
    if experiment.objective.optimizer_steps == 1:  # rows are summed over, however they are cut
        free.append("train.rows")
    saved, wanted = _saved(path), experiment_lib.fields(experiment)
    return sorted(
        name
        for name in saved.keys() | wanted.keys()
        if saved.get(name) != wanted.get(name) and not name.startswith(tuple(free))
    )


def _saved(path: pathlib.Path) -> dict:
    try:
        return experiment_lib.flat(json.loads((path / "config.json").read_text())["config"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path / 'config.json'} is not the config of a run ({error!r}); give another --workdir"
        ) from error


def _another(path: pathlib.Path, experiment: experiment_lib.Experiment, differs: list[str]) -> str:
    old = _saved(path).get(differs[0], "absent")
    new = experiment_lib.fields(experiment).get(differs[0], "absent")
    more = f" ({len(differs) - 1} more fields differ)" if differs[1:] else ""
    return (
        f"workdir {path} belongs to another config: {differs[0]} was {old!r}, now {new!r}{more}; give another --workdir, or "
        f"the config it was started with"
    )


def secret(workdir: pathlib.Path, seed: int) -> bytes:
    """The key of what workers must not foresee (which groups are checked); kept in the workdir, readable by us alone."""
    file = workdir / "secret.key"
    if not file.exists():
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(os.urandom(32))
    return file.read_bytes() + str(seed).encode()


def signing_key(workdir: pathlib.Path, hosts: hosts_lib.Hosts = hosts_lib.ALONE) -> rollout_lib.WorkerKey:
    """The key that signs this run's weights; servers and relays elsewhere are told its public half (`--weights_key`)."""
    file = workdir / "weights.key"
    if hosts.is_first and not file.exists():
        rollout_lib.WorkerKey.generate().save(file)
    hosts.agree()
    return rollout_lib.WorkerKey.load(file)

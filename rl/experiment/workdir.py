"""The work directory of a run: its lock, its config, and its keys, which are generated at first use and reused after a resume."""

import contextlib
import json
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

from inference.rollouts import rollout as rollout_lib
from models import hub, lora
from rl.experiment import experiment as experiment_lib
from rl.experiment.reporting import monitors as monitors_lib
from rl.protocol import env_mix
from rl.protocol.ledger import run_ledger
from sharding.system import atomic_file
from sharding.system import files as files_lib
from sharding.system.logs import run_logs
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import broadcast, bucket
from sharding.weights.format import journal, manifest

ORCHESTRATOR_LOCK = ".orchestrator.lock"
# Entries of a workdir whose run has not begun; rl.launch makes some.
UNCLAIMED = (".lock", ".hosts", "root.json", "launch", "logs", "keys", "weights.key")
# Fields that supervised fine-tuning on `warmup.data` does not use.
FOR_ROLLOUTS = tuple("env. envs. rl. sampling. inference. evaluation. objective. loss_options. curriculum.".split())
# Fields that a command which only reads a run may set differently: they do not determine the policy of a checkpoint.
READ_BY_RUNS = tuple(
    "evaluation. inference. sampling. trust. train. broadcast. retention. profile. rl.num_steps env.digest warmup.digest".split()
)

CODE_AND_DATA = {"env.digest", "env.num_tasks", "rl.digest", "rl.loss_function", "warmup.digest"}


@contextlib.contextmanager
def open_workdir(
    workdir: str | os.PathLike,
    experiment: experiment_lib.Experiment,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
    free: tuple[str, ...] = (),
) -> Iterator[pathlib.Path]:
    """Creates or reopens the run's work directory, locks it during the block, and saves the config in it; yields its absolute path.

    For a directory in a bucket, the path is that of the local folder that is mirrored there (sharding/weights/bucket/mirror.py). Until RL
    begins, fields that begin with one of `free` may differ from the config of the first start. Raises ValueError if the directory
    belongs to another config, another process uses it, or this host's config differs from that of host 0. Hosts other than the first do
    not access the directory.
    """
    if not workdir:
        raise ValueError("--workdir is empty; give a directory for the run")
    path = bucket.local_folder(workdir)
    if not hosts.is_first:
        first, own = experiment_lib.flat(json.loads(hosts.broadcast())), experiment_lib.fields(experiment)
        for name in differing(first, own, ["topology.process_id", "warmup.digest"]):  # only host 0 reads the data
            there = f"{name} is {own.get(name)!r} here and {first.get(name)!r} on host 0"
            raise ValueError(f"{there}; give every host the same command and checkout")
        yield path
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = "is a file" if os.path.isfile(path) else f"cannot be created: {error.strerror}"
        raise ValueError(f"workdir {path} {problem}; give another --workdir") from error
    with _locked(path), bucket.mirrored(workdir, with_batches=experiment.config.retention.mode != "keep"):
        _claim(path, experiment, free)
        hosts.broadcast(experiment.config.to_json())
        yield path


@contextlib.contextmanager
def read_workdir(workdir: str | os.PathLike, experiment: experiment_lib.Experiment) -> Iterator[pathlib.Path]:
    """Locks the directory of an existing run during the block, without changing its config.json; yields its absolute path.

    Raises ValueError if a field differs that determines the policy (any but `READ_BY_RUNS`).
    """
    path = bucket.local_folder(workdir)
    if bucket.is_url(workdir):
        path.mkdir(parents=True, exist_ok=True)
    with _locked(path), bucket.mirrored(workdir):
        _check_same(path, experiment, free=READ_BY_RUNS)
        yield path


@contextlib.contextmanager
def open_orchestrator(workdir: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Creates or reopens the directory of an orchestrator, which may be its learner's, too, and locks it; yields its absolute path."""
    if bucket.is_url(workdir):
        raise ValueError(f"--workdir {workdir} is in the learner's bucket; give the orchestrator a local folder")
    path = pathlib.Path(workdir).absolute()
    path.mkdir(parents=True, exist_ok=True)
    with _locked(path, ORCHESTRATOR_LOCK):
        yield path


def check_fields(learner: dict, experiment: experiment_lib.Experiment) -> None:
    """Raises ValueError if a config field differs between a learner and its orchestrator. Fields of places and devices may differ."""
    free = ["topology.", "mesh.", "inference.mesh.", "checkpoint.", "profile.", "broadcast.", "train.rows"]
    free.append("warmup.digest")  # only the learner reads the data
    own = experiment_lib.fields(experiment)
    for name in differing(learner, own, free):
        there = f"{name} is {learner.get(name)!r} in the learner, and {own.get(name)!r} in the orchestrator"
        raise ValueError(f"{there}; give both the same config and checkout")


def differences(path: pathlib.Path, experiment: experiment_lib.Experiment) -> list[str]:
    """Returns the sorted names of config fields that differ from those saved in `path`, without those that a resume may change."""
    free = ["topology.", "mesh.", "inference.mesh.", "checkpoint.", "retention.", "profile.", "evaluation.every"]
    free += ["evaluation.sets.", "evaluation.hold_s", "broadcast.head_s", "trust."]
    old, new = experiment_lib.flat(saved_config(path)), experiment_lib.fields(experiment)
    if experiment.optimizer.schedule == "constant":  # then no step depends on the number of steps
        free.append("rl.num_steps")
    if experiment.objective.optimizer_steps == 1:  # gradients are summed over all rows, in any division
        free.append("train.rows")
    return differing(old, new, free)


def differing(old: dict, new: dict, free: Iterable[str]) -> list[str]:
    """Returns the sorted names whose values differ between two configs, without names that begin with one of `free`."""
    names = sorted(old.keys() | new.keys())
    # `record_downloads` compares the revisions.
    old, new = ({k: hub.without_revision(v) for k, v in fields.items()} for fields in (old, new))
    return [name for name in names if old.get(name) != new.get(name) and not name.startswith(tuple(free))]


def saved_config(path: pathlib.Path) -> dict:
    """Returns the resolved config that a run saved in its work directory. Raises ValueError if there is none."""
    try:
        saved = json.loads((path / "config.json").read_text())["config"]
        experiment_lib.flat(saved)
        return saved
    except json.JSONDecodeError as error:
        found = (
            f"{path / 'config.json'} is not a run's config (it is cut or damaged at line {error.lineno}: {error.msg})"
        )
        raise ValueError(f"{found}; put it back from a backup, or use another --workdir") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / 'config.json'} is not a run's config ({error!r}); use another --workdir") from error


def record_downloads(workdir: pathlib.Path, commits: Mapping[str, str]) -> None:
    """Writes {hub id: commit} to downloads.json. Raises ValueError if the run began with another commit of a repository."""
    file = workdir / "downloads.json"
    known = atomic_file.read_json(file, dict)
    for name, commit in ((hub.without_revision(id), commit) for id, commit in commits.items()):
        if known.setdefault(name, commit) != commit:
            found = f"{name} is at commit {commit}, and the run in {workdir} began with {known[name]}"
            raise ValueError(f"{found}; write {name}@{known[name]} in the config")
    if commits:
        atomic_file.write(file, json.dumps(known, indent=1).encode())


def secret(workdir: pathlib.Path, seed: int) -> bytes:
    """Returns the run's secret, which decides the groups to replay; generated at first use and kept in the work directory."""
    return atomic_file.secret_key(workdir / "secret.key") + str(seed).encode()


def signing_key(workdir: pathlib.Path, hosts: hosts_lib.Hosts = hosts_lib.ALONE) -> rollout_lib.WorkerKey:
    """Returns the key that signs this run's weights, generated at first use; servers need its public half (`--weights_key`).

    Raises ValueError if the key is missing in a run that has begun: with another key it would be another run.
    """
    file = workdir / "weights.key"
    if hosts.is_first and not file.exists():
        if (workdir / "ledger.db").exists():
            raise ValueError(f"{file} does not exist, but the run's ledger does; put the key back from a backup")
        rollout_lib.WorkerKey.generate().save(file)
    hosts.broadcast()
    return rollout_lib.WorkerKey.load(file, "the run's signing key")


def publisher(
    workdir: pathlib.Path, experiment: experiment_lib.Experiment, hosts: hosts_lib.Hosts
) -> broadcast.Publisher:
    """Returns the publisher of the run's weights, signed with its key, into `weights`. All hosts must call it."""
    fields, keep = experiment.config.broadcast, experiment.num_kept_versions
    own = {"key": signing_key(workdir, hosts).private, "dtype": experiment.published_dtypes}
    options = broadcast.PublishOptions(keep=keep, head_s=fields.head_s, root_file=root_file(workdir), **own)
    more = {"snapshot_every": fields.snapshot_every, "fixed": lora.BASE}
    return broadcast.Publisher(str(workdir / "weights"), options, **more)


def open_ledger(workdir: pathlib.Path, checkpoint_head: str | None, *, any_step: bool = False) -> run_ledger.RunLedger:
    """Opens the run's ledger, or creates it for a run that has none; its keeper's key is generated at first use.

    With `any_step`, batches may have groups of any step. `checkpoint_head` is the ledger's head in the restored checkpoint. Raises ValueError if the ledger lacks this entry or the
    one that the newest published manifest names: then it is an older copy, or another.
    """
    run, key_file = signing_key(workdir).worker, workdir / "ledger.key"
    anchors = {"the restored checkpoint": checkpoint_head} if checkpoint_head else {}
    found = (workdir / "weights").glob("v*/manifest.json")
    for file in sorted(found, key=lambda file: journal.parse_dirname(file.parent.name) or 0, reverse=True):
        try:
            newest = manifest.parse(file.read_bytes(), trusted_key=run, is_proved=True)
        except journal.CorruptSource:  # torn by a power failure, or of a key that was replaced
            continue
        if head := newest.metadata.get("ledger"):
            anchors[str(file)] = head
        break
    if not key_file.exists() and (workdir / "ledger.db").exists():
        raise ValueError(f"{key_file} does not exist, but the ledger does; put the key back from a backup")
    key = rollout_lib.WorkerKey.load_or_create(key_file, "the ledger's key")
    if (workdir / "ledger.db").exists() and not (workdir / "secret.key").exists():
        text = f"notice: {workdir / 'secret.key'} was lost, and is made again: from now on, other groups are replayed"
        print(text, file=sys.stderr, flush=True)
    atomic_file.secret_key(workdir / "secret.key")  # before the ledger, which shows that it existed
    return run_ledger.RunLedger(workdir / "ledger.db", key, run, anchors=anchors, any_step=any_step)


def public_key(workdir: pathlib.Path) -> str | None:
    """Returns the public half of the run's `signing_key` as hex, or None if the work directory has no such key."""
    return signing_key(workdir).worker if (workdir / "weights.key").exists() else None


def trusted_key(workdir: pathlib.Path) -> str | None:
    """Returns the argument of `--weights_key` for this run: its root file, else its public key, or None if it has neither."""
    return root_file(workdir) or public_key(workdir)


def root_file(workdir: pathlib.Path) -> str:
    """Returns the path of the run's root file (`python -m sharding.broadcast keys`), by which its key is replaced, or ""."""
    file = workdir / "root.json"
    return str(file) if file.exists() else ""


def worker_key_file(workdir: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a local node's private key, generated at first use."""
    file = workdir / "keys" / f"{name}.key"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    if not file.exists():
        rollout_lib.WorkerKey.generate().save(file)
    return file


@contextlib.contextmanager
def _locked(path: pathlib.Path, name: str = ".lock") -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files_lib.locked(path / name, wait=False))
        except BlockingIOError:
            raise ValueError(f"workdir {path} is in use by another run; wait, or use another --workdir") from None
        yield


def _claim(path: pathlib.Path, experiment: experiment_lib.Experiment, free: tuple[str, ...]) -> None:
    """Saves the resolved config. Raises ValueError if the run has taken a step with another config, or `path` is not a run's."""
    file, steps = path / "config.json", path / "metrics.jsonl"
    leftovers = list(path.glob(atomic_file.LEFTOVERS))  # of a kill while a key or the config was written
    has_rl = any(path.glob("checkpoints/[0-9]*"))
    if file.exists():
        saved_config(path)  # that of a checkpoint's folder is not replaced
    if file.exists() and (has_rl or steps.exists() and steps.stat().st_size):
        _check_same(path, experiment, free=() if has_rl else free)
    elif not (file.exists() or (path / ORCHESTRATOR_LOCK).exists()) and any(
        p.name not in UNCLAIMED for p in {*path.iterdir()} - {*leftovers}
    ):
        raise ValueError(f"workdir {path} has files but no config.json: it is not a run; give an empty --workdir")
    for leftover in leftovers:
        leftover.unlink()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec else [sys.argv[0]]
    versions = {"python": platform.python_version()} | {x: metadata.version(x) for x in ("jax", "jaxlib", "optax")}
    saved = {"config": json.loads(experiment.config.to_json()), "command": shlex.join([*program, *sys.argv[1:]])}
    atomic_file.write(file, (json.dumps(saved | {"versions": versions}, indent=2) + "\n").encode())


def _check_same(path: pathlib.Path, experiment: experiment_lib.Experiment, free: tuple[str, ...] = ()) -> None:
    """Raises ValueError if a field differs from the saved config, unless a resume may change it or it begins with one of `free`."""
    if names := [name for name in differences(path, experiment) if not env_mix.run_field(name).startswith(free)]:
        names.sort(key=lambda name: env_mix.run_field(name) in CODE_AND_DATA)  # stable; people set no digests
        if {*map(env_mix.run_field, names)} <= CODE_AND_DATA:
            found = f"workdir {path}: code or data of the run ({', '.join(names)}) changed since its first start"
            raise ValueError(
                f"{found}; restore them (a new version of Intellax is other code, too), or give another --workdir"
            )
        both = experiment_lib.flat(saved_config(path)), experiment_lib.fields(experiment)
        old, new = (fields.get(names[0], "absent") for fields in both)
        found = f"belongs to another config: {names[0]} was {old!r}, now {new!r}; fields that differ: {len(names)}"
        command = atomic_file.read_json(path / "config.json", dict).get("command")
        remedy = (
            f"give the fields of its last start, {command}, or go on from its newest policy: --config.init_from={path}"
        )
        raise ValueError(f"workdir {path} {found}; {remedy} with another --workdir")


def monitors(
    workdir: pathlib.Path, experiment: experiment_lib.Experiment, hosts: hosts_lib.Hosts = hosts_lib.ALONE
) -> dict[str, monitors_lib.Monitor]:
    """Returns the monitors of `topology.monitors` for a run in a working directory, by name; none on hosts other than the first."""
    if not hosts.is_first:
        return {}
    run = monitors_lib.Run(workdir, signing_key(workdir).worker, experiment_lib.fields(experiment))
    return monitors_lib.begin(experiment.config.topology.monitors, run)


def logs(workdir: pathlib.Path, *, is_first: bool = True) -> run_logs.Folder:
    """Returns the folder of the logs of this attempt of a run; `is_first` is False on hosts other than the first."""
    return run_logs.folder(workdir, signing_key(workdir).worker, is_first=is_first)

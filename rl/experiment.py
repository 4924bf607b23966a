"""What every command of `rl` does first: read the config, derive, refuse, and own the working directory.

1. `run(main)` parses the flags. A mistake of the user ends in one line on stderr and a non-zero exit, never a traceback;
   an error raised inside a library is our bug and keeps its traceback.
2. `resolve` derives what follows from other fields, once, after the overrides, and checks what no single field can.
3. `open_workdir` locks the directory, refuses one that belongs to another config, and saves the resolved config; `read_workdir`
   does so for who looks at a run, and saves nothing.

Over several hosts, `joined` comes before all of it (sharding/hosts.py), and only the first host touches the directory here.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import inspect
import json
import logging
import os
import pathlib
import platform
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata

import jax
from absl import app, flags
from ml_collections import config_dict

from inference import engine, web
from inference import rollout as rollout_lib
from models import config as config_lib
from models import tokenizer as tokenizer_lib
from rl import command_line, config_rules, learner, lora, losses, router_replay
from rl import credit as credit_lib
from sharding import atomic_file, rules
from sharding import hosts as hosts_lib

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The resolved config as frozen parts, each typed by its owner; `raw` is the whole of it."""

    raw: config_dict.FrozenConfigDict
    model: config_lib.ModelConfig
    engine: engine.EngineConfig
    server_mesh: dict[str, int]  # axes of the local server's mesh that are not 1
    optimizer: learner.OptimizerConfig
    loss: str | Callable  # a name of losses.LOSSES, or the config file's own function
    loss_options: dict
    objective: learner.Objective
    credit: credit_lib.Credit
    lora: lora.LoraConfig
    tokenizer: tokenizer_lib.Tokenizer

    @property
    def broadcast_metadata(self) -> dict:
        """What goes beside the weights, so that a server needs nothing else to start."""
        model = self.raw.model.to_dict()
        if self.raw.broadcast.dtype and model["param_dtype"] == "float32":  # the widest there is
            model["param_dtype"] = self.raw.broadcast.dtype
        return {"model": model, "tokenizer": self.raw.tokenizer}

    def rows(self, mesh: jax.sharding.Mesh) -> int:
        """Rows of a micro-batch: train.rows, which must divide over the batch axes of the mesh."""
        shards = rules.num_batch_shards(mesh)
        if self.raw.train.rows % shards:
            raise ValueError(
                f"train.rows = {self.raw.train.rows} does not divide over the {shards} batch shards of the mesh "
                f"(data x fsdp x expert); set config.train.rows to a multiple of {shards}"
            )
        return self.raw.train.rows


define_flags = command_line.define


def run(main: Callable[[], None]) -> None:
    """Runs `main` under absl's flags with the project's rule for errors."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request
    logging.getLogger("jax._src.distributed").setLevel(logging.WARNING)
    logging.getLogger("jax._src.xla_bridge").setLevel(
        logging.ERROR
    )  # "unable to initialize backend" for each absent one

    def guarded(argv):
        if len(argv) > 1:
            raise ValueError(f"argument {argv[1]!r} is not a flag; write --config.field=value")
        main()

    try:
        app.run(guarded, flags_parser=_parse)
    except (KeyboardInterrupt, ValueError, OSError) as error:
        message, code, rank = explain(error)
        if rank == hosts_lib.BUG:
            raise
        if os.environ.get("INTELLAX_TRACEBACK"):
            traceback.print_exc()
        _fail(message, code)


# What a disk or a path is at fault for, whoever's call it was.
OUTSIDE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EIO)


def explain(error: BaseException) -> tuple[str, int, int]:
    """(Message, exit code, rank of sharding/hosts.py) of an error that ends a command."""
    if isinstance(error, KeyboardInterrupt):
        return hosts_lib.INTERRUPTION, 130, hosts_lib.INTERRUPTED
    outside = isinstance(error, OSError) and error.errno in OUTSIDE
    if isinstance(error, (ValueError, OSError)) and (outside or _raised_by_us(error)):
        told_elsewhere = str(error).endswith("see their errors")  # a publisher's, of hosts that could not publish
        return str(error), 1, hosts_lib.CONSEQUENCE if told_elsewhere else hosts_lib.MISTAKE
    return f"{type(error).__name__}: {error}".splitlines()[0], 1, hosts_lib.BUG


@contextlib.contextmanager
def joined() -> Iterator[hosts_lib.Hosts]:
    """The hosts that run this command together, as `config.topology` and the environment say."""
    topology = flags.FLAGS.config.topology
    with hosts_lib.joined(
        coordinator=topology.coordinator,
        num_processes=topology.num_processes,
        process_id=topology.process_id,
        timeout_s=topology.join_s,
        workdir=pathlib.Path(flags.FLAGS.workdir).absolute(),
        explain=explain,
    ) as hosts:
        yield hosts


def resolve(config: config_dict.ConfigDict) -> Experiment:
    """Returns the experiment of a config; ValueError names the field, the rule and the remedy."""
    loss, config = _own_loss(config)
    tokenizer = tokenizer_lib.load(config.tokenizer, date=config.tokenizer_date)
    model = config_lib.ModelConfig(**config.model)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} entries; "
            f"set config.model.vocab_size to a multiple of 16 that holds them"
        )
    for name, value, table in (
        ("rl.loss", config.rl.loss, losses.LOSSES if loss == config.rl.loss else config.loss_options),
        ("topology.mode", config.topology.mode, ("local", "remote")),
        ("broadcast.dtype", config.broadcast.dtype, ("", "float32", "bfloat16")),
        ("trust.device", config.trust.device, ("auto", "accelerator", "cpu")),
    ):
        if value not in table:
            raise ValueError(f"{name} = {value!r} is unknown; choose one of {', '.join(x or repr(x) for x in table)}")
    config_rules.check_ranges(config)
    if config.inference.max_model_len > config.train.row_length:
        raise ValueError(
            f"inference.max_model_len = {config.inference.max_model_len} exceeds train.row_length = "
            f"{config.train.row_length}: the longest rollout would not fit a packed row; raise train.row_length"
        )
    if config.topology.mode == "remote" and not config.topology.servers:
        raise ValueError("topology.mode = 'remote' needs topology.servers, the URLs of running rollout servers")
    optimizer = learner.OptimizerConfig(**config.optimizer)
    for holds, words in CONTRADICTIONS:
        if holds(config):
            raise ValueError(words)
    sizes = config.inference.to_dict()
    server_mesh = {axis: size for axis, size in sizes.pop("mesh").items() if size != 1}
    return Experiment(
        raw=config_dict.FrozenConfigDict(config),
        model=model,
        engine=engine.EngineConfig(**sizes, routed_experts=config.train.router_replay),
        server_mesh=server_mesh,
        optimizer=optimizer,
        loss=loss,
        loss_options=_loss_options(config),
        objective=_objective(config),
        credit=credit_lib.Credit(
            config.rl.advantage,
            config.rl.normalize,
            config.rl.average,
            config.rl.overlong_buffer,
            config.sampling.max_tokens,
            config.objective.teacher_coef,
            config.train.share_prompts,
            router_replay.RouterReplay.of(model) if config.train.router_replay else None,
        ),
        lora=lora.LoraConfig(**config.lora),
        tokenizer=tokenizer,
    )


# Configs that run, and do not do what they say.
CONTRADICTIONS = (
    (
        lambda c: c.objective.policy_coef == 0 and not c.objective.teacher_coef,
        "objective.policy_coef = 0 leaves nothing to learn from; set it above 0, or objective.teacher_coef",
    ),
    (
        lambda c: c.objective.policy_coef == 0 and c.objective.teacher_coef and not c.objective.reference_model,
        "objective.policy_coef = 0 with a teacher that is the policy itself learns nothing; name another in "
        "objective.reference_model",
    ),
    (
        lambda c: (
            c.objective.reference_model
            and not c.objective.teacher_coef
            and not (c.objective.kl_coef and c.objective.kl_reference == "reference")
        ),
        "objective.reference_model is set and nothing reads it; set objective.teacher_coef, or objective.kl_coef with "
        "objective.kl_reference = 'reference'",
    ),
    (
        lambda c: c.rl.loss in config_rules.SAMPLER_CORRECTIONS and c.objective.old_logprobs != "learner",
        "this loss corrects the sampler's policy to the learner's old one, so that it needs both; set "
        "objective.old_logprobs = 'learner'",
    ),
    (
        lambda c: c.rl.average != "tokens" and c.rl.loss in ("grpo", "dr_grpo", "gspo", "gmpo"),
        "this loss averages over samples itself; set rl.average = 'tokens'",
    ),
    (
        lambda c: c.rl.samples_per_prompt == 1 and c.rl.advantage != "given" and not c.objective.teacher_coef,
        "rl.samples_per_prompt = 1: a sample alone has nothing to be compared with, and its advantage is always 0; take more, "
        "or rl.advantage = 'given'",
    ),
    (
        lambda c: c.evaluation.samples_per_task > 1 and c.evaluation.temperature == 0,
        "evaluation.samples_per_task is above 1 at temperature 0, where all samples are the same; raise "
        "evaluation.temperature",
    ),
    (
        lambda c: c.warmup.patience > 0 and not c.warmup.eval_every,
        "warmup.patience waits for held-out losses and none is taken; set warmup.eval_every",
    ),
    (
        lambda c: (
            c.optimizer.schedule != "constant"
            and c.optimizer.total_steps < c.rl.num_steps * c.objective.optimizer_steps
        ),
        "optimizer.total_steps is less than rl.num_steps x objective.optimizer_steps: the rate would lie at its floor for the "
        "rest of the run; raise it",
    ),
    (
        lambda c: c.topology.mode == "local" and c.topology.servers,
        "topology.servers is set and topology.mode = 'local' starts a server of its own; set topology.mode = 'remote'",
    ),
    (
        lambda c: c.topology.mode == "local" and c.topology.workers,
        "topology.workers names who may submit, and topology.mode = 'local' starts workers with keys of their own, which it would "
        "turn away; leave it out, or set topology.mode = 'remote'",
    ),
    (
        lambda c: c.inference.max_model_len <= c.sampling.max_tokens,
        "inference.max_model_len must exceed sampling.max_tokens, since a prompt and its completion share it; raise it (and "
        "train.row_length), or lower sampling.max_tokens",
    ),
    (
        lambda c: 0 < c.model.max_positions < c.inference.max_model_len,
        "inference.max_model_len exceeds model.max_positions, for which the model was trained; lower it, or stretch the positions "
        "(model.rope_scaling) and raise model.max_positions",
    ),
    (
        lambda c: not c.model.num_experts and (c.model.experts_per_token or c.model.expert_ffn_dim),
        "model.experts_per_token and model.expert_ffn_dim mean nothing in a dense model; set model.num_experts",
    ),
    (
        lambda c: not c.model.num_experts and (c.objective.router_balance_coef or c.objective.router_balance_rate),
        "objective.router_balance_coef and objective.router_balance_rate balance experts, and the model has none; leave them out",
    ),
    (
        lambda c: c.model.window and "S" not in c.model.layer_pattern,
        "model.window is read by sliding layers alone; say which they are in model.layer_pattern, such as 'SF'",
    ),
    (
        lambda c: c.model.rope_scaling == "none" and c.model.rope_factor != 1,
        "model.rope_factor stretches nothing with model.rope_scaling = 'none'; set that to 'linear', 'llama3' or 'yarn'",
    ),
    (
        lambda c: c.train.router_replay and not c.model.num_experts,
        "train.router_replay is set and the model has no router to replay (model.num_experts = 0); leave it out",
    ),
    (
        lambda c: c.train.router_replay and _group_bytes(c) > web.MAX_BODY_BYTES,
        "train.router_replay needs a whole group with its experts in one submission, of 64 MiB: rl.samples_per_prompt x "
        "inference.max_model_len x (model.num_layers x model.experts_per_token + 21) bytes, with two bytes per expert above 256 "
        "experts; lower one of them",
    ),
)


def _group_bytes(config: config_dict.ConfigDict) -> int:
    """Of the longest group that says which experts ran; 21 per token are for the rest of it. They hardly compress."""
    num_tokens = config.rl.samples_per_prompt * config.inference.max_model_len
    experts = config.model.num_layers * config.model.experts_per_token * (1 + (config.model.num_experts > 256))
    return num_tokens * (experts + 21)


def _objective(config: config_dict.ConfigDict) -> learner.Objective:
    try:
        return learner.Objective(**config.objective)
    except ValueError as error:  # begins with the field
        raise ValueError(f"objective.{error}") from None


def _loss_options(config: config_dict.ConfigDict) -> dict:
    options = config.loss_options[config.rl.loss].to_dict()
    if config.rl.loss == "dr_grpo" and not options["length"]:
        options["length"] = float(config.sampling.max_tokens)
    return options


def _own_loss(config: config_dict.ConfigDict) -> tuple[str | Callable, config_dict.ConfigDict]:
    """The loss, and the config with a function of its own replaced by its name and a hash of its text, which can be saved."""
    function = config.rl.loss_function
    if function is None:
        return config.rl.loss, config
    if not callable(function):
        raise ValueError(f"rl.loss_function = {function!r} is no function; set it in a config file, see rl/losses.py")
    name, options = config.rl.loss, config.loss_options.get(config.rl.loss, {})
    taken = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if unknown := sorted(set(options) - set(taken)):
        raise ValueError(
            f"rl.loss_function = {function.__name__} takes no option {unknown[0]!r}, which loss_options.{name} has; in the config "
            f"file, set c.rl.loss = {function.__name__!r} and c.loss_options.{function.__name__} = dict(...) of what it takes"
        )
    config = config.copy_and_resolve_references()
    digest = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    with config.ignore_type():
        config.rl.loss_function = f"{function.__name__} {digest}"
    return function, config


@contextlib.contextmanager
def open_workdir(
    workdir: str, experiment: Experiment, hosts: hosts_lib.Hosts = hosts_lib.ALONE
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
        hosts.agree(experiment.raw.to_json())
        yield path


@contextlib.contextmanager
def read_workdir(workdir: str, experiment: Experiment) -> Iterator[pathlib.Path]:
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


def _check_same(firsts: str, experiment: Experiment) -> None:
    first, own = _flat(json.loads(firsts)), _flat(json.loads(experiment.raw.to_json()))
    for name in sorted(first.keys() | own.keys()):
        if first.get(name) != own.get(name) and name != "topology.process_id":
            raise ValueError(
                f"{name} is {own.get(name)!r} here and {first.get(name)!r} on host 0; give every host the same command and checkout"
            )


def _claim(path: pathlib.Path, experiment: Experiment) -> None:
    """Saves the resolved config, or checks that the one saved is the same but for where things run, and how long.

    The config of a run that ended before its first step binds nobody: a mistake in it may be corrected.
    """
    wanted = json.loads(experiment.raw.to_json())
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


def differences(path: pathlib.Path, experiment: Experiment) -> list[str]:
    """Fields that the config saved in a workdir has otherwise, but for where things run and how long; sorted."""
    free = ["topology.", "mesh.", "inference.mesh.", "checkpoint.", "evaluation.every", "trust.max_attempts"]
    if experiment.optimizer.schedule == "constant":  # then no step depends on how many follow
        free.append("rl.num_steps")
    if experiment.objective.optimizer_steps == 1:  # rows are summed over, however they are cut
        free.append("train.rows")
    saved, wanted = _saved(path), _flat(json.loads(experiment.raw.to_json()))
    return sorted(
        name
        for name in saved.keys() | wanted.keys()
        if saved.get(name) != wanted.get(name) and not name.startswith(tuple(free))
    )


def _saved(path: pathlib.Path) -> dict:
    try:
        return _flat(json.loads((path / "config.json").read_text())["config"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path / 'config.json'} is not the config of a run ({error!r}); give another --workdir"
        ) from error


def _another(path: pathlib.Path, experiment: Experiment, differs: list[str]) -> str:
    old = _saved(path).get(differs[0], "absent")
    new = _flat(json.loads(experiment.raw.to_json())).get(differs[0], "absent")
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


def describe(experiment: Experiment) -> str:
    """The resolved config, one field a line."""
    flat = _flat(json.loads(experiment.raw.to_json()))
    width = max(map(len, flat))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in flat.items())


def _flat(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _raised_by_us(error: BaseException) -> bool:
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    file = pathlib.Path(frame.tb_frame.f_code.co_filename).resolve()
    return ROOT in file.parents and "site-packages" not in file.parts


def _parse(argv: list[str]) -> list[str]:
    try:
        return command_line.parse(argv)
    except ValueError as error:
        _fail(str(error), 2)


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)

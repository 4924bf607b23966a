"""What every command of `rl` does first: read the config, derive, and refuse.

1. `run(main)` parses the flags. A mistake of the user ends in one line on stderr and a non-zero exit, never a traceback;
   an error raised inside a library is our bug and keeps its traceback.
2. `resolve` derives what follows from other fields, once, after the overrides, and checks what no single field can.
3. rl/experiment/workdir.py locks and claims the working directory.

Over several hosts, `joined` comes before all of it (sharding/multihost/hosts.py).
"""

import contextlib
import dataclasses
import errno
import hashlib
import inspect
import json
import logging
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator

import jax
from absl import app, flags
from ml_collections import config_dict

from inference.engine import engine
from models import config as config_lib
from models.text import tokenizer as tokenizer_lib
from rl.algorithms import losses
from rl.batch import credit as credit_lib
from rl.batch import router_replay
from rl.experiment import flags as command_line
from rl.experiment import rules as config_rules
from rl.learner import lora, train_step
from sharding import rules
from sharding.multihost import hosts as hosts_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The resolved config as frozen parts, each typed by its owner; `config` is the whole of it."""

    config: config_dict.FrozenConfigDict
    model: config_lib.ModelConfig
    engine: engine.EngineConfig
    server_mesh: dict[str, int]  # axes of the local server's mesh that are not 1
    optimizer: train_step.OptimizerConfig
    loss: str | Callable  # a name of losses.LOSSES, or the config file's own function
    loss_options: dict
    objective: train_step.Objective
    credit: credit_lib.Credit
    lora: lora.LoraConfig
    tokenizer: tokenizer_lib.Tokenizer

    @property
    def broadcast_metadata(self) -> dict:
        """What goes beside the weights, so that a server needs nothing else to start."""
        model = self.config.model.to_dict()
        if self.config.broadcast.dtype and model["param_dtype"] == "float32":  # the widest there is
            model["param_dtype"] = self.config.broadcast.dtype
        return {"model": model, "tokenizer": self.config.tokenizer}

    def rows(self, mesh: jax.sharding.Mesh) -> int:
        """Rows of a micro-batch: train.rows, which must divide over the batch axes of the mesh."""
        shards = rules.num_batch_shards(mesh)
        if self.config.train.rows % shards:
            raise ValueError(
                f"train.rows = {self.config.train.rows} does not divide over the {shards} batch shards of the mesh "
                f"(data x fsdp x expert); set config.train.rows to a multiple of {shards}"
            )
        return self.config.train.rows


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
    """(Message, exit code, rank of sharding/multihost/hosts.py) of an error that ends a command."""
    if isinstance(error, KeyboardInterrupt):
        return hosts_lib.INTERRUPTION, 130, hosts_lib.INTERRUPTED
    outside = isinstance(error, OSError) and error.errno in OUTSIDE
    if isinstance(error, (ValueError, OSError)) and (outside or _raised_by_us(error)):
        return str(error), 1, hosts_lib.MISTAKE
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
    optimizer = train_step.OptimizerConfig(**config.optimizer)
    config_rules.check_contradictions(config)
    sizes = config.inference.to_dict()
    server_mesh = {axis: size for axis, size in sizes.pop("mesh").items() if size != 1}
    return Experiment(
        config=config_dict.FrozenConfigDict(config),
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


def _objective(config: config_dict.ConfigDict) -> train_step.Objective:
    try:
        return train_step.Objective(**config.objective)
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
        raise ValueError(
            f"rl.loss_function = {function!r} is no function; set it in a config file, see rl/algorithms/losses.py"
        )
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


def describe(experiment: Experiment) -> str:
    """The resolved config, one field a line."""
    found = fields(experiment)
    width = max(map(len, found))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in found.items())


def fields(experiment: Experiment) -> dict:
    """The resolved config's fields by their names with dots."""
    return flat(json.loads(experiment.config.to_json()))


def flat(tree: dict, prefix: str = "") -> dict:
    """A tree of fields by their names with dots."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


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

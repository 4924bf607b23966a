"""The steps of every command of `rl` after its flags were parsed (rl/experiment/command.py): join the hosts, and resolve the config.

1. `joined` connects the hosts of the learner, if there are several (sharding/system/multihost/hosts.py).
2. `resolve` derives values from the config, after the overrides, and checks it (rl/experiment/rules.py).
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import inspect
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from absl import flags
from ml_collections import config_dict

from inference.engine import engine as engine_lib
from inference.engine import paged_cache
from inference.rollouts import kept_sets
from models import config as config_lib
from models import lora as lora_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from rl import envs
from rl.experiment import base_fields, command
from rl.experiment import rules as config_rules
from rl.learning.algorithms import losses
from rl.learning.batch import credit as credit_lib
from rl.learning.batch import packing, router_replay
from rl.learning.data import sources
from rl.learning.learner import objective as objective_lib
from rl.learning.learner import optimizers, train_step
from rl.protocol import env_mix, user_code
from sharding.mesh import rules
from sharding.system import cli
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import bucket
from sharding.weights.format import tree

MAX_CALLS = 64  # of an episode, without env.max_calls


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One resolved experiment: its config, and the frozen dataclasses and functions that are built from the config."""

    config: config_dict.FrozenConfigDict
    model: config_lib.ModelConfig
    engine: engine_lib.EngineConfig
    server_mesh: dict[str, int]  # axes of the local server's mesh that are not 1
    optimizer: optimizers.OptimizerConfig
    loss: str | Callable  # a name of losses.LOSSES, or the config file's own function
    loss_options: dict
    objective: objective_lib.Objective
    credit: credit_lib.Credit
    lora: lora_lib.LoraConfig
    tokenizer: tokenizer_lib.Tokenizer

    def learner(self, mesh: jax.sharding.Mesh) -> train_step.Learner:
        """Returns the `Learner`: the model, optimizer, loss, and options of which a train step on `mesh` is compiled."""
        return train_step.Learner(
            model=self.model,
            optimizer=train_step.make_optimizer(self.optimizer, self.model, self.lora),
            policy_loss=objective_lib.bind(self.loss, self.loss_options),
            mesh=mesh,
            objective=self.objective,
            lora=self.lora,
            share_prompts=self.credit.share_prompts,
        )

    @property
    def published_model(self) -> config_lib.ModelConfig:
        """The model as it is published and served: wider parameters are cast to `broadcast.dtype`, by default that of activations."""
        dtypes = self.model.param_dtype if self.lora else "float32", self.config.broadcast.dtype or self.model.dtype
        return dataclasses.replace(self.model, param_dtype=min(dtypes, key=lambda name: jax.numpy.dtype(name).itemsize))

    @property
    def published_dtypes(self) -> dict[str, str]:
        """The dtype in which each tensor is published, by its name, with or without adapters: some are float32 at any `param_dtype`."""
        specs = transformer.specs(self.published_model)
        trees = [lora_lib.published_specs(specs, lora) for lora in {None, self.lora or None}]
        leaves = [tree.flatten(rules.abstract(one), lambda name, leaf: None)[0] for one in trees]
        return {name: leaf.dtype.name for found in leaves for name, leaf in found.items()}

    @property
    def num_kept_versions(self) -> int:
        """The number of newest versions that a rollout in flight may name, which publisher and relays keep."""
        return self.config.rl.max_lag + self.config.rl.max_off_policy + 2

    @property
    def broadcast_metadata(self) -> dict:
        """The metadata published with the weights, from which a server can start: model, tokenizer, and sizes of the engine."""
        model = self.config.model.to_dict() | {"param_dtype": self.published_model.param_dtype}
        tokenizer, is_remote = self.config.tokenizer, self.config.topology.mode == "remote"
        tokenizer = tokenizer if is_remote else tokenizer_lib.located(tokenizer)
        variables = {"chat_template_kwargs": dict(self.tokenizer.variables)} if self.tokenizer.variables else {}
        lora = {"lora": dataclasses.asdict(self.lora)} if self.lora else {}
        return {"model": model, "tokenizer": tokenizer, "engine": dataclasses.asdict(self.engine)} | variables | lora

    def published(self, params: transformer.Params) -> tuple[transformer.Params, dict]:
        """Returns (tree, metadata) in which a policy is published; it may have no adapters yet."""
        tree, metadata = lora_lib.published(params), self.broadcast_metadata
        return tree, metadata if lora_lib.BASE in tree else {n: x for n, x in metadata.items() if n != "lora"}

    def layout(self, mesh: jax.sharding.Mesh, num_streams: int, **fields) -> packing.Layout:
        """Returns the size of batches of `num_streams` token sequences, packed into rows; `fields` are others of `packing.Layout`."""
        length, row_length = self.config.inference.max_model_len, self.config.train.row_length
        return packing.Layout.for_streams(num_streams, length, row_length=row_length, rows=self.rows(mesh), **fields)

    def rollout_layout(self, mesh: jax.sharding.Mesh) -> packing.Layout:
        """Returns the layout of the training batches that the host packs from rollouts: their rows and the arrays in them."""
        return self.layout(
            mesh,
            env_mix.max_streams(self.config),
            shards=rules.num_batch_shards(mesh),
            # A layer multiplies a token by about 12 D^2 parameters, and a key takes 2 D products more.
            key_cost=1 / (6 * self.model.model_dim),
            streams=self.credit.streams,
            router_replay=self.credit.router_replay,
            kept=self.credit.kept,
        )

    def train_layout(self, mesh: jax.sharding.Mesh) -> packing.Layout:
        """Returns the layout of the batches that the train step takes: those packed from rollouts, scored by the reference if needed."""
        layout = self.rollout_layout(mesh)
        scored = ("ref_logp",) if self.objective.needs_reference else ()
        return dataclasses.replace(layout, streams=(*layout.streams, *scored))

    def abstract_batch(self, mesh: jax.sharding.Mesh) -> packing.TrainBatch:
        """Returns the shapes and shardings of the batches that the train step takes, to compile it before a batch exists."""
        return packing.abstract(self.train_layout(mesh), mesh)

    def rows(self, mesh: jax.sharding.Mesh) -> int:
        """Returns the number of rows of a micro-batch. Raises ValueError if they, or their tokens, do not divide over the mesh."""
        length, parts = self.config.train.row_length, mesh.shape["context"]
        if length % parts:
            found = f"train.row_length = {length} does not divide over the {parts} devices of mesh.context"
            raise ValueError(f"{found}; set it to {length + -length % parts}, or to another multiple of {parts}")
        shards = rules.num_batch_shards(mesh)
        if self.config.train.rows % shards:
            found = f"train.rows = {self.config.train.rows} does not divide over the {shards} batch shards of the mesh"
            raise ValueError(f"{found} (data x fsdp x expert); set it to a multiple of {shards}")
        return self.config.train.rows


def joined() -> contextlib.AbstractContextManager[hosts_lib.Hosts]:
    """Returns a context manager that connects the hosts which run this command together, as set in `config.topology`."""
    topology = flags.FLAGS.config.topology
    return hosts_lib.joined(
        coordinator=topology.coordinator,
        num_processes=topology.num_processes,
        process_id=topology.process_id,
        timeout_s=topology.join_s,
        workdir=bucket.local_folder(flags.FLAGS.workdir),
        explain=command.explain,
    )


def resolve(
    config: config_dict.ConfigDict,
    code: Sequence[str] | None = None,
    *,
    saved: dict | None = None,
    has_rollouts: bool = True,
) -> Experiment:
    """Checks a config, derives values, and returns the `Experiment`. Raises ValueError with the field, rule, and remedy.

    The user's code comes from the folders `code`; None: from anywhere. `envs.load` reports an environment that cannot be found. `saved`
    is the flat config of an earlier start of the run: facts about environments and data are taken from it, so that neither is loaded.
    Without `has_rollouts`, as in rl.sft, fields that are for rollouts alone may contradict each other.
    """
    draft = _completed(config, code, saved)
    parts = _checked(draft, has_rollouts)
    return _frozen(draft, parts)


class _Draft(NamedTuple):
    """A config with the values that follow from others, the functions of the user's code, and the mistakes found so far."""

    config: config_dict.ConfigDict
    loss: str | Callable
    functions: dict[str, Callable]  # for advantages and further metrics, by name
    problems: list[str]


class _Parts(NamedTuple):
    """The parts of an experiment that check their own section of the config."""

    tokenizer: tokenizer_lib.Tokenizer
    model: config_lib.ModelConfig
    optimizer: optimizers.OptimizerConfig
    objective: objective_lib.Objective
    lora: lora_lib.LoraConfig


def _completed(config: config_dict.ConfigDict, code: Sequence[str] | None, saved: dict | None) -> _Draft:
    """Returns a copy of the config with the values that follow from other fields, and from environments, data, and the user's code."""
    config = config.copy_and_resolve_references()
    rate = config.optimizer
    if rate.schedule != "constant" and not rate.total_steps:
        num_updates = config.rl.num_steps * config.objective.optimizer_steps
        rate.total_steps = max(num_updates, rate.warmup_steps + rate.decay_steps + 1)
    loss, functions = _own_loss(config), _own_rules(config)
    problems = cli.mistake(lambda: _settle_envs(config, code, saved))
    if config.warmup.data and config.warmup.num_steps and not config.warmup.digest:
        config.warmup.digest = _data_digest(config.warmup.data) if saved is None else saved["warmup.digest"]
    return _Draft(config, loss, functions, problems)


def _checked(draft: _Draft, has_rollouts: bool) -> _Parts:
    """Returns the parts of the experiment that check themselves. Raises ValueError with all mistakes of the config, a line for each."""
    config, loss, problems = draft.config, draft.loss, draft.problems
    problems += config_rules.mistakes(config, is_settled=not problems, has_rollouts=has_rollouts)
    is_shipped = loss == config.rl.loss
    problems += config_rules.unknown("rl.loss", config.rl.loss, losses.LOSSES if is_shipped else config.loss_options)

    def made(build: Callable[[], Any], prefix: str = "") -> Any:
        """Returns the result of `build`, or None with a further problem, unless a rule has found it."""
        try:
            return build()
        except ValueError as error:
            message = f"{prefix}{error}"
            if message.split(" ")[0] not in {problem.split(" ")[0] for problem in problems}:
                problems.append(message)

    variables = config.chat_template_kwargs.to_dict()
    parts = _Parts(
        tokenizer=made(lambda: tokenizer_lib.load(config.tokenizer, date=config.tokenizer_date, variables=variables)),
        model=made(lambda: config_lib.ModelConfig(**config.model)),
        optimizer=made(lambda: optimizers.OptimizerConfig(**config.optimizer)),
        objective=made(lambda: objective_lib.Objective(**config.objective), "objective."),
        lora=made(lambda: lora_lib.LoraConfig(**config.lora)),
    )
    cli.fail_for(problems)
    needed, size = parts.tokenizer.vocab_size, parts.model.vocab_size
    if needed > size:
        remedy = "use the checkpoint's tokenizer" if config.init_from else f"set it to {-(-needed // 16) * 16}"
        raise ValueError(f"model.vocab_size = {size} is smaller than the tokenizer's {needed} entries; {remedy}")
    if not isinstance(loss, str):
        objective_lib.check_own(loss, config.loss_options[config.rl.loss].to_dict())
    if config.inference.num_pages > 0 and has_rollouts:
        paged_cache.check(parts.model)
    return parts


def _frozen(draft: _Draft, parts: _Parts) -> Experiment:
    """Returns the experiment of a config that was checked."""
    config, model = draft.config, parts.model
    loss_options = config.loss_options[config.rl.loss].to_dict()
    if config.rl.loss == "dr_grpo" and not loss_options["length"]:
        loss_options["length"] = float(env_mix.max_tokens(config))
    sizes = config.inference.to_dict()
    del sizes["mesh"]
    kept = kept_sets.width(config.sampling, model.vocab_size)
    return Experiment(
        config=config_dict.FrozenConfigDict(config),
        model=model,
        engine=engine_lib.EngineConfig(**sizes, routed_experts=config.train.router_replay, kept_tokens=kept),
        server_mesh=own_server_axes(config),
        optimizer=parts.optimizer,
        loss=draft.loss,
        loss_options=loss_options,
        objective=parts.objective,
        credit=_credit(config, draft.functions, model, parts.objective),
        lora=parts.lora,
        tokenizer=parts.tokenizer,
    )


def own_server_axes(config: config_dict.ConfigDict) -> dict[str, int]:
    """Returns {axis: size} of `inference.mesh`, the mesh of a run's own server, without the axes of size 1."""
    return {axis: size for axis, size in config.inference.mesh.to_dict().items() if size != 1}


def _settle_envs(config: config_dict.ConfigDict, code: Sequence[str] | None, saved: dict | None) -> None:
    """Sets the digest, and the numbers of tasks and of calls of an episode, of each environment that can be found, or is in `saved`.

    Its evaluation sets have at most as many tasks as it holds out.
    """
    for entry in env_mix.entries(config).values():
        if saved is not None:
            section = config.envs[entry.key] if entry.key else config.env
            with section.unlocked():
                known = [name for name in ("digest", "num_tasks", "max_calls") if entry.field(name) in saved]
                section.update({name: getattr(entry, name) or saved[entry.field(name)] for name in known})
            continue
        try:
            name, options = envs.locate(entry.name, entry.options, code)
        except ValueError:
            continue
        section = config.envs[entry.key] if entry.key else config.env
        with section.unlocked(), entry.naming_fields():
            section.digest = envs.digest(name, options)
            shipped = envs.ENVS.get(name.partition(":")[0])
            has_one_call = shipped is not None and shipped.is_one_turn
            if has_one_call:
                section.max_calls = 1
            is_counted = entry.num_tasks or (shipped and shipped.is_endless and not envs.is_wrapped(options))
            if not (is_counted and (has_one_call or entry.max_calls)):
                env = envs.load(name, seed=config.seed, **options)
                section.num_tasks = entry.num_tasks or env.num_tasks
                section.max_calls = 1 if has_one_call or env.play is None else entry.max_calls or MAX_CALLS
                # A task that is asked twice has the same greedy answer.
                for one in (config.evaluation, *config.evaluation.sets.values()):
                    count, of = getattr(one, "num_tasks", 0), getattr(one, "env", "")
                    if env.num_held_out and of == entry.key and isinstance(count, int) and count > env.num_held_out:
                        one.num_tasks = env.num_held_out
    if config.envs:
        config.env.digest = env_mix.digest(config)


def _credit(config, functions: dict[str, Callable], model, objective: objective_lib.Objective) -> credit_lib.Credit:
    """Returns the rules for credit; with several environments, they have those of each."""
    rl, train = config.rl, config.train
    of_run = {
        "average": rl.average,
        "teacher_coef": objective.teacher_coef,
        "gate": rl.gate,
        "share_prompts": train.share_prompts,
    }
    of_run["router_replay"] = router_replay.RouterReplay.of(model) if train.router_replay else None
    of_run["kept"] = kept_sets.width(config.sampling, model.vocab_size)

    def rule(entry: env_mix.Entry) -> credit_lib.Credit:
        names = ("normalize", "credit", "branch_weight", "overlong_buffer", "max_tokens", "weight")
        own = {name: getattr(entry, name) for name in names}
        own["field"] = lambda name: entry.field(name) if name in env_mix.FIELDS else f"rl.{name}"
        advantage = functions.get(entry.advantage, entry.advantage)
        return credit_lib.Credit(advantage=advantage, max_lag=rl.max_lag, **of_run, **own)

    metrics = tuple(functions[name] for name in rl.metrics)
    rules = {entry.label: rule(entry) for entry in env_mix.entries(config).values()}
    if not config.envs:
        return dataclasses.replace(*rules.values(), metrics=metrics)
    return credit_lib.Credit(max_lag=rl.max_lag, **of_run, metrics=metrics, envs=rules)


def _own_loss(config: config_dict.ConfigDict) -> str | Callable:
    """Returns the loss. In the config, name and hash of an own one take the place of the function, or of "module:function"."""
    function, name = config.rl.loss_function, config.rl.loss
    if function is None and not user_code.is_name(name):
        return name
    if function is None:
        function, digest = user_code.load(name), _code_digest(name)
        config.rl.loss = name.rpartition(":")[2]
    elif not callable(function):
        remedy = "set it in a config file, as rl/learning/algorithms/losses.py describes"
        raise ValueError(f"rl.loss_function = {function!r} is not a function; {remedy}")
    else:
        name, digest = function.__name__, hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    taken = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if config.rl.loss == function.__name__ and config.rl.loss not in config.loss_options:
        config.loss_options[config.rl.loss] = {}
    if unknown := sorted(set(config.loss_options.get(config.rl.loss, {})) - set(taken)):
        own = function.__name__
        found = f"your loss function {own} has no keyword argument {unknown[0]!r}, but loss_options.{config.rl.loss} sets it"
        remedy = f"set c.rl.loss = {own!r}, and c.loss_options.{own} = dict(its own options) if it has any"
        raise ValueError(f"{found}. In the config file, {remedy}")
    with config.ignore_type():
        config.rl.loss_function = f"{name} {digest}"
    return function


def _own_rules(config: config_dict.ConfigDict) -> dict[str, Callable]:
    """Returns the user's functions for advantages and further metrics by their names. `rl.digest` is set to the hash of their code."""
    forms = {name: "metrics(groups)" for name in config.rl.metrics}
    for entry in env_mix.entries(config).values():
        if user_code.is_name(entry.advantage):
            forms[entry.advantage] = "advantage(rewards_G)"
    functions = {name: user_code.load(name) for name in forms}
    for name, form in forms.items():
        user_code.check_arguments(functions[name], name, form, 1)
    config.rl.digest = ",".join(map(_code_digest, forms))
    return functions


def _code_digest(name: str) -> str:
    return user_code.digest(user_code.code_files(user_code.locate(name)).items())[:16]


def _data_digest(paths: str) -> str:
    """Returns the hash of the files with conversations in `warmup.data`. One that does not exist counts as such."""
    found = []
    for number, path in enumerate(paths.split(",")):
        files = sources.files(pathlib.Path(path.strip()))
        found += [(f"{number}/{name}", file) for name, file in files.items()]
    return user_code.digest(found)


def code_options(experiment: Experiment) -> list[str]:
    """Returns the option --code, with the folders that workers and validators on this machine need, or [] if they need none."""
    located = envs.located(experiment.config).values()
    folders = [*dict.fromkeys(folder for one in located for folder in envs.folders(one.name, one.options))]
    return ["--code", *folders] if folders else []


def describe(experiment: Experiment, workdir: pathlib.Path) -> str:
    """Returns the text that a run prints first: the config fields that differ from configs/base.py, and the files to watch."""
    defaults, found = default_fields(), fields(experiment)
    changed = {
        name: value for name, value in found.items() if value != defaults.get(name) and not name.endswith(".digest")
    }  # digests are derived
    width = max(map(len, changed), default=0)
    count = f"{len(changed)} of {len(found)} config fields differ from configs/base.py"
    lines = [f"{count} (all are in {workdir / 'config.json'}):"]
    lines += [f"  {name:<{width}} = {value!r} (was {defaults.get(name)!r})" for name, value in changed.items()]
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    install = "" if has_tensorboard else "pip install tensorboard; "
    lines += [f"metrics: {workdir / 'metrics.jsonl'}, or {install}tensorboard --logdir {workdir / 'tensorboard'}"]
    return "\n".join([*lines, f"logs: {workdir / 'logs'}, or python -m rl.logs {workdir} --follow"])


def fields(experiment: Experiment) -> dict:
    """Returns the fields of the resolved config as plain JSON values, by dotted name."""
    return flat(json.loads(experiment.config.to_json()))


def default_fields() -> dict:
    """Returns the fields of configs/base.py as plain JSON values, by dotted name."""
    return flat(json.loads(base_fields.config().to_json()))


def flat(tree: dict) -> dict:
    """Returns nested dicts as one flat dict with dotted names as keys, without empty ones."""
    return {name: value for name, value in base_fields.flat(tree).items() if value != {}}

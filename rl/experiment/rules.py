"""The rules that a config must satisfy beyond the types of its fields. Imports no JAX, and slow modules only where they are used.

A config file may contain unused fields, such as options of losses that it does not use. A field on the command line may not be
unused: a user who types it expects an effect.
"""

import math
import os
import pathlib
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ml_collections import config_dict

from inference.rollouts import kept_sets
from models import config as config_lib
from models import hub
from rl.experiment import base_fields
from rl.learning.algorithms import advantages
from rl.protocol import curriculum, env_mix, lease, task_schedule, user_code
from sharding.system import atomic_file, cli, sockets
from sharding.system import text as text_lib
from sharding.weights.format import gguf_header

if TYPE_CHECKING:
    from models.text import tokenizer as tokenizer_lib

# Losses that correct the sampler's policy to the learner's old one.
SAMPLER_CORRECTIONS = ("decoupled_ppo", "truncated_importance_sampling")
TEMPLATE_TOKENS = 512  # at most, of a chat template's own text
MAX_TOKEN_BYTES = 1024  # no vocabulary has longer tokens
# (rule, its test, the fields it applies to); NaN passes no test
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 0",
        lambda v: 0 <= v < math.inf,
        "env.num_tasks env.max_calls env.max_episode_tokens rl.num_steps rl.max_lag rl.max_off_policy rl.refill rl.gate rl.min_group rl.tokens_per_step warmup.num_steps warmup.learning_rate warmup.rate_steps rl.branch_weight warmup.eval_every warmup.patience "
        "optimizer.learning_rate optimizer.warmup_steps optimizer.total_steps optimizer.decay_steps optimizer.weight_decay "
        "optimizer.eps optimizer.clip_norm objective.entropy_coef objective.kl_coef objective.policy_coef objective.teacher_coef "
        "objective.router_balance_coef objective.router_balance_rate sampling.top_k trust.margin trust.max_wrong_tokens "
        "trust.quorum trust.routing_margin trust.logprob_tolerance trust.min_stake evaluation.every evaluation.temperature "
        "mesh.rollout_devices checkpoint.every_minutes vine.max_states vine.token_ratio plan.median_length",
    ),
    ("at least 0, or -1 (chosen)", lambda v: v >= -1, "inference.num_pages"),
    (
        "at least 1",
        lambda v: 1 <= v < math.inf,
        "rl.prompts_per_step rl.samples_per_prompt sampling.max_tokens train.row_length train.rows warmup.tasks_per_step "
        "warmup.eval_tasks evaluation.num_tasks evaluation.samples_per_task checkpoint.every checkpoint.keep "
        "plan.num_slices broadcast.snapshot_every vine.num_continuations vine.step_tokens topology.num_workers trust.max_attempts rl.oversampling",
    ),
    ("in [0, 1]", lambda v: 0 <= v <= 1, "warmup.decoy_fraction sampling.min_p optimizer.final_rate"),
    ("in [0, 1)", lambda v: 0 <= v < 1, "optimizer.beta1 optimizer.beta2 optimizer.momentum"),
    ("in (0, 1]", lambda v: 0 < v <= 1, "sampling.top_p trust.min_rate trust.invited_rate"),
    ("above 0 (greedy samples of a group are all alike)", lambda v: 0 < v < math.inf, "sampling.temperature"),
    (
        "above 0",
        lambda v: 0 < v < math.inf,
        "topology.lease_s topology.join_s topology.heartbeat_s topology.patience_s trust.verdict_s lora.alpha "
        "evaluation.hold_s plan.length_sigma",
    ),
    ("in 0..65535", lambda v: 0 <= v <= 65535, "topology.port topology.relay_port"),
    ("in 0..2147483647", lambda v: 0 <= v < 2**31, "seed"),
    (f"in 1..{lease.MAX_WORK_BITS}", lambda v: 1 <= v <= lease.MAX_WORK_BITS, "trust.work_bits"),
)


CHOICES = {
    "env.thinking": ("keep", "strip"),
    "topology.mode": ("auto", "local", "colocated", "remote"),
    "broadcast.dtype": ("", "float32", "bfloat16"),
    "trust.device": ("auto", "accelerator", "cpu"),
    "trust.environments": ("pure", "replayed", "recorded"),
    "trust.admission": ("", "open", "invited", "stake", "work"),
    "trust.pin_versions": ("strangers", "all", "none"),
    "rl.batch": task_schedule.BATCHES,
    "rl.curriculum": tuple(curriculum.KINDS),
    "optimizer.name": ("adamw", "muon", "sgd", "sign"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
}
# {field with a path, or for warmup.data several with commas between them: a remedy for one that does not exist}
FILES = {
    "init_from": "give a checkpoint, the working directory of a run, or a hub id like 'Qwen/Qwen3-0.6B'",
    "tokenizer": "give a checkpoint, or a hub id; '' with init_from takes that of the checkpoint",
    "warmup.data": "set it to files or folders of conversations, with commas between them",
    "objective.reference_model": "give a checkpoint",
    "trust.bands": "set it to the file that `python -m rl.validator calibrate` wrote",
    "trust.stake_ledger": "set it to the file of a ledger",
}
# Fields that rl/experiment/plan/sizes.py chooses where they are 0 or "auto".
OPEN = (
    *("model.dtype", "model.param_dtype", "model.remat"),
    *("sampling.max_tokens", "rl.prompts_per_step", "evaluation.num_tasks"),
    *("inference.max_model_len", "train.row_length"),
    *("inference.num_slots", "train.rows", "inference.mesh.tensor"),
)


def mistakes(config: config_dict.ConfigDict, *, is_settled: bool = True, has_rollouts: bool = True) -> Iterator[str]:
    """Yields an error message for each rule that a config violates.

    Unless `is_settled`, its environments, its checkpoint, and the devices have not been looked at, and rules on values that these decide are left out.
    Without `has_rollouts`, as in rl.sft, fields that are for rollouts alone may contradict each other.
    """
    if found := cli.mistake(lambda: env_mix.order(config)):
        yield from found
        return  # no entry can be read
    values: dict[str, Any] = base_fields.flat(config.to_dict())
    undecided = *OPEN, "env.max_calls", "env.num_tasks"  # the environment decides the last two
    is_open = {name: not is_settled and values[name] in (0, "auto") for name in undecided}
    yield from _out_of_range(config, {name: value for name, value in values.items() if not is_open.get(name)})
    for name, table in CHOICES.items():
        yield from unknown(name, values[name], table)
    yield from unknown("rl.average", config.rl.average, advantages.AVERAGES)
    for entry in env_mix.entries(config).values():
        if not user_code.is_name(entry.advantage):
            yield from unknown(entry.field("advantage"), entry.advantage, advantages.ADVANTAGES)
        yield from unknown(entry.field("normalize"), entry.normalize, advantages.NORMALIZERS)
    for check in (_check_profile, _check_warmup, _check_evaluation_sets, _check_addresses, _check_validators):
        yield from cli.mistake(lambda check=check: check(config))
    found_by = contradictions if has_rollouts else contradictions_of_training
    if is_settled:
        yield from found_by(config)
        yield from cli.mistake(lambda: _check_settled(config)) if has_rollouts else ()
        return
    if not user_code.is_name(config.rl.loss) and config.rl.loss_function is None:
        yield from unknown("rl.loss", config.rl.loss, config.loss_options)
    if not config.init_from:  # else its architecture is the checkpoint's
        least = {"dtype": "float32", "param_dtype": "float32", "remat": "none"}
        chosen = {name: value for name, value in least.items() if is_open[f"model.{name}"]}
        yield from cli.mistake(lambda: config_lib.ModelConfig(**config.model.to_dict() | chosen))
    for message in found_by(config):
        is_of_model = config.init_from and re.search(r"\bmodel\b", message)
        if not is_of_model and not any(name in message for name, undecided in is_open.items() if undecided):
            yield message


def mistakes_outside(config: config_dict.ConfigDict, workdir: str = "") -> Iterator[str]:
    """Yields an error message for each environment, environment option, file of rows, and checkpoint that does not exist. Reads none of them.

    If the run in `workdir` began with another `init_from`, yields that mistake alone, before the new checkpoint is downloaded.
    """
    from rl import envs

    if is_resumed := bool(workdir) and (pathlib.Path(workdir) / "metrics.jsonl").exists():
        saved = atomic_file.read_json(pathlib.Path(workdir) / "config.json", dict)
        own, first = config.init_from, saved.get("config", {}).get("init_from", "")
        if saved and hub.without_revision(own) != hub.without_revision(first):
            found = f"workdir {workdir} belongs to another config: init_from was {first!r}, now {own!r}"
            yield f"{found}; give the fields of its last start: {saved.get('command')}"
            return
    values = base_fields.flat(config.to_dict())
    elsewhere = {  # values that name no file of this machine
        "init_from": lambda path: hub.is_id(path) or hub.is_url(path),
        "warmup.data": lambda path: is_resumed,  # an evaluation of the run does not need them
        "trust.bands": lambda path: path == "auto",
        "trust.stake_ledger": lambda path: False,
    }
    for name, remedy in FILES.items():
        for path in values[name].split(",") if name == "warmup.data" else [values[name]]:
            path = path.strip()
            is_here = bool(path) and name in elsewhere and not elsewhere[name](path)
            if (is_here or path.startswith((".", "/"))) and not os.path.exists(path):
                yield f"{name} = {path!r} does not exist; {remedy}"
    folder = pathlib.Path(config.init_from)
    if (
        config.init_from
        and os.path.exists(folder)
        and not (folder / "weights").exists()
        and not gguf_header.is_gguf(folder)
    ):
        problems = cli.mistake(lambda: atomic_file.read_json(hub.config_file(folder), dict))
        yield from (f"init_from: {problem}" for problem in problems)
    if cli.mistake(lambda: env_mix.entries(config)):
        return  # `mistakes` reports it

    def check(entry: env_mix.Entry) -> None:
        with entry.naming_fields():
            envs.check(*envs.locate(entry.name, entry.options))

    for entry in env_mix.entries(config).values():
        yield from cli.mistake(lambda entry=entry: check(entry))


def unknown(name: str, value: Any, table: Iterable[str]) -> Iterator[str]:
    """Yields an error message if the value of the field `name` is not in `table`."""
    if value not in table:
        choices = ", ".join(x or repr(x) for x in table)
        yield f"{name} = {value!r} is unknown{text_lib.hint(value, table)}; choose one of {choices}"


def _out_of_range(config: config_dict.ConfigDict, values: dict[str, Any]) -> Iterator[str]:
    """Yields an error message for each number that is out of its range; `values` are the fields to check, by dotted name."""
    entries = env_mix.entries(config).values()
    of_envs = [(one.field(own), name, getattr(one, own)) for one in entries for own, name in env_mix.FIELDS.items()]
    for rule, is_within, names in RANGES:
        own = [(name, values[name]) for name in names.split() if name in values]
        # An environment without a length of its own has the run's, which may be open.
        others = [(shown, x) for shown, name, x in of_envs if name in names.split() and (name in values or x)]
        for name, value in own + others:
            if not is_within(value):
                yield f"{name} = {value} must be {rule}; set it to an allowed value"
    for name, value in config.loss_options.get(config.rl.loss, {}).items():
        if not value >= 0:
            yield f"loss_options.{config.rl.loss}.{name} = {value} must be at least 0; raise it"


def _check_profile(config: config_dict.ConfigDict) -> None:
    if steps := config.profile.steps:
        if len(steps) != 2 or not all(isinstance(one, int) for one in steps) or not 1 <= steps[0] <= steps[1]:
            raise ValueError(f"profile.steps = {steps} is not a range of steps; write (FIRST, LAST), from 1 on, or ()")


def _check_warmup(config: config_dict.ConfigDict) -> None:
    if not all(path.strip() for path in config.warmup.data.split(",")) and config.warmup.data:
        raise ValueError(f"warmup.data = {config.warmup.data!r} has an empty path; remove a comma")
    if not all(weight > 0 for weight in config.warmup.weights):
        raise ValueError(f"warmup.weights = {config.warmup.weights} must be above 0; remove the file of a weight of 0")


def _check_addresses(config: config_dict.ConfigDict) -> None:
    for name in ("servers", "control_servers"):
        for url in config.topology[name]:
            if not sockets.is_url(url):
                raise ValueError(f"topology.{name} contains {url!r}, which is not a URL; write http://HOST:PORT")
    address = config.topology.orchestrator
    if address and not (sockets.is_url(address) or address.startswith("unix:/")):
        raise ValueError(f"topology.orchestrator = {address!r} is not a URL; write http://HOST:PORT, or unix:PATH")
    for name in ("workers", "server_keys"):
        for key in config.topology[name]:
            if not text_lib.is_hex(key):
                raise ValueError(f"topology.{name} contains {key!r}, which is not a public key; write 64 hex digits")


def _check_validators(config: config_dict.ConfigDict) -> None:
    keys = [validator.rpartition("#")[2] for validator in config.trust.validators]
    for validator, key in zip(config.trust.validators, keys, strict=True):
        found = f"trust.validators contains {validator!r}"
        if not sockets.is_url(validator):
            raise ValueError(f"{found}, which is not a URL; write http://HOST:PORT#KEY")
        if not text_lib.is_hex(key):
            raise ValueError(f"{found}, without a public key; write http://HOST:PORT#KEY with its 64 hex digits")
        if keys.count(key) > 1:
            raise ValueError(f"{found}, whose key is listed more than once; remove the repetition")
    if config.trust.quorum > len(config.trust.validators):
        found = f"trust.quorum = {config.trust.quorum} exceeds the {len(config.trust.validators)} trust.validators"
        raise ValueError(f"{found}; lower it, or name more validators")


def _check_settled(config: config_dict.ConfigDict) -> None:
    """Raises ValueError for a submission of more bytes than a server takes, and for a wrong rule of retention."""
    from inference.server import web
    from rl.experiment import redaction

    redaction.Rule(**config.retention.to_dict())
    if (num_bytes := _group_bytes(config)) > web.MAX_BODY_BYTES:
        found = f"a group has up to {num_bytes} bytes, more than the {web.MAX_BODY_BYTES} that a submission may have"
        more = ", or sampling.top_k" if kept_sets.width(config.sampling, config.model.vocab_size) else ""
        raise ValueError(f"{found}; lower rl.samples_per_prompt or inference.max_model_len{more}")


def _check_evaluation_sets(config: config_dict.ConfigDict) -> None:
    evaluation, envs = config.evaluation, [*config.envs]
    least = {"num_tasks": 1, "samples_per_task": 1, "temperature": 0.0, "every": 0}
    for name, fields in evaluation.sets.items():
        if not re.fullmatch("[a-z0-9_]+", name):
            raise ValueError(f"evaluation.sets has {name!r}; name sets by lower-case letters, digits, and _")
        if not isinstance(fields, config_dict.ConfigDict):
            raise ValueError(f"evaluation.sets.{name} = {fields!r} is not a set; write dict({', '.join(least)})")
        if (env := fields.get("env", "")) and env not in envs:
            found = (
                f"evaluation.sets.{name}.env = {env!r} is not an environment of this run{text_lib.hint(str(env), envs)}"
            )
            remedy = f"choose one of {', '.join(envs)}" if envs else "remove it: the run has one environment"
            raise ValueError(f"{found}; {remedy}")
        for field, value in fields.items():
            if field == "env":
                continue
            if field not in least:
                raise ValueError(
                    f"evaluation.sets.{name} has the unknown field {field!r}; use {', '.join(least)}, or env"
                )
            kind = (int, float) if field == "temperature" else int
            if not (isinstance(value, kind) and least[field] <= value < math.inf):
                number = "a number" if field == "temperature" else "a whole number"
                rule = f"must be {number} of at least {least[field]}, and finite; correct it"
                raise ValueError(f"evaluation.sets.{name}.{field} = {value!r} {rule}")


def check_tolerances(config: config_dict.ConfigDict) -> None:
    """Raises ValueError if a run without bands allows replays to differ by more than float32 needs: a worker could gain by using that room.

    With room of 0.02 a worker may choose 1 token in 80; with 0.05 it may bias each importance ratio by 5 %. Workdirs of earlier
    versions are read without this rule.
    """
    for name, limit in (("margin", 1e-3), ("logprob_tolerance", 1e-3), ("max_wrong_tokens", 0)):
        if not config.trust.bands and config.trust[name] > limit:
            found = f"trust.{name} = {config.trust[name]} exceeds {limit} and trust.bands is '': a worker could gain by using that room"
            raise ValueError(f"{found}; lower it, or set trust.bands = 'auto' or to a file of `rl.validator calibrate`")


def check_stakes(config: config_dict.ConfigDict) -> None:
    """Raises ValueError if `trust.stake_ledger` is not a good ledger."""
    if file := config.trust.stake_ledger:
        from rl.protocol.ledger import ledger

        try:
            ledger.Ledger(file).close()
        except (OSError, ValueError, sqlite3.Error) as error:
            raise ValueError(f"trust.stake_ledger: {error} (docs/decisions/trust.md has a recipe)") from error


def check_trainable(config: config_dict.ConfigDict) -> None:
    """Raises ValueError if the filters of sampling can keep more tokens than a rollout names (inference/rollouts/kept_sets.py).

    The learner needs these sets: without them, importance ratios would be wrong from the first step (0.28 on average for top-k 5 with top-p 0.9).
    """
    if (width := kept_sets.width(config.sampling, config.model.vocab_size)) > kept_sets.MAX_KEPT:
        filters = ", ".join(f"sampling.{name} = {config.sampling[name]}" for name in kept_sets.OFF)
        found = f"{filters} keep up to {width} tokens, and a rollout names at most {kept_sets.MAX_KEPT} for each sampled token"
        raise ValueError(f"{found}; set sampling.top_k, too, or remove the filters")


def check_prompts(config: config_dict.FrozenConfigDict, tokenizer: "tokenizer_lib.Tokenizer") -> None:
    """Raises ValueError for a task whose prompt leaves no room for a completion, or breaks a rule of the chat template: no worker could finish it.

    Checks all tasks of a dataset, and the first ones of an endless environment. A short prompt that fits with any template is rendered
    only if its sequence of roles is new.
    """
    from rl import envs

    limit, first, found = config.inference.max_model_len, 16, envs.load_all(config)
    for key, env in found.items():
        if 0 < env.num_held_out < (count := -(-config.evaluation.num_tasks // len(found))):
            field, rest = "evaluation.num_tasks", f"there are only {env.num_held_out}, which are taken several times"
            cli.note(
                f"note: {field} = {config.evaluation.num_tasks} takes {count} held-out tasks of {env.name}: {rest}; lower it, or add rows"
            )
        counts, known = {"train": env.num_tasks, "held_out": config.evaluation.num_tasks if env.num_tasks else 0}, set()
        prompts = {split: [] for split in counts}
        for split, index in [(split, i) for split, count in counts.items() for i in range(count or first)]:
            messages = env.make_task(index, split).messages
            prompts[split].append(hash(envs.environment.prompt_text(messages)))
            task = f"task {index} ({split}{f' of envs.{key}' if key else ''})"
            size = sum(len(str(message).encode()) for message in messages)
            roles = tuple(message.get("role") for message in messages)
            if size < limit - TEMPLATE_TOKENS and roles in known:
                continue  # a token has a byte or more
            no_room = f"inference.max_model_len = {limit} has no room for an answer; raise it (and train.row_length), or shorten the task"
            if size > limit * MAX_TOKEN_BYTES:  # 20 MB take 20 s to render
                raise ValueError(f"the prompt of {task} has {size} bytes, and {no_room}")
            known.add(roles)
            try:
                num_tokens = len(tokenizer.render(messages, add_generation_prompt=True).token_ids)
            except ValueError as error:
                raise ValueError(f"the prompt of {task} cannot be rendered: {error}") from None
            if not num_tokens:
                remedy = "correct the checkpoint's chat_template.jinja or tokenizer_config.json"
                raise ValueError(f"the chat template renders the prompt of {task} as no token; {remedy}")
            if num_tokens >= limit:
                raise ValueError(f"the prompt of {task} has {num_tokens} tokens, and {no_room}")
        trained = {*prompts["train"]}
        if count := sum(prompt in trained for prompt in prompts["held_out"]):
            found = (
                f"{count} of {len(prompts['held_out'])} held-out tasks of {env.name} have the prompt of a training task"
            )
            cli.note(f"note: {found}, so their score does not show what the policy does with new ones; replace them")


def without_effect(config: config_dict.ConfigDict, names: Iterable[str]) -> Iterator[str]:
    """Yields an error message, with the remedy, for each field in `names` (set on the command line) that has no effect."""
    for name in names:
        for fields, is_unused, remedy in _unused(config, name):
            if is_unused and re.fullmatch(fields, name):
                yield f"config.{name} has no effect here; {remedy}"
                break


def contradictions(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields an error message for each combination of config fields that contradict, ignore, or defeat each other."""
    yield from contradictions_of_training(c)
    loss, objective, model, inference = c.rl.loss, c.objective, c.model, c.inference
    if objective.policy_coef == 0 and not objective.teacher_coef:
        yield "objective.policy_coef = 0 leaves nothing to learn from; raise it, or set objective.teacher_coef"
    if objective.policy_coef == 0 and objective.teacher_coef and not objective.reference_model:
        yield "objective.policy_coef = 0 and the teacher is the policy itself; set objective.reference_model to another model"
    uses_reference = objective.teacher_coef or (objective.kl_coef and objective.kl_reference == "reference")
    if objective.reference_model and not uses_reference:
        yield "objective.reference_model has no effect; set objective.teacher_coef, or kl_coef and kl_reference = 'reference'"
    if loss in SAMPLER_CORRECTIONS and objective.old_logprobs != "learner":
        yield f"rl.loss = {loss!r} needs the log-probabilities of sampler and learner; set objective.old_logprobs = 'learner'"
    if c.rl.average != "tokens" and loss in advantages.OWN_AVERAGES:
        yield f"rl.loss = {loss!r} averages over samples itself; set rl.average = 'tokens'"
    entries = [*env_mix.entries(c).values()]
    if loss == "oapl":
        yield from _misuses_of_oapl(c, entries)
    for one in entries:
        is_alone = one.samples_per_prompt == 1 and ":" not in one.advantage  # the user's own function may do otherwise
        if is_alone and one.advantage != "given" and not objective.teacher_coef:
            found = f"{one.field('samples_per_prompt')} = 1: the advantage of a group of one is always 0"
            yield f"{found}; raise it, or set {one.field('advantage')} = 'given'"
        if one.credit == "vine" and (
            one.key or one.advantage != "rloo" or one.normalize != "none" or one.overlong_buffer
        ):
            yield "rl.credit = 'vine' is for one environment in c.env, rl.advantage = 'rloo', and neither normalization nor a penalty; set these"
        if one.credit == "vine" and (one.max_calls != 1 or c.rl.max_lag):
            found = f"rl.credit = 'vine' with calls of {one.max_calls} at most and rl.max_lag = {c.rl.max_lag}"
            yield f"{found}: continuations are of one call, and of the policy that is trained; set env.max_calls = 1 and rl.max_lag = 0"
        if one.credit == "turn" and one.overlong_buffer:
            found = f"{one.field('overlong_buffer')} = {one.overlong_buffer} shapes the reward of an episode"
            yield f"{found}, and {one.field('credit')} = 'turn' uses those of turns; set one of them to its default"
    if c.rl.oversampling > 1 and task_schedule.is_fixed(c.rl):
        found = f"rl.oversampling = {c.rl.oversampling}, but each batch waits for its own groups"
        yield f"{found}; set rl.batch = 'first' or rl.refill, or raise rl.max_lag instead"
    if c.rl.curriculum and (c.rl.batch != "prescribed" or c.rl.tokens_per_step or c.rl.oversampling > 1):
        found = f"rl.curriculum = {c.rl.curriculum!r} draws the groups of each batch by themselves"
        yield f"{found}; set rl.batch = 'prescribed', rl.tokens_per_step = 0, and rl.oversampling = 1"
    if c.rl.curriculum and all(one.digest for one in entries):  # else rl.export, which needs no environment
        curriculum.Curriculum(c)
    smallest = min(entries, key=lambda one: one.samples_per_prompt)
    if c.rl.score_errors not in ("leave out", "zero"):
        yield f"rl.score_errors = {c.rl.score_errors!r} is unknown; choose 'leave out' or 'zero'"
    if c.rl.min_group and not 2 <= c.rl.min_group <= (most := smallest.samples_per_prompt):
        found = f"rl.min_group = {c.rl.min_group} of {most} samples ({smallest.field('samples_per_prompt')})"
        yield f"{found}: set it in 2..{most}, or to 0 for any number"
    if c.evaluation.samples_per_task > 1 and c.evaluation.temperature == 0:
        yield "evaluation.samples_per_task is above 1, but samples at temperature 0 are equal; raise evaluation.temperature"
    steps, num_updates = c.optimizer.total_steps, c.rl.num_steps * objective.optimizer_steps
    if c.optimizer.schedule != "constant" and 0 < steps < num_updates:
        yield f"optimizer.total_steps = {steps} leaves the rate at its floor for the rest of the run; set it to {num_updates}"
    if c.trust.admission == "stake" and not c.trust.stake_ledger:
        yield "trust.admission = 'stake' needs a ledger with stakes; set trust.stake_ledger to its file"
    yield from _contradictions_of(c.topology)
    if c.retention.mode != "keep" and c.topology.orchestrator:
        found = f"retention.mode = {c.retention.mode!r}, but the rollouts are with the orchestrator at {c.topology.orchestrator}"
        yield f"{found}, which has no checkpoints; set retention.mode = 'keep', or topology.orchestrator = ''"
    if c.mesh.rollout_devices and c.topology.mode in ("local", "remote"):
        found = f"mesh.rollout_devices = {c.mesh.rollout_devices}, but topology.mode = {c.topology.mode!r} has its servers elsewhere"
        yield f"{found}; set topology.mode = 'colocated', or mesh.rollout_devices = 0"
    longest = max(entries, key=lambda one: one.max_tokens)
    length, completion = inference.max_model_len, longest.max_tokens
    if length <= completion:
        field = longest.field("max_tokens")
        remedy = f"set {field} below the model's {length} positions" if length == model.max_positions else "raise it"
        yield f"inference.max_model_len = {length} leaves no room for a prompt: it must exceed {field} = {completion}; {remedy}"
    if not model.num_experts and (objective.router_balance_coef or objective.router_balance_rate):
        yield "the model has no experts to balance; remove objective.router_balance_coef and objective.router_balance_rate"
    if c.train.router_replay and not model.num_experts:
        yield "train.router_replay = True, but the model has no router to replay (model.num_experts = 0); remove it"


def contradictions_of_training(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields an error text for each contradiction that supervised fine-tuning can have, too: in the model, in lengths, and in early stopping."""
    model, length, row = c.model, c.inference.max_model_len, c.train.row_length
    if c.warmup.patience > 0 and not c.warmup.eval_every:
        yield "warmup.patience needs losses on held-out examples; set warmup.eval_every"
    limit = f"inference.max_model_len = {length}"
    if length > row:
        yield f"{limit} exceeds train.row_length = {row}: the longest sequence would not fit into a row; raise train.row_length"
    if 0 < model.max_positions < length:
        remedy = "lower it, or set model.rope_scaling and raise model.max_positions"
        yield f"{limit} exceeds model.max_positions = {model.max_positions}, for which the model was trained; {remedy}"
    if not model.num_experts and (model.experts_per_token or model.expert_ffn_dim):
        yield "model.experts_per_token and model.expert_ffn_dim have no effect in a dense model; set model.num_experts"
    if model.window and "S" not in model.layer_pattern:
        yield "model.window applies only to sliding layers; name them in model.layer_pattern, such as 'SF'"
    if model.rope_scaling == "none" and model.rope_factor != 1:
        yield "model.rope_factor has no effect; set model.rope_scaling = 'linear', 'llama3', or 'yarn'"


def _misuses_of_oapl(c: config_dict.ConfigDict, entries: Sequence[env_mix.Entry]) -> Iterator[str]:
    """Yields an error for each setting that changes the advantage, a target in (beta S - A)^2 and not a factor, or replaces the sampler."""
    if c.objective.old_logprobs == "learner":
        found = "rl.loss = 'oapl' is relative to the sampler, however old, and objective.old_logprobs = 'learner'"
        yield f"{found} replaces it; set objective.old_logprobs = 'sampler'"
    for one in entries:
        wanted = {"weight": 1.0, "normalize": "none", "branch_weight": 1.0}
        if one.advantage != "given" and ":" not in one.advantage:
            wanted["advantage"] = "optimal"
        for name, value in wanted.items():
            if getattr(one, name) != value:
                found = f"rl.loss = 'oapl' regresses on the advantage, and {one.field(name)} = {getattr(one, name)!r} changes it"
                yield f"{found}; set it to {value!r}"


def _contradictions_of(topology: config_dict.ConfigDict) -> Iterator[str]:
    servers, controls = topology.servers, topology.control_servers
    if topology.mode == "remote" and not (servers or topology.server_keys):
        remedy = "set topology.server_keys to the keys of servers that sign in, or topology.servers to URLs"
        yield f"topology.mode = 'remote' needs inference servers; {remedy} (python -m rl.validator key --key FILE makes a key)"
    if topology.mode == "remote" and len(controls) != len(servers):
        found = f"topology.control_servers has {len(controls)} URLs for {len(servers)} servers"
        yield f"{found}; set it to the URL of each server's control listener (python -m inference.serve --control HOST:PORT)"
    own = f"topology.mode = {topology.mode!r}"
    if topology.mode != "remote" and servers:
        yield f"{own} starts its own server; set topology.mode = 'remote' to use topology.servers"
    if topology.mode != "remote" and topology.workers:
        yield f"{own} invites the workers that it starts; set topology.mode = 'remote' to invite topology.workers"


def _unused(c: config_dict.ConfigDict, name: str) -> Iterator[tuple[str, bool, str]]:
    """Yields rules (regex of fields, True if these fields have no effect in the config, remedy) for the field `name`."""
    loss = name.split(".")[1] if name.startswith("loss_options.") else c.rl.loss
    kind = f"optimizer.name = {c.optimizer.name!r} does not use it; set optimizer.name ="
    yield r"loss_options\..*", loss != c.rl.loss.rpartition(":")[2], f"rl.loss is {c.rl.loss!r}; set rl.loss = {loss!r}"
    yield r"retention\.keep_steps", c.retention.mode == "keep", "set retention.mode = 'drop' or 'encrypt'"
    yield r"rl\.min_group", c.rl.score_errors == "zero", "no sample is left out; set rl.score_errors = 'leave out'"
    yield r"rl\.gate", c.rl.refill == 0, "no group is replaced; set rl.refill above 0"
    pools = r"curriculum\.((hard|easy)_.*|(normal|unseen)_weight|drop_at)"
    yield pools, c.rl.curriculum != "pools", "set rl.curriculum = 'pools'"
    yield r"curriculum\.level_.*", c.rl.curriculum != "levels", "set rl.curriculum = 'levels'"
    yield r"vine\..*", c.rl.credit != "vine", "set rl.credit = 'vine'"
    yield r"lora\.(alpha|targets)", c.lora.rank == 0, "set lora.rank above 0"
    yield r"objective\.kl_(estimator|place|reference)", c.objective.kl_coef == 0, "set objective.kl_coef above 0"
    yield r"optimizer\.momentum", c.optimizer.name not in ("muon", "sgd"), f"{kind} 'muon' or 'sgd'"
    yield r"optimizer\.(beta1|beta2|eps)", c.optimizer.name not in ("adamw", "muon"), f"{kind} 'adamw' or 'muon'"
    schedule = c.optimizer.schedule
    falling = r"optimizer\.(total_steps|final_rate)"
    yield falling, schedule == "constant", "set optimizer.schedule = 'linear' or 'cosine'"
    yield r"optimizer\.decay_steps", schedule != "linear", "set optimizer.schedule = 'linear'"
    yield r"warmup\.eval_tasks", c.warmup.eval_every == 0, "set warmup.eval_every above 0"
    yield r"warmup\.weights", "," not in c.warmup.data, "set warmup.data to several files"
    has_decoys_of_file = bool(c.warmup.data) and c.warmup.decoy_fraction > 0
    yield r"warmup\.decoy_fraction", has_decoys_of_file, "a file has no decoys; remove it, or warmup.data"
    limits = r"trust\.(margin|max_wrong_tokens|logprob_tolerance|routing_margin)"
    yield limits, bool(c.trust.bands), "trust.bands sets the limits; remove it, or set trust.bands = ''"
    yield r"trust\.routing_margin", not c.train.router_replay, "rollouts name no experts; set train.router_replay"
    yield r"(env|envs\..*|rl|warmup)\.digest", True, "it follows from the code and data that are named; remove it"
    yield r"env\.(name|num_tasks|options\..*)", bool(c.envs), "envs names the environments; set a field of one of those"
    alone = not c.trust.validators
    yield r"trust\.(quorum|verdict_s)", alone, "this process replays alone; set trust.validators"
    yield r"trust\.device", not alone, "the processes in trust.validators replay, each on its own device; remove it"
    yield r"trust\.(stake_ledger|min_stake)", c.trust.admission != "stake", "set trust.admission = 'stake'"
    yield r"trust\.work_bits", c.trust.admission != "work", "set trust.admission = 'work'"
    is_local = c.topology.mode != "remote"
    elsewhere = r"topology\.(relay_host|relay_port|server_keys|control_servers|control_token_file|orchestrator)"
    yield elsewhere, is_local, "set topology.mode = 'remote'"
    remote = "with topology.mode = 'remote', servers and workers are started elsewhere; remove it"
    yield r"topology\.num_workers|inference\.mesh\..*", not is_local, remote


def _group_bytes(config: config_dict.ConfigDict) -> int:
    """Returns the largest size in bytes of a submitted group: its routed experts, its kept sets, and 21 bytes per token of other data."""
    num_tokens = env_mix.max_samples(config) * config.inference.max_model_len
    experts = config.model.num_layers * config.model.experts_per_token * (1 + (config.model.num_experts > 256))
    width = kept_sets.width(config.sampling, config.model.vocab_size)
    return num_tokens * (experts * config.train.router_replay + 4 * (1 + width) * bool(width) + 21)

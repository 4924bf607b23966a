"""What a config must satisfy beyond the types of its fields.

1. `check_ranges`: each number within its bounds (`RANGES`), each address one that can be; `nan` is within none.
2. `check_contradictions`: what two fields say against each other (`CONTRADICTIONS`).
3. `check_trainable`: what only a run refuses, since an evaluation may ask for it.
4. `check_overrides`: what was set on the command line is read by somebody (`UNREAD`). A config file may hold leftovers, such as the
   options of losses that it does not use; who types a field means it.
"""

import math
import re
import urllib.parse
from collections.abc import Callable, Iterable

from ml_collections import config_dict

from inference.engine import request
from inference.server import web

# Losses that correct the sampler's policy to the learner's old one.
SAMPLER_CORRECTIONS = ("decoupled_ppo", "truncated_importance_sampling")
RANGES: tuple[tuple[str, Callable, tuple[str, ...]], ...] = (
    (
        "at least 0",
        lambda v: 0 <= v < math.inf,
        (
            "rl.num_steps",
            "rl.max_lag",
            "rl.max_off_policy",
            "warmup.num_steps",
            "warmup.learning_rate",
            "warmup.eval_every",
            "warmup.patience",
            "optimizer.learning_rate",
            "optimizer.warmup_steps",
            "optimizer.total_steps",
            "optimizer.decay_steps",
            "optimizer.weight_decay",
            "optimizer.eps",
            "optimizer.clip_norm",
            "objective.entropy_coef",
            "objective.kl_coef",
            "objective.policy_coef",
            "objective.teacher_coef",
            "objective.router_balance_coef",
            "objective.router_balance_rate",
            "sampling.top_k",
            "trust.margin",
            "trust.max_wrong_tokens",
            "trust.routing_margin",
            "trust.logprob_tolerance",
            "evaluation.every",
            "evaluation.temperature",
        ),
    ),
    (
        "at least 1",
        lambda v: v >= 1,
        (
            "rl.prompts_per_step",
            "rl.samples_per_prompt",
            "sampling.max_tokens",
            "train.row_length",
            "train.rows",
            "warmup.tasks_per_step",
            "warmup.eval_tasks",
            "evaluation.num_tasks",
            "evaluation.samples_per_task",
            "checkpoint.every",
            "checkpoint.keep",
            "broadcast.snapshot_every",
            "topology.num_workers",
            "trust.max_attempts",
        ),
    ),
    (
        "in [0, 1]",
        lambda v: 0 <= v <= 1,
        ("trust.check_fraction", "warmup.decoy_fraction", "sampling.min_p", "optimizer.final_rate"),
    ),
    ("in [0, 1)", lambda v: 0 <= v < 1, ("optimizer.beta1", "optimizer.beta2", "optimizer.momentum")),
    ("in (0, 1]", lambda v: 0 < v <= 1, ("sampling.top_p",)),
    ("above 0 (greedy samples of a group are all alike)", lambda v: 0 < v < math.inf, ("sampling.temperature",)),
    ("above 0", lambda v: 0 < v < math.inf, ("topology.lease_s", "topology.join_s", "lora.alpha")),
    ("in 0..65535", lambda v: 0 <= v <= 65535, ("topology.port", "topology.relay_port")),
    ("in 0..2147483647", lambda v: 0 <= v < 2**31, ("seed",)),
)


def check_ranges(config: config_dict.ConfigDict) -> None:
    """ValueError: value, rule and, where the rule does not say it, the remedy."""
    for rule, holds, names in RANGES:
        for name in names:
            if not holds(_get(config, name)):
                raise ValueError(f"{name} = {_get(config, name)} must be {rule}")
    for name, value in config.loss_options[config.rl.loss].items():
        if not value >= 0:
            raise ValueError(f"loss_options.{config.rl.loss}.{name} = {value} must be at least 0")
    for url in config.topology.servers:
        if not _is_url(url):
            raise ValueError(f"topology.servers has {url!r}, which is no URL such as http://host:8100")
    for key in config.topology.workers:
        if not re.fullmatch("[0-9a-f]{64}", str(key)):
            raise ValueError(f"topology.workers has {key!r}, which is no public key; give its 64 hexadecimal digits")


def check_contradictions(config: config_dict.ConfigDict) -> None:
    """ValueError says which fields do not go together, and what to do about it."""
    for holds, words in CONTRADICTIONS:
        if holds(config):
            raise ValueError(words)


def check_trainable(config: config_dict.ConfigDict) -> None:
    """ValueError for samples that an evaluation may ask for, and a run cannot learn from as its objective has it."""
    off = request.NO_FILTERS
    filters = [f"sampling.{name} = {config.sampling[name]}" for name in off if config.sampling[name] != off[name]]
    objective = config.objective
    if not filters or (
        objective.old_logprobs == "learner"
        and config.rl.loss not in SAMPLER_CORRECTIONS
        and not (objective.kl_coef and objective.kl_reference == "sampler")
    ):
        return
    raise ValueError(
        f"{', '.join(filters)}: what is left out makes the rest likelier for the sampler, not for the learner, and ratios between "
        "them would be off from the start; leave it alone, or look at no ratio to the sampler (objective.old_logprobs = 'learner', "
        f"no KL to it, and a loss other than {' and '.join(SAMPLER_CORRECTIONS)})"
    )


def check_overrides(config: config_dict.ConfigDict, names: Iterable[str]) -> None:
    """ValueError names the first of the fields in `names` that this config leaves unread, and what would have it read."""
    for name in names:
        for fields, is_unread, remedy in UNREAD:
            if re.fullmatch(fields, name) and is_unread(config, name):
                raise ValueError(f"config.{name} is set and nothing reads it: {remedy(config, name)}")


# Configs that run, and do not do what they say.
CONTRADICTIONS: tuple[tuple[Callable, str], ...] = (
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
        lambda c: c.rl.loss in SAMPLER_CORRECTIONS and c.objective.old_logprobs != "learner",
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

# (fields, whether the config leaves them unread, what to do about it)
UNREAD: tuple[tuple[str, Callable, Callable], ...] = (
    (
        r"loss_options\..*",
        lambda c, name: name.split(".")[1] != c.rl.loss,
        lambda c, name: f"rl.loss is {c.rl.loss!r}; set rl.loss = {name.split('.')[1]!r}",
    ),
    (r"lora\.(alpha|targets)", lambda c, _: c.lora.rank == 0, lambda c, _: "set lora.rank above 0"),
    (
        r"objective\.kl_(estimator|place|reference)",
        lambda c, _: c.objective.kl_coef == 0,
        lambda c, _: "set objective.kl_coef above 0",
    ),
    (
        r"optimizer\.momentum",
        lambda c, _: c.optimizer.name not in ("muon", "sgd"),
        lambda c, _: f"optimizer.name is {c.optimizer.name!r}; 'muon' and 'sgd' have a momentum",
    ),
    (
        r"optimizer\.(beta1|beta2|eps)",
        lambda c, _: c.optimizer.name not in ("adamw", "muon"),
        lambda c, _: f"optimizer.name is {c.optimizer.name!r}; 'adamw' and 'muon' have it",
    ),
    (
        r"optimizer\.(total_steps|final_rate)",
        lambda c, _: c.optimizer.schedule == "constant",
        lambda c, _: "set optimizer.schedule = 'linear' or 'cosine'",
    ),
    (
        r"optimizer\.decay_steps",
        lambda c, _: c.optimizer.schedule != "linear",
        lambda c, _: "set optimizer.schedule = 'linear'",
    ),
    (r"warmup\.eval_tasks", lambda c, _: c.warmup.eval_every == 0, lambda c, _: "set warmup.eval_every above 0"),
    (
        r"warmup\.decoy_fraction",
        lambda c, _: bool(c.warmup.data) and c.warmup.decoy_fraction > 0,
        lambda c, _: "warmup.data is a file, which has no decoys; leave one of the two out",
    ),
    (
        r"trust\.(margin|max_wrong_tokens|logprob_tolerance|routing_margin)",
        lambda c, _: bool(c.trust.bands),
        lambda c, _: "the limits are those of trust.bands; leave one of the two out",
    ),
    (
        r"trust\.routing_margin",
        lambda c, _: not c.train.router_replay,
        lambda c, _: "rollouts name no experts; set train.router_replay",
    ),
    (
        r"topology\.(relay_host|relay_port)",
        lambda c, _: c.topology.mode == "local",
        lambda c, _: "set topology.mode = 'remote'",
    ),
    (
        r"topology\.num_workers|inference\.mesh\..*",
        lambda c, _: c.topology.mode == "remote",
        lambda c, _: "with topology.mode = 'remote' servers and workers are started elsewhere",
    ),
)


def _group_bytes(config: config_dict.ConfigDict) -> int:
    """Of the longest group that says which experts ran; 21 per token are for the rest of it. They hardly compress."""
    num_tokens = config.rl.samples_per_prompt * config.inference.max_model_len
    experts = config.model.num_layers * config.model.experts_per_token * (1 + (config.model.num_experts > 256))
    return num_tokens * (experts + 21)


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0  # a port may be no number
    except ValueError:
        return False


def _get(config: config_dict.ConfigDict, name: str):
    for part in name.split("."):
        config = config[part]
    return config

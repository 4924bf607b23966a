"""What a config must satisfy beyond the types of its fields.

1. `check_ranges`: each number within its bounds (`RANGES`), each address one that can be; `nan` is within none.
2. `check_trainable`: what only a run refuses, since an evaluation may ask for it.
3. `check_overrides`: what was set on the command line is read by somebody (`UNREAD`). A config file may hold leftovers, such as the
   options of losses that it does not use; who types a field means it.

What two fields say against each other is in rl/experiment.py: CONTRADICTIONS.
"""

import math
import re
import urllib.parse
from collections.abc import Callable, Iterable

from ml_collections import config_dict

SAMPLER_CORRECTIONS = (
    "decoupled_ppo",
    "truncated_importance_sampling",
)  # losses from the sampler's policy to an old one
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


def check_trainable(config: config_dict.ConfigDict) -> None:
    """ValueError for samples that an evaluation may ask for, and a run cannot learn from as its objective has it."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
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

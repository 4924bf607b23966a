"""The rules of a run: everything that it prescribes for a rollout, and how far a replay may differ."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from inference.proofs import toploc
from inference.rollouts import kept_sets
from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from rl.learning.batch import router_replay
from rl.protocol import env_mix, lease, task_schedule
from rl.trust.verification import sequential_test

GroupsByNumber = Mapping[int, lease.Lease]
MAX_REPLAY_ROWS = 64  # rollouts that callers replay together
# Fields that each environment has.
OF_ENV = ("env", "env_digest", "max_tokens", "max_turns", "prompt", "score", "replay")
MAX_REPLAY_TOKENS = 2**16  # of rollouts replayed together: their hidden states go to the host, 0.7 GB at 5120 dims


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The allowed differences between one rollout's claims and our replay: 0 in exact arithmetic, more across backends and dtypes."""

    margin: float  # nats by which the noised logit of a claimed token may be below the largest
    max_wrong_tokens: int  # tokens of a rollout that may exceed `margin`, besides flips
    logprob: float  # of log-odds (`sequential_test.log_odds`) between claimed and replayed probability
    proofs: toploc.Thresholds = toploc.PAPER
    routing: float = 0.02  # nats by which a claimed expert's router logit may be below the best one left out
    floor: float = 1.0  # of 1 - p in these; 1: `logprob` is in nats, for all tokens
    flips: float = 0.0  # share of tokens with another expert in the replay, in MoE rollouts that name no experts

    @classmethod
    def of(cls, trust) -> "Tolerance":
        """Returns the tolerance set in `trust` (the config section of that name), with the paper's limits on TOPLOC proofs."""
        limits = trust.margin, trust.max_wrong_tokens, trust.logprob_tolerance
        return cls(*limits, routing=trust.routing_margin)


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """The reward components of one episode as the verifier's own scorer computed them, to compare with a worker's claim."""

    scores: dict[str, float]
    slow: bool = False  # an honest worker's scorer, with its shorter limit, may have timed out
    timed_out: bool = False  # our scorer did
    mismatch: str = ""  # a difference between the episode and its replay


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of a run that rollouts are checked against: tasks, seeds, limits, and tolerances; independent of workers' claims."""

    env: str
    env_seed: int
    vocab_size: int
    max_model_len: int
    max_tokens: int
    groups: Callable[[int], GroupsByNumber]  # step -> its groups; empty for a step that the run lacks
    filters: dict[str, float]  # top_k, top_p, min_p
    tolerance: Tolerance
    experts: router_replay.RouterReplay  # the experts of the model
    bands: sequential_test.Bands | None = None  # of honest replays; None: not measured
    env_digest: str = ""  # of the environment's code and data; "": not compared
    max_turns: int = 1  # calls of an episode, which bound its branches, too
    run: str = ""  # the public key of the run, which servers sign
    hidden_dim: int = 0  # of the model, which gives proofs their form; 0: proofs are not looked at without a replay
    is_fixed: bool = True  # batch n has the groups of step n, so that no version from n on can have made them
    router_replay: bool = False  # training rollouts must name the experts that ran
    kept: int = 0  # training rollouts must name the tokens that filters kept, up to so many each; 0: no filters
    newest: int | None = None  # newest published version; None: no bound
    stop_ids: tuple[int, ...] = ()
    held_out: Callable[[int], GroupsByNumber] | None = None  # version -> the groups of its evaluation
    prompt: Callable[[lease.Lease], Sequence[int]] | None = None  # the environment's prompt; None: not checked
    score: Callable[[lease.Lease, Sequence[Sequence[int]]], list[Recomputed]] | None = None  # None: not checked
    # Plays the episodes of a group again, in environments with episodes of several calls; instead of `prompt` and `score`.
    replay: Callable[[lease.Lease, Sequence[Sequence[rollout_lib.Rollout]]], list[Recomputed]] | None = None

    vine: Mapping[str, Any] | None = None  # options of the continuations that training groups must have; None: none
    envs: Mapping[str, "Rules"] = dataclasses.field(default_factory=dict)  # by `Lease.env`, if a run has several

    @property
    def each(self) -> "tuple[Rules, ...]":
        """These rules, and those of each environment in a run with several."""
        return self, *self.envs.values()

    @property
    def max_branches(self) -> int:
        """The largest number of branches in an episode."""
        return max(self.max_turns, 1 + self.vine["num_continuations"] * self.vine["max_states"] if self.vine else 1)

    @property
    def max_samples(self) -> int:
        """The number of samples in the largest training group of step 1, over all environments."""
        groups = (group for rules in self.each for group in rules.groups(1).values())
        return max((group.num_samples for group in groups), default=0)

    @classmethod
    def of(cls, config, run: str = "") -> "Rules":
        """Returns the rules that follow from a resolved config alone: enough for `checks.AT_LEASE` and for a replay."""
        entries = env_mix.entries(config).values()
        envs = {one.key: cls.of(env_mix.alone(config, one.key), run) for one in entries if one.key}
        envs = {key: dataclasses.replace(own, env=key) for key, own in envs.items()}
        steps = task_schedule.group_steps(config)
        groups = functools.lru_cache(16)(lambda step: by_number(_groups(config, step)) if step in steps else {})
        return cls(
            env=config.env.name,
            env_seed=config.seed,
            vocab_size=config.model.vocab_size,
            max_model_len=config.inference.max_model_len,
            max_tokens=env_mix.max_tokens(config),
            groups=groups,
            env_digest=config.env.digest,
            max_turns=env_mix.max_calls(config),
            filters={name: config.sampling[name] for name in ("top_k", "top_p", "min_p")},
            tolerance=Tolerance.of(config.trust),
            hidden_dim=config.model.model_dim,
            run=run,
            experts=router_replay.RouterReplay.of(config_lib.ModelConfig(**config.model)),
            is_fixed=task_schedule.is_fixed(config.rl),
            router_replay=config.train.router_replay,
            kept=kept_sets.width(config.sampling, config.model.vocab_size),
            vine=config.vine.to_dict() if config.rl.credit == "vine" else None,
            envs=envs,
        )

    def of_group(self, group: lease.Lease) -> "Rules":
        """Returns the rules for the environment of a group."""
        own = self.envs.get(group.env)
        return dataclasses.replace(self, **{name: getattr(own, name) for name in OF_ENV}) if own else self

    def at_lease(self, group: lease.Lease, newest: int) -> "Rules":
        """Returns a copy of these rules that allows rollouts of one leased group only, and policy versions up to `newest`."""
        return dataclasses.replace(self.of_group(group), groups=lambda step: by_number([group]), newest=newest)


def by_number(groups: Iterable[lease.Lease]) -> GroupsByNumber:
    """Returns groups by their number."""
    return {group.group: group for group in groups}


def _groups(config, step: int) -> list[lease.Lease]:
    """Returns the groups of a training step. With a curriculum, their tasks are ANY: the orchestrator and an audit know the draws."""
    groups = task_schedule.train_groups(config, step)
    return [dataclasses.replace(one, index=task_schedule.ANY) for one in groups] if config.rl.curriculum else groups

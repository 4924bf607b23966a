"""The checks on a rollout, each a function that gives a verdict: what INTELLECT-2's validators look at, and more.

Cheap before dear. From the record alone:
1. `form` (every field of the schema), `routable` (experts that the model has), `signature`, `fresh` (not handed in before).
2. `prescribed`: task, seed, sample and temperature are those that follow from the run's seed (rl/protocol/task_schedule.py).
3. `policy_version`: within the lag that this batch allows, not newer than what was published.
4. `bounds`: lengths, vocabulary, rewards. `ending`: the finish reason is what the last token says.
5. `prompt`: made again by the environment. `claims`: the log-probabilities fit the noise that drew the tokens.
   `rewards`: made again.
From one replay (rl/verification/replay.py), in which the experts run that the rollout names, if it does:
   `routing`: each is its router's choice, or nearly. So a claim steers neither the learner nor what follows here.
6. `sampling`: each token is what the seed's noise draws. `logprob`: claimed against replayed.
7. `stopping`: the closing token was not absurdly unlikely. `shape`: tokens were drawn at the claimed temperature.
8. `proof`: TOPLOC.

A verdict is a value with a reason code, whatever the input was. Nothing here raises for what a stranger wrote, does I/O,
or knows an environment: `Rules` carries the two functions that ask one.

INTELLECT-2 wants P(EOS) > 0.1 at the end. An honest policy draws an EOS of probability 0.05 once in twenty chances, so
that rule refuses honest rollouts at temperature 1; it is there as `Rules.min_stop_probability`. The default is a bound
by chance: over T positions an honest stream ends where P(stop) < q with probability at most T q.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from inference.engine import sampler
from inference.proofs import toploc
from inference.rollouts import rollout as rollout_lib
from rl.batch import router_replay
from rl.envs import scorer
from rl.protocol import task_schedule
from rl.verification import sequential_test

NOISE_SPAN = (
    20.0  # nats between the largest Gumbel noise of 23 bits (16.6) and the smallest (-2.8), and some for rounding
)
CHANCE = 1e-7  # of refusing an honest rollout, per check that rests on chance


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`reason` is "ok" or a code: schema, signature, duplicate, samples, task, seed, temperature, step, versions,
    length, tokens, reward, unscored (our scorer gave up), termination, prompt, weights, routing, sampling, logprob, shape,
    toploc, statistics."""

    reason: str
    detail: str = ""

    @property
    def accepted(self) -> bool:
        return self.reason == "ok"

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


OK = Verdict("ok")


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the run prescribes; a worker's word is not taken for any of it."""

    env: str
    env_seed: int
    vocab_size: int
    max_model_len: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    groups: Callable[[int], list[task_schedule.Group]]  # step -> its prescribed groups
    num_steps: int
    max_lag: int
    reward_bounds: tuple[float, float] = (-1.0, 1.0)
    min_stop_probability: float = 0.0
    prompt: Callable[[task_schedule.Group], Sequence[int]] | None = None  # made by the environment
    score: Callable[[task_schedule.Group, Sequence[Sequence[int]]], list[scorer.Scored]] | None = (
        None  # of completions' tokens
    )
    held_out: Callable[[int], list[task_schedule.Group]] | None = None  # version -> the groups of its evaluation
    first_step: int = 1
    router_replay: bool = False  # rollouts must say which experts ran


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far an honest replay may lie from the claim: 0 in exact arithmetic, more across backends and dtypes."""

    margin: float  # nats of noised logit by which a claimed token may miss the argmax
    max_wrong_tokens: int  # tokens of a rollout that may miss it by more
    logprob: float  # nats between claimed and replayed log-probability
    proofs: toploc.Thresholds = toploc.DEPLOYED
    routing: float = 0.02  # nats of a router's logits by which a claimed expert may miss the best

    @classmethod
    def of(cls, trust, proofs: toploc.Thresholds = toploc.DEPLOYED) -> "Tolerance":
        """As `config.trust` has it."""
        return cls(trust.margin, trust.max_wrong_tokens, trust.logprob_tolerance, proofs, trust.routing_margin)


# ---- from the record alone ------------------------------------------------------------------------------------------


def form(rollout) -> Verdict:
    reason = rollout_lib.validate(rollout)
    return Verdict("schema", reason) if reason else OK


def routable(rollout: rollout_lib.Rollout, claims: router_replay.RouterReplay) -> Verdict:
    """The experts that it names, if it does, are such as `claims` of this model can name."""
    reason = None if rollout.routed_experts is None else claims.refusal(rollout)
    return Verdict("routing", reason) if reason else OK


def routed(rollout: rollout_lib.Rollout, claims: router_replay.RouterReplay, rules: Rules) -> Verdict:
    """It names experts, where the run replays them."""
    reason = claims.misfit(rollout) if rules.router_replay else None
    return Verdict("routing", reason) if reason else OK


def signature(rollout: rollout_lib.Rollout, workers: Sequence[str] = ()) -> Verdict:
    """`workers`: keys that may submit; empty: any."""
    if workers and rollout.worker not in workers:
        return Verdict("signature", f"the key {rollout.worker[:16]} may not submit here")
    return OK if rollout_lib.signature_ok(rollout) else Verdict("signature", "the key in `worker` did not sign this")


def fresh(rollout: rollout_lib.Rollout, seen: "Seen") -> Verdict:
    """Same tokens alone are no offence: two samples may well agree."""
    return Verdict("duplicate", reason) if (reason := seen.refusal(rollout)) else OK


class Seen:
    """Places (step, group, sample) and digests of rollouts accepted, for as many steps as may come again.

    Only what was accepted is remembered: a group that was refused is asked for again.
    """

    def __init__(self, keep_steps: int = 16):
        self.keep_steps = keep_steps
        self._by_step: dict[int, set] = {}

    @property
    def newest(self) -> int:
        return max(self._by_step, default=0)

    def refusal(self, rollout: rollout_lib.Rollout) -> str | None:
        if self._by_step and rollout.step <= self.newest - self.keep_steps:
            return f"step {rollout.step} is over: rollouts of step {self.newest} were accepted already"
        known = self._by_step.get(rollout.step, ())
        if rollout_lib.digest(rollout) in known:
            return "this rollout was accepted before"
        if _place(rollout) in known:
            return f"sample {rollout.sample} of group {rollout.task.group} was accepted before"
        return None

    def remember(self, rollouts: Sequence[rollout_lib.Rollout]) -> None:
        self.add(entries(rollouts))

    def add(self, found: Sequence[tuple[int, bytes, str, int, int]]) -> None:
        """What `entries` gave, maybe long ago."""
        for step, digest, *place in found:
            self._by_step.setdefault(step, set()).update((digest, tuple(place)))
        for step in [step for step in self._by_step if step <= self.newest - self.keep_steps]:
            del self._by_step[step]


def entries(rollouts: Sequence[rollout_lib.Rollout]) -> list[tuple[int, bytes, str, int, int]]:
    """What `Seen` keeps of each: (step, digest, environment, group, sample)."""
    return [(rollout.step, rollout_lib.digest(rollout), *_place(rollout)) for rollout in rollouts]


def _place(rollout: rollout_lib.Rollout) -> tuple:
    return rollout.task.env, rollout.task.group, rollout.sample


def complete(rollouts: Sequence[rollout_lib.Rollout], rules: Rules) -> Verdict:
    """A group is its G samples once each, of one prompt, from one worker."""
    group = _group(rollouts[0], rules)
    wanted = list(range(group.num_samples)) if group else []
    found = sorted(r.sample for r in rollouts)
    if found != wanted:
        return Verdict("samples", f"expected 0..{len(wanted) - 1} once each, got {found[:16]}")
    prompt = rollouts[0].tokens[: rollouts[0].prompt_length]
    if any(not np.array_equal(r.tokens[: r.prompt_length], prompt) for r in rollouts):
        return Verdict("prompt", "the samples of one group have different prompts")
    if len({r.worker for r in rollouts}) > 1:
        return Verdict("signature", "the samples of one group come from different workers")
    return OK


def prescribed(rollout: rollout_lib.Rollout, rules: Rules) -> Verdict:
    """The task, the seed and the temperature follow from the run's seed: a worker can choose none of them."""
    if not 1 <= rollout.step <= rules.num_steps:
        return Verdict("step", f"{rollout.step} is not one of 1..{rules.num_steps}")
    group = _group(rollout, rules)
    if group is None:
        return Verdict("task", f"group {rollout.task.group} does not belong to step {rollout.step}")
    task = (rollout.task.env, rollout.task.index, rollout.task.seed)
    if task != (rules.env, group.index, rules.env_seed):
        return Verdict("task", f"expected {rules.env} {group.index}, got {task[0]} {task[1]} of seed {task[2]}")
    if not 0 <= rollout.sample < group.num_samples:
        return Verdict("samples", f"expected one of 0..{group.num_samples - 1}, got {rollout.sample}")
    if rollout.seed != (group.seed + rollout.sample) % 2**32:
        expected = (group.seed + rollout.sample) % 2**32
        return Verdict("seed", f"expected {expected} for sample {rollout.sample}, got {rollout.seed}")
    if abs(rollout.temperature - group.temperature) > 1e-6:
        return Verdict("temperature", f"expected {group.temperature}, got {rollout.temperature}")
    return OK


def policy_version(rollout: rollout_lib.Rollout, rules: Rules, newest: int) -> Verdict:
    """Step n takes versions n - 1 - max_lag .. n - 1, of those that are out, in the order in which they came out."""
    versions = rollout.versions
    oldest = max(0, rollout.step - 1 - rules.max_lag)
    if (low := int(versions.min())) < oldest:  # of the prompt's keys, too
        return Verdict("versions", f"{low} is older than {oldest}, the oldest that step {rollout.step} takes")
    latest = min(newest, rollout.step - 1)
    if (high := int(versions.max())) > latest:
        return Verdict("versions", f"{high} is newer than {latest}, the newest that step {rollout.step} can have seen")
    if np.any(np.diff(versions) < 0):
        return Verdict("versions", "they fall along the sequence")
    return OK


def bounds(rollout: rollout_lib.Rollout, rules: Rules) -> Verdict:
    num_sampled = int(rollout.sampled_mask.sum())
    if num_sampled > rules.max_tokens:
        return Verdict("length", f"{num_sampled} sampled tokens, at most {rules.max_tokens} were asked for")
    if len(rollout.tokens) > rules.max_model_len:
        return Verdict("length", f"{len(rollout.tokens)} tokens, more than the model's {rules.max_model_len}")
    if (top := int(rollout.tokens.max())) >= rules.vocab_size:
        return Verdict("tokens", f"id {top} is outside the vocabulary of {rules.vocab_size}")
    if (least := float(rollout.logprobs.min())) < -(math.log(rules.vocab_size) + NOISE_SPAN):
        return Verdict("logprob", f"{least} of a token is less than the noise can make up for")
    low, high = rules.reward_bounds
    if not low <= rollout.reward <= high:
        return Verdict("reward", f"{rollout.reward} is outside [{low}, {high}]")
    return OK


def ending(rollout: rollout_lib.Rollout, rules: Rules) -> Verdict:
    """ "stop" ends with a stop token and holds none before; "length" was really at a limit and holds none at all."""
    sampled = rollout.tokens[rollout.sampled_mask]
    stops = np.isin(sampled, rules.stop_ids)
    if not rollout.sampled_mask[-1]:
        return Verdict("termination", "it goes on after the last sampled token")
    if stops[:-1].any() and rollout.sampled_mask[rollout.prompt_length :].all():  # several turns have several
        return Verdict("termination", "it goes on after a stop token")
    if (rollout.finish_reason == "stop") != bool(stops[-1]):
        return Verdict("termination", f"finish_reason is {rollout.finish_reason}, the last token says otherwise")
    full = len(sampled) == rules.max_tokens or len(rollout.tokens) == rules.max_model_len
    if rollout.finish_reason == "length" and not full:
        return Verdict("termination", f"{len(sampled)} tokens are not the most allowed, and the last is no stop token")
    return OK


def prompt(rollout: rollout_lib.Rollout, rules: Rules) -> Verdict:
    """It is the task's own; and nothing was put into the answer, for the environments of one turn that there are."""
    if rules.prompt is None:
        return OK
    if not rollout.sampled_mask[rollout.prompt_length :].all():
        return Verdict("prompt", "tokens that were not sampled stand behind it")
    expected = rules.prompt(_group(rollout, rules))
    found = rollout.tokens[: rollout.prompt_length].tolist()
    return OK if found == list(expected) else Verdict("prompt", "it is not the one that its task has")


def claimed_races(rollouts: Sequence[rollout_lib.Rollout]) -> list[np.ndarray]:
    """y [N] of rl/verification/sequential_test.py per rollout: exponentially distributed where the noise of its seed drew each token and the
    log-probabilities are those that it was drawn with. All at once, as numpy's calls cost more than the arithmetic."""
    positions = [np.flatnonzero(rollout.sampled_mask) for rollout in rollouts]
    counts = [len(position_N) for position_N in positions]
    tokens = [rollout.tokens[position_N] for rollout, position_N in zip(rollouts, positions, strict=True)]
    logps = [rollout.logprobs[position_N] for rollout, position_N in zip(rollouts, positions, strict=True)]
    if not rollouts:
        return []
    seeds = np.repeat(np.array([rollout.seed for rollout in rollouts], np.uint32), counts)
    races = sampler.exponential_noise(seeds, np.concatenate(positions), np.concatenate(tokens))
    y = races * np.exp(-np.concatenate(logps).astype(np.float64))
    return np.split(y, np.cumsum(counts)[:-1])


def claims(rollout: rollout_lib.Rollout, y_N: np.ndarray) -> Verdict:
    """Of one of `claimed_races`. Greedy streams have no noise."""
    if rollout.temperature == 0:
        return OK
    limit = math.log(len(y_N) / CHANCE)
    if (top := float(y_N.max())) > limit:
        at = int(np.flatnonzero(rollout.sampled_mask)[y_N.argmax()])
        least = float(rollout.logprobs[at]) + math.log(top / limit)
        return Verdict("logprob", f"{rollout.logprobs[at]:.3g} of token {at}, its noise draws it from {least:.3g} on")
    odds = sequential_test.log_mean_exp(sequential_test.claims_ratio(y_N))
    if odds < -math.log(CHANCE):
        return OK
    return Verdict("logprob", f"the noise fits other log-probabilities than those claimed better, e^{odds:.1f} to 1")


def rewards(rollouts: Sequence[rollout_lib.Rollout], rules: Rules) -> list[Verdict]:
    """Of rollouts of one group: recomputed by the environment, the number and every named part.

    A scorer has a limit (rl/envs/scorer.py), and who rolled out gave up sooner than we do. Where it gave up, the
    completion is worth 0, and we believe that if it takes us a fifth of its limit. Where we gave up, it must have, too:
    honest machines are not five times as fast as ours; should one be, the group is not taken and nobody is to blame.
    """
    if rules.score is None or not rollouts:
        return [OK] * len(rollouts)
    found = rules.score(_group(rollouts[0], rules), [r.tokens[r.sampled_mask].tolist() for r in rollouts])
    return [_reward(rollout, scored) for rollout, scored in zip(rollouts, found, strict=True)]


def _reward(rollout: rollout_lib.Rollout, scored: scorer.Scored) -> Verdict:
    claimed = dict(rollout.rewards) | {"reward": rollout.reward}
    if set(claimed) != set(scored.scores):
        return Verdict("reward", f"its parts are {sorted(scored.scores)}, got {sorted(claimed)[:16]}")
    # A checker may add in another order on another Python; a reward moves by far more when it is invented.
    wrong = [name for name, score in sorted(scored.scores.items()) if not abs(claimed[name] - score) <= 1e-6]
    if not wrong or (not any(claimed.values()) and scored.cpu_s >= scorer.LIMIT_S / scorer.SPREAD):
        return OK
    if not scored.in_time:
        return Verdict(
            "unscored", f"the scorer took {scorer.CHECK_LIMIT_S} s, and a completion that takes that is worth 0"
        )
    return Verdict("reward", f"{wrong[0]} is {claimed[wrong[0]]}, recomputed {scored.scores[wrong[0]]}")


# ---- from one replay ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scores:
    """One rollout's part of a replay: rows are its N sampled tokens."""

    positions_N: np.ndarray
    margin_N: np.ndarray  # of the noised argmax over the claimed token, nats
    claimed_N: np.ndarray  # log-probabilities
    logp_N: np.ndarray
    tilt_K: np.ndarray  # log-likelihood ratios of the whole rollout, `sequential.TILTS` against the claimed temperature
    hidden_ND: np.ndarray
    gap_T: np.ndarray | None = None  # of the experts claimed for each token but the last, nats; None without a claim


def scores(rollout: rollout_lib.Rollout, replay, row: int) -> Scores:
    """`replay` is a rl.replay.Replay of host arrays."""
    sampled = np.flatnonzero(rollout.sampled_mask)
    tilt_NK = replay.tilt[row, sampled].astype(np.float64)
    return Scores(
        positions_N=sampled,
        margin_N=replay.margin[row, sampled],
        claimed_N=rollout.logprobs[sampled],
        logp_N=replay.logp[row, sampled],
        # A token outside the filters has probability 0 and no finite ratio; `sampling` sees to it.
        tilt_K=np.where(np.isfinite(tilt_NK), tilt_NK, 0).sum(axis=0),
        hidden_ND=replay.hidden[row, sampled],
        gap_T=None if rollout.routed_experts is None else replay.gap[row, : len(rollout.tokens) - 1],
    )


def replayed(
    rollout: rollout_lib.Rollout,
    scored: Scores,
    results: Sequence[toploc.ProofResult],
    tolerance: Tolerance,
    rules: Rules | None,
) -> Verdict:
    """All checks below in their order; `results` are those of `proof_results`."""
    verdict = routing(scored, tolerance)
    verdict = sampling(scored, tolerance) if verdict.accepted else verdict
    verdict = logprob(scored, tolerance) if verdict.accepted else verdict
    verdict = stopping(rollout, scored, rules) if verdict.accepted and rules is not None else verdict
    verdict = shape(rollout, scored) if verdict.accepted else verdict
    return proof(results) if verdict.accepted else verdict


def proof_results(
    rollouts: Sequence[rollout_lib.Rollout], scored: Sequence[Scores], thresholds: toploc.Thresholds
) -> list[list[toploc.ProofResult]]:
    """Per rollout and window. All at once: for a few windows at a time, numpy's calls cost more than the arithmetic."""
    proofs = [toploc.split(r.proofs, *s.hidden_ND.shape) for r, s in zip(rollouts, scored, strict=True)]
    return toploc.verify_proofs_batch([s.hidden_ND for s in scored], proofs, thresholds=thresholds)


def routing(scored: Scores, tolerance: Tolerance) -> Verdict:
    if scored.gap_T is None:
        return OK
    gap_T = np.where(np.isnan(scored.gap_T), np.inf, scored.gap_T)
    if (worst := float(gap_T.max())) <= tolerance.routing:
        return OK
    wrong = int((gap_T > tolerance.routing).sum())
    return Verdict(
        "routing",
        f"{wrong} of {len(gap_T)} tokens name experts that its policy does not choose; those of token "
        f"{int(gap_T.argmax())} miss by {worst:.3g}",
    )


def sampling(scored: Scores, tolerance: Tolerance) -> Verdict:
    margin_N = np.where(np.isnan(scored.margin_N), np.inf, scored.margin_N)
    wrong = int((margin_N > tolerance.margin).sum())
    if wrong <= tolerance.max_wrong_tokens:
        return OK
    worst = int(margin_N.argmax())
    return Verdict(
        "sampling",
        f"{wrong} of {len(margin_N)} tokens are not what the seed draws; token {int(scored.positions_N[worst])} misses "
        f"by {margin_N[worst]:.3g}",
    )


def logprob(scored: Scores, tolerance: Tolerance) -> Verdict:
    error = float(np.abs(scored.logp_N - scored.claimed_N).max())
    if error <= tolerance.logprob:
        return OK
    return Verdict("logprob", f"claimed and replayed differ by {error:.3g}, more than {tolerance.logprob}")


def stopping(rollout: rollout_lib.Rollout, scored: Scores, rules: Rules) -> Verdict:
    """Of the closing token. Greedy streams stop where the argmax does: `sampling` sees to those."""
    if rollout.finish_reason != "stop" or rollout.temperature == 0:
        return OK
    floor = max(CHANCE / len(scored.logp_N), rules.min_stop_probability)
    probability = float(np.exp(scored.logp_N[-1]))
    if probability >= floor:
        return OK
    return Verdict(
        "termination", f"it stopped where that had a probability of {probability:.2g}, less than {floor:.2g}"
    )


def shape(rollout: rollout_lib.Rollout, scored: Scores) -> Verdict:
    odds = sequential_test.log_mean_exp(scored.tilt_K)
    if rollout.temperature == 0 or odds < -np.log(CHANCE):
        return OK
    best = sequential_test.TILTS[int(scored.tilt_K.argmax())]
    return Verdict("shape", f"its tokens fit {1 / best:.2f} times the claimed temperature better, e^{odds:.1f} to 1")


def proof(results: Sequence[toploc.ProofResult]) -> Verdict:
    failed = [result for result in results if not result.accepted]
    if not failed:
        return OK
    return Verdict("toploc", f"{failed[0].reason} ({failed[0].exp_mismatches} exponent mismatches)")


def evidence(
    rollout: rollout_lib.Rollout, scored: Scores, results: Sequence[toploc.ProofResult]
) -> sequential_test.Evidence:
    """What an accepted rollout adds to its node's record."""
    k = min(128, scored.hidden_ND.size)
    proofs = [(r.exp_mismatches / k + min(r.mantissa_mean, 128) / 128) / 2 for r in results]
    return sequential_test.Evidence(
        margin=float(np.minimum(scored.margin_N, 1).mean()),
        logprob=float(np.minimum(np.abs(scored.claimed_N - scored.logp_N), 1).mean()),
        proof=float(np.mean(proofs)),
        shape=scored.tilt_K if rollout.temperature > 0 else np.zeros(len(scored.tilt_K)),
        num_tokens=len(scored.margin_N),
    )


def _group(rollout: rollout_lib.Rollout, rules: Rules) -> task_schedule.Group | None:
    if not rules.first_step <= rollout.step <= rules.num_steps:
        return None
    groups = rules.groups(rollout.step)
    at = rollout.task.group - groups[0].group
    return groups[at] if 0 <= at < len(groups) else None

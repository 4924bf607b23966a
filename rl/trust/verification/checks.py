"""The rules that an honest rollout keeps, each a function that returns a verdict. Nothing else states them.

A check takes (subject, rules) and returns OK or a `Verdict` that rejects; `first_failure` runs a table of checks in order, cheap ones first.
1. `AT_LEASE`: fields that follow from the lease. The orchestrator checks them under its lock (`check_at_lease`), so each takes microseconds.
2. `IF_SIGNED`: all that needs no model, AT_LEASE included, of a rollout whose form and signature were checked (`UNSIGNED`; both together
   are `WITHOUT_WEIGHTS`). `claimed_logprobs` and `rewards` complete it; they take many rollouts, since a call of numpy or of the
   scorer costs more than the arithmetic (18 against 390 us per rollout of 500 tokens).
3. `WITH_WEIGHTS`: a replay (rl/trust/verification/replay.py) of a rollout that passed WITHOUT_WEIGHTS. Routing is first: a false
   claim about experts must not change the result of the checks after it.

No check raises for the content of a rollout, and none does I/O: `Rules` holds the functions that call an environment.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from inference.engine import sampler
from inference.proofs import toploc
from inference.rollouts import attestation, kept_sets
from inference.rollouts import rollout as rollout_lib
from rl.learning.algorithms import continuations
from rl.protocol import lease, noise_seed, task_schedule
from rl.protocol import verdict as verdict_lib
from rl.trust.verification import replay, sequential_test
from rl.trust.verification import rules as rules_lib

NOISE_SPAN = 20.0  # nats: Gumbel noise of 23 bits is at most 16.6 and at least -2.8, plus room for rounding
REWARD_SLACK = 1e-6  # of a claimed reward: a scorer may round to float32. A batch has our own rewards, not the claims
CHANCE = 1e-7  # probability of rejecting an honest rollout, per check that depends on chance
Subject = TypeVar("Subject")
Reason = verdict_lib.Reason


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of checking one rollout or group: OK, or a reason to reject it, with details as text."""

    reason: str  # a `Reason`; validators elsewhere may have others
    detail: str = ""
    scores: Mapping[str, float] | None = dataclasses.field(default=None, compare=False)  # recomputed, by `rewards`

    @property
    def accepted(self) -> bool:
        """True if the check accepts the rollout."""
        return self.reason == Reason.OK

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)


OK = Verdict(Reason.OK)
Check = Callable[[Subject, rules_lib.Rules], Verdict]


def first_failure(checks: Iterable[Check[Subject]], subject: Subject, rules: rules_lib.Rules) -> Verdict:
    """Runs checks in order on a subject (a rollout, group, or replay). Returns the first verdict that rejects it, or OK if none does."""
    return first_rejection(check(subject, rules) for check in checks)


def first_rejection(found: Iterable[Verdict]) -> Verdict:
    """Returns the first verdict that rejects, or OK if none does."""
    return next((verdict for verdict in found if not verdict.accepted), OK)


def own_rules(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> rules_lib.Rules:
    """Returns the rules for the environment of a rollout that has passed `form`; `rules` if the schedule has no such group."""
    group = _prescribed(rollout, rules) if rules.envs else None
    return rules.of_group(group) if group else rules


def check_at_lease(rollouts: Sequence[rollout_lib.Rollout], rules: rules_lib.Rules) -> Verdict:
    """Checks well-formed rollouts of one lease against the result of `Rules.at_lease`; returns the first rejection, or OK. Takes microseconds."""
    each = (first_failure(AT_LEASE, rollout, rules) for rollout in rollouts)
    return first_rejection(itertools.chain([whole_group(rollouts, rules)], each))


def whole_group(rollouts: Sequence[rollout_lib.Rollout], rules: rules_lib.Rules) -> Verdict:
    """Checks that rollouts are all samples of one group, each branch once, with one prompt and of one worker."""
    group = _prescribed(rollouts[0], rules)
    if group is None:
        return task(rollouts[0], rules)
    count, episodes = group.num_samples, rollout_lib.episodes(rollouts)
    roots = [episode[0] for episode in episodes]
    if (found := [root.sample for root in roots]) != list(range(count)):
        return Verdict(Reason.SAMPLES, f"expected 0..{count - 1} once each, got {found[:16]}")
    for episode in episodes:
        places = [(rollout.branch, rollout.num_branches) for rollout in episode]
        if places != [(branch, len(episode)) for branch in range(len(episode))]:
            detail = f"expected every branch of sample {episode[0].sample} once, got (branch, number) {places[:16]}"
            return Verdict(Reason.SAMPLES, detail)
    if len({root.tokens[: root.prompt_length].tobytes() for root in roots}) > 1:
        return Verdict(Reason.PROMPT, "the samples of one group have different prompts")
    if rules.vine and group.split == "train":
        branches = [episode[1:] for episode in episodes]
        if (found := continuations.error(roots, branches, rules.vine, rules.max_tokens)) is not None:
            return Verdict(Reason.SAMPLES, found)
    is_same = len({rollout.worker for rollout in rollouts}) == 1
    return _accept_if(is_same, Reason.SIGNATURE, "the samples of one group come from different workers")


# ---- one rollout, without weights -----------------------------------------------------------------------------------


def form(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks the type and range of every field. Runs before all other checks."""
    return _reject_for(Reason.SCHEMA, rollout_lib.validate(rollout))


def signature(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks the signature by the public key in the field `worker`."""
    return _accept_if(rollout_lib.signature_ok(rollout), Reason.SIGNATURE, "the key in `worker` did not sign this")


def vouched(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks that the server that a rollout names, if any, vouches for it, in this run and under its settings."""
    asked = {"run": rules.run, "max_tokens": rules.max_tokens, "return_routed_experts": rules.router_replay}
    is_vouched = not rollout.server or attestation.fits(rollout, dict(rules.filters) | asked, rules.hidden_dim)
    found = f"the signature of server {rollout.server[:16]} does not fit the samples"
    return _accept_if(is_vouched, Reason.ATTESTATION, found)


def task(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Compares step, task, sample, seed, and temperature with the run's schedule.

    The seed of the sampling noise is prescribed, so that a worker cannot choose among several samples.
    """
    if not rules.groups(rollout.step):
        return Verdict(Reason.STEP, f"{rollout.step} is not a step of this run")
    group, found = _prescribed(rollout, rules), rollout.task
    if group is None:
        return Verdict(Reason.TASK, f"group {found.group} does not belong to step {rollout.step}")
    if (found.env, found.index, found.seed) != (rules.env, group.index, rules.env_seed):
        expected = f"{rules.env} {group.index} of seed {rules.env_seed}"
        return Verdict(Reason.TASK, f"expected {expected}, got {found.env} {found.index} of seed {found.seed}")
    if rules.env_digest and rollout.env_digest not in ("", rules.env_digest):
        return Verdict(
            Reason.TASK, f"its environment has the digest {rollout.env_digest[:16]}, not {rules.env_digest[:16]}"
        )
    if not 0 <= rollout.sample < group.num_samples:
        return Verdict(Reason.SAMPLES, f"expected one of 0..{group.num_samples - 1}, got {rollout.sample}")
    prompt = rollout.tokens[: rollout.prompt_length]
    seed = noise_seed.stream_seed(group.seed, rollout.sample, rollout.branch, prompt, rollout.draw)
    if rollout.seed != seed:
        return Verdict(Reason.SEED, f"expected {seed} for sample {rollout.sample}, got {rollout.seed}")
    detail = f"expected {group.temperature}, got {rollout.temperature}"
    return _accept_if(abs(rollout.temperature - group.temperature) <= 1e-6, Reason.TEMPERATURE, detail)


def limits(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks the limits on the numbers of turns, of sampled and of all tokens, and on token IDs."""
    spans = rollout.spans
    if rollout.calls is None and not rollout.sampled_mask[rollout.prompt_length :].all():
        return Verdict(Reason.PROMPT, "tokens after the prompt were not sampled")
    if len(spans) > rules.max_turns or rollout.num_branches > rules.max_branches:
        found = f"{len(spans)} calls in one of {rollout.num_branches} branches"
        return Verdict(Reason.TURNS, f"{found}, more than the turns of an episode, {rules.max_turns}")
    for (start, end), most in zip(spans, _call_limits(rollout, rules), strict=True):
        if most > rules.max_tokens:  # the worker asked for so many
            return Verdict(Reason.TURNS, f"a call asked for {most} tokens, more than {rules.max_tokens}")
        if end - start > most:
            return Verdict(Reason.LENGTH, f"{end - start} sampled tokens, at most {most} were asked for")
    if len(rollout.tokens) > rules.max_model_len:
        return Verdict(Reason.LENGTH, f"{len(rollout.tokens)} tokens, more than the model's {rules.max_model_len}")
    top = int(rollout.tokens.max())
    return _accept_if(
        top < rules.vocab_size, Reason.TOKENS, f"ID {top} is outside the vocabulary of {rules.vocab_size}"
    )


def one_call(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks that a rollout of a one-call environment sets no field that only a program of several calls may set.

    With such fields a worker could choose which samples train, and where they end. `continuations.error` checks the fields of a
    continuation.
    """
    if rules.score is None:
        return OK
    if rollout.branch and not (rules.vine and _group(rollout, rules).split == "train"):
        return Verdict(Reason.TURNS, f"branch {rollout.branch} of an episode that has only one call")
    is_set = {"calls": rollout.calls is not None, "prefix_versions": rollout.prefix_versions is not None}
    if not rollout.branch:
        is_set |= {"call_limits": rollout.call_limits is not None, "draw": rollout.draw != 0}
        is_set |= {"trains": not rollout.trains}
    found = ", ".join(name for name, value in is_set.items() if value)
    return _accept_if(not found, Reason.TURNS, f"{found} set in an episode with one call")


def version_window(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks that the policy versions that computed the tokens ascend, are recent enough, and are published.

    Step n trains on rollouts of versions up to n - 1, since the step itself makes version n. In a run whose batches have groups of any
    step, the newest published version is the bound.
    """
    group, versions = _group(rollout, rules), rollout.versions
    low, high = rollout.oldest_version, int(versions.max())
    if low < group.min_version:
        return Verdict(
            Reason.VERSIONS, f"{low} is older than {group.min_version}, the oldest that step {group.step} takes"
        )
    if low != high and np.any(versions[1:] < versions[:-1]):
        return Verdict(Reason.VERSIONS, "versions decrease along the sequence")
    before = 0
    # Each other split of a prompt would be one more sample to choose from.
    for start, end in rollout.spans if low != high else ():
        if np.any(versions[before:start] != versions[start - 1]):
            return Verdict(Reason.VERSIONS, f"several versions prefilled the prompt before token {start}")
        before = end
    if _pins_others(group, low, high):
        return Verdict(Reason.VERSIONS, f"{low} to {versions[-1]}, but the lease pins {group.version}")
    newest = math.inf if rules.newest is None else rules.newest
    if group.split == "train" and rules.is_fixed:
        newest = min(newest, group.step - 1)
    detail = f"{high} is newer than {newest}, the newest that step {group.step} can have seen"
    return _accept_if(high <= newest, Reason.VERSIONS, detail)


def is_excluded(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> bool:
    """Returns True if the worker knew from its lease that it must not hand in these policy versions: too old ones, or others than pinned."""
    group, low, high = _group(rollout, rules), rollout.oldest_version, int(rollout.versions.max())
    return low < group.min_version or _pins_others(group, low, high)


def _pins_others(group: lease.Lease, low: int, high: int) -> bool:
    return group.version >= 0 and not low == high == group.version


def experts_named(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks that a training rollout of a run with router replay names the MoE experts that ran, in the right shape."""
    required = rules.router_replay and _group(rollout, rules).split == "train"
    return _reject_for(Reason.ROUTING, rules.experts.misfit(rollout) if required else None)


def kept_named(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks that a training rollout names, for each sampled token, the tokens that the run's filters kept, the sampled one among them.

    Without filters it must name none: the learner would normalize over them. Top-k alone keeps exactly k, for all logits.
    """
    required = kept_width(rollout, rules)
    if bool(rollout.kept) != bool(required):
        return Verdict(
            Reason.KEPT, f"{len(rollout.kept)} bytes of kept tokens, but the run's filters keep {required or 'all'}"
        )
    if not required:
        return OK
    try:
        count_N, ids = kept_sets.read(rollout.kept, [end - start for start, end in rollout.spans], required)
    except ValueError as error:
        return Verdict(Reason.KEPT, str(error))
    is_exact = all(rules.filters.get(name, kept_sets.OFF[name]) == kept_sets.OFF[name] for name in ("top_p", "min_p"))
    if is_exact and (least := int(count_N.min())) < required:
        return Verdict(Reason.KEPT, f"a kept set has {least} IDs, but top-k alone keeps {required}")
    if (top := int(ids.max())) >= rules.vocab_size:
        return Verdict(Reason.KEPT, f"ID {top} is outside the vocabulary of {rules.vocab_size}")
    is_own = ids == np.repeat(rollout.tokens[rollout.sampled_mask], count_N)
    has_own_N = np.logical_or.reduceat(is_own, np.cumsum(count_N) - count_N)
    return _accept_if(bool(has_own_N.all()), Reason.KEPT, "a sampled token is not in its own kept set")


def kept_width(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> int:
    """Returns the largest number of tokens in a kept set of a rollout that has passed `task`; 0 if it must name none."""
    return rules.kept if _group(rollout, rules).split == "train" else 0


def experts_exist(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks that the model has the MoE experts that a rollout names, if any."""
    return _reject_for(Reason.ROUTING, None if rollout.routed_experts is None else rules.experts.refusal(rollout))


def proof_form(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks that the TOPLOC proofs of a training rollout could be those of some hidden states."""
    if not rules.hidden_dim or _group(rollout, rules).split != "train":
        return OK
    proofs = zip(rollout_lib.proofs_by_call(rollout, rules.hidden_dim), rollout.spans, strict=True)
    found = (toploc.malformed(one, end - start, rules.hidden_dim) for one, (start, end) in proofs)
    return _reject_for(Reason.TOPLOC, next(filter(None, found), None))


def logprob_range(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks that sampling noise can draw even the token with the smallest claimed log-probability."""
    least = float(rollout.logprobs.min())
    is_possible = least >= -(math.log(rules.vocab_size) + NOISE_SPAN)
    return _accept_if(is_possible, Reason.LOGPROB, f"{least} of a token is less than the noise can make up for")


def ending(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Checks that each completion ends where a server ends one, and the last as claimed.

    A completion ends with its only stop token, or has as many tokens as a limit allows. The last token must be sampled.
    """
    if not rollout.sampled_mask[-1]:
        return Verdict(Reason.TERMINATION, "tokens follow the last sampled token")
    for (start, end), most in zip(rollout.spans, _call_limits(rollout, rules), strict=True):
        sampled = rollout.tokens[start:end]
        stops = np.logical_or.reduce([sampled == stop for stop in rules.stop_ids] or [np.zeros(len(sampled), bool)])
        if stops[:-1].any():
            return Verdict(Reason.TERMINATION, "tokens follow a stop token")
        if end == len(rollout.tokens) and (rollout.finish_reason == "stop") != bool(stops[-1]):
            last = f"the last token {'is' if stops[-1] else 'is not'} a stop token"
            return Verdict(Reason.TERMINATION, f"finish_reason is {rollout.finish_reason}, and {last}")
        if not stops[-1] and end - start < most and end < rules.max_model_len:
            detail = f"finish_reason is length after {end - start} of {most} tokens"
            return Verdict(Reason.TERMINATION, detail)
    return OK


def prompt(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Verdict:
    """Compares the prompt with that of the environment's task.

    Later prompts of an episode are checked with its reward, by `rewards`.
    """
    if rules.prompt is None or rollout.branch:
        return OK
    found = rollout.tokens[: rollout.prompt_length].tolist()
    is_same = found == list(rules.prompt(_group(rollout, rules)))
    return _accept_if(is_same, Reason.PROMPT, "it is not the prompt of its task")


AT_LEASE = (task, limits, version_window, experts_named)
IF_SIGNED = (vouched, *AT_LEASE, one_call, kept_named, experts_exist, logprob_range, ending, proof_form, prompt)
UNSIGNED = (form, signature)
WITHOUT_WEIGHTS = (*UNSIGNED, *IF_SIGNED)


def exponential_noise(rollouts: Sequence[rollout_lib.Rollout]) -> list[np.ndarray]:
    """Returns, for each rollout, y [N] = exp(-(claimed log-probability + sampling noise)) of its sampled tokens.

    If the claims are true and the seed's noise drew the tokens, y is exponentially distributed with rate 1, for any policy.
    """
    if not rollouts:
        return []
    counts = [int(rollout.sampled_mask.sum()) for rollout in rollouts]
    seeds = np.repeat(np.array([rollout.seed for rollout in rollouts], np.uint32), counts)
    positions = np.concatenate([np.flatnonzero(rollout.sampled_mask) for rollout in rollouts])
    tokens = np.concatenate([rollout.tokens[rollout.sampled_mask] for rollout in rollouts])
    logps = np.concatenate([rollout.logprobs[rollout.sampled_mask] for rollout in rollouts]).astype(np.float64)
    return np.split(sampler.exponential_noise(seeds, positions, tokens) * np.exp(-logps), np.cumsum(counts)[:-1])


def claimed_logprobs(rollouts: Sequence[rollout_lib.Rollout]) -> list[Verdict]:
    """Checks claimed log-probabilities against the sampling noise. Returns a verdict per rollout; a greedy one has no noise and passes."""
    noise = exponential_noise(rollouts)
    return [_claimed_logprob(*one) if one[0].temperature else OK for one in zip(rollouts, noise, strict=True)]


def _claimed_logprob(rollout: rollout_lib.Rollout, y_N: np.ndarray) -> Verdict:
    limit = math.log(len(y_N) / CHANCE)
    if (top := float(y_N.max())) > limit:
        at = int(np.flatnonzero(rollout.sampled_mask)[y_N.argmax()])
        claim = float(rollout.logprobs[at])
        least = f"its noise needs {claim + math.log(top / limit):.3g} at least"
        return Verdict(Reason.LOGPROB, f"{claim:.3g} claimed for token {at}, but {least}")
    odds = sequential_test.log_mean_exp(sequential_test.claims_ratio(y_N))
    detail = f"the noise fits other log-probabilities than those claimed better, e^{odds:.1f} to 1"
    return _accept_if(odds < -math.log(CHANCE), Reason.LOGPROB, detail)


def rewards(rollouts: Sequence[rollout_lib.Rollout], rules: rules_lib.Rules) -> list[Verdict]:
    """Checks every claimed reward component of one group's rollouts against our own scores. Returns a verdict per rollout, with them.

    An episode of several calls is played again: its prompts, its limits, and its branches must be those of the environment, too.

    A completion whose scorer times out is worth 0; our time limit is five times that of a worker. A claim of 0 is accepted if
    our scorer was so slow that the worker's may have timed out. If our scorer timed out and the claim is not 0, the verdict is
    "unscored", which is not the worker's fault: its machine may be much faster than ours.
    """
    if not rollouts or not (rules.score or rules.replay):
        return [OK] * len(rollouts)
    if rules.replay:
        episodes = rollout_lib.episodes(rollouts)
        replayed = rules.replay(_group(rollouts[0], rules), episodes)
        by_sample = {episode[0].sample: one for episode, one in zip(episodes, replayed, strict=True)}
        return [_reward(rollout, by_sample[rollout.sample]) for rollout in rollouts]
    assert rules.score is not None
    group = _group(rollouts[0], rules)
    # A continuation is scored with the tokens of its sample before it.
    starts = [len(rules.prompt(group)) if r.branch and rules.prompt else r.prompt_length for r in rollouts]
    found = rules.score(group, [r.tokens[start:].tolist() for r, start in zip(rollouts, starts, strict=True)])
    return [_reward(rollout, recomputed) for rollout, recomputed in zip(rollouts, found, strict=True)]


def _reward(rollout: rollout_lib.Rollout, recomputed: rules_lib.Recomputed) -> Verdict:
    claimed = dict(rollout.rewards) | {"reward": rollout.reward}
    if recomputed.mismatch:
        return Verdict(Reason.ENVIRONMENT, recomputed.mismatch)
    if recomputed.timed_out and set(claimed) != set(recomputed.scores):
        return Verdict(
            "unscored", "the environment exceeded its limits here, and an episode that takes that long is worth 0"
        )
    if set(claimed) != set(recomputed.scores):
        return Verdict(Reason.REWARD, f"expected components {sorted(recomputed.scores)}, got {sorted(claimed)[:16]}")
    close = {"rel_tol": REWARD_SLACK, "abs_tol": REWARD_SLACK}
    wrong = [
        name for name, score in sorted(recomputed.scores.items()) if not math.isclose(claimed[name], score, **close)
    ]
    if not wrong or (recomputed.slow and not any(claimed.values())):
        return Verdict(Reason.OK, scores=None if recomputed.timed_out else recomputed.scores)
    if recomputed.timed_out:
        return Verdict(Reason.UNSCORED, "our scorer timed out, and a completion that takes that long is worth 0")
    return Verdict(Reason.REWARD, f"{wrong[0]} is {claimed[wrong[0]]}, recomputed {recomputed.scores[wrong[0]]}")


# ---- one rollout and its replay -------------------------------------------------------------------------------------


def routing(one: replay.Replayed, rules: rules_lib.Rules) -> Verdict:
    """Checks that the MoE routers choose the claimed experts, if any, within the tolerance."""
    if one.gap_T is None:
        return OK
    gap_T, wrong = _misses(one.gap_T, rules.tolerance.routing)
    worst = f"those of token {int(gap_T.argmax())} miss by {gap_T.max():.3g}"
    detail = f"{wrong} of {len(gap_T)} tokens name experts that their policy does not choose; {worst}"
    return _accept_if(wrong == 0, Reason.ROUTING, detail)


def sampling(one: replay.Replayed, rules: rules_lib.Rules) -> Verdict:
    """Checks that the claimed tokens are those that the seed's noise draws in the replay, within the tolerance."""
    margin_N, wrong = _misses(one.margin_N, rules.tolerance.margin)
    worst = f"token {int(one.positions_N[margin_N.argmax()])} misses by {margin_N.max():.3g}"
    detail = f"{wrong} of {len(margin_N)} tokens are not those that the seed draws; {worst}"
    return _accept_if(wrong <= max(rules.tolerance.max_wrong_tokens, most_flips(one, rules)), Reason.SAMPLING, detail)


def kept(one: replay.Replayed, rules: rules_lib.Rules) -> Verdict:
    """Checks that the filters of the run keep the claimed tokens in the replay, if any are claimed, within the tolerance.

    The replay draws from the claimed sets, and takes log-probabilities over them: `sampling` and `logprob` see other changes.
    """
    if one.kept_gap_N is None:
        return OK
    gap_N, wrong = _misses(one.kept_gap_N, rules.tolerance.margin)
    worst = f"that of token {int(one.positions_N[gap_N.argmax()])} misses by {gap_N.max():.3g}"
    detail = f"{wrong} of {len(gap_N)} kept sets are not those of the filters; {worst}"
    return _accept_if(wrong <= max(rules.tolerance.max_wrong_tokens, most_flips(one, rules)), Reason.KEPT, detail)


def logprob(one: replay.Replayed, rules: rules_lib.Rules) -> Verdict:
    """Checks that every claimed log-probability is within the tolerance of the replayed one, except for up to `most_flips` tokens."""
    floor, limit = rules.tolerance.floor, rules.tolerance.logprob
    error_N = np.abs(sequential_test.log_odds(one.error_N, one.doubt_N, floor))
    wrong = int((~(error_N <= limit)).sum())
    worst = np.nan_to_num(error_N, nan=np.inf).argmax()
    unit = "" if floor >= 1 else " in log-odds"
    detail = f"claimed and replayed differ by {error_N[worst]:.3g}, more than {limit:.3g}{unit}"
    return _accept_if(wrong <= most_flips(one, rules), Reason.LOGPROB, detail)


def deviation(one: replay.Replayed, rules: rules_lib.Rules) -> Verdict:
    """Checks that the errors and ties of one rollout together are those of honest work, if the run has bands.

    Many tokens that err a little are as improbable as one that errs much. An honest rollout is rejected with a probability of CHANCE.
    """
    if rules.bands is None or one.rollout.temperature == 0 or most_flips(one, rules):
        return OK
    for name, odds in sequential_test.alone(rules.bands, one.evidence).items():
        if odds > -math.log(CHANCE):
            reason = {"error": Reason.LOGPROB, "ties": Reason.SAMPLING}[name]
            return Verdict(reason, f"its tokens deviate more than honest ones do together, e^{odds:.1f} to 1")
    return OK


def most_flips(one: replay.Replayed, rules: rules_lib.Rules) -> int:
    """Returns how many tokens of a rollout may differ from the replay by any amount: near ties in the router may choose other experts there.

    The result is 0 if the rollout names its experts, because the replay then uses these. Otherwise an honest rollout exceeds the result
    with a probability of at most CHANCE (Chernoff's bound for a Poisson variable).
    """
    mean = rules.tolerance.flips * len(one.margin_N)
    if not mean or not rules.experts.num_experts or one.rollout.routed_experts is not None:
        return 0
    count = math.ceil(mean)
    while (count + 1) * math.log((count + 1) / mean) - (count + 1 - mean) < -math.log(CHANCE):
        count += 1
    return count


def stopping(one: replay.Replayed, rules: rules_lib.Rules) -> Verdict:
    """Checks that each stop token was likely enough in the replay. Greedy rollouts pass."""
    ends = np.cumsum([end - start for start, end in one.rollout.spans]) - 1
    is_last = ends == len(one.logp_N) - 1
    is_stop = np.isin(one.rollout.tokens[one.positions_N[ends]], rules.stop_ids)
    logp = one.logp_N[ends][np.where(is_last, one.rollout.finish_reason == "stop", is_stop)]
    if not len(logp) or one.rollout.temperature == 0:
        return OK
    floor = CHANCE / len(one.logp_N)
    probability = float(np.exp(logp.min()))
    detail = f"the stop token had a probability of {probability:.2g}, less than {floor:.2g}"
    return _accept_if(probability >= floor, Reason.TERMINATION, detail)


def shape(one: replay.Replayed, rules: rules_lib.Rules) -> Verdict:
    """Checks that the tokens do not fit a hotter or colder distribution than at the claimed temperature. Greedy rollouts pass."""
    odds = sequential_test.log_mean_exp(one.tilt_K)
    best = sequential_test.TILTS[int(one.tilt_K.argmax())]
    detail = f"its tokens fit {1 / best:.2f} times the claimed temperature better, e^{odds:.1f} to 1"
    return _accept_if(one.rollout.temperature == 0 or odds < -math.log(CHANCE), Reason.SHAPE, detail)


def proof(one: replay.Replayed, rules: rules_lib.Rules) -> Verdict:
    """Compares the TOPLOC proofs with the hidden states of the replay."""
    failed = [result for result in one.proofs if not result.accepted]
    if not failed:
        return OK
    return Verdict(Reason.TOPLOC, f"{failed[0].reason} ({failed[0].exp_mismatches} exponent mismatches)")


def _misses(gap: np.ndarray, limit: float) -> tuple[np.ndarray, int]:
    """Returns (gaps with infinity for NaN, the number of those above the limit)."""
    gap = np.where(np.isnan(gap), np.inf, gap)
    return gap, int((gap > limit).sum())


WITH_WEIGHTS = (routing, kept, sampling, logprob, stopping, shape, proof, deviation)


def _accept_if(condition: bool, reason: str, detail: str) -> Verdict:
    return OK if condition else Verdict(reason, detail)


def _reject_for(reason: str, detail: str | None) -> Verdict:
    return OK if detail is None else Verdict(reason, detail)


def _call_limits(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> Sequence[int]:
    """Returns the limit on the tokens of each call of a rollout."""
    return [rules.max_tokens] * len(rollout.spans) if rollout.call_limits is None else rollout.call_limits.tolist()


def _prescribed(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> lease.Lease | None:
    """Returns the scheduled group that a rollout claims to belong to, or None if its step has no such group."""
    groups_by_number = rules.groups(rollout.step)
    group = groups_by_number.get(rollout.task.group)
    if group and group.index == task_schedule.ANY:
        return dataclasses.replace(group, index=rollout.task.index)
    return group


def _group(rollout: rollout_lib.Rollout, rules: rules_lib.Rules) -> lease.Lease:
    """Returns the scheduled group of a rollout that passed the check `task`."""
    group = _prescribed(rollout, rules)
    assert group is not None
    return group

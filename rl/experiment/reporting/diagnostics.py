"""Derives metrics that explain why a run does or does not learn, and prints plain advice on known pathologies.

`derived` turns the step's additive metrics into readable ones, `of_groups` measures the sampled groups before packing. `advice`
returns the text of the first of `PATHOLOGIES` that holds in the last steps; `Adviser` gives each piece once per run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from inference.rollouts import rollout as rollout_lib
from rl.experiment.reporting import metrics

WINDOW = 5  # steps that a piece of advice looks at
SOLVED = 0.95  # mean reward, of at most 1
UNSOLVED = 0.02
MIN_SCORES = 3  # held-out scores, before they are compared with the rewards
CHANGES = ("loss/entropy", "rollout/reward", "rollout/response_length")  # metrics whose change counts


def not_finite(values: dict[str, float]) -> str | None:
    """Returns the name of the first metric that is infinite or NaN, or None if all are finite."""
    return next((name for name, value in values.items() if not math.isfinite(value)), None)


def derived(values: dict[str, float]) -> dict[str, float]:
    """Computes further metrics from those of a step; returns {} if the loss has no importance ratios.

    loss/effective_sample_frac     (mean r)^2 / mean r^2: the fraction of the tokens that an unweighted sample of the same
                                   variance would have (Kish 1965); 1 on policy
    loss/mismatch_kl_per_dropped   mean k3 of the tokens whose gradient the loss dropped
    loss/mismatch_kl_per_kept      mean k3 of the other tokens

    If versions may change within a rollout, also its part in the mismatch of learner and sampler, since the learner scores
    all of a rollout with one version:

    loss/mismatch_kl_per_mixed     mean k3 of the tokens for which the sampler read keys of other versions than their own
    loss/mismatch_kl_per_unmixed   mean k3 of the other tokens
    """
    if "loss/ratio_sq_mean" not in values:
        return {}
    kl, dropped_kl, dropped = (values[f"loss/{name}"] for name in ("mismatch_kl", "mismatch_kl_dropped", "clip_frac"))
    second = values["loss/ratio_sq_mean"]
    found = {}
    if "loss/mixed_frac" in values:
        sampler_kl, mixed = values.get("loss/sampler_kl", kl), values["loss/mixed_frac"]
        mixed_kl = values["loss/mismatch_kl_mixed"]
        found["loss/mismatch_kl_per_mixed"] = mixed_kl / mixed if mixed > 0 else 0.0
        found["loss/mismatch_kl_per_unmixed"] = (sampler_kl - mixed_kl) / (1 - mixed) if mixed < 1 else 0.0
    return found | {
        "loss/effective_sample_frac": values["loss/ratio_mean"] ** 2 / second if second > 0 else 0.0,
        "loss/mismatch_kl_per_dropped": dropped_kl / dropped if dropped > 0 else 0.0,
        "loss/mismatch_kl_per_kept": (kl - dropped_kl) / (1 - dropped) if dropped < 1 else 0.0,
    }


def of_trained_tokens(values: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of a train step without means over its trained tokens if it trained none: they are unknown, not 0."""
    if values["loss/num_tokens"]:
        return values
    return {name: value for name, value in values.items() if not name.startswith("loss/") or name in _OF_STEPS}


_OF_STEPS = ["loss/total", "loss/num_tokens", "loss/skipped", "loss/grad_norm", "loss/ce", "loss/ref_kl"]
_OF_STEPS += ["loss/router_balance", "loss/optimizer_steps", "loss/optimizer_steps_missing"]


def of_groups(groups: Sequence[Sequence], *, step: int, max_tokens: Mapping[str, int]) -> dict[str, float]:
    """Returns metrics of a batch's groups of rollouts: rewards, lengths, and lag. `step` is the train step that uses the batch.

    `max_tokens` is the length limit of a completion in each environment.

    rollout/all_lowest_frac, rollout/all_highest_frac: groups whose rewards all equal the least (greatest) of the batch.
    rollout/length_p10, _p50, _p90 in tokens, rollout/length_of_best: mean length of samples above their group's mean.
    sync/lag_0, sync/lag_1, ...: histogram of the lag in versions of a sample's oldest token, as fractions
    of the samples; the last bin, 8, counts all above it, too.
    """
    episodes = [*map(rollout_lib.episodes, groups)]
    rewards = [np.array([one[0].reward for one in group]) for group in episodes]
    everything, rollouts = np.concatenate(rewards), [r for group in groups for r in group]
    tokens = np.array([sum(int(r.sampled_mask.sum()) for r in one if r.trains) for group in episodes for one in group])
    limits = np.array([max_tokens[one[0].task.env] for group in episodes for one in group])
    lag = np.array([min(step - 1 - int(r.versions[r.sampled_mask].min()), 8) for r in rollouts])
    spread = everything.max() > everything.min()
    above = np.concatenate([r > r.mean() for r in rewards])
    bins = np.bincount(lag) / len(lag)
    return {
        "rollout/all_lowest_frac": float(np.mean([spread and (r == everything.min()).all() for r in rewards])),
        "rollout/all_highest_frac": float(np.mean([spread and (r == everything.max()).all() for r in rewards])),
        "rollout/length_at_limit_frac": float(np.mean(tokens >= limits)),
        "rollout/length_of_best": float(tokens[above].mean()) if above.any() else 0.0,
        **{f"rollout/length_p{n}": float(np.quantile(tokens, n / 100)) for n in (10, 50, 90)},
        **{f"sync/lag_{lag}": float(part) for lag, part in enumerate(bins)},
    }


class Adviser:
    """Watches the metrics of a run for pathologies of training, and gives each piece of advice at most once."""

    def __init__(self):
        self._history: list[dict[str, float]] = []
        self._scores: dict[int, float] = {}  # held-out, by version
        self._given: set[str] = set()

    def scored(self, version: int, score: float) -> None:
        """Records the held-out score of a version."""
        self._scores[version] = score

    def after(self, step: int, values: dict[str, float]) -> str | None:
        """Records the metrics of a step. Every fifth step, returns a line of advice not given before; otherwise None."""
        self._history.append(values)
        if step % WINDOW:
            return None
        name, line = advice(self._history, [score for _, score in sorted(self._scores.items())])
        if name in self._given:
            return None
        self._given.add(name)
        return line


def of_run(steps: Sequence[dict[str, Any]], scores: Mapping[int, float]) -> list[tuple[int, str]]:
    """Returns (step, advice) of a whole run, from the metrics of its steps and the held-out scores by version."""
    adviser, found, left = Adviser(), [], sorted(scores.items())
    for record in steps:
        while left and left[0][0] < record["step"]:
            adviser.scored(*left.pop(0))
        if line := adviser.after(record["step"], record):
            found.append((record["step"], line))
    return found


def advice(history: Sequence[dict[str, float]], scores: Sequence[float] = ()) -> tuple[str, str | None]:
    """Returns the first of `PATHOLOGIES` in the last `WINDOW` of the steps' metrics: (its name, the advice), or ("", None).

    `scores` are the held-out scores so far, the oldest first.
    """
    if len(history) < WINDOW:
        return "", None
    now = _Means(history[-WINDOW:])
    # A change is that between two windows, which may not overlap.
    first = _Means(history[:WINDOW] if len(history) >= 2 * WINDOW else ())
    now |= {f"first {name.rpartition('/')[2]}": first[name] for name in CHANGES}
    now["sampler_kl"] = now[metrics.sampler_kl(history[-1])]
    now["waiting"] = now["time/wait_s"] / max(now["time/step_s"], 1e-9)
    if len(scores) >= MIN_SCORES:
        now |= {"first score": scores[0], "score": float(np.mean(scores[-2:]))}
    return next(((name, text.format(now)) for name, (holds, text) in PATHOLOGIES.items() if holds(now)), ("", None))


class _Means(dict[str, float]):
    """The mean of a metric's finite values over steps, computed at its first use; NaN, for which no condition is true, if it has none."""

    def __init__(self, steps: Sequence[dict[str, float]]):
        super().__init__()
        self._steps = steps

    def __missing__(self, name: str) -> float:
        found = [step[name] for step in self._steps if math.isfinite(step.get(name, math.nan))]
        self[name] = sum(found) / len(found) if found else math.nan
        return self[name]


# Advice by the name of a pathology, with its condition on the means of the last steps. The first that holds is reported: causes before consequences.
PATHOLOGIES: dict[str, tuple[Callable[[dict[str, float]], bool], str]] = {
    "solved": (
        lambda m: m["rollout/zero_advantage_frac"] > 0.9 and m["rollout/reward"] >= SOLVED,
        "solved: the mean reward is {0[rollout/reward]:.2f} of at most 1, and in {0[rollout/zero_advantage_frac]:.0%} of the "
        "groups all rewards are equal; stop here, or make the tasks harder",
    ),
    "unsolved": (
        lambda m: m["rollout/zero_advantage_frac"] > 0.9 and m["rollout/reward"] <= UNSOLVED,
        "advice: no task is solved (mean reward {0[rollout/reward]:.2f}), so no sample is preferred: make the tasks easier "
        "(env.options), train on demonstrations first (warmup.num_steps), raise rl.samples_per_prompt, or give partial credit",
    ),
    "equal rewards": (
        lambda m: m["rollout/zero_advantage_frac"] > 0.9,
        "advice: in {0[rollout/zero_advantage_frac]:.0%} of the groups all rewards are equal (mean reward "
        "{0[rollout/reward]:.2f}), so no sample is preferred: make the tasks easier or harder, raise rl.samples_per_prompt, or "
        "give partial credit",
    ),
    # with hardly any staleness the policy did not change: a ratio away from 1 is a numerical error
    "mismatch": (
        lambda m: m["sync/lag"] < 0.5 and m["sampler_kl"] > 0.01,
        "advice: learner and sampler disagree (mismatch KL {0[sampler_kl]:.3g} at a lag of {0[sync/lag]:.1f}): check that "
        "temperature, tokenizer and dtype are the same on both sides before looking at the algorithm",
    ),
    "varying ratios": (
        lambda m: m["loss/effective_sample_frac"] < 0.3,
        "advice: importance ratios vary so much that only {0[loss/effective_sample_frac]:.0%} of the tokens count: lower "
        "rl.max_lag, or optimizer.learning_rate",
    ),
    "clipping": (
        lambda m: m["loss/clip_frac"] > 0.3,
        "advice: {0[loss/clip_frac]:.0%} of the tokens are clipped or masked away: lower optimizer.learning_rate or rl.max_lag,"
        " or widen the bounds of the loss",
    ),
    "entropy": (
        lambda m: 0.1 * m["first entropy"] > max(m["loss/entropy"], 0.0),
        "advice: entropy fell from {0[first entropy]:.3g} to {0[loss/entropy]:.3g}: the policy has stopped exploring; lower "
        "optimizer.learning_rate, widen clip_high, or set objective.entropy_coef",
    ),
    "rising entropy": (
        lambda m: m["loss/entropy"] > 3 * m["first entropy"] and m["rollout/reward"] < m["first reward"],
        "advice: entropy rose from {0[first entropy]:.3g} to {0[loss/entropy]:.3g}, and the reward fell: lower "
        "objective.entropy_coef or optimizer.learning_rate",
    ),
    "truncation": (
        lambda m: m["rollout/truncated_frac"] > 0.5,
        "advice: {0[rollout/truncated_frac]:.0%} of the samples end at the length limit before they can be rewarded: raise "
        "sampling.max_tokens, or shape long answers",
    ),
    "held-out flat": (
        lambda m: m["rollout/reward"] - m["first reward"] > 0.15 and m["score"] - m["first score"] < 0.02,
        "advice: the reward rose from {0[first reward]:.2f} to {0[rollout/reward]:.2f}, and the held-out score stayed at "
        "{0[score]:.2f} ({0[first score]:.2f} at first): read samples for a reward that is exploited (python -m rl.envs check "
        "NAME), or raise env.num_tasks",
    ),
    "longer": (
        lambda m: (
            m["rollout/response_length"] > 1.5 * m["first response_length"]
            and m["rollout/reward"] - m["first reward"] < 0.02
        ),
        "advice: completions grew from {0[first response_length]:.0f} to {0[rollout/response_length]:.0f} tokens without more "
        "reward: set rl.overlong_buffer, or rl.loss = 'dr_grpo', which does not prefer long wrong answers",
    ),
    "shorter": (
        lambda m: (
            m["rollout/response_length"] < 0.5 * m["first response_length"]
            and m["rollout/reward"] - m["first reward"] < 0.02
        ),
        "advice: completions shrank from {0[first response_length]:.0f} to {0[rollout/response_length]:.0f} tokens without more"
        " reward: lower rl.overlong_buffer or optimizer.learning_rate, and look for samples that give up early",
    ),
    # without overlap (a lag near 0), learner and servers wait for each other by design
    "full servers": (
        lambda m: (
            m["waiting"] > 0.7 and m["sync/lag"] > 0.2 and m["machine/servers_waiting"] > m["machine/servers_running"]
        ),
        "advice: the learner waits in {0[waiting]:.0%} of the time, and {0[machine/servers_waiting]:.0f} requests wait for a "
        "slot: add inference servers, or raise inference.num_slots",
    ),
    "idle servers": (
        lambda m: m["waiting"] > 0.7 and m["sync/lag"] > 0.2 and m["machine/servers_kv_used"] < 0.2,
        "advice: the learner waits in {0[waiting]:.0%} of the time, and the servers are idle: raise topology.num_workers, or "
        "add workers",
    ),
    "few micro-batches": (
        lambda m: m["loss/optimizer_steps_missing"] > 0,
        "advice: a batch fills too few micro-batches: {0[loss/optimizer_steps_missing]:.1f} of objective.optimizer_steps found "
        "none; lower train.rows or train.row_length, or take fewer steps",
    ),
    "no gradient": (
        lambda m: m["loss/grad_norm"] < 1e-8,
        "advice: the gradient's norm is {0[loss/grad_norm]:.1g}: no token trains; look at loss masks and advantages",
    ),
}

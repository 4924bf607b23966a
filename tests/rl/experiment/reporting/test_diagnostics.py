"""Diagnostics against loops; each piece of advice against a run that has just its pathology, and against one that has none."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from rl.experiment.reporting import diagnostics
from rl.learning.learner import train_step

HEALTHY = {
    "loss/entropy": 1.0,
    "loss/grad_norm": 0.3,
    "loss/clip_frac": 0.05,
    "loss/mismatch_kl": 1e-4,
    "loss/effective_sample_frac": 0.97,
    "loss/skipped": 0.0,
    "rollout/zero_advantage_frac": 0.3,
    "rollout/reward": 0.5,
    "rollout/truncated_frac": 0.1,
    "rollout/response_length": 40.0,
    "sync/lag": 0.0,
    "time/wait_s": 1.0,
    "time/step_s": 10.0,
    "machine/servers_waiting": 2.0,
    "machine/servers_running": 30.0,
    "machine/servers_kv_used": 0.5,
}
WAITING = {"time/wait_s": 8.0, "sync/lag": 1.0}


def advice(history):
    return diagnostics.advice(history)[1]


def test_module_norms_are_over_all_layers():
    rng = np.random.default_rng(0)
    w = {name: rng.standard_normal((3, 2)) for name in ("embed", "q0", "q1", "o1", "norm", "stacked")}
    tree = {
        "embed": w["embed"],
        "layers": {
            "000": {"attn": {"q": w["q0"]}, "attn_norm": w["norm"]},
            "001": {"attn": {"q": w["q1"], "o": w["o1"]}},
            "mlp": {"up": w["stacked"]},  # layers stacked along a dim have no number in their path
        },
    }
    got = train_step.module_norms({k: v for k, v in tree.items()})
    members = {"embed": ["embed"], "attn": ["q0", "q1", "o1"], "attn_norm": ["norm"], "mlp": ["stacked"]}
    assert got.keys() == {f"grad_norm/{name}" for name in members}
    for name, parts in members.items():
        expected = np.sqrt(sum((w[part] ** 2).sum() for part in parts))
        assert float(got[f"grad_norm/{name}"]) == pytest.approx(expected, rel=1e-6)
    whole = np.sqrt(sum((x**2).sum() for x in w.values()))
    assert np.sqrt(sum(float(x) ** 2 for x in got.values())) == pytest.approx(whole, rel=1e-6)
    assert train_step.module_norms({"layers": {"000": {"attn": {"q": {"a": jnp.ones(4)}}}}}) == {"grad_norm/attn": 2.0}


def test_a_step_that_trains_nothing_has_no_entropy():
    """Its zeros would be points of the curves, as if the entropy had collapsed."""
    step = HEALTHY | {"loss/num_tokens": 0.0, "loss/total": 0.0, "loss/own": 0.0, "grad_norm/attn": 0.0}
    means = {"loss/entropy", "loss/clip_frac", "loss/mismatch_kl", "loss/effective_sample_frac", "loss/own"}
    assert step.keys() - diagnostics.of_trained_tokens(step).keys() == means
    trained = step | {"loss/num_tokens": 1.0}
    assert diagnostics.of_trained_tokens(trained) == trained
    assert diagnostics.advice([diagnostics.of_trained_tokens(step)] * 12) == ("", None)


def test_derived_metrics_equal_loops_over_tokens():
    rng = np.random.default_rng(1)
    r, dropped = np.exp(rng.uniform(-2, 2, 50)), rng.random(50) < 0.3
    k3 = r - 1 - np.log(r)
    values = {
        "loss/ratio_mean": r.mean(),
        "loss/ratio_sq_mean": (r**2).mean(),
        "loss/clip_frac": dropped.mean(),
        "loss/mismatch_kl": k3.mean(),
        "loss/mismatch_kl_dropped": (k3 * dropped).mean(),
    }
    got = diagnostics.derived(values)
    assert got["loss/effective_sample_frac"] == pytest.approx(r.sum() ** 2 / (r**2).sum() / 50)  # Kish
    assert got["loss/mismatch_kl_per_dropped"] == pytest.approx(k3[dropped].mean())
    assert got["loss/mismatch_kl_per_kept"] == pytest.approx(k3[~dropped].mean())
    assert diagnostics.derived(dict.fromkeys(values, 0.0)) == dict.fromkeys(got, 0.0)  # a step without a token
    assert diagnostics.derived({"loss/total": 1.0}) == {}
    everything = diagnostics.derived(values | {"loss/clip_frac": 1.0})
    assert everything["loss/mismatch_kl_per_kept"] == 0


def test_metrics_of_groups():
    rewards = [np.array([0.0, 0.0]), np.array([1.0, 1.0]), np.array([0.0, 1.0]), np.array([0.5, 0.5])]
    lengths = [np.array([3, 5]), np.array([8, 8]), np.array([2, 4]), np.array([1, 7])]
    lags = [np.array([0, 0]), np.array([1, 1]), np.array([1, 3]), np.array([20, 0])]

    def groups(rewards):
        """Two prompt tokens; the first sampled token is the oldest."""
        return [
            [
                types.SimpleNamespace(
                    sample=sample,
                    branch=0,
                    task=types.SimpleNamespace(env="e"),
                    trains=True,
                    reward=float(reward),
                    sampled_mask=np.array([False] * 2 + [True] * int(n)),
                    versions=np.array([0] * 2 + [29 - int(lag)] + [29] * (int(n) - 1)),
                )
                for sample, (reward, n, lag) in enumerate(zip(*group, strict=True))
            ]
            for group in zip(rewards, lengths, lags, strict=True)
        ]

    got = diagnostics.of_groups(groups(rewards), step=30, max_tokens={"e": 8})
    assert got["rollout/all_lowest_frac"] == got["rollout/all_highest_frac"] == 0.25
    assert got["rollout/length_at_limit_frac"] == 0.25 and got["rollout/length_of_best"] == 4
    assert got["rollout/length_p50"] == 4.5 and got["rollout/length_p10"] < 2 < 7 < got["rollout/length_p90"]
    assert [got[f"sync/lag_{n}"] for n in range(9)] == [0.375, 0.375, 0, 0.125, 0, 0, 0, 0, 0.125]
    flat = diagnostics.of_groups(groups([np.ones(2)] * 4), step=30, max_tokens={"e": 9})
    assert flat["rollout/all_lowest_frac"] == flat["rollout/all_highest_frac"] == flat["rollout/length_of_best"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout/zero_advantage_frac": 0.95, "rollout/reward": 0.2}, ("95% of the groups", "0.20", "partial credit")),
        ({"rollout/zero_advantage_frac": 0.95, "rollout/reward": 0.0}, ("no task is solved", "0.00", "env.options")),
        ({"loss/entropy": 4.0, "rollout/reward": 0.4}, ("from 1 to 4", "objective.entropy_coef")),
        ({"rollout/response_length": 70.0}, ("grew from 40 to 70", "rl.overlong_buffer")),
        ({"rollout/response_length": 15.0}, ("shrank from 40 to 15", "give up early")),
        (WAITING | {"machine/servers_waiting": 90.0}, ("waits in 80%", "90 requests", "inference.num_slots")),
        (WAITING | {"machine/servers_kv_used": 0.1}, ("waits in 80%", "topology.num_workers")),
        ({"loss/mismatch_kl": 0.05}, ("0.05", "temperature", "dtype")),
        ({"loss/mismatch_kl": 0.05, "sync/lag": 2.0, "loss/effective_sample_frac": 0.2}, ("20%", "rl.max_lag")),
        ({"loss/clip_frac": 0.4}, ("40%", "clipped or masked")),
        ({"loss/entropy": 0.05}, ("1", "0.05", "entropy_coef")),
        ({"rollout/truncated_frac": 0.8}, ("80%", "sampling.max_tokens")),
        ({"loss/grad_norm": 0.0}, ("no token trains",)),
        ({"loss/optimizer_steps_missing": 6.0}, ("6.0 of objective.optimizer_steps", "train.rows")),
        ({"loss/sampler_kl": 0.07}, ("0.07", "temperature", "dtype")),
    ],
)
def test_advice_names_the_pathology(changes, words):
    history = [HEALTHY] * 10 + [HEALTHY | changes] * 5
    line = advice(history)
    assert line and "\n" not in line and all(word in line for word in words), line
    assert advice(history[:-5]) is None


def test_no_advice_without_cause():
    assert advice([]) is None
    assert advice([HEALTHY] * 20) is None
    assert advice([HEALTHY | {"loss/clip_frac": 0.9}] * 4) is None  # too early for advice
    assert advice([{"loss/total": 1.0}] * 9) is None  # supervised steps have none of these
    assert advice([HEALTHY] * 9 + [HEALTHY | {"loss/clip_frac": 0.9}]) is None  # one step is not enough
    stale = HEALTHY | {"loss/mismatch_kl": 0.05, "sync/lag": 2.0}
    assert advice([stale] * 9) is None  # staleness explains the drift
    assert advice([HEALTHY | {"loss/entropy": float("nan")}] * 9) is None
    assert "groups" in advice([HEALTHY | {"rollout/zero_advantage_frac": 1.0, "loss/grad_norm": 0.0}] * 9)


def test_a_reward_that_rises_alone_is_suspect():
    """Three held-out scores are needed, and one that rises with the reward is learning."""
    risen = [HEALTHY] * 10 + [HEALTHY | {"rollout/reward": 0.8, "rollout/response_length": 90.0}] * 5
    line = diagnostics.advice(risen, [0.5, 0.49, 0.51])[1]
    assert "from 0.50 to 0.80" in line and "stayed at 0.50" in line and "rl.envs check" in line
    for scores in ([0.5, 0.5], [0.5, 0.7, 0.75], []):
        assert diagnostics.advice(risen, scores) == ("", None)  # longer answers that earn more are no drift
    steps = [values | {"phase": "rl", "step": step} for step, values in enumerate(risen, 1)]
    assert diagnostics.of_run(steps, {0: 0.5, 5: 0.49, 14: 0.51, 15: 0.9}) == [(15, line)]
    assert diagnostics.of_run(steps, {0: 0.5, 5: 0.49}) == []


def test_each_piece_of_advice_is_given_once_per_run():
    """Advice comes in the first window after it holds; a second pathology later is another piece."""
    clipped, ended = HEALTHY | {"loss/clip_frac": 0.4}, HEALTHY | {"rollout/truncated_frac": 0.8}
    adviser = diagnostics.Adviser()
    lines = [
        adviser.after(step, values) for step, values in enumerate([HEALTHY] * 7 + [clipped] * 18 + [ended] * 20, 1)
    ]
    (first, second), steps = filter(None, lines), [step for step, line in enumerate(lines, 1) if line]
    assert first.startswith("advice: ") and "clipped" in first and "sampling.max_tokens" in second
    assert steps == [15, 30]


def test_a_solved_run_is_called_solved_and_gets_no_advice():
    flat = HEALTHY | {"rollout/zero_advantage_frac": 1.0, "loss/grad_norm": 0.0, "loss/entropy": 0.01}
    solved = advice([HEALTHY] * 9 + [flat | {"rollout/reward": 0.99}] * 5)
    assert solved.startswith("solved: the mean reward is 0.99") and "raise" not in solved
    assert "partial credit" in advice([flat | {"rollout/reward": 0.5}] * 9)
    assert "solved" not in (advice([HEALTHY | {"rollout/reward": 0.99}] * 9) or "")

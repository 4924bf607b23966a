"""The named recipes: each resolves, and states the constants that its source states."""

import pathlib
import subprocess
import sys

import pytest

from configs import recipes
from rl.experiment import experiment
from rl.experiment.reporting import metrics

ROOT = pathlib.Path(__file__).resolve().parents[3]


def resolved(name):
    return experiment.resolve(recipes.get_config(name))


def test_intellect2():
    """arXiv 2505.07291 and its configuration: two-sided clip of 0.2 with delta 4, old policy of the learner, 8 steps, AdamW."""
    exp = resolved("intellect2")
    assert (exp.loss, exp.loss_options) == ("two_sided_clip", {"clip_low": 0.2, "clip_high": 0.2, "delta": 4.0})
    assert (exp.objective.old_logprobs, exp.objective.optimizer_steps) == ("learner", 8)
    assert exp.objective.entropy_coef == 1e-3 and exp.objective.kl_coef == 0
    o = exp.optimizer
    assert [o.name, o.beta1, o.beta2] == ["adamw", 0.9, 0.99]
    assert [o.weight_decay, o.clip_norm, o.warmup_steps] == [0.01, 0.1, 25]
    rl = exp.config.rl
    assert (rl.advantage, rl.max_lag, exp.config.sampling.temperature) == ("group_mean_std", 2, 0.6)
    # Eight optimizer steps need eight micro-batches of the groups' trees.
    assert rl.prompts_per_step * rl.samples_per_prompt == 256
    assert rl.prompts_per_step / exp.config.train.rows >= exp.objective.optimizer_steps


def test_intellect3():
    """arXiv 2512.16144: tokens in [0.5, 5], streams out below 1e-5, no standard deviation, Muon, a lag of at most 8."""
    exp = resolved("intellect3")
    options = exp.loss_options
    assert exp.loss == "masked_importance_sampling"
    assert (options["ratio_low"], options["ratio_high"], options["stream_low"]) == (0.5, 5.0, 1e-5)
    assert (exp.optimizer.name, exp.optimizer.momentum, exp.config.rl.advantage) == ("muon", 0.95, "group_mean")
    assert (exp.config.rl.max_lag, exp.config.rl.max_off_policy, exp.config.rl.samples_per_prompt) == (1, 8, 16)


def test_prime_2026():
    """PRIME-RL in August 2026: bounds of 0.2 on the change of probability, 1e-3 of the squared log-ratio, AdamW (0.9, 0.999)."""
    exp = resolved("prime_2026_08")
    assert (exp.loss, exp.loss_options) == ("dppo_tv", {"low": 0.2, "high": 0.2, "kl_tau": 1e-3})
    assert (exp.optimizer.beta1, exp.optimizer.beta2, exp.optimizer.weight_decay) == (0.9, 0.999, 0.01)
    assert exp.optimizer.clip_norm == 1.0 and exp.config.rl.advantage == "group_mean"


def test_prime_2026_09():
    """September 2026: the same with IPO in its place, 0.3 and no KL, in batches of constant size."""
    exp, before = resolved("prime_2026_09"), resolved("prime_2026_08")
    assert (exp.loss, exp.loss_options, exp.config.rl.refill > 0) == ("ipo", {"bound": 0.3, "kl_tau": 0.0}, True)
    assert exp.optimizer == before.optimizer and exp.objective.kl_coef == 0


def test_swarm_lagged():
    """OAPL regresses on the optimal advantage; samples may be 50 versions old, and are not dropped before."""
    exp = resolved("swarm_lagged")
    assert (exp.loss, exp.loss_options, exp.credit.advantage) == ("oapl", {"beta": 1e-3}, "optimal")
    assert exp.config.rl.max_lag == exp.config.rl.max_off_policy == 50


def test_scalerl():
    """arXiv 2510.13786: CISPO with an upper bound of 5, batch-normalised advantages, prompt average, a lag of 8."""
    exp = resolved("scalerl")
    assert (exp.loss, exp.loss_options) == ("cispo", {"ratio_low": 0.0, "ratio_high": 5.0})
    assert (exp.config.rl.normalize, exp.config.rl.average, exp.config.rl.max_lag) == ("batch_std", "prompts", 8)


def test_an_unknown_recipe_is_refused():
    assert set(recipes.RECIPES) == {
        "intellect2",
        "intellect3",
        "prime_2026_08",
        "prime_2026_09",
        "scalerl",
        "swarm_lagged",
    }
    with pytest.raises(
        ValueError, match="'intellect4' does not exist.*intellect2, intellect3, prime_2026_08, prime_2026_09,"
    ):
        recipes.get_config("intellect4")


# ---- do they learn? --------------------------------------------------------------------------------------------------


def rise(config, workdir):
    """Mean reward of the last ten of 60 steps, less that of the first five."""
    arguments = [f"--config={config}", f"--workdir={workdir}", "--config.rl.num_steps=60"]
    command = [sys.executable, "-m", "rl.train", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr
    rewards = [r["rollout/reward"] for r in metrics.read(workdir / "metrics.jsonl") if r["phase"] == "rl"]
    assert len(rewards) == 60
    return sum(rewards[-10:]) / 10 - sum(rewards[:5]) / 5


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_each_recipe_learns(name, tmp_path):
    assert rise(f"configs/recipes.py:{name}", tmp_path / "w") > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["-advantage_BT, mask_BT", "advantage_BT, 1 - mask_BT"], ids=["sign", "mask"])
def test_a_broken_loss_does_not(broken, tmp_path):
    """The test above can see such a difference."""
    (tmp_path / "broken.py").write_text(f"""
from configs import quickstart
from rl.learning.algorithms import losses

def broken(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, clip_low, clip_high, delta, denom):
    options = dict(clip_low=clip_low, clip_high=clip_high, delta=delta, denom=denom)
    return losses.two_sided_clip(logp_BT, behavior_logp_BT, {broken}, **options)

def get_config():
    c = quickstart.get_config()
    c.rl.loss_function = broken
    return c
""")
    assert rise(tmp_path / "broken.py", tmp_path / "w") < 0.05

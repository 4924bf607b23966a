"""Published RL recipes on the quickstart's task, each with its own constants.

    python -m rl.train --config=configs/recipes.py:intellect2 --workdir=runs/intellect2

A recipe sets the fields that define it: loss and its bounds, advantages, old log-probabilities, optimizer, group size, lag. Fields
that depend on the size of the model are the quickstart's: learning rates of 3e-7 to 1e-6 are for 32 B to 106 B parameters, and a
batch is 256 rollouts instead of 4096. configs/intellect2.py has its model. Hardware: 2 CPU cores, as the quickstart.
"""

import difflib

from configs import quickstart


def get_config(name: str = "intellect2"):
    """Returns the config of the recipe `name`."""
    if name not in RECIPES:
        near = "".join(f" (did you mean {near}?)" for near in difflib.get_close_matches(name, RECIPES, 1))
        remedy = f"write --config=configs/recipes.py:NAME with one of {', '.join(RECIPES)}"
        raise ValueError(f"recipe {name!r} does not exist{near}; {remedy}")
    c = quickstart.get_config()
    c.rl.prompts_per_step = 16  # of INTELLECT-2 and -3: 256
    RECIPES[name](c)
    return c


def intellect2(c):
    """Sets INTELLECT-2's constants (arXiv 2505.07291, April 2025): a two-sided clip against the learner's own old policy."""
    c.rl.update(loss="two_sided_clip", advantage="group_mean_std", samples_per_prompt=16)
    c.loss_options.two_sided_clip.update(clip_low=0.2, clip_high=0.2, delta=4.0)  # delta bounds the loss of A < 0
    c.objective.old_logprobs = "learner"  # recomputed before the first of ...
    c.objective.optimizer_steps = 8  # ... 8 steps, there on 512 samples each
    c.train.rows = 2  # so that a batch has 8 micro-batches
    c.objective.entropy_coef = 1e-3
    c.rl.max_lag = 2  # the paper's two-step asynchrony
    c.sampling.temperature = 0.6
    c.optimizer.learning_rate = 2e-4  # there 3e-7
    c.optimizer.update(warmup_steps=25, beta1=0.9, beta2=0.99, weight_decay=0.01, clip_norm=0.1)


def intellect3(c):
    """Sets INTELLECT-3's constants (arXiv 2512.16144): IcePop against the sampler, Muon, advantages that only subtract the mean."""
    c.rl.update(loss="masked_importance_sampling", advantage="group_mean", samples_per_prompt=16)
    c.rl.update(max_lag=1, max_off_policy=8)
    # A token with a ratio below stream_low drops the whole rollout.
    c.loss_options.masked_importance_sampling.update(ratio_low=0.5, ratio_high=5.0, stream_low=1e-5)
    c.optimizer.learning_rate = 5e-4  # there 1e-6
    c.optimizer.update(name="muon", momentum=0.95, weight_decay=0.01)


def prime_2026_08(c):
    """Sets PRIME-RL's constants of August 2026: DPPO's total-variation mask with a squared log-ratio; AdamW with its defaults."""
    c.loss_options.dppo_tv.update(low=0.2, high=0.2, kl_tau=1e-3)
    c.rl.update(loss="dppo_tv", advantage="group_mean", samples_per_prompt=16)  # its `grpo` only subtracts the mean
    c.rl.update(max_lag=1, max_off_policy=8)  # max_lag: TARGET_LAG
    c.optimizer.learning_rate = 5e-4  # there 1e-6
    c.optimizer.update(warmup_steps=0, beta1=0.9, beta2=0.999, weight_decay=0.01, clip_norm=1.0)


def prime_2026_09(c):
    """Sets PRIME-RL's constants of September 2026: IPO alone, with a bound of 0.3 and no KL (pull requests 3418 and 3586)."""
    prime_2026_08(c)
    c.rl.loss = "ipo"
    c.loss_options.ipo.update(bound=0.3, kl_tau=0.0)
    c.rl.refill = 1.0  # groups without a signal are replaced, so that a batch keeps its size (pull request 3463)


def swarm_lagged(c):
    """Sets OAPL (arXiv 2602.19362) for a swarm whose samples are up to 50 versions old: a regression, not an importance ratio.

    The paper's abstract reports lags of more than 400 gradient steps.
    """
    c.rl.update(loss="oapl", advantage="optimal", samples_per_prompt=16)
    c.loss_options.oapl.beta = 1e-3
    c.rl.update(max_lag=50, max_off_policy=50)
    c.optimizer.learning_rate = 5e-4


def scalerl(c):
    """Sets ScaleRL's constants (arXiv 2510.13786): CISPO, batch-normalized advantages, equal weight per prompt, a lag of up to 8.

    Two parts are missing: prompts that are solved nine times out of ten are not removed, and long reasoning is not interrupted.
    """
    c.loss_options.cispo.update(ratio_low=0.0, ratio_high=5.0)
    c.rl.update(loss="cispo", advantage="group_mean", normalize="batch_std", average="prompts", samples_per_prompt=16)
    c.rl.update(max_lag=8, max_off_policy=8)  # PipelineRL with k = 8
    c.optimizer.learning_rate = 2e-4  # at this size, 5e-4 moves too far in eight versions


RECIPES = {
    recipe.__name__: recipe for recipe in (intellect2, intellect3, prime_2026_08, prime_2026_09, scalerl, swarm_lagged)
}

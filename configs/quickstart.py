"""The quickstart: can rewards alone correct a model that was trained on wrong solutions?

    python -m rl.train --config=configs/quickstart.py --workdir=runs/quickstart

A model of 0.6 M parameters is warmed up on demonstrations of which 60 % copy the text instead of reversing it, so that
it mostly copies. RL then sees only rewards (1 for the exact reversal, else 0), on real rollouts with real proofs.

Hardware: 2 CPU cores of a Xeon, 1.6 GiB, three minutes (docs/performance.md). The held-out score is about 0.15 after the warm-up
and above 0.9 after RL.
"""

from configs import base


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    c.env.name = "reverse_text"
    c.env.options.update(min_length=3, max_length=5, alphabet="abcdefgh", reward="exact")
    c.warmup.update(num_steps=180, decoy_fraction=0.6)
    c.rl.update(num_steps=140, prompts_per_step=32, samples_per_prompt=8, advantage="group_mean_std")
    c.rl.max_lag = 0  # synchronous: every number of the run repeats bit for bit
    c.optimizer.learning_rate = 5e-4
    c.train.row_length = 160
    c.sampling.max_tokens = 12
    c.inference.num_slots = 128
    return c

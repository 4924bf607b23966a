"""A recursive language model: a model learns to read its context by a program that counts the right lines, instead of all lines.

    python -m rl.train --config=configs/environments/rlm.py --workdir=runs/rlm

A model of 0.6 M parameters is warmed up on programs of which 80 % count all lines of the context, which the prompt does not show. RL then
sees only rewards: 1 for the right count, else 0.

Hardware: 2 CPU cores; docs/environments.md has the curves.
"""

from configs import base


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    c.env.name = "rlm"
    c.env.options.update(kind="count", lines=8, words=4, turns=2, system_prompt="")
    c.warmup.update(num_steps=120, tasks_per_step=32, decoy_fraction=0.8)
    c.rl.update(num_steps=30, prompts_per_step=8, samples_per_prompt=8, advantage="group_mean_std")
    c.rl.max_lag = 0  # synchronous: every number of the run repeats bit for bit
    c.optimizer.learning_rate = 5e-4
    c.train.row_length = 320
    c.sampling.max_tokens = 96
    c.inference.update(num_slots=64, max_model_len=320)
    c.evaluation.num_tasks = 50
    return c

"""A Python session: a model learns to compute an answer by a program instead of guessing it.

    python -m rl.train --config=configs/environments/python_tool.py --workdir=runs/python_tool

A model of 0.6 M parameters is warmed up on conversations of which 60 % guess a product of two-digit numbers, and the others run a
program in the sandbox and copy its output. RL then sees only rewards: 1 for the right number, else 0.

Hardware: 2 CPU cores; docs/environments.md has the curves.
"""

from configs import base


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    c.env.name = "python_tool"
    c.env.options.update(kind="product", protocol="text", turns=3, system_prompt="")
    c.warmup.update(num_steps=240, tasks_per_step=64, decoy_fraction=0.6)
    c.rl.update(num_steps=30, prompts_per_step=8, samples_per_prompt=8, advantage="group_mean_std")
    c.rl.max_lag = 0  # synchronous: every number of the run repeats bit for bit
    c.optimizer.learning_rate = 5e-4
    c.train.row_length = 128
    c.sampling.max_tokens = 32
    c.inference.update(num_slots=64, max_model_len=128)
    c.evaluation.num_tasks = 50
    return c

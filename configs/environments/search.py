"""Search in two hops: a model learns to follow its first result with a second search, instead of answering with it.

    python -m rl.train --config=configs/environments/search.py --workdir=runs/search

A model of 0.6 M parameters is warmed up on conversations of which 80 % stop after one search, and answer with the company that it
returns; the question needs a second search, for the company's town. RL then sees only rewards: 1 for the right town, else 0.

Hardware: 2 CPU cores; 9 seconds of CPU time for a step, and 2 minutes for the warm-up. docs/environments.md has the curves.
"""

from configs import base


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    c.env.name = "search"
    c.env.options.update(facts=2000, distractors=False, protocol="text", results=1, turns=4, system_prompt="")
    c.warmup.update(num_steps=120, tasks_per_step=32, decoy_fraction=0.8)
    c.rl.update(num_steps=30, prompts_per_step=8, samples_per_prompt=8, advantage="group_mean_std")
    c.rl.max_lag = 0  # synchronous: every number of the run repeats bit for bit
    c.optimizer.learning_rate = 5e-4
    c.train.row_length = 192
    c.sampling.max_tokens = 16
    c.inference.update(num_slots=64, max_model_len=192)
    c.evaluation.num_tasks = 50
    return c

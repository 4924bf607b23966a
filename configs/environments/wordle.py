"""Wordle with 3 letters, 50 words, and 4 guesses: a model learns over several turns to use the replies to its guesses.

    python -m rl.train --config=configs/environments/wordle.py --workdir=runs/wordle

A model of 0.6 M parameters is warmed up on games of which half guess at random, and the others guess the first word of the list that
fits all replies. RL then sees only rewards, those of verifiers' `wordle`.

Hardware: 2 CPU cores, 8 minutes with much other work on them; docs/environments.md has the curves.
"""

from configs import base


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    c.env.name = "wordle"
    c.env.options.update(letters=3, words=50, guesses=4, system_prompt="")
    c.warmup.update(num_steps=400, tasks_per_step=32, decoy_fraction=0.5)
    c.rl.update(num_steps=30, prompts_per_step=8, samples_per_prompt=8, advantage="group_mean_std")
    c.rl.max_lag = 0  # synchronous: every number of the run repeats bit for bit
    c.optimizer.learning_rate = 5e-4
    c.train.row_length = 272
    c.sampling.max_tokens = 24
    c.inference.update(num_slots=64, max_model_len=272)
    c.evaluation.num_tasks = 50
    return c

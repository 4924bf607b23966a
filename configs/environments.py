"""Environments of several turns that a model of 0.6 M parameters learns on two CPU cores, and the length targets of INTELLECT-2.

    python -m rl.train --config=configs/environments.py:wordle --workdir=runs/wordle

Each small experiment warms up on demonstrations of which some are tempting and wrong. RL then sees only rewards. Hardware: 2 CPU cores,
two to nine minutes; docs/environments.md has the curves.
"""

import difflib

from configs import base, intellect2

# Tokens of thinking that a prompt asks for (INTELLECT-2, arXiv 2505.07291).
TARGETS = {"target_short": (1000, 2000, 3000, 4000), "target_long": (2000, 4000, 6000, 8000, 10000)}


def get_config(name: str = "python_tool"):
    """Returns the config of the experiment `name`."""
    if name in TARGETS:
        return _targets(name)
    if name not in SMALL:
        near = "".join(f" (did you mean {near}?)" for near in difflib.get_close_matches(name, (*SMALL, *TARGETS), 1))
        remedy = f"write --config=configs/environments.py:NAME with one of {', '.join((*SMALL, *TARGETS))}"
        raise ValueError(f"experiment {name!r} does not exist{near}; {remedy}")
    c = base.get_config()
    c.env.name = name
    c.env.options.system_prompt = ""
    c.warmup.tasks_per_step = 32
    c.rl.update(num_steps=30, prompts_per_step=8, samples_per_prompt=8, advantage="group_mean_std")
    c.rl.max_lag = 0  # synchronous: every number of the run repeats bit for bit
    c.optimizer.learning_rate = 5e-4
    c.inference.num_slots = 64
    c.evaluation.num_tasks = 50
    SMALL[name](c)
    c.train.row_length = c.inference.max_model_len
    return c


def python_tool(c):
    """Learns to compute an answer by a program instead of guessing it: 60 % of the demonstrations guess a product."""
    c.env.options.update(kind="product", protocol="text", turns=3)
    c.warmup.update(num_steps=240, tasks_per_step=64, decoy_fraction=0.6)
    c.sampling.max_tokens, c.inference.max_model_len = 32, 128


def rlm(c):
    """Learns to read a context by a program that counts the right lines: 80 % of the demonstrations count all lines."""
    c.env.options.update(kind="count", lines=8, words=4, turns=2)
    c.warmup.update(num_steps=120, decoy_fraction=0.8)
    c.sampling.max_tokens, c.inference.max_model_len = 96, 320


def search(c):
    """Learns to follow a first result with a second search: 80 % of the demonstrations answer with the first result."""
    c.env.options.update(facts=2000, distractors=False, protocol="text", results=1, turns=4)
    c.warmup.update(num_steps=120, decoy_fraction=0.8)
    c.sampling.max_tokens, c.inference.max_model_len = 16, 192


def wordle(c):
    """Learns to use the replies to its guesses (3 letters, 50 words, 4 guesses): half of the demonstrations guess at random."""
    c.env.options.update(letters=3, words=50, guesses=4)
    c.warmup.update(num_steps=400, decoy_fraction=0.5)
    c.sampling.max_tokens, c.inference.max_model_len = 24, 272


SMALL = {"python_tool": python_tool, "rlm": rlm, "search": search, "wordle": wordle}


def _targets(name: str):
    """Returns an experiment with the addresses and hardware of configs/intellect2.py: does a model learn to think for as long as asked?

    The reward falls by 0.0003 per token of distance from the target. The paper's model learned the task, and not the lengths, within
    the run. GSM8K stands in for SYNTHETIC-1.
    """
    c = intellect2.get_config()
    c.env.options.update(budget="exact", budget_targets=TARGETS[name], budget_alpha=0.0003)
    return c

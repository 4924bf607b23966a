"""TARGET-SHORT of INTELLECT-2: does a model learn to think for 1,000 to 4,000 tokens, as the prompt asks?

    python -m rl.train --config=configs/environments/target_short.py --workdir=/shared/target_short (and the addresses of configs/intellect2.py)

Source: arXiv 2505.07291. The reward falls by alpha = 0.0003 per token of distance from the target. Their model learned the task, and not
the lengths, within the run. configs/environments/target_long.py has the longer targets. GSM8K stands in for SYNTHETIC-1. Hardware: that of
configs/intellect2.py.
"""

from configs import intellect2

TARGETS = (1000, 2000, 3000, 4000)


def get_config():
    """Returns the config of this experiment."""
    c = intellect2.get_config()
    c.env.options.update(budget="exact", budget_targets=TARGETS, budget_alpha=0.0003)
    return c

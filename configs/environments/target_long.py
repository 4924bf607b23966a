"""TARGET-LONG of INTELLECT-2: the experiment of configs/environments/target_short.py with targets of 2,000 to 10,000 tokens.

    python -m rl.train --config=configs/environments/target_long.py --workdir=/shared/target_long (and the addresses of configs/intellect2.py)

Hardware: that of configs/intellect2.py.
"""

from configs.environments import target_short

TARGETS = (2000, 4000, 6000, 8000, 10000)


def get_config():
    """Returns the config of this experiment."""
    c = target_short.get_config()
    c.env.options.budget_targets = TARGETS
    return c

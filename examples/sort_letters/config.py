"""The experiment: python -m rl.train --code=examples --config=examples/sort_letters/config.py --workdir=runs/sort_letters"""

from configs import quickstart


def get_config():
    """Returns the quickstart's config with an environment, a loss, advantages, and metrics of this package."""
    c = quickstart.get_config()
    c.env.name = "sort_letters.environment:build"
    c.env.options = dict(min_length=3, max_length=5)
    c.rl.loss = "sort_letters.learning:clipped"
    c.loss_options.clipped = dict(high=2.0)
    c.rl.advantage = "sort_letters.learning:above_median"
    c.rl.metrics = ("sort_letters.learning:spread",)
    return c

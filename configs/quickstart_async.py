"""The quickstart with asynchrony: the next batch is generated while this one is trained on.

    python -m rl.train --config=configs/quickstart_async.py --workdir=runs/quickstart_async

Servers update their weights in flight; the mismatch KL shows one step of policy drift instead of rounding.
"""

from configs import quickstart


def get_config():
    """Returns the config of this experiment."""
    c = quickstart.get_config()
    c.rl.update(max_lag=1, loss="masked_importance_sampling")
    return c

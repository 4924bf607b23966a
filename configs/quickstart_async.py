"""What does asynchrony cost? The quickstart with generation of the next batch overlapping training on this one.

    python -m rl.train --config=configs/quickstart_async.py --workdir=runs/quickstart_async

Servers swap weights in flight; the mismatch KL now shows one step of policy drift instead of rounding.
"""

from configs import quickstart


def get_config():
    c = quickstart.get_config()
    c.rl.max_lag = 1
    c.rl.loss = "masked_importance_sampling"
    return c

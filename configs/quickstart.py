"""Can a 0.6 M parameter model, warmed up until it half knows a task, learn the rest from reward alone?

python -m rl.train --config=configs/quickstart.py --workdir=runs/quickstart
"""

from configs import base


def get_config():
    c = base.get_config()
    c.env.name = "reverse_text"
    c.env.options.min_length = 3
    c.env.options.max_length = 6
    c.env.options.reward = "exact"
    c.warmup.num_steps = 76
    c.rl.num_steps = 120
    c.rl.prompts_per_step = 32
    c.rl.samples_per_prompt = 16
    c.rl.advantage = "group_mean_std"
    c.optimizer.learning_rate = 5e-4
    c.rl.max_lag = 0
    c.train.row_length = 160
    c.sampling.max_tokens = 12
    c.inference.num_slots = 128
    return c

"""A config of a run with episodes of two turns, for tests: the quickstart with another environment and a smaller model."""

import pathlib

from configs import quickstart

ENV = pathlib.Path(__file__).parent / "user_code" / "turn_envs.py"  # in no package, which would all be its code


def get_config():
    """Returns the config."""
    c = quickstart.get_config()
    c.env.name, c.env.options = f"{ENV}:letters", {"turns": 2}
    c.model.update(model_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, ffn_dim=64)
    c.warmup.num_steps, c.rl.num_steps, c.rl.prompts_per_step, c.rl.samples_per_prompt = 0, 3, 4, 4
    c.evaluation.num_tasks, c.checkpoint.every, c.inference.num_slots, c.inference.prefill_batch = 4, 2, 16, 4
    c.sampling.max_tokens, c.trust.invited_rate, c.inference.max_model_len = 12, 1.0, 160
    return c

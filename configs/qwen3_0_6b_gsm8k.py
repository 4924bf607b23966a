"""Qwen3-0.6B on GSM8K, on the smallest TPU machine: how far does RL alone improve a 0.6 B model?

    python -m rl.train --config=configs/qwen3_0_6b_gsm8k.py --workdir=runs/qwen3_0_6b_gsm8k --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers=http://10.0.1.2:8100 \
        --config.topology.control_servers=http://10.0.1.2:8101

The checkpoint is Qwen/Qwen3-0.6B. Reward is 1 for the right number after "####", else 0 (rl/envs/native/gsm8k.py). Constants are
PRIME-RL's defaults with its rules of thumb for sizes: batches of at least 64 prompts' worth, groups of at least 8.

Hardware: a learner on v5e:2x4 (8 chips, one host), and as much for an inference server. Estimate: 1.1 GiB of 15.75 per chip; a
step (0.38 M tokens, median 600) takes at least 1.35 s, and a server decodes at most 64,600 tokens/s.
"""

from configs import tpu_gsm8k


def get_config():
    """Returns the config of this experiment."""
    c = tpu_gsm8k.get_config("Qwen/Qwen3-0.6B", "v5e:2x4")
    c.rl.update(num_steps=300, prompts_per_step=64, samples_per_prompt=8, loss="masked_importance_sampling")
    c.model.remat = "attention"
    c.train.update(row_length=2048, rows=32)  # four rows per chip
    c.sampling.max_tokens = 1536
    c.evaluation.every = 50
    c.inference.update(num_slots=160, num_pages=2048, max_model_len=2048)
    c.plan.update(median_length=600, length_sigma=0.7)
    return c

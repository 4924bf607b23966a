"""Qwen3-30B-A3B at the sizes of PRIME-RL's example on mathematics: does a small MoE model learn like a dense one?

    python -m rl.train --config=configs/qwen3_30b_a3b.py --workdir=/shared/qwen3_30b_a3b --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers="('http://10.0.1.2:8100',)" \
        --config.topology.control_servers="('http://10.0.1.2:8101',)"

The checkpoint is Qwen/Qwen3-30B-A3B. Source: PRIME-RL's qwen3-30b-a3b example of August 2026: batches of 512 rollouts, rows of
32,768 tokens; its default optimizer and loss (binary total-variation mask, arXiv 2602.04879). GSM8K stands in for its tasks.

Hardware: a learner on v5p:2x4x4 (32 chips), without expert parallelism, and inference servers of one v5p host each (4 chips).
Estimate: 14.2 GiB of 95.74 per chip; a step (3.5 M tokens, median 5,000) takes at least 11.2 s, and a server decodes at most 2,660/s.
"""

from configs import tpu_gsm8k


def get_config():
    """Returns the config of this experiment."""
    c = tpu_gsm8k.get_config("Qwen/Qwen3-30B-A3B", "v5p:2x4x4")
    c.rl.update(num_steps=400, prompts_per_step=64, samples_per_prompt=8, loss="dppo_tv")
    c.model.remat = "attention"
    c.train.update(row_length=32768, rows=32)  # one row per chip
    c.sampling.max_tokens = 30000
    c.inference.update(num_slots=64, max_model_len=32768, prefill_batch=8)
    c.plan.median_length = 5000
    return c

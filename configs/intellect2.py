"""The recipe of INTELLECT-2 on QwQ-32B: does globally distributed RL improve a 32 B reasoning model?

    python -m rl.train --config=configs/intellect2.py --workdir=/shared/intellect2 --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers="('http://10.0.1.2:8100', 'http://10.0.1.3:8100')" \
        --config.topology.control_servers="('http://10.0.1.2:8101', 'http://10.0.1.3:8101')"

The checkpoint is Qwen/QwQ-32B. Source: arXiv 2505.07291 and PRIME-RL's configs/{training,inference}/intellect2_qwq.toml (May
2025): 256 prompts x 16 samples, packed rows of 32,768 tokens, at most 16,000 per rollout, AdamW 3e-7, and the constants of
configs/recipes.py. Its tasks (SYNTHETIC-1, math and code with a length reward) are not included; GSM8K stands in.

Hardware: a learner on v5p:4x4x4 (64 chips) and inference servers of one v5p host each (4 chips). Estimate: 7.6 GiB of 95.74 per
chip; a step (26 M tokens, median 5,000) takes at least 297 s, and a server decodes at most 2,100 tokens/s.
"""

from configs import recipes, tpu_gsm8k


def get_config():
    """Returns the config of this experiment."""
    c = tpu_gsm8k.get_config("Qwen/QwQ-32B", "v5p:4x4x4")
    recipes.intellect2(c)
    c.rl.update(num_steps=400, prompts_per_step=256)
    c.model.remat = "attention"
    c.train.update(row_length=16384, rows=128)  # two rows per chip: as many tokens as one of 32,768, with less padding
    c.optimizer.learning_rate = 3e-7
    c.sampling.max_tokens = 15000  # 16,000 minus a prompt of up to 1,000
    c.inference.update(num_slots=64, max_model_len=16000, prefill_batch=8)
    c.plan.median_length = 5000
    return c

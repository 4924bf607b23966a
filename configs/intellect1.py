"""INTELLECT-1 on GSM8K: does RL with exact rewards improve a 10 B model that was itself trained over the internet?

    python -m rl.train --config=configs/intellect1.py --workdir=/shared/intellect1 --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers="('http://10.0.1.2:8100',)" \
        --config.topology.control_servers="('http://10.0.1.2:8101',)"

The checkpoint is PrimeIntellect/INTELLECT-1-Instruct (arXiv 2412.01152: a Llama of 42 layers, contexts of 8,192 tokens,
pretrained by DiLoCo on 1 T tokens). The RL constants are PRIME-RL's defaults: groups of 16, masked importance sampling.

Hardware: a learner on v5e:8x8 (64 chips) and inference servers of one v5e host each (8 chips). Estimate: 2.4 GiB of 15.75 per
chip; a longest step (4.2 M tokens) takes at least 26.5 s, and a server decodes at most 6,500 tokens/s.
"""

from configs import tpu_gsm8k


def get_config():
    """Returns the config of this experiment."""
    c = tpu_gsm8k.get_config("PrimeIntellect/INTELLECT-1-Instruct", "v5e:8x8")
    c.rl.update(num_steps=200, prompts_per_step=64, samples_per_prompt=16, loss="masked_importance_sampling")
    c.train.update(row_length=8192, rows=64)  # one row per chip
    c.sampling.max_tokens = 2048
    c.inference.update(num_slots=64, max_model_len=4096)
    return c

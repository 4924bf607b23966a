"""The recipe of INTELLECT-3 on GLM-4.5-Air: how far does RL improve a 106 B MoE model?

    python -m rl.train --config=configs/intellect3.py --workdir=/shared/intellect3 --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers="('http://10.0.1.2:8100', 'http://10.0.1.3:8100')" \
        --config.topology.control_servers="('http://10.0.1.2:8101', 'http://10.0.1.3:8101')"

The checkpoint is zai-org/GLM-4.5-Air-Base. Source: arXiv 2512.16144 and PRIME-RL at its release (December 2025): 256 prompts x
16 samples, contexts of 65,536 tokens, Muon at 1e-6, weights swapped in flight, evaluation every 15 of about 600 steps, no expert
parallelism, and the constants of configs/recipes.py. Its environments (math, code, science, logic, search, software) are not
included; GSM8K stands in.

Hardware: a learner on v5p:4x4x8 (128 chips), one row of 65,536 tokens per chip, and inference servers of one v5p host each
(4 chips). Estimate: 9.4 GiB of 95.74 per chip; a longest step (268 M tokens) takes at least 2,340 s, and a server decodes at most
490 tokens/s.
"""

from configs import recipes, tpu_gsm8k


def get_config():
    """Returns the config of this experiment."""
    c = tpu_gsm8k.get_config("zai-org/GLM-4.5-Air-Base", "v5p:4x4x8")
    recipes.intellect3(c)
    c.model.remat = "offload"  # inputs of the layers, 23 GiB per chip, stay in host memory
    c.rl.update(num_steps=600, prompts_per_step=256)
    c.train.update(row_length=65536, rows=128)  # one row per chip
    c.optimizer.learning_rate = 1e-6
    c.optimizer.beta2 = 0.95  # of the parameters that Muon leaves to AdamW
    c.sampling.max_tokens = 60000
    c.evaluation.every = 15
    c.inference.update(num_slots=12, max_model_len=65536, prefill_batch=8)
    return c

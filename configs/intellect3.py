"""The recipe of INTELLECT-3 on GLM-4.5-Air: how far do two stages of supervised fine-tuning, then RL, improve a 106 B MoE model?

    python -m rl.sft --config=configs/intellect3.py:reasoning --workdir=/shared/reasoning --config.warmup.data=data/reasoning
    python -m rl.sft --config=configs/intellect3.py:agentic --workdir=/shared/agentic --config.warmup.data=data/agentic \
        --config.init_from=/shared/reasoning

    python -m rl.train --config=configs/intellect3.py --workdir=/shared/intellect3 --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers="('http://10.0.1.2:8100', 'http://10.0.1.3:8100')" \
        --config.topology.control_servers="('http://10.0.1.2:8101', 'http://10.0.1.3:8101')"

The checkpoint is zai-org/GLM-4.5-Air-Base. Source: arXiv 2512.16144 and PRIME-RL at its release (December 2025): 256 prompts x
16 samples, contexts of 65,536 tokens, Muon at 1e-6, weights swapped in flight, evaluation every 15 of about 600 steps, no expert
parallelism, and the constants of configs/recipes.py. Its environments (math, code, science, logic, search, software) are not
included; GSM8K stands in.

The supervised stages are those of section 3. "reasoning": distilled reasoning in rows of 65,536 tokens, 33 M tokens per step, Muon at
5e-5 after 300 steps of warm-up. "agentic": 800 steps on traces with tools in rows of 98,304 tokens, split over two chips, Muon at 5e-8.
Their data is not included: `warmup.data` is conversations in JSONL or Parquet files. A batch is a number of conversations, which makes
33 M tokens if they fill their rows. Sources disagree on the tokens of the first stage; its steps are those of 46 B.

Hardware: a learner on v5p:4x4x8 (128 chips), one row of 65,536 tokens per chip, and inference servers of one v5p host each
(4 chips). Estimate: 9.4 GiB of 95.74 per chip; a step (86 M tokens, median 16,000) takes at least 413 s, and a server decodes 48
sequences of 16,128 tokens on average at 1,510 tokens/s at most, or on two hosts 176 of 16,384 at 5,140.
"""

from configs import recipes, tpu_gsm8k


def get_config(stage: str = "rl"):
    """Returns the config of a stage: "reasoning", "agentic", or "rl"."""
    if stage not in ("reasoning", "agentic", "rl"):
        raise ValueError(
            f"stage {stage!r} does not exist; write --config=configs/intellect3.py:reasoning, :agentic, or :rl"
        )
    c = tpu_gsm8k.get_config("zai-org/GLM-4.5-Air-Base", "v5p:4x4x8")
    recipes.intellect3(c)
    c.model.remat = "offload"  # inputs of the layers, 23 GiB per chip, stay in host memory
    c.rl.update(num_steps=600, prompts_per_step=256)
    c.train.update(row_length=65536, rows=128)  # one row per chip
    c.optimizer.learning_rate = 1e-6
    c.optimizer.beta2 = 0.95  # of the parameters that Muon leaves to AdamW
    c.sampling.max_tokens = 60000
    c.evaluation.every = 15
    c.inference.update(num_slots=48, num_pages=12096, max_model_len=65536, prefill_batch=8)
    c.plan.median_length = 16000
    if stage == "reasoning":
        c.warmup.update(num_steps=1400, tasks_per_step=512, learning_rate=5e-5, rate_steps=300)
    elif stage == "agentic":
        c.warmup.update(num_steps=800, tasks_per_step=344, learning_rate=5e-8, rate_steps=300)
        c.train.update(row_length=98304, rows=64)
        c.inference.max_model_len = 98304
        c.mesh.context = 2
    return c

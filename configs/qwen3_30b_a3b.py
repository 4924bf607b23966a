"""Qwen3-30B-A3B at the sizes of PRIME-RL's example on mathematics: does a small MoE model learn like a dense one?

    python -m rl.plan --config=configs/qwen3_30b_a3b.py --topology=v5p:2x4x4
    python -m rl.train --config=configs/qwen3_30b_a3b.py --workdir=/shared/qwen3_30b_a3b --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers="('http://10.0.1.2:8100',)"

Run the second command on every host of the slice, with the work directory on a shared disk (see configs/intellect2.py).

First: `hf download Qwen/Qwen3-30B-A3B --local-dir checkpoints/Qwen3-30B-A3B`, and the train.jsonl and test.jsonl of
github.com/openai/grade-school-math in data/gsm8k. Servers and workers elsewhere need the tokenizer at the same path.

Source: PRIME-RL's qwen3-30b-a3b example of August 2026: batches of 512 rollouts, rows of 32,768 tokens; its default optimizer
(AdamW 1e-6, (0.9, 0.999), weight decay 0.01, clip 1.0) and loss (binary total-variation mask, arXiv 2602.04879). GSM8K from
`env.options.path` stands in for its tasks.

Hardware: a learner on v5p:2x4x4 (32 chips), everything split over all of them (fsdp), no expert parallelism; inference servers
of one v5p host each (4 chips, tensor parallel).

Estimate of rl.plan: parameters, gradients, and moments take 14.2 GiB of 95.74 per chip; a step in which
every rollout is as long as it may be (16.8 M tokens) takes at least 94 s, and a server decodes at most 2,660 tokens/s.
Both assume the chips' full rate: bounds, not measurements.
"""

from configs import base, presets


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    presets.use(c, "qwen3_30b_a3b")
    c.init_from = c.tokenizer = "checkpoints/Qwen3-30B-A3B"
    c.env.name = "gsm8k"
    c.env.options.path = "data/gsm8k"
    c.rl.num_steps = 400
    c.rl.prompts_per_step = 64
    c.rl.samples_per_prompt = 8
    c.rl.loss = "dppo_tv"
    c.train.row_length = 32768
    c.train.rows = 32  # one row per chip
    c.train.share_prompts = False  # the TPU's attention kernel supports packed sequences, not shared prompts
    c.optimizer.learning_rate = 1e-6
    c.optimizer.beta2 = 0.999
    c.optimizer.weight_decay = 0.01
    c.sampling.max_tokens = 30000
    c.inference.num_slots = 64
    c.inference.max_model_len = 32768
    c.inference.prefill_batch = 8
    c.inference.steps_per_call = 16
    c.trust.logprob_tolerance = 0.05  # bfloat16
    c.trust.check_fraction = 0.0  # no CPU of a host keeps up; `rl.validator serve` replays elsewhere
    c.topology.mode = "remote"
    c.plan.topology = "v5p:2x4x4"
    return c

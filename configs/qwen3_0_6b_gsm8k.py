"""Qwen3-0.6B on GSM8K, on the smallest TPU machine: how far does RL alone improve a 0.6 B model?

    python -m rl.plan --config=configs/qwen3_0_6b_gsm8k.py --topology=v5e:2x4
    python -m rl.train --config=configs/qwen3_0_6b_gsm8k.py --workdir=runs/qwen3_0_6b_gsm8k --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers=http://10.0.1.2:8100

The learner runs on the machine at 10.0.0.2, which prints the commands for server and workers and waits for them.

First: `hf download Qwen/Qwen3-0.6B --local-dir checkpoints/Qwen3-0.6B`, and the train.jsonl and test.jsonl of
github.com/openai/grade-school-math in data/gsm8k. Servers and workers elsewhere need the tokenizer at the same path.

Reward is 1 for the right number after "####", else 0 (rl/envs/gsm8k.py). Constants are PRIME-RL's defaults of August 2026
(AdamW 1e-6, (0.9, 0.999), weight decay 0.01, clip 1.0) with its rules of thumb for sizes: batches of at least 64 prompts'
worth, groups of at least 8.

Hardware: v5e:2x4 (8 chips, one host) for the learner, parameters and batch split over all of them (fsdp), and as much for an
inference server (tensor parallel).

Estimate of rl.plan: parameters, gradients, and moments take 1.1 GiB of 15.75 per chip; a step in which
every rollout is as long as it may be (1.0 M tokens) takes at least 6.0 s, and a server decodes at most 26,800 tokens/s.
Both assume the chips' full rate: bounds, not measurements.
"""

from configs import base, presets


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    presets.use(c, "qwen3_0_6b")
    c.init_from = c.tokenizer = "checkpoints/Qwen3-0.6B"
    c.env.name = "gsm8k"
    c.env.options.path = "data/gsm8k"
    c.rl.num_steps = 300
    c.rl.prompts_per_step = 64
    c.rl.samples_per_prompt = 8
    c.rl.loss = "masked_importance_sampling"
    c.train.row_length = 8192
    c.train.rows = 8  # one row per chip
    c.train.share_prompts = False  # the TPU's attention kernel supports packed sequences, not shared prompts
    c.optimizer.learning_rate = 1e-6
    c.optimizer.beta2 = 0.999
    c.optimizer.weight_decay = 0.01
    c.sampling.max_tokens = 1536
    c.evaluation.every = 50
    c.inference.num_slots = 128
    c.inference.max_model_len = 2048
    c.inference.steps_per_call = 16
    c.trust.logprob_tolerance = 0.05  # bfloat16
    c.topology.mode = "remote"
    c.plan.topology = "v5e:2x4"
    return c

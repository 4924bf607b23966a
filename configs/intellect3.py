"""The recipe of INTELLECT-3 on GLM-4.5-Air: how far does RL improve a 106 B MoE model?

    python -m rl.plan --config=configs/intellect3.py --topology=v5p:4x4x8
    python -m rl.train --config=configs/intellect3.py --workdir=/shared/intellect3 --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers="('http://10.0.1.2:8100', 'http://10.0.1.3:8100')"

Run the second command on every host of the slice, with the work directory on a shared disk (see configs/intellect2.py).

First: `hf download zai-org/GLM-4.5-Air-Base --local-dir checkpoints/GLM-4.5-Air-Base`, and the train.jsonl and test.jsonl of
github.com/openai/grade-school-math in data/gsm8k. Servers and workers elsewhere need the tokenizer at the same path.

Source: arXiv 2512.16144 and PRIME-RL at its release (December 2025): 256 prompts x 16 samples, contexts of 65,536 tokens,
Muon at 1e-6, masked token importance sampling with ratios kept in [0.5, 5] directly against the sampler's
log-probabilities (a ratio below 1e-5 drops the whole rollout), advantages centred but not divided, weights swapped in flight,
one step of lag, rollouts dropped after eight policies, evaluation every 15 of about 600 steps. Its environments (math, code,
science, logic, search, software) are not included; GSM8K from `env.options.path` stands in.

Hardware: a learner on v5p:4x4x8 (128 chips), everything split over all of them (fsdp), one row of 65,536 tokens per chip,
inputs of the layers offloaded to the hosts and, as there, no expert parallelism; inference servers of one v5p host each (4 chips:
heads, experts and vocabulary split over them).

Estimate of rl.plan: parameters, gradients, and moments take 9.4 GiB of 95.74 per chip; a step in which
every rollout is as long as it may be (268 M tokens) takes at least 1,990 s, and a server decodes at most 490 tokens/s.
Both assume the chips' full rate: bounds, not measurements.
"""

from configs import base, presets


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    presets.use(c, "glm_4_5_air")
    c.model.remat = "offload"  # inputs of the layers, 23 GiB per chip, stay in host memory
    c.init_from = c.tokenizer = "checkpoints/GLM-4.5-Air-Base"
    c.env.name = "gsm8k"
    c.env.options.path = "data/gsm8k"
    c.rl.num_steps = 600
    c.rl.prompts_per_step = 256
    c.rl.samples_per_prompt = 16
    c.rl.loss = "masked_importance_sampling"
    c.loss_options.masked_importance_sampling.ratio_low = 0.5
    c.loss_options.masked_importance_sampling.ratio_high = 5.0
    c.loss_options.masked_importance_sampling.stream_low = 1e-5
    c.rl.advantage = "group_mean"
    c.rl.max_lag = 1
    c.rl.max_off_policy = 8
    c.train.row_length = 65536
    c.train.rows = 128  # one row per chip
    c.train.share_prompts = False  # the TPU's attention kernel supports packed sequences, not shared prompts
    c.optimizer.name = "muon"
    c.optimizer.learning_rate = 1e-6
    c.optimizer.momentum = 0.95
    c.optimizer.weight_decay = 0.01
    c.sampling.max_tokens = 60000
    c.evaluation.every = 15
    c.inference.num_slots = 12
    c.inference.max_model_len = 65536
    c.inference.prefill_batch = 8
    c.inference.steps_per_call = 16
    c.trust.logprob_tolerance = 0.05  # bfloat16
    c.trust.check_fraction = 0.0  # no CPU of a host keeps up; `rl.validator serve` replays elsewhere
    c.topology.mode = "remote"
    c.plan.topology = "v5p:4x4x8"
    return c

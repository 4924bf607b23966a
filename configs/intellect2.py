"""The recipe of INTELLECT-2 on QwQ-32B: does globally distributed RL improve a 32 B reasoning model?

    python -m rl.plan --config=configs/intellect2.py --topology=v5p:4x4x4
    python -m rl.train --config=configs/intellect2.py --workdir=/shared/intellect2 --config.topology.host=10.0.0.2 \
        --config.topology.relay_host=10.0.0.2 --config.topology.servers="('http://10.0.1.2:8100', 'http://10.0.1.3:8100')"

Run the second command on every host of the slice (`gcloud compute tpus tpu-vm ssh NAME --worker=all --command=...`): they find each
other. The work directory and `init_from` are on a disk that all share. 10.0.0.2 is the first host, which prints the commands for
servers and workers and waits for them. If one host ends, all end, and the same command resumes.

First: `hf download Qwen/QwQ-32B --local-dir checkpoints/QwQ-32B`, and the train.jsonl and test.jsonl of
github.com/openai/grade-school-math in data/gsm8k. Servers and workers elsewhere need the tokenizer at the same path.

Source: arXiv 2505.07291 and PRIME-RL's configs/{training,inference}/intellect2_qwq.toml (May 2025): 256 prompts x 16
samples, packed rows of 32,768 tokens, at most 16,000 per rollout, temperature 0.6, AdamW 3e-7 (0.9, 0.99) with weight
decay 0.01 and 25 steps of warm-up, gradients clipped at 0.1, eight optimizer steps per batch against the learner's own old
log-probabilities, two-sided clip of 0.2 with delta = 4, entropy bonus 0.001, advantages divided by their standard deviation,
generation with a lag of up to two steps. Its tasks (SYNTHETIC-1, math and code with a length reward)
are not included; GSM8K from `env.options.path` stands in.

Hardware: a learner on v5p:4x4x4 (64 chips), parameters, gradients and moments split over all of them (fsdp), and rollout
servers of one v5p host each (4 chips, tensor parallel).

Estimate of rl.plan: parameters, gradients, and moments take 7.6 GiB of 95.74 per chip; a step in which
every rollout is as long as it may be (67 M tokens) takes at least 1,000 s, and a server decodes at most 2,100 tokens/s.
Both assume the chips' full rate: bounds, not measurements.
"""

from configs import base, presets


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    presets.use(c, "qwq_32b")
    c.init_from = c.tokenizer = "checkpoints/QwQ-32B"
    c.env.name = "gsm8k"
    c.env.options.path = "data/gsm8k"
    c.rl.num_steps = 400
    c.rl.prompts_per_step = 256
    c.rl.samples_per_prompt = 16
    c.rl.loss = "two_sided_clip"
    c.rl.advantage = "group_mean_std"
    c.rl.max_lag = 2
    c.objective.old_logprobs = "learner"
    c.objective.optimizer_steps = 8
    c.objective.entropy_coef = 1e-3
    c.train.row_length = 32768
    c.train.rows = 64  # one row per chip
    c.train.share_prompts = False  # the TPU's attention kernel supports packed sequences, not shared prompts
    c.optimizer.learning_rate = 3e-7
    c.optimizer.warmup_steps = 25
    c.optimizer.beta1 = 0.9
    c.optimizer.beta2 = 0.99
    c.optimizer.weight_decay = 0.01
    c.optimizer.clip_norm = 0.1
    c.sampling.temperature = 0.6
    c.sampling.max_tokens = 15000  # 16,000 minus a prompt of up to 1,000
    c.inference.num_slots = 64
    c.inference.max_model_len = 16000
    c.inference.prefill_batch = 8
    c.inference.steps_per_call = 16
    c.trust.logprob_tolerance = 0.05  # bfloat16
    c.trust.check_fraction = 0.0  # no CPU of a host keeps up; `rl.validator serve` replays elsewhere
    c.topology.mode = "remote"
    c.plan.topology = "v5p:4x4x4"
    return c

"""Qwen3-0.6B on GSM8K with adapters, on one chip: do thirty steps of RL in half an hour improve it? examples/colab.ipynb runs it.

    python -m rl.train --config=examples/gsm8k_one_chip.py --workdir=runs/gsm8k

The data are the Parquet files of openai/gsm8k, in data/gsm8k (`hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k
--include "main/*"`). Reward is 1 if the last number of a completion is that of the answer. With `enable_thinking=False` Qwen3 begins
no separate reasoning, so that 384 tokens suffice.

Hardware: v5e:1x1, or a GPU. No chip was at hand: bench/results/tpu_compiled.md has the plan's estimate.
"""

from configs import finetune


def get_config():
    """Returns the config of this experiment."""
    c = finetune.get_config()
    c.env.name = "dataset"
    c.env.options.update(path="data/gsm8k", prompt="question", answer="answer", reward="number")
    c.env.options.system_prompt = "Solve the problem in a few short steps. End with the number that is the answer."
    c.chat_template_kwargs.enable_thinking = False
    c.sampling.max_tokens = 384
    c.rl.num_steps = 30
    c.optimizer.update(learning_rate=5e-5, warmup_steps=3)
    c.evaluation.every = 10
    c.checkpoint.every = 10
    return c

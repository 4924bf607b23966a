"""A mix of environments: does one policy learn two tasks from one stream of batches?

    python -m rl.train --config=examples/mix.py --workdir=runs/mix
    python -m rl.train --config=examples/mix.py:DIRECTORY --workdir=runs/mix_gsm8k --config.init_from=Qwen/Qwen3-0.6B \
        --config.chat_template_kwargs.enable_thinking=False

The model and the warm-up are those of the quickstart (configs/quickstart.py). Two of three groups are of reversing letters, with 8 samples
each, and one is of reversing digits, with 12 samples and its own advantage. With a DIRECTORY that has the files of GSM8K (train.jsonl and
test.jsonl), every fourth group is of GSM8K, whose completions may be longer.
"""

from configs import quickstart


def get_config(gsm8k: str = ""):
    """Returns the config of this experiment; `gsm8k` is a directory with the files of GSM8K, or "" for a mix without them."""
    c = quickstart.get_config()
    options = dict(c.env.options.to_dict(), reward="exact")
    c.envs.letters = dict(name="reverse_text", options=options, ratio=2.0)
    c.envs.digits = dict(name="reverse_text", options=dict(options, alphabet="01234567"), ratio=1.0)
    c.envs.digits.update(samples_per_prompt=12, advantage="rloo")
    if gsm8k:
        c.envs.gsm8k = dict(name="gsm8k", options=dict(path=gsm8k), ratio=1.0, max_tokens=256)
        c.warmup.num_steps = 0  # GSM8K has no wrong solutions to begin with
        c.inference.max_model_len = 1536  # bytes, for a tokenizer of bytes
        c.train.row_length = 1536
    return c

"""Runs a peer's sampler for bench/inference.py, in an interpreter that has it; imports nothing of ours.

    PYTHON bench/inference_peer.py transformers|tunix SHAPE

Reads a line {"prompts", "lengths"} and answers with [seconds, CPU seconds], until its input ends. A batch is all
prompts together, sampled at temperature 1 up to the longest length: neither can stop one row earlier by its own length.
"""

import json
import resource
import sys
import time


def main() -> None:
    """Answers rounds until the input ends."""
    name, shape = sys.argv[1], json.loads(sys.argv[2])
    try:
        run = {"transformers": transformers_sampler, "tunix": tunix_sampler}[name](shape)
    except ImportError as error:
        sys.exit(f"{name}: {error}")
    for line in sys.stdin:
        work = json.loads(line)
        begun, cpu = time.perf_counter(), _cpu_s()
        run(work["prompts"], max(work["lengths"]))
        print(json.dumps([time.perf_counter() - begun, _cpu_s() - cpu]), flush=True)


def transformers_sampler(shape):
    """Returns a function that samples with transformers."""
    import torch
    import transformers

    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["model_dim"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["ffn_dim"],
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()

    def run(prompts, num_new):
        ids = torch.tensor(prompts)
        options = dict(max_new_tokens=num_new, min_new_tokens=num_new, do_sample=True, top_k=0, pad_token_id=0)
        with torch.no_grad():
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return run


def tunix_sampler(shape):
    """Returns a function that samples with Tunix."""
    import jax
    import numpy as np
    from flax import nnx
    from tunix.generate import sampler as sampler_lib
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=shape["num_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["model_dim"],
        hidden_dim=shape["ffn_dim"],
        num_heads=shape["num_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_kv_heads"],
        rope_theta=10000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(jax.random.key(0)))

    class Tokenizer:
        """The tokenizer that the peer's sampler needs; our prompts are token ids written as words."""

        def encode(self, text, **kwargs):
            return [int(word) for word in text.split()]

        def decode(self, ids, **kwargs):
            return " ".join(map(str, np.asarray(ids).tolist()))

        def bos_id(self):
            return 0

        def eos_id(self):
            return shape["vocab_size"] + 1  # never

        def pad_id(self):
            return 0

        def dedup_bos_ids(self, ids):
            return ids

    made = {}

    def run(prompts, num_new):
        longest = len(prompts[0]) + 1
        if num_new not in made:
            cache = sampler_lib.CacheConfig(
                cache_size=longest + num_new,
                num_layers=shape["num_layers"],
                num_kv_heads=shape["num_kv_heads"],
                head_dim=shape["head_dim"],
            )
            made[num_new] = sampler_lib.Sampler(model, Tokenizer(), cache)
        texts = [" ".join(map(str, prompt)) for prompt in prompts]
        made[num_new](texts, max_generation_steps=num_new, max_prompt_length=longest, temperature=1.0, seed=0)

    return run


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()

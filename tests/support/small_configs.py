"""Every experiment of configs/ with its parameters shrunk, so that a CPU samples and replays it in seconds."""

import functools
import importlib
import json
import pathlib

import jax
import jax.numpy as jnp

from configs import recipes
from models import transformer
from rl.experiment import experiment
from rl.experiment.plan import sizes
from tests.support import tiny

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
NO_EXPERIMENTS = ("__init__", "base", "presets", "tpu_gsm8k", "recipes", "environments")
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem not in NO_EXPERIMENTS)
NAMES += [f"recipes:{name}" for name in recipes.RECIPES]
DIMS = dict(vocab_size=272, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64)


def shrunk(name: str, folder: pathlib.Path, *, prompts: int, samples: int, steps: int, **rl) -> experiment.Experiment:
    """Returns the experiment `name` (a file of configs/, or recipes:NAME) with a tiny model; `folder` gets the data that it needs. `rl` are further fields of config.rl."""
    module, _, argument = name.partition(":")
    c = importlib.import_module(f"configs.{module}").get_config(*filter(None, [argument]))
    m = c.model
    m.update(DIMS)
    if m.num_experts:
        m.update(num_experts=4, experts_per_token=2, expert_ffn_dim=16, first_dense_layers=min(1, m.first_dense_layers))
    if m.rope_dim:
        m.rope_dim = 4
    c.init_from, c.tokenizer, c.topology.mode = "", "byte_chatml", "local"
    c.rl.update(prompts_per_step=prompts, samples_per_prompt=samples, num_steps=steps, **rl)
    c.sampling.max_tokens = min(c.sampling.max_tokens, 24)
    c.inference.update(num_slots=32, prefill_batch=8, max_model_len=min(c.inference.max_model_len or 192, 192))
    if c.env.name == "gsm8k":
        rows = [{"question": f"What is {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(1, 200)]
        data = folder / "gsm8k"  # its digest covers all files
        data.mkdir(exist_ok=True)
        for file in ("train.jsonl", "test.jsonl"):
            (data / file).write_text("\n".join(map(json.dumps, rows)))
        c.env.options.update(path=str(data), system_prompt="")
    return sizes.settled(c, sizes.present, experiment.resolve)[0]


@functools.cache
def params(model, seed=0) -> transformer.Params:
    """Returns random weights of unit gain: compiling `init` takes a second per layer."""
    return jax.tree.map(jnp.asarray, tiny.params(model, seed))

"""The model that most tests run (two layers of 32 dims, float32, every switch stated once), and a rollout to change."""

import dataclasses

import jax
import numpy as np

from configs import base, presets
from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from models import transformer
from sharding.mesh import rules


def model(**changes) -> config_lib.ModelConfig:
    fields = dict(vocab_size=272, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64)
    fields |= dict(rope_theta=1000.0, norm_eps=1e-6, qk_norm=True, tie_embeddings=True, norm_topk=True)
    fields |= dict(num_experts=0, experts_per_token=0, expert_ffn_dim=0, first_dense_layers=0)
    fields |= dict(param_dtype="float32", dtype="float32", remat="none")
    return config_lib.ModelConfig(**fields | changes)


def use(c, **changes) -> None:
    """Gives an experiment's config the model of `model`."""
    c.model.update({name: value for name, value in dataclasses.asdict(model(**changes)).items() if name in c.model})


def params(config: config_lib.ModelConfig, seed: int) -> transformer.Params:
    """Matrices of unit gain drawn by numpy, scales in 0.5 .. 1.5: compiling `init` takes a second per layer, and tokens are far
    from uniform, so that a wrong key or position shows."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        if len(spec.shape) == 1:
            return rng.uniform(0.5, 1.5, spec.shape).astype(np.float32)
        return (rng.standard_normal(spec.shape) * config.model_dim**-0.5).astype(np.float32)

    return jax.tree.map(draw, transformer.specs(config), is_leaf=rules.is_spec)


def drawn(specs, seed: int, scale: float):
    """Returns the tree of `specs` with normal numbers of that standard deviation, float32."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        return (rng.standard_normal(spec.shape) * scale).astype(np.float32)

    return jax.tree.map(draw, specs, is_leaf=rules.is_spec)


def rollout(mask, **changes) -> rollout_lib.Rollout:
    """Returns an unsigned rollout whose tokens are sampled where `mask` is True; every other field is as simple as possible."""
    fields = dict(
        tokens=np.zeros(len(mask), np.int32),
        sampled_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.zeros(len(mask), np.int32),
        temperature=1.0,
        seed=0,
        task=rollout_lib.TaskRef("e", 0, 0, 0),
        sample=0,
        step=1,
        reward=0.0,
        rewards={},
        finish_reason="length",
        proofs=b"",
        worker="",
        signature=b"",
    )
    return rollout_lib.Rollout(**fields | changes)


def published(name: str, **changes) -> config_lib.ModelConfig:
    """Returns the config of a published model in bfloat16, as experiments use it."""
    c = base.get_config()
    presets.use(c, name)
    return config_lib.ModelConfig(**c.model.to_dict() | {"param_dtype": "bfloat16"} | changes)

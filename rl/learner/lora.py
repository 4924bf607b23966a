"""Low-rank adapters (LoRA, arXiv 2106.09685): train A and B of W + (alpha / rank) A B while W stays.

1. `specs` names an (a, b) pair for each targeted kernel of the model, in the same language as the model's own parameters:
   the pair is drawn, sharded, optimised and saved by the code that does so for those.
2. `merge` gives the whole model's parameters with the adapters added in. The learner differentiates through it, and what it
   returns is what is published and exported: the rollout servers run the very weights that the learner computed with.
3. b starts at 0: at first the merged model is the base, bit for bit.

Left out: applying A and B beside W without merging. It would save the pass that forms the gradient of W (a third of a step) at
the price of a second definition of every matmul in `models`; here the gradient of W exists for one kernel at a time, has no
optimizer state, and only the adapters' gradients are accumulated. No dropout either: a rollout server has none.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from rl.learner import optimizers
from sharding import rules

KERNELS = ("q", "k", "v", "o", "gate", "up", "down")
RANK_AXIS = "rank"  # never split


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """rank 0 turns adapters off: all parameters train."""

    rank: int = 0
    alpha: float = 32.0  # the update counts alpha / rank
    targets: tuple[str, ...] = KERNELS  # last part of a parameter's name

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"lora.rank = {self.rank} must be at least 0 (0: no adapters)")
        if self.rank and not self.targets:
            raise ValueError(
                "lora.targets is empty: nothing would train; name kernels such as 'q', or set lora.rank to 0"
            )

    def __bool__(self) -> bool:
        return self.rank > 0


def specs(model_specs: dict, config: LoraConfig) -> dict:
    """The adapters' tree of `ParamSpec`: at the place of each targeted kernel {"a": ..., "b": ...}; the rest is left out.

    A kernel [D, H, C] has a [D, r] and b [r, H, C]; one of experts [E, D, F] has a [E, D, r] and b [E, r, F].

    Raises:
      ValueError: no parameter has a name of `targets`, or one that has is no matrix.
    """
    found = set()

    def adapt(tree, name=""):
        if rules.is_spec(tree):
            if name not in config.targets:
                return None
            if not rules.is_matrix(tree):
                raise ValueError(f"lora.targets names {name!r}, which is no matrix: its dims are {tree.logical_axes}")
            found.add(name)
            return _adapter(tree, config.rank)
        adapted = {key: adapt(child, key) for key, child in tree.items()}
        return {key: child for key, child in adapted.items() if child is not None} or None

    adapters = adapt(model_specs)
    if missing := [name for name in config.targets if name not in found]:
        raise ValueError(
            f"lora.targets names {missing[0]!r}, but the model has no such parameter; it may have {KERNELS}"
        )
    return adapters


def init(key: jax.Array, adapter_specs: dict) -> dict:
    """Draws the adapters: a normal with standard deviation 1 / sqrt(inputs), b zero."""
    leaves, structure = jax.tree.flatten(adapter_specs, is_leaf=rules.is_spec)
    drawn = [spec.init(jax.random.fold_in(key, index), spec.shape, spec.dtype) for index, spec in enumerate(leaves)]
    return jax.tree.unflatten(structure, drawn)


def merge(params: dict, adapters: dict, model_specs: dict, config: LoraConfig) -> dict:
    """The model's parameters with W + (alpha / rank) A B at the adapted places; summed in float32, in W's dtype."""

    def add(tree, adapter, spec):
        if adapter is None:
            return tree
        if rules.is_spec(spec):
            return _add(tree, adapter, spec, config.alpha / config.rank)
        return {key: add(child, adapter.get(key), spec[key]) for key, child in tree.items()}

    return add(params, adapters, model_specs)


def _adapter(spec: rules.ParamSpec, rank: int) -> dict:
    copies, inputs, outputs = optimizers.matrix_dims(spec)

    def part(dims, rank_last, init):
        rank_axis = (RANK_AXIS,)
        shape, axes = tuple(spec.shape[i] for i in dims), tuple(spec.logical_axes[i] for i in dims)
        lead = tuple(spec.shape[i] for i in copies), tuple(spec.logical_axes[i] for i in copies)
        if rank_last:
            return rules.ParamSpec(lead[0] + shape + (rank,), spec.dtype, lead[1] + axes + rank_axis, init)
        return rules.ParamSpec(lead[0] + (rank,) + shape, spec.dtype, lead[1] + rank_axis + axes, init)

    fan_in = math.prod(spec.shape[i] for i in inputs)
    return {"a": part(inputs, True, _normal(fan_in)), "b": part(outputs, False, _zeros)}


def _add(kernel, adapter, spec, scale):
    copies, inputs, outputs = optimizers.matrix_dims(spec)
    assert copies + inputs + outputs == tuple(range(len(spec.shape))), spec  # copies lead, then inputs, then outputs
    n = math.prod(spec.shape[i] for i in copies)
    rank = adapter["a"].shape[-1]
    a_NIR = adapter["a"].reshape(n, -1, rank).astype(jnp.float32)
    b_NRO = adapter["b"].reshape(n, rank, -1).astype(jnp.float32)
    change = jnp.einsum("NIR,NRO->NIO", a_NIR, b_NRO).reshape(spec.shape)
    return (kernel.astype(jnp.float32) + scale * change).astype(kernel.dtype)


def _normal(fan_in: int):
    def draw(key, shape, dtype):
        return (jax.random.normal(key, shape) * fan_in**-0.5).astype(dtype)

    return draw


def _zeros(key, shape, dtype):
    del key
    return jnp.zeros(shape, dtype)

"""Low-rank adapters (LoRA, arXiv 2106.09685): trains A and B of W + (alpha / rank) A B while W stays fixed.

1. `specs` describes an (a, b) pair for each targeted kernel, in the same form as the model's own parameters: the pair is
   drawn, sharded, optimized and saved by the same code.
2. `merge` returns the whole model's parameters with the adapters added. The learner differentiates through it, and its
   result is published and exported: inference servers run exactly the weights that the learner computed with.

Left out: A and B applied next to W. It would save the gradient of W (a third of a step), but define every matmul in `models` a
second time. No dropout either: an inference server has none.
"""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp

from rl.learner import optimizers
from sharding import rules

KERNELS = ("q", "k", "v", "o", "gate", "up", "down")
# The kernels that a target stands for in latent attention (MLA), which has none of its name.
LATENT = {"q": ("q_down", "q_up"), "k": ("kv_down", "k_rope", "k_up"), "v": ("kv_down", "v_up")}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The rank and the target kernels of LoRA adapters. False as a bool if rank is 0: then all parameters train."""

    rank: int = 0
    alpha: float = 32.0  # A B is multiplied by alpha / rank
    targets: tuple[str, ...] = KERNELS  # last part of a parameter's name, or a key of LATENT

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"lora.rank = {self.rank} is negative; set it to at least 0 (0: no adapters)")
        if self.rank and not self.targets:
            raise ValueError(
                "lora.targets is empty: nothing would train; add a kernel such as 'q', or set lora.rank = 0"
            )

    def __bool__(self) -> bool:
        return self.rank > 0


def specs(model_specs: dict, config: LoraConfig) -> dict:
    """Returns the `ParamSpec` tree of the adapters: {"a": ..., "b": ...} at each targeted kernel, no other parameters.

    A kernel [D, H, C] has a [D, r] and b [r, H, C]; a kernel of experts [E, D, F] has a [E, D, r] and b [E, r, F].
    Raises ValueError if a name in `config.targets` is not a parameter of the model, or not a matrix, or if the rank exceeds
    that of a targeted kernel.
    """
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(model_specs, is_leaf=rules.is_spec)}
    targets = [
        kernel for name in config.targets for kernel in ((name,) if name in names else LATENT.get(name, (name,)))
    ]
    matrices = set()

    def adapt(tree, name=""):
        if not rules.is_spec(tree):
            adapted = {key: adapt(child, key) for key, child in tree.items()}
            return {key: child for key, child in adapted.items() if child}
        if rules.is_matrix(tree):
            matrices.add(name)
        elif name in targets:
            axes = tree.logical_axes
            raise ValueError(f"lora.targets has {name!r}, which is not a matrix: its dims are {axes}; remove it")
        if name in targets and config.rank > (most := _full_rank(tree)):
            found = f"lora.rank = {config.rank} exceeds the rank {most} of the kernel {name!r}, of shape {tree.shape}"
            raise ValueError(f"{found}; lower it, or leave the kernel out of lora.targets")
        return _adapter(tree, config.rank) if name in targets else {}

    adapters = adapt(model_specs)
    if missing := [name for name in targets if name not in matrices]:
        choices = ", ".join(sorted(matrices))
        raise ValueError(f"lora.targets has {missing[0]!r}, but the model has no such parameter; choose from {choices}")
    return adapters


def init(key: jax.Array, adapter_specs: dict) -> dict:
    """Draws adapters: a from a normal distribution with standard deviation 1 / sqrt(inputs), b zero."""
    leaves, structure = jax.tree.flatten(adapter_specs, is_leaf=rules.is_spec)
    alike = collections.defaultdict(list)
    for index, spec in enumerate(leaves):
        alike[spec.shape, spec.dtype, spec.logical_axes].append(index)
    drawn = {}
    for indices in (
        alike.values()
    ):  # in a loop: a program with 420 draws takes a minute to compile, and a batched one rounds otherwise
        spec = leaves[indices[0]]
        draw = lambda index, spec=spec: spec.init(jax.random.fold_in(key, index), spec.shape, spec.dtype)  # noqa: E731
        drawn |= zip(indices, jax.lax.map(draw, jnp.asarray(indices, jnp.uint32)), strict=True)
    return jax.tree.unflatten(structure, [drawn[index] for index in range(len(leaves))])


def merge(params: dict, adapters: dict, model_specs: dict, config: LoraConfig) -> dict:
    """Merges adapters into a model's parameters: W becomes W + (alpha / rank) A B, summed in float32, returned in W's dtype."""

    def add(tree, adapter, spec):
        if adapter is None:
            return tree
        if not rules.is_spec(spec):
            return {key: add(child, adapter.get(key), spec[key]) for key, child in tree.items()}
        num_copies = math.prod(spec.shape[: optimizers.matrix_dims(spec)[0]])
        a_NIR = adapter["a"].reshape(num_copies, -1, config.rank).astype(jnp.float32)
        b_NRO = adapter["b"].reshape(num_copies, config.rank, -1).astype(jnp.float32)
        change = jnp.einsum("NIR,NRO->NIO", a_NIR, b_NRO).reshape(spec.shape)
        return (tree.astype(jnp.float32) + config.alpha / config.rank * change).astype(tree.dtype)

    return add(params, adapters, model_specs)


def _full_rank(spec: rules.ParamSpec) -> int:
    first, split = optimizers.matrix_dims(spec)
    return min(math.prod(spec.shape[first:split]), math.prod(spec.shape[split:]))


def _adapter(spec: rules.ParamSpec, rank: int) -> dict:
    (first, split), shape, axes = optimizers.matrix_dims(spec), spec.shape, spec.logical_axes

    def normal(key, shape, dtype):
        return (jax.random.normal(key, shape) * math.prod(spec.shape[first:split]) ** -0.5).astype(dtype)

    b_shape, b_axes = (*shape[:first], rank, *shape[split:]), (*axes[:first], "rank", *axes[split:])
    return {
        "a": rules.ParamSpec((*shape[:split], rank), spec.dtype, (*axes[:split], "rank"), normal),
        "b": rules.ParamSpec(b_shape, spec.dtype, b_axes, jax.nn.initializers.zeros),
    }

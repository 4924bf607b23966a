"""Low-rank adapters (LoRA, arXiv 2106.09685): trains A and B of W + (alpha / rank) A B while W stays fixed.

1. `specs` describes an (a, b) pair for each targeted kernel, in the same form as the model's own parameters: the pair is
   drawn, sharded, optimized and saved by the same code. It is float32; the policy has it with 11 bits of mantissa (`rounded`).
2. `attach` puts the adapters next to their kernels (models/kernels/adapted.py): learner, server, and validator run this tree.
3. `published` returns a policy as it is broadcast: {"base", "adapters"}. Versions share the base, so that each is as many bytes as the
   adapters. `restored` is its inverse.
4. `merge` adds the adapters to the kernels, for export.

Left out: dropout, because an inference server has none.
"""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp

from models.kernels import adapted
from sharding.mesh import rules

MANTISSA_BITS = 11  # of adapters in use, of the 23 of float32: a relative error of at most 2^-12
BASE = "base"  # the name of the part of a published policy that no version changes
KERNELS = ("q", "k", "v", "o", "gate", "up", "down")
# Matrices that no product of activations multiplies by as they are: a row is looked up, or the head is shared with it.
TABLES = ("embed", "lm_head")
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
            raise ValueError("lora.targets is empty: nothing would train; add a kernel like 'q', or set lora.rank = 0")

    def __bool__(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        """The factor on A B."""
        return self.alpha / self.rank


def specs(model_specs: dict, config: LoraConfig) -> dict:
    """Returns the `ParamSpec` tree of the adapters: {"a": ..., "b": ...} at each targeted kernel, no other parameters.

    A kernel [D, H, C] has a [D, r] and b [r, H, C]; a kernel of experts [E, D, F] has a [E, D, r] and b [E, r, F].
    Raises ValueError if a name in `config.targets` is not a parameter of the model, or not a matrix, or if the rank exceeds
    that of a targeted kernel.
    """
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(model_specs, is_leaf=rules.is_spec)}
    latent = {name: kernels for name, kernels in LATENT.items() if name not in names}
    targets = [kernel for name in config.targets for kernel in latent.get(name, (name,))]
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
        if name in targets and name in TABLES:
            raise ValueError(f"lora.targets has {name!r}, a table of tokens, next to which no adapter runs; remove it")
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
    # In a loop: a program with 420 draws takes a minute to compile, and a batched one rounds otherwise.
    for indices in alike.values():
        spec = leaves[indices[0]]

        def draw(index, spec=spec):
            return spec.init(jax.random.fold_in(key, index), spec.shape, spec.dtype)

        drawn |= zip(indices, jax.lax.map(draw, jnp.asarray(indices, jnp.uint32)), strict=True)
    return jax.tree.unflatten(structure, [drawn[index] for index in range(len(leaves))])


@jax.jit
def rounded(adapters: dict) -> dict:
    """Returns trained adapters as the policy has them: with `MANTISSA_BITS`. The gradient passes through unchanged, so small steps add up.

    A step of AdamW changes all the low bits of A and of B. With fewer of them, a version is less than half as many bytes.
    """

    def of(x):
        low = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=MANTISSA_BITS)
        return x + jax.lax.stop_gradient(low - x)  # exactly `low`: both differences are of close numbers

    return jax.tree.map(of, adapters)


def attach(params: dict, adapters: dict, config: LoraConfig, mask: jax.Array | None = None) -> dict:
    """Returns a model's parameters with each adapted kernel replaced by an `Adapted` one with `mask`. Leaves may also be specs or shardings."""
    if not isinstance(params, dict):
        return adapted.Adapted(params, adapters["a"], adapters["b"], config.scale, mask)
    return params | {name: attach(params[name], adapter, config, mask) for name, adapter in adapters.items()}


def detach(params: dict) -> tuple[dict, dict]:
    """Returns (parameters, adapters) of a tree that `attach` returned; without adapters, the second is empty."""
    pairs = jax.tree_util.tree_leaves_with_path(params, is_leaf=adapted.is_adapted)
    adapters: dict = {}
    for path, kernel in pairs:
        if adapted.is_adapted(kernel):
            place = adapters
            for part in path:
                place = place.setdefault(part.key, {})
            place |= {"a": kernel.a, "b": kernel.b}
    return jax.tree.map(adapted.base_of, params, is_leaf=adapted.is_adapted), adapters


def published(params: dict) -> dict:
    """Returns the tree in which a policy is published: {BASE: parameters, "adapters": adapters}, or `params` itself without adapters."""
    base, adapters = detach(params)
    return {BASE: base, "adapters": adapters} if adapters else params


def published_specs(model_specs: dict, config: LoraConfig | None) -> dict:
    """Returns the `ParamSpec` tree of a published policy with the adapters of `config`, if there are any."""
    return {BASE: model_specs, "adapters": specs(model_specs, config)} if config else model_specs


def restored(tree: dict, config: LoraConfig | None) -> dict:
    """Returns the parameters of the published `tree`, with the adapters of `config` attached, if there are any."""
    return attach(tree[BASE], tree["adapters"], config) if config else tree


def of_metadata(metadata: dict) -> LoraConfig | None:
    """Returns the adapters that the metadata of a published policy describes, or None. Raises ValueError if they are malformed."""
    fields = metadata.get("lora")
    try:
        return LoraConfig(**fields | {"targets": tuple(fields["targets"])}) if fields else None
    except (TypeError, KeyError) as error:
        raise ValueError(f"the published lora = {str(fields)[:200]} is malformed ({error}); publish it again") from None


def merge(params: dict) -> dict:
    """Merges attached adapters: W becomes W + (alpha / rank) A B, summed in float32, returned in W's dtype."""
    return jax.tree.map(adapted.dense, params, is_leaf=adapted.is_adapted)


def _full_rank(spec: rules.ParamSpec) -> int:
    first, split = rules.matrix_dims(spec)
    return min(math.prod(spec.shape[first:split]), math.prod(spec.shape[split:]))


def _adapter(spec: rules.ParamSpec, rank: int) -> dict:
    (first, split), shape, axes = rules.matrix_dims(spec), spec.shape, spec.logical_axes

    def normal(key, shape, dtype):
        return (jax.random.normal(key, shape) * math.prod(spec.shape[first:split]) ** -0.5).astype(dtype)

    b_shape, b_axes = (*shape[:first], rank, *shape[split:]), (*axes[:first], "rank", *axes[split:])
    return {
        "a": rules.ParamSpec((*shape[:split], rank), "float32", (*axes[:split], "rank"), normal),
        "b": rules.ParamSpec(b_shape, "float32", b_axes, jax.nn.initializers.zeros),
    }

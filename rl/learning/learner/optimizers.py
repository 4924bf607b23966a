"""Builds optimizers with optax: from a frozen config and the parameters' specs to one `GradientTransformation`.

In the order they act on a gradient:

1. clip by the global norm of the whole gradient;
2. the rule: AdamW, Muon (for matrices; AdamW for the rest), SGD with Nesterov momentum, or the sign of the gradient;
3. weight decay, on matrices only, times the learning rate;
4. the learning rate: linear warm-up, then constant, linear or cosine.

Moments are split exactly as their parameters (`rl/learning/learner/train_step.py: abstract_state`), so the state of every rule is
sharded like ZeRO. Only *first* moments may be bfloat16: with beta2 = 0.999 the second moves by 0.001 of itself a step, under
half a unit of bfloat16 (0.004), and would never change. optax.contrib.muon is not used: on 8 devices it executes 1.34 times
the FLOPs (docs/decisions/training.md).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sharding.mesh import rules

# Quintic Newton-Schulz coefficients (Jordan 2024, "Muon"): steepest at 0, singular values end in about 0.7 .. 1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer's rule, its rates, and the dtype and memory of its state."""

    learning_rate: float
    warmup_steps: int  # linear, from learning_rate / warmup_steps at the first step
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # matrices only: scales and biases are not decayed
    clip_norm: float  # of the whole gradient; 0: no clipping
    name: str = "adamw"  # a name of RULES
    momentum: float = 0.95  # of muon and sgd
    schedule: str = "constant"  # after the warm-up: "constant", "linear" (over the last decay_steps), "cosine"
    total_steps: int = 0  # optimizer steps of the run, warm-up included; required if the rate falls
    decay_steps: int = 0  # of "linear"; 0: from the end of the warm-up on
    final_rate: float = 0.0  # where a falling rate ends, as a fraction of learning_rate
    moment_dtype: str = "float32"  # of first moments and momenta: or "bfloat16"
    offload_moments: bool = False  # keep the optimizer's state in host memory between steps

    def __post_init__(self):
        for field, value, known in (
            ("name", self.name, RULES),
            ("schedule", self.schedule, ("constant", "linear", "cosine")),
            ("moment_dtype", self.moment_dtype, ("float32", "bfloat16")),
        ):
            if value not in known:
                raise ValueError(f"optimizer.{field} = {value!r} is unknown; choose one of {', '.join(known)}")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps + self.decay_steps:
            raise ValueError(
                f"optimizer.total_steps = {self.total_steps}, but schedule {self.schedule!r} needs more than warmup_steps + "
                f"decay_steps = {self.warmup_steps + self.decay_steps}; raise optimizer.total_steps"
            )


RULES: dict[str, Callable[[OptimizerConfig, Any], optax.GradientTransformation]] = {
    # Loshchilov & Hutter, arXiv 1711.05101, algorithm 2.
    "adamw": lambda c, specs: optax.scale_by_adam(c.beta1, c.beta2, c.eps, mu_dtype=c.moment_dtype),
    "muon": lambda c, specs: scale_by_muon(specs, c.momentum, c.moment_dtype),
    "sgd": lambda c, specs: optax.trace(c.momentum, nesterov=True, accumulator_dtype=c.moment_dtype),
    "sign": lambda c, specs: optax.scale_by_sign(),  # signSGD (arXiv 1802.04434): no state but the count of steps
}


def make(config: OptimizerConfig, specs) -> optax.GradientTransformation:
    """Returns the optimizer of parameters that are described by `specs`, their tree of `ParamSpec`."""
    rate, decayed = learning_rate(config), jax.tree.map(rules.is_matrix, specs, is_leaf=rules.is_spec)

    def rule(name, decayed):
        decay = optax.add_decayed_weights(config.weight_decay, decayed)
        return optax.chain(RULES[name](config, specs), decay, optax.scale_by_learning_rate(rate))

    if config.name == "muon":
        labels = jax.tree.map(lambda s: "muon" if is_hidden_matrix(s) else "adamw", specs, is_leaf=rules.is_spec)
        rest = jax.tree.map(lambda keep, name: keep if name == "adamw" else optax.MaskedNode(), decayed, labels)
        optimizer = optax.partition({"muon": rule("muon", None), "adamw": rule("adamw", rest)}, labels)
    else:
        optimizer = rule(config.name, decayed)
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm > 0 else []
    optimizer = optax.chain(*clip, optimizer)
    if not config.offload_moments:
        return optimizer
    return optax.GradientTransformation(lambda params: jax.tree.map(_to_host, optimizer.init(params)), optimizer.update)


def _to_host(x):
    return jax.device_put(x, jax.memory.Space.Host) if x.ndim else x


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """Returns the learning rate as a function of the optimizer step 0, 1, ...; with a warm-up, step 0 already has a rate above 0."""
    peak, num_warmup = config.learning_rate, config.warmup_steps
    warmup = optax.linear_schedule(peak / max(num_warmup, 1), peak, max(num_warmup - 1, 1))
    if config.schedule == "constant":
        return warmup
    rest = config.total_steps - num_warmup
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_rate)
    else:
        steps = config.decay_steps or rest
        after = optax.linear_schedule(peak, peak * config.final_rate, steps, transition_begin=rest - steps)
    return optax.join_schedules([warmup, after], [num_warmup]) if num_warmup else after


def next_rate(config: OptimizerConfig, opt_state: optax.OptState) -> float:
    """Returns the learning rate of the next update. Refused updates do not count, so only the optimizer's state has its number."""
    (_, schedule), *_ = optax.tree.get_all_with_path(opt_state, "ScaleByScheduleState")  # Muon has two, with one count
    return float(jax.device_get(learning_rate(config)(int(jax.device_get(schedule.count)))))


def is_hidden_matrix(spec: rules.ParamSpec) -> bool:
    """Returns True if a parameter is a matrix that Muon orthogonalizes: any matrix but the embedding and the output head."""
    return rules.is_matrix(spec) and "vocab" not in spec.logical_axes


def scale_by_muon(specs, beta: float, moment_dtype: str) -> optax.GradientTransformation:
    """Returns Muon's rule: Nesterov momentum, orthogonalized matrix by matrix (Jordan 2024), scaled to the size of AdamW's.

        m <- beta m + (1 - beta) g;  update = 0.2 sqrt(max(rows, columns)) NS(beta m + (1 - beta) g)

    The scale is Moonlight's (arXiv 2502.16982, eq. 4), so AdamW's learning rate and weight decay carry over. A kernel with
    heads is one matrix, [D, H x C]; every layer and every expert is a separate matrix. Stacks of matrices, not the matrices, are
    split over the batch axes of the mesh (one all-to-all each way), as in INTELLECT-3's trainer (arXiv 2512.16144): a device
    orthogonalizes whole matrices, without a collective inside, and no other device repeats its work.
    """

    def init(params):
        return optax.TraceState(jax.tree.map(lambda x: jnp.zeros(x.shape, moment_dtype), params))

    def update(updates, state, params=None):
        del params
        trace = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g.astype(jnp.float32), state.trace, updates)
        ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g.astype(jnp.float32), trace, updates)
        kept = jax.tree.map(lambda m: m.astype(moment_dtype), trace)
        return _orthogonalize_tree(ahead, specs), optax.TraceState(kept)

    return optax.GradientTransformation(init, update)


def orthogonalize(x_NRC: jax.Array) -> jax.Array:
    """Makes N matrices [R, C] nearly orthogonal: U S V' becomes U S' V' with singular values S' in about 0.7 .. 1.2.

    Five quintic Newton-Schulz steps, X <- a X + (b A + c A A) X with A = X X', on the side with fewer rows.
    """
    a, b, c = NEWTON_SCHULZ
    if x_NRC.shape[1] > x_NRC.shape[2]:
        return orthogonalize(x_NRC.swapaxes(1, 2)).swapaxes(1, 2)
    norm_N = jnp.sqrt(jnp.sum(jnp.square(x_NRC), axis=(1, 2), keepdims=True))
    x_NRC = x_NRC / (norm_N + 1e-8)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_NRR = x_NRC @ x_NRC.swapaxes(1, 2)
        x_NRC = a * x_NRC + (b * gram_NRR + c * gram_NRR @ gram_NRR) @ x_NRC
    return x_NRC


class _Layout(NamedTuple):
    """The mesh axes that split a stack of matrices [E, N, R, C], of N layers with E experts each; R is the dim split by fsdp."""

    experts: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]


def _orthogonalize_tree(tree, specs):
    """Orthogonalizes each matrix of a tree: stacks matrices of one shape and layout, and splits each stack over the devices."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)  # inside a partition, of some of the parameters
    by_path = dict(jax.tree_util.tree_leaves_with_path(specs, is_leaf=rules.is_spec))
    done: dict[int, jax.Array] = {}
    groups: dict[tuple, dict[int, jax.Array]] = {}  # {(E, R, C, layout): {index of the leaf: its stack [E, N, R, C]}}
    for i, (path, x) in enumerate(leaves):
        x_ENRC, layout = _as_stack(x, by_path[path])
        groups.setdefault((x_ENRC.shape[0], *x_ENRC.shape[2:], layout), {})[i] = x_ENRC
    for (_, *shape, layout), members in groups.items():
        stack = _orthogonalize_spread(jnp.concatenate([*members.values()], 1), layout) * (0.2 * math.sqrt(max(shape)))
        ends = np.cumsum([x_ENRC.shape[1] for x_ENRC in members.values()])
        for i, x_ENRC in zip(members, jnp.split(stack, ends[:-1], 1), strict=True):
            path, x = leaves[i]
            x_ENRC = x_ENRC.swapaxes(2, 3) if _is_transposed(by_path[path]) else x_ENRC
            done[i] = x_ENRC.swapaxes(0, 1).reshape(x.shape)
    return jax.tree.unflatten(structure, [done[i] for i in range(len(leaves))])


def _as_stack(x: jax.Array, spec: rules.ParamSpec) -> tuple[jax.Array, _Layout]:
    """Returns the matrices of a parameter as a stack [E, N, R, C], and its layout. Rows are the dim `model`, if there is one."""
    (first, split), mesh = rules.matrix_dims(spec), rules.several_devices()
    num_experts = x.shape[first - 1] if rules.EXPERTS in spec.logical_axes else 1
    shape = -1, num_experts, math.prod(x.shape[first:split]), math.prod(x.shape[split:])
    axes = [()] * x.ndim if mesh is None else rules.dim_axes(mesh, x.shape, spec.logical_axes)
    experts = axes[first - 1] if num_experts > 1 else ()
    rows, columns = axes[first], axes[split]  # of several dims, such as heads and head_dim, only the first is split
    x_ENRC = x.reshape(shape).swapaxes(0, 1)
    if _is_transposed(spec):
        return x_ENRC.swapaxes(2, 3), _Layout(experts, columns, rows)
    return x_ENRC, _Layout(experts, rows, columns)


def _is_transposed(spec: rules.ParamSpec) -> bool:
    return "model" in spec.logical_axes[rules.matrix_dims(spec)[1] :]


def _orthogonalize_spread(x_ENRC, layout: _Layout):
    """Orthogonalizes matrices, each on one device. From their layout to that and back it is one all-to-all, named step by step.

    Asked for both at the same time, the compiler's partitioner would make the whole stack on every device ("involuntary full
    rematerialization").
    """
    E, N, R, C = x_ENRC.shape
    if (mesh := rules.several_devices()) is None:
        return orthogonalize(x_ENRC.reshape(-1, R, C)).reshape(x_ENRC.shape)
    experts, rows, columns = layout
    others = tuple(axis for axis in rules.RULES["batch"] if mesh.shape[axis] > 1 and axis not in (*experts, *rows))
    ways = math.prod(mesh.shape[axis] for axis in (*experts, *rows, *others))
    x_ENRC = jnp.pad(x_ENRC, ((0, 0), (0, -N % (ways // math.gcd(E, ways))), (0, 0), (0, 0)))

    def place(x, *axes):
        spec = jax.sharding.PartitionSpec(*(names or None for names in axes))
        # Without the barrier, XLA:CPU may fuse a transpose into one operand of an all-to-all, and refuse it.
        return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(x), spec)

    steps = (experts, rows, ()), ((*experts, *rows), (), ()), ((*experts, *rows, *others), (), ())
    x_MRC = place(place(x_ENRC, experts, (), rows, columns), experts, (), rows, ()).reshape(-1, R, C)
    for axes in steps:
        x_MRC = place(x_MRC, *axes)
    x_MRC = orthogonalize(x_MRC)
    for axes in reversed(steps):
        x_MRC = place(x_MRC, *axes)
    return place(place(x_MRC.reshape(x_ENRC.shape), experts, (), rows, ()), experts, (), rows, columns)[:, :N]

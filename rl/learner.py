"""The learner: `train_step(state, batch) -> (state, metrics)`, pure, jitted once, its input donated.

1. `apply` runs the packed batch, `token_logprobs` scores its tokens at the temperature they were sampled at.
2. `LOSSES[name]` turns log-probabilities, advantages and masks into a scalar over the global token count.
3. Gradients are summed over micro-batches; since the denominator is global, the sum is exactly the gradient of the whole
   batch. The number of micro-batches is data, not shape: one compilation serves batches of any size.
4. optax clips, scales and applies the gradient.

The learner is algorithm-blind: rewards, groups and staleness were dealt with before a batch reaches it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import struct

from models import config as config_lib
from models import logprobs, transformer
from rl import losses, packing
from sharding import rules


@struct.dataclass
class TrainState:
    """Everything a step changes: int32 step (batches consumed), parameters, optimizer state."""

    step: jax.Array
    params: transformer.Params
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up to a constant rate, after clipping by the global norm."""

    learning_rate: float
    warmup_steps: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # matrices only: norm scales are not decayed
    clip_norm: float  # of the whole gradient; 0 turns clipping off


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    schedule = optax.linear_schedule(
        config.learning_rate / max(config.warmup_steps, 1), config.learning_rate, max(config.warmup_steps - 1, 1)
    )
    adamw = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm > 0 else adamw


def abstract_state(
    model: config_lib.ModelConfig, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
    """The train state as `ShapeDtypeStruct` with shardings; moments are split exactly as their parameters."""
    params = transformer.abstract(model, mesh)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = jax.eval_shape(lambda p: TrainState(jnp.zeros((), jnp.int32), p, optimizer.init(p)), params)
    layout = TrainState(
        replicated,
        rules.shardings(transformer.specs(model), mesh),
        optax.tree.map_params(
            optimizer,
            lambda _, sharding: sharding,
            state.opt_state,
            rules.shardings(transformer.specs(model), mesh),
            transform_non_params=lambda _: replicated,
        ),
    )
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, layout)


def init_state(
    key: jax.Array,
    model: config_lib.ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    params: transformer.Params | None = None,
) -> TrainState:
    """A fresh train state, born in its sharding; from given parameters, or drawn from `key`."""
    layout = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer, mesh))

    @functools.partial(jax.jit, out_shardings=layout)
    def create(key, params):
        params = transformer.init(key, model) if params is None else params
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    with jax.set_mesh(mesh):
        return create(key, params)


def make_train_step(
    model: config_lib.ModelConfig,
    optimizer: optax.GradientTransformation,
    loss_name: str,
    loss_options: Mapping[str, float],
    mesh: jax.sharding.Mesh,
) -> Callable[[TrainState, packing.TrainBatch], tuple[TrainState, dict]]:
    """Returns the jitted step. `state` is donated: use the one that comes back.

    Metrics are float32 scalars on the device: loss/total, loss/entropy, loss/grad_norm, loss/num_tokens and the loss's own.
    """
    if loss_name not in losses.LOSSES:
        raise ValueError(f"loss {loss_name!r} is unknown; choose one of {', '.join(losses.LOSSES)}")
    loss_fn = functools.partial(losses.LOSSES[loss_name], **loss_options)

    def forward(params, rows: packing.TrainBatch, denom):
        hidden_BTD = transformer.apply(
            params,
            model,
            rows.tokens,
            positions_BT=rows.positions,
            segment_ids_BT=rows.segment_ids,
            branch_ids_BT=rows.branch_ids,
        )
        logp_BT, entropy_BT = logprobs.token_logprobs(
            params, model, hidden_BTD, rows.tokens, rows.temperature, predictors_BT=rows.predictors
        )
        loss, metrics = loss_fn(logp_BT, rows.behavior_logp, rows.advantage, rows.loss_mask, denom=denom)
        entropy = jnp.sum(entropy_BT * rows.loss_mask) / denom
        return loss, metrics | {"loss/total": loss, "loss/entropy": entropy}

    def train_step(state: TrainState, batch: packing.TrainBatch):
        num_tokens = jnp.sum(batch.loss_mask)
        denom = jnp.maximum(num_tokens, 1.0)
        grads, metrics = _accumulate(jax.grad(forward, has_aux=True), state.params, batch, denom)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"loss/grad_norm": optax.tree.norm(grads), "loss/num_tokens": num_tokens}
        return TrainState(state.step + 1, params, opt_state), metrics

    jitted = jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer, mesh)), None),
    )

    def step(state, batch):
        with jax.set_mesh(mesh):
            return jitted(state, batch)

    step.jitted = jitted
    return step


def _accumulate(gradient, params, batch: packing.TrainBatch, denom):
    """Sums gradients and metrics over the micro-batches in use; one program whatever their number."""
    rows = batch.replace(num_micro_batches=None)

    def add(i, total):
        return jax.tree.map(jnp.add, total, gradient(params, jax.tree.map(lambda x: x[i], rows), denom))

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], rows), denom),
    )
    return jax.lax.fori_loop(0, batch.num_micro_batches, add, zeros)
